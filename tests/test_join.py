"""join(): a rank out of data follows whatever the others do; and options that change in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import stages
from scenario import Parameters
from world import message_of, run_world

import dynzero


def model_ab() -> Parameters:
    return Parameters(a=torch.ones(5), b=torch.ones(3))


def oracle(steps: list[tuple[int, float]], rates: list[float]) -> torch.Tensor:
    """`a` after SGD with momentum on gradient (sum over ranks) / world, one rate a step."""
    p = torch.nn.Parameter(torch.ones(5))
    opt = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    for (ranks, world), rate in zip(steps, rates, strict=True):
        opt.param_groups[0]["lr"] = rate
        p.grad = torch.full((5,), ranks / world)
        opt.step()
    return p.detach()


def uneven_data(rank: int, world: int, stage: int, extra: str) -> dict[str, Any]:
    """Rank 0 has one batch, the others three; the loop has a scheduler and does `extra`."""
    model = model_ab()
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=1.0, momentum=0.9, stage=stage
    )
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    state: dict[str, Any] = {}
    with opt.join():
        for _ in range(1 if rank == 0 else 3):
            if extra == "discard" and rank:
                opt.backward(100 * model.a.sum())
                opt.zero_grad()
            opt.backward(model.a.sum())
            if extra == "norm":
                opt.grad_norm()
            if extra == "clip":
                opt.clip_grad_norm_(100.0)
            if extra == "read":
                assert opt.full_grad(model.a) is not None
            opt.step()
            opt.zero_grad()
            scheduler.step()
            if extra == "save":
                state = opt.full_state_dict()
    return {"a": model.a.detach(), "b": model.b.detach(), "state": state}


@stages
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("extra", ["", "norm", "clip", "read", "save"])
def test_joined_rank_follows_the_others(world: int, stage: int, extra: str) -> None:
    expected = oracle([(world, world)] + [(world - 1, world)] * 2, [1.0, 0.5, 0.25])
    results = run_world(world, uneven_data, stage, extra)
    for result in results:
        assert torch.equal(result["a"], results[0]["a"])
        torch.testing.assert_close(result["a"], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(result["b"], torch.ones(3))


def joined_then_discard(rank: int, world: int, stage: int) -> torch.Tensor:
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, stage=stage)
    with opt.join():
        for _ in range(2 * rank):
            opt.backward(100 * model.a.sum())
            opt.zero_grad()
            opt.backward(model.a.sum())
            opt.step()
            opt.zero_grad()
    return model.a.detach()


@stages
def test_joined_rank_follows_a_discarded_window(stage: int) -> None:
    for a in run_world(2, joined_then_discard, stage):
        assert torch.equal(a, torch.zeros(5))


def joined_then_add_group(rank: int, world: int, stage: int) -> str:
    model = model_ab()
    opt = dynzero.ZeroOptimizer([model.a], torch.optim.SGD, lr=1.0, stage=stage)

    def loop() -> None:
        with opt.join():
            if rank == 1:
                opt.add_param_group({"params": [model.b]})

    return message_of(RuntimeError, loop)


@stages
def test_adding_a_group_is_refused_while_a_rank_has_joined(stage: int) -> None:
    for message in run_world(2, joined_then_add_group, stage):
        assert "add_param_group()" in message and "join()" in message


def momentum_later(rank: int, world: int, stage: int, fused: bool | None) -> torch.Tensor:
    model = model_ab()
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=1.0, stage=stage, fused=fused
    )
    for step in range(4):
        if step == 1:
            opt.param_groups[0]["momentum"] = 0.9
        opt.backward(model.a.sum())
        opt.step()
        opt.zero_grad()
    return model.a.detach()


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fused", [None, False])
def test_momentum_switched_on_later(world: int, stage: int, fused: bool | None) -> None:
    p = torch.nn.Parameter(torch.ones(5))
    opt = torch.optim.SGD([p], lr=1.0)
    for step in range(4):
        if step == 1:
            opt.param_groups[0]["momentum"] = 0.9
        p.grad = torch.ones(5)
        opt.step()
    for a in run_world(world, momentum_later, stage, fused):
        torch.testing.assert_close(a, p.detach(), rtol=1e-6, atol=1e-6)


def amsgrad_later(rank: int, world: int, stage: int) -> str:
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.Adam, lr=1.0, stage=stage)
    opt.param_groups[0]["amsgrad"] = True

    def train() -> None:  # stage 2 says it in backward, at the first exchange
        opt.backward(model.a.sum())
        opt.step()

    message = message_of(ValueError, train)
    assert torch.equal(model.a.detach(), torch.ones(5))
    return message


@stages
def test_amsgrad_switched_on_later_is_refused(stage: int) -> None:
    for message in run_world(2, amsgrad_later, stage):
        assert "amsgrad" in message and "fused=False" in message


def scaler_on_sparse(rank: int, world: int, stage: int) -> torch.Tensor:
    torch.manual_seed(0)
    table = torch.nn.Embedding(4, 2, sparse=True)
    start = table.weight.detach().clone()
    opt = dynzero.ZeroOptimizer(table.parameters(), torch.optim.SGD, lr=1.0, stage=stage)
    scaler = dynzero.GradScaler("cpu", init_scale=4.0)
    # Rank 0 sees row 1 twice; the last rank has no gradient where there are two.
    if rank == 0:
        scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    else:
        scaler.scale(torch.zeros(1))
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    return start - table.weight.detach()


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_grad_scaler_with_sparse_gradients(world: int, stage: int) -> None:
    expected = torch.zeros(4, 2)
    expected[1] = 2.0 / world
    for moved in run_world(world, scaler_on_sparse, stage):
        torch.testing.assert_close(moved, expected)


def test_grad_scaler_refuses_fp16_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    opt = dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0)
    scaler = dynzero.GradScaler("cpu")
    scaler.scale(p.float().sum()).backward()
    with pytest.raises(ValueError, match="loss_scale='dynamic'"):
        scaler.unscale_(opt)
