"""Stage 2: reduction while backward runs, bucket by bucket.

Hooks see a backward pass begin. What it will bring is announced at once; buckets go out as they
fill, and what is left when the pass ends. See Note [Backward never blocks for good].
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from .ops import ops
from .plan import Plan
from .reduced import Local, Reader
from .streams import is_current
from .transports.collective import Collective

# Note [Backward never blocks for good]
# Inside backward this rank must not insist on an answer: another rank may have no backward here
# and be waiting, before its step(), for a collective of the user's or of another optimizer. So a
# round is a little state machine that holds its own gradients. Hooks push it on without waiting;
# the end of backward pushes it on and waits for a bounded time only (to keep memory low in the
# normal case, where all ranks arrive); the next call that reduces (step and the like) finishes what
# is left, in order. The result does not depend on when: each round is summed by itself and added in
# order. Where ranks differ, asking them for details is left to that call as well. After zero_grad()
# has given up rounds that others may be waiting for, a thread finishes them, for this rank may not
# come back here before the others have gone on.

PATIENCE_S = 0.25
LOOK_EVERY_S = 1e-3
# The frame from which autograd calls the backward of a torch.autograd.Function.
FUNCTION_BACKWARD = BackwardCFunction.apply.__code__
# Which Rounds watch a parameter; weak on both sides, and looked at only to find a predecessor.
WATCHERS = WeakTensorKeyDictionary()


# All there are, of this process; weak.
LIVE: weakref.WeakSet[Rounds] = weakref.WeakSet()


class Waitable(Protocol):
    def ready(self) -> bool: ...


class Later:
    """What comes next may block, and so has to wait until hooks and backward are over."""

    def ready(self) -> bool:
        return False


class Failed(Later):
    """All ranks have agreed on an error. Whoever finishes the rounds raises it; then, unless
    zero_grad() discards them, they are announced again with the gradients that they still hold."""

    def __init__(self, error: Exception) -> None:
        self.error, self.raised = error, False


class Until:
    """Ready when a function says so."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready


class Pass(Local):
    """The gradients of one backward pass, which arrive while it runs.

    `bits` are those that have arrived and been taken, `announced` what was told to all ranks.
    """

    def __init__(self, reader: Reader, watch: Any, local: Local) -> None:
        local.drop(pinned=reader.device.type == "cuda")  # its parts are copied as buckets leave
        super().__init__(local.ptrs, local.bits)
        self._reader, self._watch = reader, watch
        self.announced = torch.empty_like(self.bits)
        self.window: object = None  # the one in which its round is, once the ranks have agreed
        self._running = True
        self._feed: Any = None
        # Announced, and its bucket has not left.
        self._open = torch.empty(len(reader.params), dtype=torch.bool, device="cpu")
        watch.begin(self.announced, self._open)

    @property
    def located(self) -> bool:
        return not self._running

    def feed(self, reduction: Any, plan: Plan, collective: Collective) -> Iterator[Any]:
        if not self._running:
            yield from super().feed(reduction, plan, collective)
            return
        feed = ops.BucketFeed(
            reduction, self._reader.scan, self.taken, self.ptrs[0], self.bits, self._open,
            plan.places,
        )  # fmt: skip
        self._feed = feed
        self._watch.follow(feed)
        while not feed.done:
            yield feed
            with collective.naming_ranks():
                odd = feed.push()
            for i in odd:
                self._reader.make_regular(self, i, self.taken.get(i))

    def close(self) -> None:
        """The pass has ended: take the rest of what was announced, and only that.

        What belongs to a round must not depend on how fast the other ranks are.
        """
        self._running = False
        self._watch.end()
        self._reader.take(self, self._open)
        if self._feed is not None:
            self._feed.close()


class Rounds:
    """The queue of started rounds of one optimizer, and the hooks that start them.

    open_pass(watch) -> the pass that begins, and an iterator that reduces it and yields whatever it
    waits for next; close_pass(pass) is called at its end. excused(error) -> whether nobody needs to
    be told of this error, of rounds that zero_grad() has given up.
    """

    def __init__(
        self,
        params: list[Tensor],
        device: torch.device,
        open_pass: Callable[[Any], tuple[Pass, Iterator[Waitable]]],
        close_pass: Callable[[Pass], None],
        excused: Callable[[BaseException], bool],
    ) -> None:
        self._open, self._close = weakref.WeakMethod(open_pass), weakref.WeakMethod(close_pass)
        self._excused = weakref.WeakMethod(excused)
        self._queue: deque[Iterator[Waitable]] = deque()
        self._waits_for: Waitable | None = None
        self._current: Pass | None = None
        self._driving = threading.Lock()  # held by whoever pushes rounds on
        self._failure: BaseException | None = None  # of the thread, for the next call here
        self.superseded = False
        self.nested = False  # a backward has run inside another
        # All work of rounds is queued on one stream, wherever hooks and calls find themselves.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        LIVE.add(self)
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles)
        me = weakref.ref(self)

        def meet() -> bool:
            rounds = me()
            return rounds is not None and rounds._meet()

        def progress() -> None:
            rounds = me()
            if rounds is not None:
                rounds._advance(0.0)

        stream_id = 0 if self._stream is None else self._stream.stream_id
        self._watch = ops.GradWatch(meet, progress, stream_id)
        self.watch(params)

    @property
    def alone(self) -> bool:
        """No other optimizer of this process may have buckets on their way during backward."""
        return len(LIVE) == 1 or all(rounds is self or rounds.superseded for rounds in LIVE)

    @property
    def paused(self) -> bool:
        """Inside no_sync(): backward passes leave their gradients where they are."""
        return bool(self._watch.paused)

    @paused.setter
    def paused(self, value: bool) -> None:
        self._watch.paused = value

    def watch(self, params: list[Tensor]) -> None:
        """Add hooks, also on parameters that are frozen now and may train later."""
        me = weakref.ref(self)
        for p, hook in zip(params, self._watch.add(params), strict=True):
            WATCHERS[p] = me
            self._handles.append(hook_gradient(p, hook))

    def _meet(self) -> bool:
        """In the first hook of a pass: follow it, unless it is a part of another."""
        if inside_function():
            self.nested = True
            return False
        self.end_pass()  # one that an exception has cut short
        self._advance(0.0, in_stream=True)
        opener = self._open()
        assert opener is not None
        with self._on_stream():
            self._current, round_ = opener(self._watch)
        self._queue.append(round_)
        # Weak: on CUDA a thread of autograd may drop this callback only after the next step().
        me, current = weakref.ref(self), weakref.ref(self._current)

        def at_end() -> None:
            rounds = me()
            if rounds is not None and rounds._current is not None and rounds._current is current():
                rounds.end_pass()
                rounds._advance(time.monotonic() + PATIENCE_S)

        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        self._advance(0.0)
        return True

    def end_pass(self) -> bool:
        """Follow no pass any more. True if there was one whose end had not been seen."""
        current, self._current = self._current, None
        closer = self._close()
        if current is None or closer is None:
            return False
        with self._on_stream():
            closer(current)
        return True

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def last(self) -> Iterator[Waitable] | None:
        """The round started last, if it is not over."""
        return self._queue[-1] if self._queue else None

    def drop_failed(self) -> None:
        """Drop the rounds, if all ranks have agreed that the first one cannot be."""
        if isinstance(self._waits_for, Failed):
            self._drop()

    def _drop(self) -> None:
        self._queue.clear()
        self._waits_for = None

    def push(self, work: Iterator[Waitable]) -> None:
        """Queue `work` and start it if its turn has come; waits for nobody."""
        self.append(work)
        self._advance(0.0)

    def append(self, work: Iterator[Waitable]) -> None:
        """Queue `work` for later."""
        self._queue.append(work)

    def _on_stream(self) -> AbstractContextManager[Any]:
        """CUDA: the stream of the rounds, after what the current one and the hooks' now hold."""
        if self._stream is None or self._watch.all_on(self._stream.stream_id):
            return nullcontext()
        if is_current(self._stream) and not self._watch.streams():
            return nullcontext()
        current = torch.cuda.current_stream(self._stream.device)
        for s in self._watch.streams():
            other = torch.cuda.Stream(stream_id=s[0], device_index=s[1], device_type=s[2])
            if other != self._stream:
                self._stream.wait_stream(other)
        if current == self._stream:
            return nullcontext()
        self._stream.wait_stream(current)
        return torch.cuda.stream(self._stream)

    def _advance(self, deadline: float, *, in_stream: bool = False) -> None:
        """Push rounds on, in order, waiting for others until `deadline` (time.monotonic).

        in_stream: CUDA streams may be made to wait for rounds that are in step.
        """
        if not self._driving.acquire(blocking=False):
            return
        try:
            while self._queue and self._may_go_on(deadline, in_stream=in_stream):
                self._next()
        finally:
            self._driving.release()

    def _may_go_on(self, deadline: float, *, later: bool = False, in_stream: bool = False) -> bool:
        waits_for: Any = self._waits_for
        if isinstance(waits_for, Later):
            return later
        if self._stream is not None and isinstance(waits_for, (ops.BucketFeed, ops.Reduction)):
            # On its way, which is nothing for the host to wait for; only for its own thread, that
            # is still sending.
            while waits_for.sending and time.monotonic() < deadline:
                time.sleep(2e-5)
            return bool(waits_for.ready()) or (in_stream and waits_for.in_step)
        while waits_for is not None and not waits_for.ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(2e-5)
        return True

    def _next(self) -> None:
        failed = self._waits_for
        if isinstance(failed, Failed) and not failed.raised:
            failed.raised = True
            raise failed.error
        with self._on_stream(), torch.no_grad():
            try:
                self._waits_for = next(self._queue[0])
            except StopIteration:
                self._queue.popleft()
                self._waits_for = None
            except BaseException:
                self._drop()
                self._current = None
                self._watch.end()
                raise

    def finish(self) -> None:
        """Complete all started rounds, waiting for as long as it takes."""
        self.end_pass()
        with self._driving:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            while self._queue:
                self._next()
        if self._stream is not None and not is_current(self._stream):
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def finish_aside(self) -> None:
        """Complete the rounds started so far, in a thread; errors are for the next finish()."""
        last = self.last
        if last is not None:  # weak, both: a round knows the optimizer, which may be dropped
            args = weakref.ref(self), weakref.ref(last)
            threading.Thread(target=finish_in_thread, args=args, daemon=True).start()

    def finish_some(self, last: Iterator[Waitable] | None) -> bool:
        """Push rounds on up to `last`, without waiting for gradients. True if that is over."""
        with self._driving:
            more = False
            try:
                while last in self._queue and self._may_go_on(0.0, later=True):
                    more = self._queue[-1] is not last
                    self._next()
            except BaseException as error:
                excused = self._excused()
                if more or excused is None or not excused(error):
                    self._failure = error
                self._drop()
            return last not in self._queue


def supersede(params: list[Tensor]) -> None:
    """Another optimizer takes these parameters over: a gradient can be taken by one only, and the
    newest over a parameter gets it. The others say so when they are next used.
    """
    for p in params:
        predecessor = WATCHERS[p]() if p in WATCHERS else None
        if predecessor is not None:
            predecessor.superseded = predecessor.paused = True


def finish_in_thread(rounds: weakref.ref[Rounds], last: weakref.ref[Any]) -> None:
    """Look again and again: waiting in C++ while Python ends would abort the process."""
    while True:
        some, round_ = rounds(), last()
        if some is None or round_ is None or some.finish_some(round_):
            return
        del some, round_
        time.sleep(LOOK_EVERY_S)


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


def hook_gradient(p: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Run `hook` after each gradient of `p`, which may be frozen now. Returns what removes it."""
    frozen = not p.requires_grad
    # torch takes hooks only on tensors that require a gradient at that moment.
    p.requires_grad_(True)
    handle = p.register_post_accumulate_grad_hook(hook)
    p.requires_grad_(not frozen)
    return handle


def remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
