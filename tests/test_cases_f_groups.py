"""Case 28 of the public reports: groups added later, learning rates per group, schedulers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from models import TwoHeads
from oracle import Replica
from play import assert_close, assert_ranks_agree, assert_same_bits, stages, worlds
from scenario import Record, Turn, data, named, snapshot, state_by_name
from torch import Tensor, nn
from torch.optim import lr_scheduler
from world import message_of, rank_device, run_world

import dynzero

ADDED_AT = 2
STEPS = 5
OPTIONS = {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.1}


def seeded_heads() -> TwoHeads:
    torch.manual_seed(0)
    return TwoHeads()


def trunk_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if n.startswith("trunk")]


def head_group(model: nn.Module) -> dict[str, Any]:
    head = [(f"a.{n}", p) for n, p in model.a.named_parameters()]
    return {"params": head, "lr": 0.5, "weight_decay": 0.0}


def trunk_then_head(model: nn.Module, turn: Turn) -> Tensor:
    x = torch.tanh(model.trunk(data(turn, 5, 4, like=model.trunk.weight)))
    return (x if turn.step < ADDED_AT else model.a(x)).square().mean()


class Schedulers(NamedTuple):
    step: lr_scheduler.StepLR
    plateau: lr_scheduler.ReduceLROnPlateau

    @staticmethod
    def over(optimizer: torch.optim.Optimizer, every: int) -> Schedulers:
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return Schedulers(lr_scheduler.StepLR(optimizer, step_size=every, gamma=0.1), plateau)

    def advance(self, step: int) -> None:
        self.step.step()
        self.plateau.step(float([3, 2, 2, 1, 1][step]))


def grow(
    rank: int, world: int, stage: int, fused: bool | None, every: int
) -> tuple[Record, dict[str, Any]]:
    """StepLR acts every so many steps."""
    model = seeded_heads().to(rank_device())
    opt = dynzero.ZeroOptimizer(
        trunk_of(model), torch.optim.SGD, stage=stage, fused=fused, bucket_bytes=64, **OPTIONS
    )
    schedulers = Schedulers.over(opt, every)
    record = Record([snapshot(model)], [], [], [], [])
    seen: dict[str, Any] = {}
    for step in range(STEPS):
        if step == ADDED_AT:
            before = state_by_name(opt.full_state_dict())
            opt.add_param_group(head_group(model))
            seen["kept"] = before, state_by_name(opt.full_state_dict())
            seen["twice"] = message_of(ValueError, opt.add_param_group, head_group(model))
            seen["groups"] = len(opt.param_groups)
        record.lrs.append([group["lr"] for group in opt.param_groups])
        opt.backward(trunk_then_head(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        schedulers.advance(step)
        record.params.append(snapshot(model))
    return record, seen


def grown_oracle(world: int, every: int) -> Record:
    model = seeded_heads()
    replica = Replica(model, trunk_of(model), torch.optim.SGD, OPTIONS, world=world)
    schedulers = Schedulers.over(replica.optimizer, every)
    record = Record([snapshot(model)], [], [], [], [])
    for step in range(STEPS):
        if step == ADDED_AT:
            replica.add_group(head_group(model))
        record.lrs.append([group["lr"] for group in replica.optimizer.param_groups])
        turns = [Turn(step, 0, rank, world) for rank in range(world)]
        replica.collect([[lambda turn=turn: trunk_then_head(model, turn)] for turn in turns])
        replica.step()
        schedulers.advance(step)
        record.params.append(snapshot(model))
    return record


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("every", [1, 2])
def test_case_28_groups_added_later(
    world: int, backend: str, stage: int, fused: bool | None, every: int
) -> None:
    results = run_world(world, grow, stage, fused, every, backend=backend)
    expected = grown_oracle(world, every)
    assert_ranks_agree([record for record, _ in results])
    for record, seen in results:
        assert record.lrs == expected.lrs, "rates are read from the visible groups at step time"
        before, after = seen["kept"]
        assert before.keys() == after.keys() and before
        for name in before:
            assert_same_bits(after[name]["momentum_buffer"], before[name]["momentum_buffer"], name)
        assert "a.weight" in seen["twice"]
        assert seen["groups"] == 2, "a refused group must leave nothing behind"
        for step, (ours, theirs) in enumerate(zip(record.params, expected.params, strict=True)):
            for name in theirs:
                assert_close(ours[name], theirs[name], f"step {step - 1}, {name}")


def absent_by_group(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    """Head a skips, head b gets zeros when nobody uses it: after one step without heads."""
    model = seeded_heads()
    groups = [
        {"params": list(named(model.trunk)), "absent": "skip"},
        {"params": [(f"a.{n}", p) for n, p in named(model.a)], "absent": "skip"},
        {"params": [(f"b.{n}", p) for n, p in named(model.b)], "absent": "zero"},
    ]
    opt = dynzero.ZeroOptimizer(groups, torch.optim.SGD, stage=stage, lr=0.1, weight_decay=0.5)
    opt.backward(trunk_then_head(model, Turn(0, 0, rank, world)))
    opt.step()
    return snapshot(model)


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_absent_is_set_by_group(world: int, stage: int) -> None:
    start = snapshot(seeded_heads())
    for end in run_world(world, absent_by_group, stage):
        assert_same_bits(end["a.weight"], start["a.weight"], "a.weight")
        assert_close(end["b.weight"], start["b.weight"] * 0.95, "b.weight decays")
        assert not torch.equal(end["trunk.weight"], start["trunk.weight"])


def frozen_in_a_zero_group(
    rank: int, world: int, stage: int, trains: bool
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Two steps: in the first the trunk trains, or nothing at all; in the second nothing does."""
    model = seeded_heads()
    model.b.requires_grad_(False)
    if not trains:
        model.requires_grad_(False)
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, stage=stage, lr=0.1, weight_decay=0.5,
        absent="zero",
    )  # fmt: skip
    seen = [snapshot(model)]
    for step in range(2):
        if trains and step == 0:
            opt.backward(trunk_then_head(model, Turn(0, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        seen.append(snapshot(model))
    return seen, sorted(state_by_name(opt.full_state_dict()))


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("trains", [True, False])
def test_a_frozen_parameter_of_a_zero_group_stays(world: int, stage: int, trains: bool) -> None:
    for seen, with_state in run_world(world, frozen_in_a_zero_group, stage, trains):
        for step, after in enumerate(seen[1:]):
            for name, value in seen[0].items():
                if not trains or name.startswith("b."):
                    assert_same_bits(after[name], value, f"step {step}, {name}")
                else:
                    assert not torch.equal(after[name], value), f"step {step}, {name}"
        trained = ["a.bias", "a.weight", "trunk.bias", "trunk.weight"]
        assert with_state == (trained if trains else [])


def average_by_group(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    """The last rank alone has a gradient, 6 for all; head b's group divides by who has it."""
    model = seeded_heads()
    groups = [
        {"params": list(named(model.trunk))},
        {"params": [(f"a.{n}", p) for n, p in named(model.a)], "average": "world"},
        {"params": [(f"b.{n}", p) for n, p in named(model.b)], "average": "present"},
    ]
    opt = dynzero.ZeroOptimizer(groups, torch.optim.SGD, stage=stage, lr=1.0)
    if rank == world - 1:
        opt.backward(torch.stack([6.0 * p.sum() for p in model.parameters()]).sum())
    opt.step()
    return snapshot(model)


@stages
@pytest.mark.parametrize("world", [1, 2, 3])
def test_average_is_set_by_group(world: int, stage: int) -> None:
    start = snapshot(seeded_heads())
    for end in run_world(world, average_by_group, stage):
        for name, value in start.items():
            mean = 6.0 if name.startswith("b.") else 6.0 / world
            assert_same_bits(end[name], value - mean, name)
