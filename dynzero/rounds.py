"""Stage 2: reduction at the end of each backward pass.

Hooks see which backward is running; at its end the gradients are taken from the parameters and a
round is queued. See Note [Backward never blocks for good].
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

# Note [Backward never blocks for good]
# Inside backward this rank must not insist on an answer: another rank may have no backward here
# and be waiting, before its step(), for a collective of the user's or of another optimizer. So a
# round is a little state machine that holds its own gradients. The end of backward pushes it on
# and waits for a bounded time only (to keep memory low in the normal case, where all ranks arrive);
# the next call that reduces (step and the like) finishes what is left, in order. The result does
# not depend on when: each round is summed by itself and added in order.

PATIENCE_S = 0.25
# The frame from which autograd calls the backward of a torch.autograd.Function.
FUNCTION_BACKWARD = BackwardCFunction.apply.__code__
# Which Rounds watch a parameter; weak on both sides, and looked at only to find a predecessor.
WATCHERS = WeakTensorKeyDictionary()


class Waitable(Protocol):
    def ready(self) -> bool: ...


class Rounds:
    """The queue of started rounds of one optimizer, and the hooks that start them.

    begin() -> an iterator that yields whatever it waits for next; called at the end of a backward.
    """

    def __init__(
        self, params: list[Tensor], device: torch.device, begin: Callable[[], Iterator[Waitable]]
    ) -> None:
        self._begin = weakref.WeakMethod(begin)
        self._queue: deque[Iterator[Waitable]] = deque()
        self._waits_for: Waitable | None = None
        self._task = -1  # graph task whose end is already being watched
        self.deferred = False  # inside no_sync()
        self.superseded = False
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles)
        self.watch(params)

    def watch(self, params: list[Tensor]) -> None:
        """Add hooks, also on parameters that are frozen now and may train later.

        A gradient can be taken by one optimizer only: the newest over a parameter supersedes the
        others, which say so when they are next used.
        """
        me = weakref.ref(self)
        for p in params:
            predecessor = WATCHERS[p]() if p in WATCHERS else None
            if predecessor is not None:
                predecessor.superseded = True
            WATCHERS[p] = me

        def hook(_: Tensor) -> None:
            rounds = me()
            if rounds is not None and not rounds.superseded:
                rounds._on_gradient()

        for p in params:
            frozen = not p.requires_grad
            # torch takes hooks only on tensors that require a gradient at that moment.
            p.requires_grad_(True)
            self._handles.append(p.register_post_accumulate_grad_hook(hook))
            p.requires_grad_(not frozen)

    def _on_gradient(self) -> None:
        task = torch._C._current_graph_task_id()
        if self.deferred or task == self._task or inside_function():
            return
        self._task = task
        me = weakref.ref(self)

        def at_end() -> None:
            rounds = me()
            if rounds is not None and rounds._task == task:
                rounds._task = -1
                rounds._end_of_backward()

        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def forget(self) -> None:
        self._task = -1

    def _end_of_backward(self) -> None:
        with self._on_side_stream():
            self._queue.append(self._started())
        self._advance(time.monotonic() + PATIENCE_S)

    def _started(self) -> Iterator[Waitable]:
        begin = self._begin()
        assert begin is not None
        return begin()

    def _on_side_stream(self) -> Any:
        """CUDA work of rounds runs beside the main stream, after what is queued there now."""
        if self._side is None:
            return torch.cuda.stream(None)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        return torch.cuda.stream(self._side)

    def _advance(self, deadline: float) -> None:
        """Push rounds on, in order, waiting for others until `deadline` (time.monotonic)."""
        while self._queue:
            if self._waits_for is not None:
                while not self._waits_for.ready():
                    if time.monotonic() > deadline:
                        return
                    time.sleep(2e-5)
            self._next()

    def _next(self) -> None:
        with self._on_side_stream():
            try:
                self._waits_for = next(self._queue[0])
            except StopIteration:
                self._queue.popleft()
                self._waits_for = None
            except BaseException:
                self._queue.clear()
                self._waits_for = None
                raise

    def finish(self) -> None:
        """Complete all started rounds, waiting for as long as it takes."""
        while self._queue:
            self._next()
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


def inside_function() -> bool:
    """True in a backward that runs inside the backward of an autograd function.

    That is re-entrant checkpointing. Its gradients belong to the pass around it: they wait in
    `p.grad` for the end of that pass, or for the next call that reduces if nothing watches it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is FUNCTION_BACKWARD:
            return True
        frame = frame.f_back
    return False


def remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
