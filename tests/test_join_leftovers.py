"""What a rank that has joined still holds: its gradients, its frozen parameters, its GradScaler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from play import Lines, stages, worlds
from scenario import Parameters
from world import rank_device, run_world

import dynzero


def make(stage: int, **options: Any) -> tuple[Parameters, dynzero.ZeroOptimizer]:
    device = rank_device()
    model = Parameters(a=torch.ones(5, device=device), b=torch.ones(3, device=device))
    params = model.named_parameters()
    return model, dynzero.ZeroOptimizer(params, torch.optim.SGD, lr=1.0, stage=stage, **options)


def amp_step(
    opt: dynzero.ZeroOptimizer, scaler: dynzero.GradScaler, loss: torch.Tensor, unscale: bool
) -> None:
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()


def left_with_inf(rank: int, world: int, stage: int, unscale: bool) -> tuple[float, float]:
    """Rank 1 overflows in its only step, and keeps that gradient."""
    model, opt = make(stage)
    scaler = dynzero.GradScaler(rank_device().type, init_scale=4.0)
    with opt.join():
        for step in range(5 if rank == 0 else 1):
            opt.zero_grad()
            bad = rank == 1 and step == 0
            amp_step(opt, scaler, model.a.sum() * (math.inf if bad else 0.25), unscale)
    return model.a[0].item(), scaler.get_scale()


@worlds(2)
@stages
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_does_not_outlive_its_step(
    world: int, backend: str, stage: int, unscale: bool
) -> None:
    # One step skipped; then four with a gradient of 0.25 on one rank of two.
    assert run_world(world, left_with_inf, stage, unscale, backend=backend) == [(0.5, 2.0)] * 2


def three_epochs(rank: int, world: int, stage: int, batches: list[int]) -> list[Any]:
    model, opt = make(stage)
    scaler = dynzero.GradScaler(rank_device().type, init_scale=4.0, growth_interval=3)
    seen = []
    for epoch in range(3):
        with opt.join():
            for step in range(batches[rank]):
                opt.zero_grad()
                bad = epoch == 1 and step == max(batches) - 1
                amp_step(opt, scaler, model.a.sum() * (math.inf if bad else 0.25), False)
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return [seen, model.a[0].item()]


def one_scaler(steps: int) -> list[Any]:
    """What a scaler that takes part in all steps becomes; the last of the second epoch is bad."""
    p = torch.nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([p], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    seen = []
    for epoch in range(3):
        for step in range(steps):
            opt.zero_grad()
            bad = epoch == 1 and step == steps - 1
            scaler.scale(p.sum() * (math.inf if bad else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


@worlds(2)
@stages
@pytest.mark.parametrize("batches", [[2, 4], [4, 1], [3, 3], [2, 4, 1]])
def test_all_ranks_have_the_same_scaler_after_join(
    world: int, backend: str, stage: int, batches: list[int]
) -> None:
    if backend == "gloo":
        world = len(batches)
    batches, steps = batches[:world], max(batches[:world])
    sums = [0.25 * sum(n > step for n in batches) / world for step in range(steps)]
    expected = 1 - (3 * sum(sums) - sums[-1])
    for seen, a in run_world(world, three_epochs, stage, batches, backend=backend):
        assert seen == one_scaler(steps)
        assert a == pytest.approx(expected, abs=1e-6)


def skipped_by_scaler(
    rank: int, world: int, stage: int, check_finite: bool, fused: bool
) -> list[Any]:
    """The last rank overflows in the second of five steps. Stage 2 never calls zero_grad()."""
    model, opt = make(stage, check_finite=check_finite, fused=fused)
    scaler = dynzero.GradScaler(rank_device().type, init_scale=4.0)
    seen: list[Any] = []
    with Lines() as log:
        for step in range(5):
            if stage < 2 or world == 1:
                opt.zero_grad()
            bad = rank == world - 1 and step == 1
            amp_step(opt, scaler, model.a.sum() * (math.inf if bad else 0.125), step % 2 == 1)
            last = opt.last_step
            seen.append((last.iteration, last.stepped, last.overflow, scaler.get_scale()))
        counters = opt.counters
    return [seen, counters, log.lines, model.a[0].item()]


@worlds(1, 2)
@stages
@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_skip_of_the_scaler_is_named_and_counted(
    world: int, backend: str, stage: int, check_finite: bool, fused: bool
) -> None:
    where = [("a", world - 1, "inf")]
    options = check_finite, fused
    results = run_world(world, skipped_by_scaler, stage, *options, backend=backend)
    for seen, counters, lines, a in results:
        expected = [(i, True, None, 2.0) for i in range(5)]
        expected[:2] = [(0, True, None, 4.0), (1, False, where, 2.0)]
        assert seen == expected
        assert counters == {"taken": 4, "skipped": 1}
        assert lines == [f"iteration 1 skipped: inf in 'a' on rank {world - 1}"]
        assert a == 0.5


def without_a_step(rank: int, world: int, stage: int) -> float:
    """Rank 1 has a gradient of 10 when it leaves its loop; in stage 2 in `p.grad` as well."""
    model, opt = make(stage)
    with opt.join():
        if rank == 0:
            opt.backward(model.a.sum())
            opt.step()
            opt.zero_grad()
        else:
            with opt.no_sync():
                opt.backward(10 * model.a.sum())
    opt.step()
    return model.a[0].item()


@stages
def test_gradients_without_a_step_are_dropped(stage: int) -> None:
    assert run_world(2, without_a_step, stage) == [0.5] * 2


def frozen_later(rank: int, world: int, stage: int) -> float:
    """The rank that trains on freezes b, which decays while it may train."""
    model, opt = make(stage, absent="zero", weight_decay=0.5)
    with opt.join():
        for _ in range(1 if rank == 0 else 3):
            opt.backward(model.a.sum())
            opt.step()
            opt.zero_grad()
            if rank == 1:
                model.b.requires_grad_(False)
    return model.b[0].item()


@stages
def test_what_trains_is_up_to_those_who_train(stage: int) -> None:
    assert run_world(2, frozen_later, stage) == [0.5] * 2


def expanded(rank: int, world: int, stage: int) -> list[float]:
    model, opt = make(stage)
    model.a.grad = torch.full((1,), 3.0).expand(5) if rank == 0 else torch.full((5,), 3.0)
    norm = opt.clip_grad_norm_(1.0)
    opt.step()
    return [norm.item(), (1 - model.a.detach()).norm().item()]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_expanded_gradient_is_clipped(stage: int) -> None:
    for norm, moved in run_world(2, expanded, stage):
        assert norm == pytest.approx(3 * math.sqrt(5)) and moved == pytest.approx(1, abs=1e-5)
