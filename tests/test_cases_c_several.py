"""Cases 18 and 19 of the public reports: several models or optimizers under one loss; closures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import assert_ranks_agree, assert_same_bits, check, stages, worlds
from scenario import Record, Scenario, Turn, data, snapshot
from torch import Tensor, nn
from world import rank_device, run_world

import dynzero

OPTIONS = {"lr": 0.05, "weight_decay": 0.1}


class Cycle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)


def cycle_loss(model: nn.Module, turn: Turn) -> Tensor:
    x = data(turn, 5, 4, like=model.f.weight)
    return (model.g(model.f(x)) - x).square().mean()


CYCLE = Scenario(Cycle, cycle_loss, torch.optim.AdamW, OPTIONS, steps=3)


@stages
@worlds(1, 2, 3)
def test_case_18_one_optimizer_over_two_models(world: int, backend: str, stage: int) -> None:
    check(CYCLE, world, backend=backend, stage=stage)


def train_two_optimizers(rank: int, world: int, stages_: tuple[int, int], order: str) -> Record:
    model = CYCLE.model(rank_device())
    opts = {
        name: dynzero.ZeroOptimizer(
            getattr(model, name).named_parameters(), torch.optim.AdamW, stage=stage, **OPTIONS
        )
        for name, stage in zip("fg", stages_, strict=True)
    }
    record = Record([snapshot(model)], [], [], [], [])
    for step in range(3):
        cycle_loss(model, Turn(step, 0, rank, world)).backward()
        for name in order:
            opts[name].step()
        for name in order:
            opts[name].zero_grad()
        record.params.append(snapshot(model))
    return record


@worlds(1, 2, 3)
@pytest.mark.parametrize("stages_", [(0, 0), (1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("order", ["fg", "gf"])
def test_case_18_two_optimizers_one_backward(
    world: int, backend: str, stages_: tuple[int, int], order: str
) -> None:
    records = run_world(world, train_two_optimizers, stages_, order, backend=backend)
    assert_ranks_agree(records)
    joint = check(CYCLE, world, backend=backend, stage=1)
    for ours, theirs in zip(records[0].params, joint.params, strict=True):
        for name in ours:
            assert_same_bits(ours[name], theirs[name], name)


def step_with_closure(rank: int, world: int, stage: int) -> dict[str, Any]:
    model = CYCLE.model(rank_device())
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, stage=stage)
    calls, returned, losses = 0, [], []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            nonlocal calls
            calls += 1
            opt.zero_grad()
            loss = cycle_loss(model, Turn(step, 0, rank, world))
            opt.backward(loss)
            losses.append(float(loss))
            return loss

        returned.append(float(opt.step(closure)))
    return {"calls": calls, "returned": returned, "losses": losses, "params": snapshot(model)}


@stages
@worlds(1, 2, 3)
def test_case_19_closure_runs_once(world: int, backend: str, stage: int) -> None:
    results = run_world(world, step_with_closure, stage, backend=backend)
    plain = Scenario(Cycle, cycle_loss, torch.optim.SGD, {"lr": 0.1}, steps=3)
    expected = check(plain, world, backend=backend, stage=stage).params[-1]
    for rank, result in enumerate(results):
        assert result["calls"] == 3
        assert result["returned"] == result["losses"]
        for name, value in expected.items():
            assert_same_bits(result["params"][name], value, f"rank {rank}, {name}")
    assert len({tuple(result["losses"]) for result in results}) == world, "each rank has its data"
