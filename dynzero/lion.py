"""Lion as a plain torch optimizer: what `ZeroOptimizer(..., dynzero.Lion)` shards and fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2).

    State per parameter: `exp_avg`, the parameter's shape and dtype. `weight_decay` is decoupled.
    Raises ValueError for a negative lr or weight_decay, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0:
            raise ValueError(f"Lion: lr: expected at least 0, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion: betas: expected two numbers in [0, 1), got {betas}")
        if weight_decay < 0:
            raise ValueError(f"Lion: weight_decay: expected at least 0, got {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                direction = (beta1 * exp_avg + (1 - beta1) * grad).sign_()
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        return loss
