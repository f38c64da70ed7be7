"""After an error that all ranks have agreed on, what caused it can be repaired: nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import stages, worlds
from scenario import Parameters
from world import message_of, rank_device, run_world

import dynzero


def make(stage: int, **options: Any) -> tuple[Parameters, dynzero.ZeroOptimizer]:
    device = rank_device()
    model = Parameters(a=torch.ones(5, device=device), b=torch.ones(3, device=device))
    cls = torch.optim.SGD
    return model, dynzero.ZeroOptimizer(
        model.named_parameters(), cls, lr=1.0, stage=stage, **options
    )


def repaired(rank: int, world: int, stage: int, option: str, rounds: int) -> list[Any]:
    """One rank's option differs when the last backward begins; two failing steps, then a good one.

    Of the optimizer's windows the first is this one, the second an ordinary one.
    """
    model, opt = make(stage)
    (group,) = opt.param_groups
    good = group[option]
    for micro in range(rounds):
        if rank == world - 1 and micro == rounds - 1:
            group[option] = {"lr": 2.0, "absent": "zero"}[option]
        opt.backward((rank + 1.0) * model.a.sum())
    errors = [message_of(ValueError, opt.step) for _ in range(2)]
    group[option] = good
    opt.step()
    moved = [1 - model.a.detach().cpu()]
    opt.zero_grad()
    opt.backward(model.a.sum())
    opt.step()
    return [errors, opt.counters, *moved, 1 - model.a.detach().cpu()]


@worlds(2)
@stages
@pytest.mark.parametrize("option", ["lr", "absent"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_step_can_be_made_again(
    world: int, backend: str, stage: int, option: str, rounds: int
) -> None:
    results = run_world(world, repaired, stage, option, rounds, backend=backend)
    for errors, counters, first, second in results:
        assert all(option in error and "rank 1" in error for error in errors)
        assert counters == {"taken": 2, "skipped": 0}
        # The mean of gradients 1 and 2 in each round.
        assert torch.equal(first, torch.full((5,), 1.5 * rounds))
        assert torch.equal(second, first + 1)


def trained_on(rank: int, world: int, stage: int) -> list[torch.Tensor]:
    """After the error two more backward passes, before and behind the repair."""
    model, opt = make(stage)
    opt.param_groups[0]["lr"] = 1.0 + rank
    opt.backward(model.a.sum())
    message_of(ValueError, opt.step)
    opt.backward(model.b.sum())
    opt.param_groups[0]["lr"] = 1.0
    opt.backward(2 * model.a.sum())
    opt.step()
    return [1 - model.a.detach().cpu(), 1 - model.b.detach().cpu()]


@worlds(2)
@stages
def test_later_backward_passes_are_added(world: int, backend: str, stage: int) -> None:
    for a, b in run_world(world, trained_on, stage, backend=backend):
        assert torch.equal(a, torch.full((5,), 3.0)) and torch.equal(b, torch.ones(3))


def discarded(rank: int, world: int, stage: int) -> list[Any]:
    model, opt = make(stage)
    opt.param_groups[0]["lr"] = 1.0 + rank
    opt.backward(model.a.sum())
    message_of(ValueError, opt.step)
    opt.param_groups[0]["lr"] = 1.0
    opt.zero_grad()
    opt.backward(model.b.sum())
    opt.step()
    return [opt.last_step.active, model.a.detach().cpu(), model.b.detach().cpu()]


@worlds(2)
@stages
def test_zero_grad_discards_what_failed(world: int, backend: str, stage: int) -> None:
    for active, a, b in run_world(world, discarded, stage, backend=backend):
        assert active == ("b",)
        assert torch.equal(a, torch.ones(5)) and torch.equal(b, torch.zeros(3))


def newer(rank: int, world: int, stage: int, other: int) -> tuple[bool, torch.Tensor, str]:
    model, first = make(stage)
    options = dict(optimizer_class=torch.optim.SGD, lr=1.0, stage=other)
    second = dynzero.ZeroOptimizer(model.named_parameters(), **options)
    second.backward(model.a.sum())
    second.step()
    return second.last_step.stepped, model.a.detach(), message_of(RuntimeError, first.step)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_the_newest_optimizer_gets_the_gradients(other: int) -> None:
    for stepped, a, message in run_world(2, newer, 2, other):
        assert stepped and torch.equal(a, torch.zeros(5))
        assert "another optimizer has been built" in message
