"""How far a loss scale goes, and what of a saved one is taken over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import stages, worlds
from scenario import Parameters
from world import rank_device, run_world

import dynzero

LARGEST = 2.0**100


def make(stage: int, loss_scale: Any) -> tuple[Parameters, dynzero.ZeroOptimizer]:
    device = rank_device()
    model = Parameters(a=torch.ones(5, device=device), b=torch.ones(3, device=device))
    return model, dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=1.0, stage=stage, loss_scale=loss_scale
    )


def growing(rank: int, world: int, stage: int) -> list[Any]:
    init = 2.0**90 * 1.5
    model, opt = make(stage, dynzero.LossScale(init=init, window=1))
    scales = []
    for _ in range(16):
        opt.backward(2.0**-10 * model.a.sum())
        opt.step()
        opt.zero_grad()
        scales.append(opt.loss_scale)
    return [scales, opt.counters["taken"], 1 - model.a[0].item()]


@worlds(1, 2, 3)
@stages
def test_growth_ends_where_float32_would(world: int, backend: str, stage: int) -> None:
    for scales, taken, moved in run_world(world, growing, stage, backend=backend):
        assert scales == [1.5 * 2.0 ** min(91 + i, 99) for i in range(16)]
        assert taken == 16 and moved == 16 * 2.0**-10


@pytest.mark.parametrize("scale", [1e-46, 2.0**101, 1e39])
def test_scales_beyond_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"loss_scale: expected.*2\^-100 to 2\^100"):
        make(1, scale)
    with pytest.raises(ValueError, match=r"LossScale: (init|minimum): expected.*2\^-?100"):
        dynzero.LossScale(init=scale, minimum=min(scale, 1.0))
    _, opt = make(1, "dynamic")
    saved = opt.full_state_dict()
    saved["dynzero"]["loss_scale"]["value"] = scale
    with pytest.raises(ValueError, match=r"2\^-100 to 2\^100"):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("scale", [1 / LARGEST, LARGEST])
def test_the_limits_themselves_work(scale: float) -> None:
    model, opt = make(1, scale)
    opt.backward(model.a.sum())
    opt.step()
    assert torch.equal(model.a.detach(), torch.zeros(5))


DYNAMIC = dynzero.LossScale(init=64.0, hysteresis=3)


def resumed(rank: int, world: int, stage: int, first: Any) -> list[Any]:
    """A run with scale `first` takes a step; another, with DYNAMIC, loads what it has saved."""
    model, opt = make(stage, first)
    opt.backward(model.a.sum())
    opt.step()
    _, other = make(stage, DYNAMIC)
    other.load_state_dict(opt.full_state_dict())
    state = other._scale.state_dict()
    return [other.loss_scale, state["hysteresis"], other.counters["taken"]]


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_a_dynamic_scale_follows_a_dynamic_one_only(world: int, stage: int) -> None:
    """Where the saved run had none, or a fixed one, the scale begins as it was asked for."""
    for first in (None, 8.0):
        assert run_world(world, resumed, stage, first) == [[64.0, 3.0, 1]] * world
    saved = dynzero.LossScale(init=16.0, hysteresis=2)
    assert run_world(world, resumed, stage, saved) == [[16.0, 2.0, 1]] * world


def loaded_between(rank: int, world: int, stage: int) -> float:
    """A state with scale 8 is loaded while gradients that carry 16 wait for their step."""
    model, opt = make(stage, dynzero.LossScale(init=8.0, window=1))
    saved = opt.full_state_dict()
    opt.backward(model.b.sum())
    opt.step()
    opt.zero_grad()
    opt.backward(model.a.sum())
    opt.load_state_dict(saved)
    assert opt.loss_scale == 8.0
    opt.step()
    return 1 - model.a[0].item()


@worlds(1, 2)
@stages
def test_waiting_gradients_follow_a_loaded_scale(world: int, backend: str, stage: int) -> None:
    assert run_world(world, loaded_between, stage, backend=backend) == [1.0] * world
