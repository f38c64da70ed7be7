"""A training run written down once, to be played by rank processes (play.py) and by one process of
`torch.optim` (oracle.py). Only torch in here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Turn(NamedTuple):
    """Who computes a loss, and when."""

    step: int
    micro: int
    rank: int
    world: int


def one_backward(step: int, rank: int) -> int:
    return 1


def named(model: nn.Module) -> Any:
    return model.named_parameters()


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Every member is a module-level function or a partial of one: ranks get it by pickle."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Turn], Tensor | None]  # None: no backward in this turn
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    steps: int = 4
    micros: Callable[[int, int], int] = one_backward  # (step, rank) -> number of turns
    groups: Callable[[nn.Module], Any] = named
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    dtype: torch.dtype | None = None

    def model(self, device: torch.device | str = "cpu") -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(device=device, dtype=self.dtype)


class Record(NamedTuple):
    """What a run left behind; `params[0]`, `states[0]` are from before the first step."""

    params: list[dict[str, Tensor]]
    active: list[set[str]]
    norms: list[float]
    states: list[dict[str, dict[str, Any]]]  # by parameter name; of the last step if not asked for
    lrs: list[list[float]]


def data(turn: Turn, *shape: int, like: Tensor) -> Tensor:
    """Normal numbers that depend on the turn only, in the dtype and on the device of `like`."""
    seed = 7 + 1_000_003 * turn.step + 10_007 * turn.rank + 101 * turn.micro
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device=like.device, dtype=like.dtype)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def state_by_name(state_dict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """torch's numbered state, by parameter name; a parameter with an empty state is left out."""
    names = {}
    for group in state_dict["param_groups"]:
        names.update(zip(group["params"], group["param_names"], strict=True))
    return {
        names[number]: {
            key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for number, entries in state_dict["state"].items()
        if any(value is not None for value in entries.values())
    }


class Parameters(nn.Module):
    """A bag of parameters by name, for losses written by hand."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def weighted(model: nn.Module, factors: dict[str, float]) -> Tensor | None:
    """sum of factor * p.sum(): the gradient of every element of p is exactly its factor."""
    terms = [factor * model.get_parameter(name).sum() for name, factor in factors.items()]
    return torch.stack(terms).sum() if terms else None
