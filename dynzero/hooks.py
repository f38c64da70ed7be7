"""What torch wraps around step(): a range for the profiler, and the user's hooks.

torch's own wrapper costs as much as a third of our step on the host, mostly for a range that nobody
looks at. It runs where there is something for it to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .ops import Range


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
