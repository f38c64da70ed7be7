"""What travels: start values, the dtype on the wire, and what no finite test stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import stages
from world import run_world

import dynzero

SIZE = 37


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) * 100


def averaged(rank: int, world: int, stage: int, wire: torch.dtype, dtype: torch.dtype) -> Any:
    p = torch.nn.Parameter(torch.zeros(SIZE, dtype=dtype))
    opt = dynzero.ZeroOptimizer(
        [p], torch.optim.SGD, lr=1.0, stage=stage, wire_dtype=wire, transport="collective"
    )
    p.grad = gradient(rank).to(dtype)
    mean = opt.full_grad(p)
    opt.step()
    return mean, p.detach()


@stages
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_wire_dtype(world: int, stage: int, wire: torch.dtype, dtype: torch.dtype) -> None:
    """Each gradient is rounded once, to the wire dtype; the sum and the division are float32."""
    total = torch.zeros(SIZE)
    for rank in range(world):
        total += gradient(rank).to(dtype).to(wire).float()
    for mean, p in run_world(world, averaged, stage, wire, dtype):
        assert torch.equal(mean, total / world)
        assert torch.equal(p, -(total / world).to(dtype))


def too_large_for_the_wire(rank: int, world: int, stage: int) -> Any:
    p = torch.nn.Parameter(torch.zeros(3))
    opt = dynzero.ZeroOptimizer(
        [("p", p)], torch.optim.SGD, lr=1.0, stage=stage, wire_dtype=torch.float16
    )
    opt.backward((p * (1e6 if rank else 1.0)).sum())
    opt.step()
    return opt.last_step.overflow, p.detach()


@stages
def test_a_gradient_that_the_wire_cannot_hold_is_an_overflow(stage: int) -> None:
    for overflow, p in run_world(2, too_large_for_the_wire, stage):
        assert overflow == [("p", 1, "inf")]
        assert torch.equal(p, torch.zeros(3))


def scaled_on_the_wire(rank: int, world: int, stage: int, value: float) -> Any:
    """The last rank's gradient is `value`, the others' 1e-8."""
    p = torch.nn.Parameter(torch.zeros(3))
    opt = dynzero.ZeroOptimizer(
        [("p", p)], torch.optim.SGD, lr=1.0, stage=stage, wire_dtype=torch.float16,
        loss_scale=65536.0,
    )  # fmt: skip
    opt.backward((p * (value if rank == world - 1 else 1e-8)).sum())
    mean = opt.full_grad(p)
    opt.step()
    return mean.tolist(), opt.last_step.overflow, p.tolist()


@stages
def test_the_loss_scale_carries_small_gradients_over_the_wire(stage: int) -> None:
    """float16 has no 1e-8, but 65536 times that, to eleven bits."""
    for mean, overflow, p in run_world(2, scaled_on_the_wire, stage, 1e-8):
        assert overflow is None
        assert mean == pytest.approx([1e-8] * 3, rel=2**-11)
        assert p == pytest.approx([-1e-8] * 3, rel=2**-11)


@stages
def test_what_the_loss_scale_makes_too_large_for_the_wire_is_named(stage: int) -> None:
    """65536 times 2.0 is more than float16 holds."""
    for _, overflow, p in run_world(2, scaled_on_the_wire, stage, 2.0):
        assert overflow == [("p", 1, "inf")]
        assert p == [0.0] * 3


def unchecked(rank: int, world: int, stage: int, fused: bool | None) -> Any:
    p = torch.nn.Parameter(torch.ones(3))
    opt = dynzero.ZeroOptimizer(
        [p], torch.optim.SGD, lr=1.0, stage=stage, fused=fused, check_finite=False
    )
    opt.backward((p * torch.tensor([1.0, float("inf"), 2.0])).sum())
    opt.step()
    return opt.last_step.stepped, opt.last_step.overflow, p.detach()


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fused", [None, False])
def test_check_finite_off_steps_as_torch(world: int, stage: int, fused: bool | None) -> None:
    for stepped, overflow, p in run_world(world, unchecked, stage, fused):
        assert stepped and overflow is None
        assert p.tolist() == [0.0, float("-inf"), -1.0]


def started(rank: int, world: int, stage: int) -> torch.Tensor:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    p = torch.nn.Parameter(values.t())  # memory order is kept
    dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0, stage=stage)
    return p.detach()


@stages
def test_all_ranks_start_from_the_first_ranks_values(stage: int) -> None:
    expected = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t()
    for p in run_world(3, started, stage):
        assert torch.equal(p, expected)
