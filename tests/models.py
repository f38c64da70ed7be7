"""Small models whose losses use other parameters by iteration and by rank; shared by the tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from scenario import Scenario, Turn, data
from torch import Tensor, nn

Choose = Callable[[Turn], str]


class TwoHeads(nn.Module):
    """Trunk Linear(4, 4) and the heads a and b, Linear(4, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(torch.tanh(self.trunk(x)))


def by_iteration(turn: Turn) -> str:
    return "ab"[turn.step % 2]


def by_rank(turn: Turn) -> str:
    return "ab"[turn.rank % 2]


def mixed(turn: Turn) -> str:
    return "ab"[(turn.step // 2 + turn.rank * turn.step + turn.micro) % 2]


def head_loss(choose: Choose, model: nn.Module, turn: Turn) -> Tensor:
    x = data(turn, 5, 4, like=next(model.parameters()))
    return model(x, choose(turn)).square().mean()


def two_heads(choose: Choose, steps: int = 4, **changes: Any) -> Scenario:
    settings = {
        "optimizer": torch.optim.AdamW,
        "options": {"lr": 0.05, "weight_decay": 0.1},
        "steps": steps,
    }
    return Scenario(TwoHeads, partial(head_loss, choose), **(settings | changes))
