"""gather="lazy": the new values of a step arrive while the next forward runs.

step() sends every bucket and returns. A parameter's bucket is waited for and unpacked when the
module that holds the parameter runs its forward. See Note [Values on their way].
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .plan import Plan
from .reduced import Gradients, Reader
from .rounds import hook_gradient, remove_all
from .streams import is_current

# Note [Values on their way]
# Taking a bucket out is local (wait, unpack), and all were sent in step(): so each rank may run
# other modules than the others, in any order. Until its bucket is taken out, a parameter is part
# old and part new. Nobody can see it being read, but training on what was read shows: a gradient
# for a parameter whose module has not run since the step is an error on every rank, at the next
# call that meets them, wherever the bucket is by then; so it does not depend on how parameters fall
# into buckets. Where the module runs only after that use, autograd finds the weight changed, if
# backward reads it. A parameter that somebody writes to, or moves, meanwhile is an error as well.

# Modules that read parameters of modules below them, and do not call those.
READING_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer, torch.jit.ScriptModule)
NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
# Those that have nothing to call.
PARAMETERS = (nn.ParameterList, nn.ParameterDict)

REMEDY = "call opt.wait_for_parameters() after step(), or use gather='eager'"


class Sent:
    """The buckets of one step. ptrs: int64 [params] on the device, where they are unpacked to."""

    def __init__(
        self, gathering: Any, plan: Plan, grads: Gradients, ptrs: Tensor, params: list[Tensor]
    ) -> None:
        self.gathering, self.plan, self.ptrs, self.params = gathering, plan, ptrs, params
        self.received = 0
        self._addresses = grads.local.ptrs[1].tolist()
        self._versions = {i: params[i]._version for i in plan.indices}
        self._aside: list[Tensor] = []  # receives what has no place any more

    def __len__(self) -> int:
        return len(self.plan.buckets)

    def receive(self, staged: dict[int, Tensor]) -> list[int]:
        """Take out the next bucket. Returns parameters that were not left alone meanwhile."""
        indices = self.plan.indices[self.plan.buckets[self.received].rows]
        changed = [i for i in indices if self.params[i]._version != self._versions[i]]
        moved = [i for i in indices if i not in staged]
        moved = [i for i in moved if self.params[i].data_ptr() != self._addresses[i]]
        for i in moved:
            size = int(self.plan.layout.numel[i])
            self._aside.append(self.ptrs.new_empty(size, dtype=self.plan.layout.dtypes[i]))
            self.ptrs[i] = self._aside[-1].data_ptr()
        self.received += 1
        self.gathering.receive()
        increment_version([self.params[i] for i in indices])
        return changed + moved


class Arrivals:
    """What this rank has not yet taken out of the last step's gather. Knows no optimizer.

    naming_ranks: around what may fail to reach other ranks.
    """

    def __init__(
        self,
        params: list[Tensor],
        device: torch.device,
        naming_ranks: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._params, self._device, self._naming_ranks = params, device, naming_ranks
        self._sent: Sent | None = None
        self._reader: Reader | None = None
        self._stream: Any = None  # of the step
        self._bucket_of: dict[int, int] = {}  # by id, of parameters whose module has not run
        self._early, self._touched = "", ""  # what went wrong, for the next call that can say it
        self._lock = threading.RLock()  # autograd may run a forward, in a thread of its own
        self._hook: Any = None
        self._handles: list[Any] = []
        ALL.add(self)
        weakref.finalize(self, remove_all, self._handles)
        self.watch(params)

    def watch(self, params: list[Tensor]) -> None:
        """Notice gradients of these parameters, also of those that are frozen now."""
        me = weakref.ref(self)

        def arrived(p: Tensor) -> None:
            arrivals = me()
            if arrivals is not None and id(p) in arrivals._bucket_of:
                arrivals._note_early(p)

        self._handles += [hook_gradient(p, arrived) for p in params]

    def _name(self, index: int) -> str:
        assert self._sent is not None
        return self._sent.plan.layout.names[index]

    def _note_early(self, p: Tensor) -> None:
        index = next(i for i, other in enumerate(self._params) if other is p)
        self._early = self._early or (
            f"gather='lazy': parameter '{self._name(index)}' got a gradient, but the forward of "
            "the module that holds it has not run since step(), so it may have been read before "
            f"its new values had arrived; {REMEDY}. Discard this window with opt.zero_grad()"
        )

    def expect(self, sent: Sent, reader: Reader) -> None:
        """All buckets of a step are on their way."""
        assert self._sent is None, "the step before has not been received"
        self._sent, self._reader = sent, reader
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        for bucket in sent.plan.buckets:
            for i in sent.plan.indices[bucket.rows]:
                self._bucket_of[id(self._params[i])] = bucket.number
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # being traced, and would not run with the compiled code: Note [Compiled]
        if is_optimized(module):
            self.finish()
            return
        with self._lock:
            count = self._now_run(module._parameters.values())
            if module._modules:
                whole = [module] if isinstance(module, READING_BELOW) else hookless_below(module)
                for other in whole:
                    count = max(count, self._now_run(other.parameters()))
            if count:
                self._receive(count)
                if not self._bucket_of:
                    self.finish()

    def _now_run(self, params: Iterable[Tensor | None]) -> int:
        """How many buckets must have been taken out before these parameters are read."""
        count = 0
        for p in params:
            number = self._bucket_of.pop(id(p), -1)
            if number >= count:
                count = number + 1
        return count

    def _receive(self, count: int) -> None:
        """Take out the first `count` buckets, if they are not out yet."""
        assert self._sent is not None and self._reader is not None
        on_stream = self._stream is None or is_current(self._stream)
        if on_stream and self._sent.received >= count:
            return
        current: Any = self._stream and torch.cuda.current_stream(self._device)
        if self._sent.received < count:
            try:
                with nullcontext() if on_stream else self._on_stream(current):
                    while self._sent.received < count:
                        self._receive_next(self._sent, self._reader)
            except BaseException:
                self._forget()
                raise
        if not on_stream:
            current.wait_stream(self._stream)

    def _receive_next(self, sent: Sent, reader: Reader) -> None:
        indices = sent.plan.indices[sent.plan.buckets[sent.received].rows]
        with self._naming_ranks():
            touched = sent.receive(reader.staged)
        reader.unstage(indices)
        if touched:
            self._note_touched(touched[0])

    def _note_touched(self, index: int) -> None:
        self._touched = self._touched or (
            f"gather='lazy': parameter '{self._name(index)}' was written to or moved while its "
            f"new values were on their way; before you do so {REMEDY}"
        )

    def _on_stream(self, current: Any) -> AbstractContextManager[Any]:
        """CUDA: the stream of the step, after what the current one now holds."""
        self._stream.wait_stream(current)
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Take out all there is. From here on every parameter may be read anywhere."""
        with self._lock:
            if self._sent is not None:
                self._receive(len(self._sent))
                self._forget()

    def _forget(self) -> None:
        self._sent = self._reader = None
        self._bucket_of.clear()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def complaint(self) -> RuntimeError | None:
        """What went wrong since the step. Early gradients remain wrong until zero_grad()."""
        text, self._touched = self._touched or self._early, ""
        return RuntimeError(text) if text else None

    def clear(self) -> None:
        """zero_grad(): what was computed from old values is discarded."""
        self._early = ""


# Note [Compiled]
# Hooks do not run inside compiled code, which is traced without them and does not come back to
# them. torch.compile(module) is met from outside, and gets everything first; so does a module with
# module.compile() when the one above it runs. If there is none above, or a function is compiled
# that calls modules, their parameters count as not run: an error as above, not a wrong result.


def is_optimized(module: nn.Module) -> bool:
    """Made by torch.compile(module). Importing its class takes seconds, so it is only looked up."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def hookless_below(module: nn.Module) -> Iterator[nn.Module]:
    """Modules below this one that run without hooks, or do not run."""
    for child in module._modules.values():
        if child is None:
            continue
        if child._compiled_call_impl is not None or isinstance(child, PARAMETERS):
            yield child
        elif isinstance(child, NOT_CALLED):
            yield from hookless_below(child)


# Those of all optimizers; weak, and looked at only when another one is built.
ALL: weakref.WeakSet[Arrivals] = weakref.WeakSet()


def finish_all() -> None:
    for arrivals in list(ALL):
        arrivals.finish()
