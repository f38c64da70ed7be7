"""torch.amp.GradScaler that agrees across ranks, for loops written for torch's AMP."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from . import norms, presence
from .optimizer import ZeroOptimizer
from .transports.control import Action


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a ZeroOptimizer: scale, unscale_, clip, step, update as usual.

    A gradient that is not finite on any rank makes all ranks skip the step and back off, also one
    that comes after `unscale_`, and also where the optimizer has `check_finite=False`. `unscale_`
    and `step` are collective. After `opt.join()` all ranks have the scale of the one that trained
    longest. Use it with a ZeroOptimizer that has `loss_scale=None`; the optimizer can scale by
    itself (`loss_scale="dynamic"`), which needs no host wait and is faster. Raises ValueError for
    an optimizer with a loss scale of its own, RuntimeError as torch does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._updates = 0

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
        optimizer._scaler = weakref.ref(self)
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
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            for device, before_step in found.items():
                found[device] = torch.maximum(before_step, last.found.to(torch.float32))
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self._updates += 1

    @property
    def progress(self) -> tuple[int, float, int]:
        """Number of updates, scale and good steps since it last changed. Waits for the device."""
        assert self._growth_tracker is not None
        return self._updates, self.get_scale(), int(self._growth_tracker)

    def adopt(self, progress: tuple[int, float, int]) -> None:
        """Become what another rank's is, of which this is the `progress`."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        self._updates, scale, growth = progress
        self._scale.fill_(scale)
        self._growth_tracker.fill_(growth)

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

        The optimizer itself skips a step for what is not finite, and so names it and counts it.
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
            return optimizer.step(*args, **kwargs)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
