"""presence="static": every window repeats the first, so its answers are used again.

Ranks promise to make the same calls, with the same parameters present on each of them, in every
window; nothing is exchanged any more, and a step of one process can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .plan import indices_of
from .transports.control import SPOKEN, Action, Agreed

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


# Note [Late in every window]
# What a nested pass (re-entrant checkpointing) adds to a gradient comes in the same round, or late
# if its bucket has left by then, which is a matter of time: later windows know their plan at once,
# and would send earlier than the first. A late gradient is one more to announce, where nothing is
# asked any more. So buckets of the first window, and of all if there is nesting, leave when the
# pass ends.


class Answer(NamedTuple):
    """What all ranks said at one place of the first window, and who was present in it by then."""

    agreed: Agreed
    present: Tensor


class Repeated:
    """The answers of the first window, by the call and the number of rounds before it."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Action, int], Answer] = {}
        self.closed = False  # once the first window has ended in a step
        self._begun = False  # the window
        self._skips = False  # this window, of which the beginning is not known

    def holds(self, rounds: Any) -> bool:
        """If the buckets of a backward pass wait for its end. See Note [Late in every window]."""
        return not self.closed or rounds.nested

    def note(self, opt: ZeroOptimizer, action: Action, agreed: Agreed) -> None:
        if action in (Action.ADD_GROUP, Action.LOAD):
            self._answers.clear()
            self.closed, self._skips = False, self._begun
            return
        if self.closed or action is Action.STATE:
            return
        ends = action is Action.STEP and not agreed.any_at(Action.ROUND)
        if not self._skips:
            answer = Answer(agreed, opt._window.present.clone())
            self._answers[action, opt._window.rounds] = answer
            self.closed = ends
        self._begun = not ends
        self._skips = self._skips and not ends

    def recall(self, opt: ZeroOptimizer, action: Action, bits: Tensor) -> Agreed | None:
        """What was agreed here in the first window; None if that is not over, or to be asked anew.

        bits: presence on this rank. Raises ValueError, on this rank alone, where it differs.
        """
        if not self.closed or action in (Action.STATE, Action.ADD_GROUP, Action.LOAD):
            return None
        self._begun = action is not Action.STEP
        answer = self._answers.get((action, opt._window.rounds))
        if answer is None:
            raise ValueError(
                f"presence='static': rank {opt._control.ranks[opt._control.rank]} is at "
                f"{SPOKEN[action]} after {opt._window.rounds} backward passes, as never in the "
                "first window; repeat the same calls in every window, or use presence='exact'"
            )
        before = answer.agreed.bits[opt._control.rank]
        self._compare(opt, before[: opt._layout.bit_bytes], bits[: opt._layout.bit_bytes])
        if action is not Action.ROUND:
            opt._window.present &= answer.present
        return answer.agreed

    def _compare(self, opt: ZeroOptimizer, before: Tensor, now: Tensor) -> None:
        if torch.equal(before, now):
            return
        i = int(indices_of(before ^ now, opt._layout.size)[0])
        had = "has" if bool(now[i // 8] >> i % 8 & 1) else "has no"
        raise ValueError(
            f"presence='static': parameter '{opt._layout.names[i]}' {had} gradient in iteration "
            f"{opt._iteration} on rank {opt._control.ranks[opt._control.rank]}, unlike in the "
            "first window; the other ranks wait for this one until the group's timeout. Train the "
            "same parameters in every window, or use presence='exact'"
        )
