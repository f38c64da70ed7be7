"""Case 24 of the public reports: which norm is it that is clipped?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import by_rank, mixed, two_heads
from play import assert_same_bits, check, make, play, stages, worlds
from scenario import Parameters, Scenario, Turn, weighted
from torch import Tensor, nn
from world import rank_device, run_world

SGD_1 = (torch.optim.SGD, {"lr": 1.0})


def two_elements() -> nn.Module:
    return Parameters(a=torch.zeros(1), b=torch.zeros(1), never=torch.ones(3))


def three_and_four(model: nn.Module, turn: Turn) -> Tensor | None:
    return weighted(model, [{"a": 3.0}, {"b": 4.0}][turn.rank])


PAIR = Scenario(two_elements, three_and_four, *SGD_1, steps=1)
NORMS = {1.0: 3.5, 2.0: 2.5, float("inf"): 2.0}  # of the mean over two ranks


def read_norms(rank: int, world: int, stage: int, norm_type: float) -> dict[str, Any]:
    model = PAIR.model(rank_device())
    opt = make(PAIR, model, stage=stage, loss_scale=8.0)
    nothing = [float(opt.grad_norm(p)) for p in NORMS]
    opt.backward(three_and_four(model, Turn(0, 0, rank, world)))
    norms = [opt.grad_norm(p) for p in NORMS]
    total = opt.clip_grad_norm_(0.5, norm_type=norm_type)
    grad = opt.full_grad(model.a)
    opt.step()
    return {
        "nothing": nothing,
        "norms": [float(n) for n in norms],
        "device": norms[0].device == model.a.device == total.device,
        "total": float(total),
        "step": float(opt.last_step.grad_norm),
        "grad": grad.cpu(),
        "ends": [float(model.a), float(model.b)],
        "never": model.never.detach().cpu(),
    }


@stages
@worlds(2)
@pytest.mark.parametrize(("norm_type", "norm"), NORMS.items())
def test_case_24_which_norm(
    world: int, backend: str, stage: int, norm_type: float, norm: float
) -> None:
    clipped = [-1.5 * 0.5 / (norm + 1e-6), -2.0 * 0.5 / (norm + 1e-6)]
    results = run_world(world, read_norms, stage, norm_type, backend=backend)
    for result in results:
        assert result["nothing"] == [0.0, 0.0, 0.0]
        assert result["norms"] == pytest.approx(list(NORMS.values()), rel=1e-6)
        assert result["device"], "a norm is a tensor on the parameters' device"
        assert result["total"] == pytest.approx(norm, rel=1e-6)
        # As in torch, clip_grad_norm_ changes the gradients: what is read later is clipped.
        assert result["step"] == pytest.approx(2.5 * 0.5 / (norm + 1e-6), rel=1e-5)
        assert float(result["grad"]) == pytest.approx(-clipped[0], rel=1e-5)
        assert result["ends"] == pytest.approx(clipped, rel=1e-5)
        assert torch.equal(result["never"], torch.ones(3))
        assert result["ends"] == results[0]["ends"]


@stages
@worlds(2)
def test_case_24_max_grad_norm(world: int, backend: str, stage: int) -> None:
    record = check(PAIR, world, backend=backend, stage=stage, max_grad_norm=0.5)
    assert record.norms == pytest.approx([2.5], rel=1e-6)
    ends = [float(record.params[-1][name]) for name in "ab"]
    assert ends == pytest.approx([-0.3, -0.4], rel=1e-5)


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("max_grad_norm", [0.05, 1e6])
@pytest.mark.parametrize("loss_scale", [None, 512.0])
def test_case_24_clipping_with_absent_heads(
    world: int, backend: str, stage: int, max_grad_norm: float, loss_scale: float | None
) -> None:
    for choose in (by_rank, mixed):
        scenario = two_heads(choose, optimizer=torch.optim.SGD, options={"lr": 0.5})
        options = {"stage": stage, "max_grad_norm": max_grad_norm, "loss_scale": loss_scale}
        record = check(scenario, world, backend=backend, **options)
        assert all(norm > 0.05 for norm in record.norms), "the small limit must clip every step"


def clip_with_torch(rank: int, world: int) -> tuple[float, Tensor]:
    model = PAIR.model()
    opt = make(PAIR, model, stage=2)
    opt.backward(three_and_four(model, Turn(0, 0, rank, world)))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    return float(norm), model.a.detach()


def test_case_24_torch_function_in_stage_2_sees_nothing() -> None:
    """As the README says where it explains clipping."""
    for norm, a in run_world(2, clip_with_torch):
        assert norm == 0.0
        assert torch.equal(a, torch.tensor([-1.5]))


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_case_24_without_limit_nothing_changes(world: int, stage: int) -> None:
    """A limit far away multiplies by exactly one."""
    scenario = two_heads(mixed)
    plain = run_world(world, play, scenario, {"stage": stage})[0]
    limited = run_world(world, play, scenario, {"stage": stage, "max_grad_norm": 1e9})[0]
    for name, value in plain.params[-1].items():
        assert_same_bits(limited.params[-1][name], value, name)
