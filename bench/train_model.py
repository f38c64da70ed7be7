"""The multi-task model that `python -m bench train` trains, its data, and its cases.

A trunk of residual MLP blocks and heads of one such block and a linear layer each; an iteration
trains the trunk and some of the heads. Every implementation starts from the same values and gets
the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import short

CLASSES, BATCH = 10, 32
# Batches that are used again and again: drawing new ones is no part of training.
POOL = 4
SHARES = (1.0, 0.5, 0.25, 0.1)


@dataclass(frozen=True)
class Shape:
    """Numbers of blocks. base: the trunk has a linear layer of its own, so it can train alone."""

    width: int
    hidden: int
    trunk: int
    heads: int
    base: bool = False


@dataclass(frozen=True)
class Place:
    """Where a rank is. dtype: the 16 bits that matrices are multiplied in."""

    device: torch.device
    rank: int
    world: int
    dtype: torch.dtype
    quick: bool

    @property
    def sizes(self) -> tuple[int, int]:
        if not self.quick:
            return 2048, 8192
        return (256, 1024) if self.device.type == "cuda" else (32, 64)


@dataclass(frozen=True)
class Case:
    """mode: "all" heads in each iteration, one head in "turn", or a "share" of the parameters."""

    mode: str
    share: float = 1.0

    def shape(self, place: Place) -> Shape:
        if self.mode == "share":  # 2 of 20 blocks in the trunk: heads hold 90 %
            return Shape(*place.sizes, trunk=2, heads=18, base=True)
        return Shape(*place.sizes, trunk=16, heads=8)

    @property
    def num_used(self) -> int:
        if self.mode == "share":
            return round(20 * self.share) - 2
        return 8 if self.mode == "all" else 1

    @property
    def active(self) -> float:
        """Fraction of the parameters that an iteration trains, by blocks."""
        return self.share if self.mode == "share" else (16 + self.num_used) / 24

    def heads(self, iteration: int) -> list[int]:
        """The same on every rank; in turn, so that the set changes from iteration to iteration."""
        num_heads = 18 if self.mode == "share" else 8
        start = iteration * self.num_used
        return [(start + k) % num_heads for k in range(self.num_used)]

    def as_json(self, place: Place, stage: int | None) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "active": self.active,
            "world": place.world,
            "stage": stage,
            "dtype": short(place.dtype),
            "gpus": place.world if place.device.type == "cuda" else 0,
        }


# Cases of one group are run on one model, one after the other.
GROUPS = ([Case("all")], [Case("turn")], [Case("share", share) for share in SHARES])


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MultiTask(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block(shape) for _ in range(shape.trunk))
        self.base = nn.Linear(shape.width, CLASSES) if shape.base else None
        self.heads = nn.ModuleList(
            nn.Sequential(Block(shape), nn.Linear(shape.width, CLASSES)) for _ in range(shape.heads)
        )

    def forward(self, x: Tensor, labels: Tensor, heads: list[int]) -> Tensor:
        """x [batch, width], labels [heads, batch]: the mean loss of the chosen heads."""
        for block in self.trunk:
            x = block(x)
        outputs = [(self.heads[k](x), labels[k]) for k in heads]
        if self.base is not None:
            outputs.append((self.base(x), labels[0]))
        losses = [F.cross_entropy(logits.float(), wanted) for logits, wanted in outputs]
        return torch.stack(losses).mean()


def build_model(place: Place, shape: Shape, dtype: torch.dtype) -> MultiTask:
    """The same values everywhere, rounded to 16 bits, as `dtype`."""
    torch.manual_seed(0)
    with place.device:
        model = MultiTask(shape)
    return model.to(place.dtype).to(dtype)


class Data:
    """Labels that can be learned: for every head, the largest of ten random projections."""

    def __init__(self, place: Place, shape: Shape) -> None:
        like = {"device": place.device, "dtype": torch.float32}
        generator = torch.Generator(place.device).manual_seed(1)
        rules = torch.randn(shape.heads, shape.width, CLASSES, generator=generator, **like)
        generator.manual_seed(2 + place.rank)
        self.inputs = torch.randn(POOL, BATCH, shape.width, generator=generator, **like)
        self.labels = [(x @ rules).argmax(2) for x in self.inputs]

    def batch(self, iteration: int) -> tuple[Tensor, Tensor]:
        return self.inputs[iteration % POOL], self.labels[iteration % POOL]
