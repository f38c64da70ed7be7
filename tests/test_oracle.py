"""The oracle against DistributedDataParallel + torch.optim, which it must equal bit for bit."""

from __future__ import annotations

import pytest
import torch
from models import TwoHeads, by_iteration, by_rank, mixed, two_heads
from oracle import play_oracle
from scenario import Record, Scenario, Turn, snapshot
from torch.nn.parallel import DistributedDataParallel
from world import run_world


def play_ddp(rank: int, world: int, scenario: Scenario) -> Record:
    model = scenario.model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    opt = scenario.optimizer(model.named_parameters(), **scenario.options)
    record = Record([snapshot(model)], [], [], [], [])
    for step in range(scenario.steps):
        opt.zero_grad()
        scenario.loss(ddp, Turn(step, 0, rank, world)).backward()
        record.active.append({n for n, p in model.named_parameters() if p.grad is not None})
        opt.step()
        record.params.append(snapshot(model))
    return record


@pytest.mark.parametrize(("choose", "steps"), [(by_iteration, 4), (by_rank, 4), (mixed, 5)])
def test_oracle_equals_ddp(choose: object, steps: int) -> None:
    scenario = two_heads(choose, steps)
    expected = play_oracle(scenario, 2)
    for record in run_world(2, play_ddp, scenario):
        assert record.active == expected.active
        for ours, theirs in zip(record.params, expected.params, strict=True):
            for name in ours:
                assert torch.equal(ours[name], theirs[name]), name


def test_oracle_counts_steps_per_parameter() -> None:
    state = play_oracle(two_heads(by_iteration, 4), 2).states[-1]
    counts = {name: int(entries["step"]) for name, entries in state.items()}
    assert counts == {name: 4 if name.startswith("trunk") else 2 for name in snapshot(TwoHeads())}


def test_oracle_rounds_and_ranks_add_up_to_the_same_sum() -> None:
    scenario = two_heads(by_iteration, 3)
    by_rank_first, by_round = (play_oracle(scenario, 3, by_round=way) for way in (False, True))
    for name, value in by_rank_first.params[-1].items():
        torch.testing.assert_close(by_round.params[-1][name], value)
