"""The host-side exchange: what each rank is doing, and which parameters have a gradient there.

One small all-gather over CPU memory per window (and per backward in stage 2). Every message carries
what its rank is doing, so ranks that differ find out together. See Note [One exchange at a time].
Messages go through shared memory where all ranks are on one host, otherwise over Gloo.
"""

from __future__ import annotations

import datetime
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import ops
from ..plan import raw
from . import local

# Note [One exchange at a time]
# Every rank sends one message per exchange and receives everybody's, so all ranks judge the same
# facts and reach the same verdict: go on, take part in somebody's backward round, or raise the same
# error. Only these messages may decide which collectives follow; nothing local may.


class Action(IntEnum):
    """What a rank is doing when it sends its message."""

    ROUND = 1  # a backward pass (stage 2)
    STEP = 2
    GRAD_NORM = 3
    CLIP = 4
    FULL_GRAD = 5
    JOIN = 6
    ADD_GROUP = 7
    STATE = 8  # full_state_dict()
    UNSCALE = 9
    LOAD = 10
    CLEAR = 11  # zero_grad() after a backward that raised (stage 2)


SPOKEN = {
    Action.ROUND: "a backward pass",
    Action.STEP: "step()",
    Action.GRAD_NORM: "grad_norm()",
    Action.CLIP: "clip_grad_norm_()",
    Action.FULL_GRAD: "full_grad()",
    Action.JOIN: "the end of join()",
    Action.ADD_GROUP: "add_param_group()",
    Action.STATE: "full_state_dict()",
    Action.LOAD: "load_state_dict()",
    Action.UNSCALE: "GradScaler.unscale_()",
    Action.CLEAR: "zero_grad()",
}
# What Message.detail holds, where that is the caller's.
ARGUMENTS = {
    Action.GRAD_NORM: ("p",),
    Action.CLIP: ("max_norm", "norm_type"),
    Action.FULL_GRAD: ("parameter number",),
}
# Message.trouble: an error to report; gradients of a window that another rank has given up; the
# loss scale has overflowed at its minimum.
COMPLAINT, LOST, EXHAUSTED = 1, 2, 3
NO_DETAIL = (0.0, 0.0)
WITH_OTHERS = (1.0, 0.0)  # of Action.JOIN: this rank follows several optimizers
# Well below the patience of a rank at the end of backward (rounds.py).
TOGETHER_S = 0.1
# Of the group's timeout, to find out who is missing: so many seconds, at most this share.
NAMING_S, NAMING_SHARE = 3.0, 1 / 3


class Message(NamedTuple):
    """The fixed part of a message; `detail` holds the call's arguments as numbers, of a round what
    Agreed.in_step() asks for.

    clears, given_up: zero_grad() calls since the last step, see Note [Giving up a window].
    """

    iteration: int
    window: int
    round: int
    action: Action
    fingerprint: int
    trouble: int
    withdrawn: int  # 1 when a gradient announced in this window has not come
    clears: int
    given_up: int
    detail: tuple[float, float]

    def pack(self) -> bytes:
        return struct.pack(MESSAGE, *self[:9], *self.detail)


MESSAGE = "<9q2d"
MESSAGE_BYTES = struct.calcsize(MESSAGE)


class Agreed(NamedTuple):
    """Everybody's messages. `bits`: uint8 [world, bytes] presence, little-endian."""

    messages: list[Message]
    bits: Tensor

    @property
    def alike(self) -> bool:
        """All ranks say the same."""
        return self.messages.count(self.messages[0]) == len(self.messages)

    def in_round(self) -> list[bool]:
        """The ranks whose backward round this is; the others take part with nothing.

        Ranks that have cleared more often announce a later window: their turn comes next.
        """
        first = min(m.clears for m in self.messages if m.action is Action.ROUND)
        return [m.action is Action.ROUND and m.clears == first for m in self.messages]

    def round_bits(self) -> Tensor:
        """Presence of the ranks in the round."""
        taking_part = self.in_round()
        if all(taking_part):
            return self.bits
        return self.bits * torch.tensor(taking_part, dtype=torch.uint8, device="cpu").unsqueeze(1)

    def in_step(self, *, asked: bool) -> bool:
        """If the ranks do the same in this round, at the same time: Note [In step].

        detail: the seconds when each announced it, and 1.0 if none of its other optimizers reduces
        during backward. asked: the ranks have met for this answer.
        """
        times = [m.detail[0] for m in self.messages]
        together = not asked or max(times) - min(times) < TOGETHER_S
        alone = all(m.detail[1] == 1.0 for m in self.messages)
        if not (together and alone and all(self.in_round())):
            return False
        return bool(ops.same_rows(self.bits))

    def any_at(self, action: Action) -> bool:
        return any(m.action == action for m in self.messages)


class Control:
    """The exchange of one optimizer, with a Gloo group of its own (none for one process)."""

    def __init__(self, group: Any) -> None:
        self.world, self.rank, self.ranks = 1, 0, [0]
        self.group: Any = None
        self.board: Any = None  # the LocalBoard, where all ranks can use one
        self.last: Message | None = None  # what this rank has said last
        if not dist.is_available() or not dist.is_initialized():
            if group is not None:
                raise ValueError("process_group: torch.distributed is not initialised")
            return
        group = dist.group.WORLD if group is None else group
        kinds: Any = (dist.ProcessGroup, int)  # the latter where this rank is no member
        if not isinstance(group, kinds):
            raise TypeError(
                "process_group: expected None or a group of torch.distributed.new_group(), got "
                f"{type(group).__name__} {group!r}"
            )
        if dist.get_rank(group) < 0:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not a member; build the optimizer only "
                "on the ranks of the group"
            )
        self.ranks = dist.get_process_group_ranks(group)
        self.world, self.rank = len(self.ranks), dist.get_rank(group)
        # How long anything waits for another rank, and then for finding out for whom: together the
        # group's timeout.
        limit = group_timeout(group)
        self.naming = min(datetime.timedelta(seconds=NAMING_S), NAMING_SHARE * limit)
        self.timeout = limit - self.naming
        if self.world > 1:
            self.group = self.new_group("gloo")
            self.board = local.open_board(self)

    def new_group(self, backend: str) -> Any:
        """Collective. A process group of the same ranks."""
        with self.naming_ranks():
            return dist.new_group(
                self.ranks, backend=backend, timeout=self.timeout, use_local_synchronization=True
            )

    def start(self, message: Message, bits: Tensor) -> Exchange:
        """Send this rank's message; `bits` uint8 [bytes] of the same length on every rank."""
        return Exchange(self, message, bits)

    def exchange(self, message: Message, bits: Tensor) -> Agreed:
        return self.start(message, bits).wait()

    def gather_objects(self, thing: Any) -> list[Any]:
        """`thing` (picklable) of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [thing]
        things: list[Any] = [None] * self.world
        with self.naming_ranks():
            dist.all_gather_object(things, thing, group=self.group)
        return things

    def raise_together(self, error: Exception | None) -> None:
        """Collective. If any rank brings an error, raise the first one, with its rank, everywhere.

        The same exception type and text everywhere: one of ERRORS, others become a RuntimeError
        that names them.
        """
        if self.world == 1:
            if error is not None:
                raise error
            return
        brought = self.gather_objects(None if error is None else told(error))
        for rank, other in enumerate(brought):
            if other is not None:
                raise ERRORS[other[0]](f"rank {self.ranks[rank]}: {other[1]}") from error

    @contextmanager
    def naming_ranks(self, kind: type[Exception] = RuntimeError) -> Iterator[None]:
        """Around anything that needs the other ranks: the error names those that are missing.

        kind: what it raises when it does not reach them.
        """
        try:
            yield
        except (NotImplementedError, torch.OutOfMemoryError):
            raise  # RuntimeErrors that say nothing of other ranks
        except kind as cause:
            raise self.lost(cause) from cause

    def lost(self, cause: Exception) -> RuntimeError:
        missing = [self.ranks[r] for r in missing_ranks(self, self.naming.total_seconds())]
        who = f"rank(s) {missing}" if missing else "another rank"
        place = "construction"
        if self.last is not None:
            place = f"{SPOKEN[self.last.action]} of iteration {self.last.iteration}"
        return RuntimeError(
            f"rank {self.ranks[self.rank]} waited at {place}, but {who} did not arrive within "
            f"{self.timeout.total_seconds():g} s or died; every rank of the group must make the "
            f"same calls (opt.join() covers uneven data): {cause}"
        )


ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
}


def told(error: Exception) -> tuple[str, str]:
    """Name of the type that all ranks raise, and the text."""
    for kind, known in ERRORS.items():
        if isinstance(error, known):
            return kind, str(error)
    return "RuntimeError", f"{type(error).__name__}: {error}"


class Exchange:
    """One exchange under way: `ready()` never blocks, `wait()` returns the verdict or raises."""

    def __init__(self, control: Control, message: Message, bits: Tensor) -> None:
        self.control, control.last = control, message
        head, board = message.pack(), control.board
        with control.naming_ranks():
            # All ranks' messages have the same length, so all take the same way.
            if board is not None and len(head) + bits.numel() <= board.MESSAGE_BYTES:
                self.work = board.start(head, bits)
            else:
                self.work = GlooExchange(control, head, bits)

    def ready(self) -> bool:
        return bool(self.work.ready())

    def wait(self) -> Agreed:
        with self.control.naming_ranks():
            everybody = self.work.wait(self.control.timeout.total_seconds())
        return Agreed(unpack_all(everybody), everybody[:, MESSAGE_BYTES:])


# torch 2.13 renamed the second to the first, and warns.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


class GlooExchange:
    """What `_C.LocalExchange` is, over Gloo."""

    def __init__(self, control: Control, head: bytes, bits: Tensor) -> None:
        self.mine = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), bits])
        self.all = torch.empty(control.world, self.mine.numel(), dtype=torch.uint8, device="cpu")
        self.work = all_gather_single(
            self.all.view(-1), self.mine, group=control.group, async_op=True
        )

    def ready(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout_s: float) -> Tensor:
        """After `timeout_s`, which is the group's, it raises."""
        self.work.wait()
        return self.all


def unpack_all(everybody: Tensor) -> list[Message]:
    """everybody: uint8 [world, bytes], of which the first MESSAGE_BYTES are read."""
    heads = everybody[:, :MESSAGE_BYTES]
    same = ops.same_rows(heads)  # the normal case, where one is enough
    messages = [
        Message(n[0], n[1], n[2], Action(n[3]), n[4], n[5], n[6], n[7], n[8], (n[9], n[10]))
        for n in struct.iter_unpack(MESSAGE, raw(heads[:1] if same else heads))
    ]
    return messages * len(heads) if same else messages


def first_difference(messages: Sequence[Message], names: Sequence[int]) -> str | None:
    """What keeps these messages from belonging together, or None; names: the ranks' global numbers.

    Ranks at ROUND may meet anybody, who then takes part in the round; so may ranks at JOIN, who
    take part in whatever the others do, except what changes them for good.
    """
    named = list(zip(names, messages, strict=True))
    active = [(r, m) for r, m in named if m.action is not Action.JOIN]
    base_rank, base = active[0] if active else named[0]
    for rank, m in named:
        joined = m.action is Action.JOIN
        if m[:3] != base[:3]:
            return out_of_step(base_rank, base, rank, m)
        if joined and base.action in (Action.LOAD, Action.ADD_GROUP):
            return out_of_step(base_rank, base, rank, m)
    for rank, m in active:
        first_rank, first = active[0]
        if m.action is not first.action and Action.ROUND not in (m.action, first.action):
            return out_of_step(first_rank, first, rank, m)
        if m.action is first.action is not Action.ROUND and m.detail != first.detail:
            return (
                f"{SPOKEN[m.action]} was called with {arguments(first)} on rank {first_rank} but "
                f"with {arguments(m)} on rank {rank}; pass the same arguments on every rank"
            )
    return None


def arguments(m: Message) -> str:
    names = ARGUMENTS.get(m.action, ())
    named = [f"{name} = {value:g}" for name, value in zip(names, m.detail, strict=False)]
    return ", ".join(named) or str(m.detail)


def out_of_step(rank_a: int, a: Message, rank_b: int, b: Message) -> str:
    def place(m: Message) -> str:
        return (
            f"at {SPOKEN[m.action]} (iteration {m.iteration}, window {m.window}, round {m.round})"
        )

    return (
        f"ranks are out of step: rank {rank_a} is {place(a)}, rank {rank_b} is {place(b)}; make "
        "the same step(), zero_grad() and norm calls on every rank (zero_grad() on all of them "
        "starts a fresh window)"
    )


def group_timeout(group: Any) -> datetime.timedelta:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        backend = group._get_backend(torch.device("cuda"))
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if timeout is not None else dist.constants.default_pg_timeout


def missing_ranks(control: Control, naming_s: float) -> list[int]:
    """Ranks of the group that do not report, through the store, that they miss somebody as well.

    They may do so from different places: some may be exchanging data already. The group does not
    survive this, so one report a rank will do.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        place = "construction" if control.group is None else control.group.group_name
        keys = [f"dynzero/{place}/{rank}" for rank in control.ranks]
        store.set(keys[control.rank], "waiting")
        deadline = time.monotonic() + naming_s
        missing = list(range(control.world))
        while missing and time.monotonic() < deadline:
            missing = [r for r in missing if not store.check([keys[r]])]
            time.sleep(0.05)
        return missing
    except RuntimeError:
        return []
