"""Which parameters have a gradient here, and on any rank; what each rank is doing.

Every collective call of the optimizer meets the other ranks here first. Functions take the
optimizer, whose state they read; nothing here touches gradients on the device.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import construction, reduction
from .discard import drop_window, lost, settle
from .fused import Seen
from .ops import Range
from .plan import bit_mask
from .reduced import Local
from .rounds import Failed, Later, Pass, Until, Waitable
from .transports.control import (
    COMPLAINT,
    EXHAUSTED,
    LOST,
    NO_DETAIL,
    WITH_OTHERS,
    Action,
    Agreed,
    Exchange,
    Message,
    first_difference,
)
from .window import run

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


class Fingerprint:
    """Hash of the groups' options, computed again only when one of them may have changed."""

    def __init__(self) -> None:
        self._seen = Seen()
        self._value = 0

    def of(self, groups: list[dict[str, Any]]) -> int:
        if not self._seen.again(groups):
            self._value = construction.fingerprint(construction.hyperparameter_lines(groups))
        return self._value


def message(
    opt: ZeroOptimizer,
    action: Action,
    complaint: Exception | None,
    detail: tuple[float, float] = NO_DETAIL,
    when: tuple[int, int] | None = None,
) -> Message:
    """when: clears and given_up of a message that may be sent later than it is due."""
    in_backward = action in (Action.ROUND, Action.CLEAR)
    return Message(
        opt._iteration,
        opt._window_number,
        opt._window.rounds,
        action,
        0 if complaint is not None else opt._fingerprint.of(opt.param_groups),
        COMPLAINT
        if complaint is not None
        else EXHAUSTED
        if exhausted(opt) and not in_backward
        else 0,
        int(opt._window.rounds > 0 and bool(opt._window.withdrawn().any())),
        *(when or opt._discards.now),
        detail,
    )


def message_bits(opt: ZeroOptimizer, bits: Tensor, *, no_zeros: bool = False) -> Tensor:
    """Presence, followed where absent="zero" is in use by who may get a zero gradient.

    no_zeros: nobody by this rank, which has joined and leaves it to the others, or is in trouble.
    """
    if not opt._may_zero:
        return bits
    if no_zeros:
        return torch.cat([bits, torch.zeros_like(bits)])
    zero = [group["absent"] == "zero" for group in opt.param_groups]
    group_of = opt._layout.group.tolist()
    eligible = [i for i, p in enumerate(opt._params) if zero[group_of[i]] and p.requires_grad]
    return torch.cat([bits, bit_mask(eligible, opt._layout.size)])


def read(opt: ZeroOptimizer) -> tuple[Local, Exception | None]:
    """The local gradients, and what is wrong here, if anything."""
    local, complaint = opt._reader.read()
    if opt._rounds is not None and opt._rounds.superseded:
        complaint = RuntimeError(
            "another optimizer has been built over parameters of this one, which does not receive "
            "their gradients any more; use that one, or build each over parameters of its own"
        )
    return local, complaint or follow_groups(opt)


def follow_groups(opt: ZeroOptimizer) -> ValueError | None:
    """Follow what has been changed in `param_groups`; a complaint if that cannot be."""
    try:
        complaint = replaced(opt)
        if complaint is None and not opt._options_seen.again(opt.param_groups):
            complaint = construction.follow_options(opt)
    except (KeyError, TypeError, AttributeError) as wrong:
        complaint = ValueError(
            "param_groups: expected the groups of construction and add_param_group, with all their "
            f"options, but reading them gave {wrong!r}; put back what has been taken out"
        )
    if complaint is not None:
        opt._options_seen.forget()
    return complaint


def read_with_values(opt: ZeroOptimizer) -> tuple[Local, Exception | None]:
    """The same, once all new values of the last step are in the parameters (gather="lazy")."""
    opt.wait_for_parameters()
    local, complaint = read(opt)
    if complaint is None and opt._arrivals is not None:
        complaint = opt._arrivals.complaint()
    return local, complaint


def replaced(opt: ZeroOptimizer) -> ValueError | None:
    """A complaint if somebody has put other parameter objects into `param_groups`."""
    i = opt._reader.scan.first_other([group["params"] for group in opt.param_groups])
    if i < 0:
        return None
    name = opt._layout.names[i] if i < opt._layout.size else "one more"
    return ValueError(
        f"parameter '{name}' in param_groups is not the object that it was; expected those "
        "given at construction: use add_param_group, or build a new optimizer"
    )


# Note [Followed by others]
# A rank that has left the joins of several optimizers (joining.py) does at once what it hears of.
# On a GPU messages run ahead of the work that they announce: it might hear of two steps, do them in
# another order than the ranks that train, and its stream would wait for theirs and theirs for it.
# So as long as such a rank follows, a rank that trains announces nothing before the work of what it
# has announced so far is over. (Without a GPU it cannot: collectives have waited for the others.)

# Optimizers on GPUs that are followed so.
FOLLOWED: weakref.WeakSet[ZeroOptimizer] = weakref.WeakSet()


def agree(
    opt: ZeroOptimizer,
    action: Action,
    detail: tuple[float, float] = NO_DETAIL,
    wrong: Exception | None = None,
) -> tuple[Local, Agreed]:
    """Meet all ranks at `action`, taking part in the others' rounds until they arrive.

    wrong: with this rank's arguments; all ranks raise it.
    """
    with Range("dynzero::presence"):
        opt._in_backward = False
        if opt._rounds is not None:
            opt._rounds.finish()
        local, complaint = read_with_values(opt)
        if not local.captured:
            opt._outcomes.poll()
        complaint = wrong or complaint
        bits = message_bits(opt, local.bits, no_zeros=complaint is not None)
        while (known := recalled(opt, action, bits, complaint)) is not None:
            if not known.any_at(Action.ROUND):
                return local, known
            run(take_part(opt, known, in_step=True))
        if opt._control.world == 1:
            return local, alone(opt, action, complaint, bits)
        while True:
            mine = message(opt, action, complaint, detail)
            if opt._discards.lost:
                raise tell(opt, mine, bits)
            if FOLLOWED and opt._device.type == "cuda":
                work_is_over(opt)
            agreed = opt._control.exchange(mine, bits)
            note_followers(opt, agreed)
            if judge(opt, agreed, complaint):
                continue
            others_reduce = agreed.any_at(Action.ROUND)
            if not others_reduce:
                take_back(opt, mine, agreed)
            if opt._repeated is not None:
                opt._repeated.note(opt, action, agreed)
            if not others_reduce:
                return local, agreed
            run(take_part(opt, agreed, in_step=True))


def work_is_over(opt: ZeroOptimizer) -> None:
    """Wait for what the current stream holds, but not longer than for another rank."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(opt._device))
    deadline = time.monotonic() + opt._control.timeout.total_seconds()
    while not event.query():
        if time.monotonic() > deadline:
            raise opt._control.lost(TimeoutError("what was sent has not arrived"))
        time.sleep(1e-4)


def note_followers(opt: ZeroOptimizer, agreed: Agreed) -> None:
    """On a GPU: whether a rank follows this optimizer and others."""
    if (
        opt._device.type == "cuda"
        and not agreed.alike
        and any(m.action is Action.JOIN and m.detail == WITH_OTHERS for m in agreed.messages)
    ):
        FOLLOWED.add(opt)
    elif FOLLOWED:
        FOLLOWED.discard(opt)


def alone(opt: ZeroOptimizer, action: Action, complaint: Exception | None, bits: Tensor) -> Agreed:
    """One process has nobody to ask."""
    if complaint is not None:
        raise complaint
    raise_exhaustion(opt, exhausted(opt))
    agreed = Agreed([], bits.unsqueeze(0))
    if opt._repeated is not None:
        opt._repeated.note(opt, action, agreed)
    return agreed


def recalled(
    opt: ZeroOptimizer, action: Action, bits: Tensor, complaint: Exception | None
) -> Agreed | None:
    """presence="static": the answer of the first window."""
    if opt._repeated is None or not opt._repeated.closed:
        return None
    if complaint is not None:
        raise complaint
    if action is not Action.ROUND:
        raise_exhaustion(opt, exhausted(opt))
    return opt._repeated.recall(opt, action, bits)


def exhausted(opt: ZeroOptimizer) -> bool:
    """If the loss scale has overflowed at its minimum and nobody has said so, as far as known."""
    return opt._scale.exhausted(opt._outcomes.exhausted)


def raise_exhaustion(opt: ZeroOptimizer, anybody: bool) -> None:
    """anybody: the loss scale has overflowed at its minimum, as far as one of the ranks knows.

    Ranks learn of it at different times, and all have to raise it once.
    """
    if anybody:
        opt._outcomes.poll(wait=True)
        raise opt._scale.exhaustion(opt._outcomes.exhausted)


def to_discuss(agreed: Agreed) -> bool:
    """True if the verdict on a round takes another collective."""
    return any(m.trouble in (COMPLAINT, EXHAUSTED) for m in agreed.messages)


def judge(opt: ZeroOptimizer, agreed: Agreed, complaint: Exception | None) -> bool:
    """Raise, on every rank alike, what these messages show to be wrong.

    True if a window was given up, so that the ranks that go on must announce again.
    """
    first = agreed.messages[0]  # in the normal case all say the same, and nothing is wrong
    calm = first.action is not Action.CLEAR and first.trouble == 0 and first.given_up == 0
    if calm and agreed.alike:
        return False
    if settle(opt, agreed):
        return True
    if any(m.trouble == COMPLAINT for m in agreed.messages):
        opt._control.raise_together(complaint)
    raise_exhaustion(opt, any(m.trouble == EXHAUSTED for m in agreed.messages))
    difference = first_difference(agreed.messages, opt._control.ranks)
    if difference is not None:
        raise RuntimeError(difference)
    if agreed.any_at(Action.ROUND):
        return False  # ranks may have announced it before or after the same change of an option
    active = [r for r, m in enumerate(agreed.messages) if m.action is not Action.JOIN]
    if len({agreed.messages[r].fingerprint for r in active}) > 1:
        lines = construction.hyperparameter_lines(opt.param_groups)
        remedy = "Give parameter groups the same options on every rank (a scheduler's, too)"
        construction.agree_on_setup(opt._control, lines, remedy)
    elif active and len({m.fingerprint for m in agreed.messages}) > 1:
        # A rank that has joined no longer runs its scheduler, but still updates its pieces.
        construction.adopt_options(opt, active[0], opt._control.rank not in active)
    return False


def take_part(opt: ZeroOptimizer, agreed: Agreed, *, in_step: bool) -> Iterator[Waitable]:
    """Take part, with nothing, in the others' backward round."""
    opt._window.rounds += 1
    yield from reduction.reduce_round(opt, nothing(opt), agreed, in_step=in_step)


def nothing(opt: ZeroOptimizer) -> Local:
    """The gradients of a rank without any.

    Parameters are not looked at: it may be the thread that finishes rounds which asks, and others
    write `p.grad` meanwhile, where torch lets the GIL go.
    """
    layout = opt._layout
    ptrs = torch.zeros(layout.size, dtype=torch.int64, device="cpu")
    return Local([ptrs, ptrs], torch.zeros(layout.bit_bytes, dtype=torch.uint8, device="cpu"))


# Note [Withdrawn]
# What a round announces, at the first gradient of a backward pass, can be wrong in two ways. A
# gradient may come late: a nested pass (re-entrant checkpointing) brings it after its bucket has
# left, or unannounced. It stays in `p.grad` and goes with the next round, or the next call that
# reduces. And one may never come: an autograd function returned None for it, or the pass raised.
# Its slot went out as zeros, which changes no sum. If it came in no other pass of the window
# either, the next call that reduces takes it back, on all ranks: it was not present here.


def take_back(opt: ZeroOptimizer, mine: Message, agreed: Agreed) -> None:
    """Clear the presence of gradients that some rank announced in this window, but never had."""
    if any(m.withdrawn for m in agreed.messages):
        opt._window.present &= ~opt._control.exchange(mine, opt._window.withdrawn()).bits


def open_pass(opt: ZeroOptimizer, watch: Any) -> tuple[Pass, Iterator[Waitable]]:
    """Stage 2, first gradient of a backward pass: what it will bring, and the round for it."""
    local, complaint = read(opt)
    current = Pass(opt._reader, watch, local)
    return current, round_of(opt, current, complaint, opt._discards.now)


def close_pass(opt: ZeroOptimizer, current: Pass) -> None:
    opt._in_backward = False
    current.close()
    opt._touched |= current.bits
    if current.window is opt._window:  # it has not been given up meanwhile
        opt._window.had |= current.bits


def round_of(
    opt: ZeroOptimizer, current: Pass, complaint: Exception | None, when: tuple[int, int]
) -> Iterator[Waitable]:
    while when[0] > opt._discards.behind:
        bits = current.announced
        agreed = recalled(opt, Action.ROUND, bits, complaint)
        asked = agreed is None
        if agreed is None:
            assert opt._rounds is not None
            detail = time.time(), float(opt._rounds.alone)
            mine = message(opt, Action.ROUND, complaint, detail, when)
            sent = message_bits(opt, bits, no_zeros=complaint is not None)
            exchange = opt._control.start(mine, sent)
            yield exchange
            agreed = exchange.wait()
            if to_discuss(agreed):
                yield Later()  # in a hook: other ranks may be in a collective of the user's
            try:
                again = judge(opt, agreed, complaint)
            except (ValueError, TypeError, RuntimeError) as error:
                if error is opt._discards.told:  # the gradients have been given up
                    raise
                yield Failed(error)
                _, complaint = read(opt)
                continue
            if again:
                continue
            if opt._repeated is not None:
                opt._repeated.note(opt, Action.ROUND, agreed)
        ours = agreed.in_round()[opt._control.rank]
        opt._window.rounds += 1
        if ours:
            current.window = opt._window
            opt._window.announced |= bits
            opt._window.had |= current.bits
        if ours and opt._repeated is not None and opt._repeated.holds(opt._rounds):
            yield Until(lambda: current.located)
        local = current if ours else nothing(opt)
        in_step = agreed.in_step(asked=asked)
        yield from reduction.reduce_round(opt, local, agreed, in_step=in_step)
        if ours:
            return


def discard(opt: ZeroOptimizer) -> None:
    """zero_grad(): what it discards of this window the others will learn from the next message."""
    raised, opt._in_backward = opt._in_backward, False
    if opt._rounds is None:
        opt._discards.clear(raised)
        return
    raised |= opt._rounds.end_pass()
    opt._rounds.drop_failed()  # which no other rank has any part of
    if opt._repeated is not None and opt._repeated.closed:  # as all ranks do
        opt._rounds.finish()
        if opt._window.used:
            drop_window(opt)
        return
    opt._discards.clear(raised or opt._rounds.pending or opt._window.used)
    if raised:
        opt._rounds.append(clear(opt, opt._discards.now))
    opt._rounds.finish_aside()


def clear(opt: ZeroOptimizer, when: tuple[int, int]) -> Iterator[Waitable]:
    """Stage 2, after a backward that raised: tell others, who may count on its gradients."""
    mine = message(opt, Action.CLEAR, None, when=when)
    exchange = opt._control.start(mine, message_bits(opt, nothing(opt).bits))
    yield exchange
    settle(opt, exchange.wait())


def excused(opt: ZeroOptimizer, error: BaseException) -> bool:
    """True if the error, found after zero_grad(), only asks for a zero_grad()."""
    if error is not opt._discards.told:
        return False
    opt._discards.clear(False)
    return True


def tell(opt: ZeroOptimizer, mine: Message, bits: Tensor) -> RuntimeError:
    """The error of a rank that counts on a window given up by another.

    The others raise it when they next meet this rank, which does not wait for them: they may be
    waiting for it somewhere else.
    """

    def heard(exchange: Exchange) -> Iterator[Waitable]:
        yield exchange
        exchange.wait()

    exchange = opt._control.start(mine._replace(trouble=LOST), bits)
    if opt._rounds is None:
        exchange.wait()
    else:
        opt._rounds.push(heard(exchange))
    return lost(opt)
