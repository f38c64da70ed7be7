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
        wires = {wire for wire, _ in optimizer._layout.classes} if optimizer._mover else set()
        if torch.float16 in wires and optimizer._rounds is None:
            raise ValueError(
                "wire_dtype: float16 would lose what is small once unscale_() has divided by the "
                "scale; expected float32 or bfloat16 with a GradScaler in stages 0 and 1 (or "
                "stage=2, or loss_scale='dynamic')"
            )
        scale = self._prepare(optimizer)
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called since the last update()")
        inverse = scale.double().reciprocal().float()
        with torch.no_grad():
            local, agreed = presence.agree(optimizer, Action.UNSCALE)
            found, inverses = norms.unscale(optimizer, local, agreed, inverse)
        state["inverses"] = inverses
        state["found_inf_per_device"] = {found.device: found}
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, ZeroOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if self._enabled:
            self._prepare(optimizer)
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

    def _prepare(self, optimizer: ZeroOptimizer) -> torch.Tensor:
        """The scale, which scale() makes; a rank without a loss has not called that yet."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(optimizer._device)
        assert self._scale is not None
        return self._scale

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What step() does after unscale_(); waits for the device, so the scales can be looked at.

        RuntimeError on every rank if the ranks have scaled differently.
        """
        if isinstance(optimizer, ZeroOptimizer):
            inverses = zip(
                optimizer._control.ranks, optimizer_state["inverses"].tolist(), strict=True
            )
            # 0: a rank that has joined.
            scales = {rank: 1 / inverse for rank, inverse in inverses if inverse}
            if len(set(scales.values())) > 1:
                raise RuntimeError(
                    "GradScaler: ranks have scaled their losses differently, by rank "
                    + ", ".join(f"{rank}: {scale:g}" for rank, scale in scales.items())
                    + "; build it with the same options and load the same state on every rank"
                )
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
