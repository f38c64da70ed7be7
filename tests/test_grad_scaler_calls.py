"""What dynzero.GradScaler refuses, and what goes on working after that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import stages
from scenario import Parameters
from world import message_of, run_world

import dynzero

TINY = 2.0**-26  # float16 has nothing between 0 and 2**-24


def make(model: Parameters, stage: int, **options: Any) -> dynzero.ZeroOptimizer:
    params = model.named_parameters()
    return dynzero.ZeroOptimizer(params, torch.optim.SGD, stage=stage, **{"lr": 0.5} | options)


def scaled_twice(rank: int, world: int, stage: int, scale: Any) -> tuple[list[str], list[float]]:
    model = Parameters(a=torch.ones(4))
    opt = make(model, stage, loss_scale=scale)
    scaler = dynzero.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model.a.sum()).backward()
    messages = [message_of(ValueError, call, opt) for call in (scaler.unscale_, scaler.step)]
    return messages, model.a.tolist()


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scale", [8.0, "dynamic"])
def test_an_optimizer_that_scales_itself_is_refused(world: int, stage: int, scale: Any) -> None:
    for messages, values in run_world(world, scaled_twice, stage, scale):
        for message in messages:
            assert "loss_scale: expected None with a GradScaler" in message
        assert values == [1.0] * 4


def unscaled_twice(rank: int, world: int, stage: int) -> tuple[list[str], list[float]]:
    """The last rank's gradients are 2, the others' 0."""
    model = Parameters(a=torch.ones(4))
    opt = make(model, stage)
    scaler = dynzero.GradScaler("cpu", init_scale=8.0)
    messages = []
    for _ in range(2):
        scaler.scale((model.a * (2.0 if rank == world - 1 else 0.0)).sum()).backward()
        scaler.unscale_(opt)
        messages.append(message_of(RuntimeError, scaler.unscale_, opt))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return messages, model.a.tolist()


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_a_second_unscale_is_refused_and_changes_nothing(world: int, stage: int) -> None:
    for messages, values in run_world(world, unscaled_twice, stage):
        for message in messages:
            assert "unscale_() has already been called" in message
        assert values == [1.0 - 2 * 0.5 * 2.0 / world] * 4


def halves(rank: int, world: int, stage: int) -> tuple[str, list[float], list[float]]:
    """Rank r's gradients are r + 1 times a number that float16 does not have."""
    model = Parameters(a=torch.ones(4, dtype=torch.float16))
    opt = make(model, stage, lr=2.0**20)  # so that the step can be seen in float16
    scaler = dynzero.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(model.a.float().sum() * TINY * (rank + 1)).backward()
    if world == 1 or stage < 2:
        return message_of(ValueError, scaler.unscale_, opt), [], model.a.tolist()
    scaler.unscale_(opt)
    mean = opt.full_grad(model.a)
    assert mean is not None
    scaler.step(opt)
    return "", mean.tolist(), model.a.tolist()


@stages
@pytest.mark.parametrize("world", [1, 2, 3])
def test_fp16_parameters_are_refused_unless_summed_in_float32(world: int, stage: int) -> None:
    refused = world == 1 or stage < 2
    mean = TINY * (world + 1) / 2
    for message, means, values in run_world(world, halves, stage):
        if refused:
            assert "Attempting to unscale FP16 gradients" in message
            assert "loss_scale='dynamic'" in message
        else:
            assert means == [mean] * 4
        assert values == ([1.0] * 4 if refused else [1.0 - mean * 2.0**20] * 4)
