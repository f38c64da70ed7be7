"""What torch wraps around step(): a range for the profiler, and the user's hooks.

torch's own wrapper costs as much as a third of our step on the host, mostly for a range that nobody
looks at. It runs where there is something for it to do. Hooks for all optimizers are for those of
the user, so they do not see the ones that we make.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer, optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .ops import Range


@contextmanager
def no_global_hooks() -> Iterator[None]:
    """Around the step of an optimizer that the user does not know of.

    Its wrapper could be passed by instead, but not those of base classes that it calls, nor may
    hooks be lost that the class has registered for itself.
    """
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    kept = [getattr(optimizer, name) for name in names]
    for name in names:
        setattr(optimizer, name, OrderedDict())  # not cleared: one of them may be running
    try:
        yield
    finally:
        for name, hooks in zip(names, kept, strict=True):
            hooks.update(getattr(optimizer, name))
            setattr(optimizer, name, hooks)


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` as torch.optim.Optimizer would wrap it itself, if this did not tell that it is."""
    by_torch = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self).step is not wrapper:  # torch has wrapped the step of a derived class
            return step(self, *args, **kwargs)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiler_enabled()
        ):
            return by_torch(self, *args, **kwargs)
        with Range(f"Optimizer.step#{type(self).__name__}.step"):
            return step(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]
    return wrapper
