"""Windows that one rank gives up with zero_grad(): every rank drops them, or gets the same error.

See Note [Giving up a window]. Nothing here touches gradients on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .transports.control import LOST, Action, Agreed
from .window import Window

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer

# Note [Giving up a window]
# A rank whose backward raised, or that just wants to discard its gradients, calls zero_grad(). That
# neither waits for the others nor needs them to do the same at once: messages carry the number of
# zero_grad() calls since the last step (`clears`), and the last of these calls that had something
# to discard (`given_up`). When a new `given_up` arrives, all ranks drop the window. A rank that has
# gradients in it, or brings some and has cleared less often, is behind: what it brings of its old
# window is dropped, it is right again after a zero_grad() of its own, and a step() before that is
# an error on every rank. Numbers of calls compare because ranks clear at the same places of their
# loops; where they do not, this error is the worst that comes of it. A rank whose backward raised
# also answers (Action.CLEAR) the round that the others have announced, so that they learn of it at
# once.


class Discards:
    """What this rank knows of zero_grad() calls since the last step, its own and the others'."""

    def __init__(self, world: int) -> None:
        self.clears = 0
        self.given_up = 0
        self.seen = [0] * world  # `given_up` of each rank that has taken effect
        self.behind = -1  # `clears` at which this rank had not given up what another had
        self.text = ""  # of the error for ranks that are behind
        self.told: RuntimeError | None = None  # the error with which counting began anew

    @property
    def now(self) -> tuple[int, int]:
        return self.clears, self.given_up

    @property
    def lost(self) -> bool:
        """True while this rank may do nothing but zero_grad()."""
        return self.behind == self.clears

    def clear(self, something: bool) -> None:
        """zero_grad() was called; `something`: there was something to discard."""
        self.clears += 1
        if something:
            self.given_up = self.clears


def settle(opt: ZeroOptimizer, agreed: Agreed) -> bool:
    """Drop the window if a rank has given it up. True if all others must announce again."""
    known, messages = opt._discards, agreed.messages
    if any(m.trouble == LOST for m in messages):
        raise lost(opt)
    new = [r for r, m in enumerate(messages) if m.given_up > known.seen[r]]
    behind = ranks_behind(opt, agreed, new) if new else []
    if new:
        known.seen = [max(messages[r].given_up, seen) for r, seen in enumerate(known.seen)]
        drop_window(opt)
    if behind:
        known.text = gave_up(opt, [r for r in new if r not in behind], behind)
        if opt._control.rank in behind:
            known.behind = messages[opt._control.rank].clears
    return bool(behind) or agreed.any_at(Action.CLEAR)


def ranks_behind(opt: ZeroOptimizer, agreed: Agreed, new: list[int]) -> list[int]:
    """The ranks that have gradients in the window which one of the ranks `new` has given up last.

    That may be of `new` itself: one that has given up an earlier window, and brings this one.
    """
    clears = max(agreed.messages[r].given_up for r in new)
    counted = opt._window.present.any(1).tolist()
    brought = agreed.bits[:, : opt._layout.bit_bytes].any(1).tolist()
    return [
        r
        for r, m in enumerate(agreed.messages)
        if (counted[r] and r not in new) or (brought[r] and m.clears < clears)
    ]


def drop_window(opt: ZeroOptimizer) -> None:
    if opt._window.used and opt._device.type == "cuda":
        # Rounds work on a stream of their own: memory of another must outlive what is queued there.
        for tensor in (opt._window.sumsq, opt._window.nonfinite, *opt._window.buffers):
            tensor.record_stream(torch.cuda.current_stream(opt._device))
    opt._window = Window(opt._layout, opt._device)
    opt._window_number += 1


def gave_up(opt: ZeroOptimizer, ranks: list[int], behind: list[int]) -> str:
    def spoken(some: list[int]) -> str:
        return ", ".join(f"rank {opt._control.ranks[r]}" for r in some)

    return (
        f"ranks are out of step: {spoken(ranks)} gave up its gradients of iteration "
        f"{opt._iteration} with zero_grad(), {spoken(behind)} did not; they are discarded "
        "everywhere: call zero_grad() on every rank, then go on"
    )


def lost(opt: ZeroOptimizer) -> RuntimeError:
    """The error, the same on every rank; all ranks start counting anew."""
    error = RuntimeError(opt._discards.text)
    opt._discards = Discards(opt._control.world)
    opt._discards.told = error
    return error
