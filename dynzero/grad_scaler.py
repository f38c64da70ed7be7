"""torch.amp.GradScaler that agrees across ranks, for loops written for torch's AMP."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from . import norms, presence
from .optimizer import ZeroOptimizer
from .transports.control import Action


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a ZeroOptimizer: scale, unscale_, clip, step, update as usual.

    A gradient that is not finite on any rank makes all ranks skip the step and back off, also one
    that comes after `unscale_`. `unscale_` and `step` are collective. Use it with a ZeroOptimizer
    that has `loss_scale=None`; the optimizer can scale by itself (`loss_scale="dynamic"`), which
    needs no host wait and is faster. Raises ValueError for an optimizer with a loss scale of its
    own, RuntimeError as torch does.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled or not isinstance(optimizer, ZeroOptimizer):
            super().unscale_(optimizer)
            return
        if optimizer._scale.scaling:
            raise ValueError(
                "loss_scale: expected None with a GradScaler, the loss is scaled twice"
            )
        narrow = [p for p in optimizer._params if p.dtype == torch.float16]
        if narrow and optimizer._rounds is None:
            # As torch: dividing by the scale in float16 loses what the scale has saved.
            raise ValueError(
                "Attempting to unscale FP16 gradients: build the optimizer with "
                "loss_scale='dynamic' instead, which unscales in float32"
            )
        self._check_scale_growth_tracker("unscale_")
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called since the last update()")
        assert self._scale is not None
        inverse = self._scale.double().reciprocal().float()
        with torch.no_grad():
            local, agreed = presence.agree(optimizer, Action.UNSCALE)
            found = norms.unscale(optimizer, local, agreed, inverse)
        state["found_inf_per_device"] = {found.device: found}
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, ZeroOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer._agreed_scaler = True
        before = optimizer.last_step
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._agreed_scaler = False
        last = optimizer.last_step
        if self._enabled and last is not None and last is not before and last.found is not None:
            # The optimizer has looked again, at what came after unscale_ too.
            found = last.found.to(torch.float32)
            self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
                found.device: found
            }
        return result
