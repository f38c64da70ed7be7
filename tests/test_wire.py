"""What travels: start values, the dtype on the wire, and what no finite test stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import stages, worlds
from world import rank_device, run_world

import dynzero

SIZE = 37


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) * 100


def averaged(rank: int, world: int, stage: int, wire: torch.dtype, dtype: torch.dtype) -> Any:
    p = torch.nn.Parameter(torch.zeros(SIZE, dtype=dtype, device=rank_device()))
    opt = dynzero.ZeroOptimizer(
        [p], torch.optim.SGD, lr=1.0, stage=stage, wire_dtype=wire, transport="collective"
    )
    p.grad = gradient(rank).to(dtype).to(p.device)
    mean = opt.full_grad(p)
    opt.step()
    return mean.cpu(), p.detach().cpu()


@stages
@worlds(2, 3)
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_wire_dtype(
    world: int, backend: str, stage: int, wire: torch.dtype, dtype: torch.dtype
) -> None:
    """Each gradient is rounded once, to the wire dtype; the sum and the division are float32."""
    total = torch.zeros(SIZE)
    for rank in range(world):
        total += gradient(rank).to(dtype).to(wire).float()
    for mean, p in run_world(world, averaged, stage, wire, dtype, backend=backend):
        assert torch.equal(mean, total / world)
        assert torch.equal(p, -(total / world).to(dtype))


def too_large_for_the_wire(rank: int, world: int, stage: int) -> Any:
    p = torch.nn.Parameter(torch.zeros(3, device=rank_device()))
    opt = dynzero.ZeroOptimizer(
        [("p", p)], torch.optim.SGD, lr=1.0, stage=stage, wire_dtype=torch.float16
    )
    opt.backward((p * (1e6 if rank else 1.0)).sum())
    opt.step()
    return opt.last_step.overflow, p.tolist()


@stages
@worlds(2)
def test_a_gradient_that_the_wire_cannot_hold_is_an_overflow(
    world: int, backend: str, stage: int
) -> None:
    for overflow, p in run_world(world, too_large_for_the_wire, stage, backend=backend):
        assert overflow == [("p", 1, "inf")]
        assert p == [0.0] * 3


def scaled_on_the_wire(rank: int, world: int, stage: int, value: float) -> Any:
    """The last rank's gradient is `value`, the others' 1e-8."""
    p = torch.nn.Parameter(torch.zeros(3, device=rank_device()))
    opt = dynzero.ZeroOptimizer(
        [("p", p)], torch.optim.SGD, lr=1.0, stage=stage, wire_dtype=torch.float16,
        loss_scale=65536.0,
    )  # fmt: skip
    opt.backward((p * (value if rank == world - 1 else 1e-8)).sum())
    mean = opt.full_grad(p)
    opt.step()
    return mean.tolist(), opt.last_step.overflow, p.tolist()


@stages
@worlds(2)
def test_the_loss_scale_carries_small_gradients_over_the_wire(
    world: int, backend: str, stage: int
) -> None:
    """float16 has no 1e-8, but 65536 times that, to eleven bits."""
    for mean, overflow, p in run_world(world, scaled_on_the_wire, stage, 1e-8, backend=backend):
        assert overflow is None
        assert mean == pytest.approx([1e-8] * 3, rel=2**-11)
        assert p == pytest.approx([-1e-8] * 3, rel=2**-11)


@stages
@worlds(2)
def test_what_the_loss_scale_makes_too_large_for_the_wire_is_named(
    world: int, backend: str, stage: int
) -> None:
    """65536 times 2.0 is more than float16 holds."""
    for _, overflow, p in run_world(world, scaled_on_the_wire, stage, 2.0, backend=backend):
        assert overflow == [("p", 1, "inf")]
        assert p == [0.0] * 3


def unchecked(rank: int, world: int, stage: int, fused: bool | None) -> Any:
    p = torch.nn.Parameter(torch.ones(3, device=rank_device()))
    opt = dynzero.ZeroOptimizer(
        [p], torch.optim.SGD, lr=1.0, stage=stage, fused=fused, check_finite=False
    )
    opt.backward((p * torch.tensor([1.0, float("inf"), 2.0], device=p.device)).sum())
    opt.step()
    return opt.last_step.stepped, opt.last_step.overflow, p.tolist()


@stages
@worlds(1, 2)
@pytest.mark.parametrize("fused", [None, False])
def test_check_finite_off_steps_as_torch(
    world: int, backend: str, stage: int, fused: bool | None
) -> None:
    for stepped, overflow, p in run_world(world, unchecked, stage, fused, backend=backend):
        assert stepped and overflow is None
        assert p == [0.0, float("-inf"), -1.0]


def started(rank: int, world: int, stage: int) -> torch.Tensor:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    p = torch.nn.Parameter(values.t().to(rank_device()))  # memory order is kept
    dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0, stage=stage)
    return p.detach().cpu()


@stages
@worlds(2, 3)
def test_all_ranks_start_from_the_first_ranks_values(world: int, backend: str, stage: int) -> None:
    expected = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t()
    for p in run_world(world, started, stage, backend=backend):
        assert torch.equal(p, expected)
