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


def damped_later(rank: int, world: int, stage: int, fused: bool | None) -> torch.Tensor:
    """Two groups, one without momentum; it gets one, with dampening, after two steps."""
    model = model_ab()
    groups = [{"params": [model.a]}, {"params": [model.b], "momentum": 0.9}]
    opt = dynzero.ZeroOptimizer(groups, torch.optim.SGD, lr=0.1, stage=stage, fused=fused)
    return train_damped(opt, model, opt.backward)


def train_damped(opt: torch.optim.Optimizer, model: Any, backward: Any) -> torch.Tensor:
    for step in range(4):
        if step == 2:
            opt.param_groups[0].update(momentum=0.9, dampening=0.5)
        backward(model.a.sum() + model.b.sum())
        opt.step()
        opt.zero_grad()
    return torch.cat([model.a.detach(), model.b.detach()])


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fused", [None, False])
def test_damped_momentum_starts_with_the_gradient(
    world: int, stage: int, fused: bool | None
) -> None:
    model = model_ab()
    groups = [{"params": [model.a]}, {"params": [model.b], "momentum": 0.9}]
    plain = torch.optim.SGD(groups, lr=0.1)
    expected = train_damped(plain, model, lambda loss: loss.backward())
    for result in run_world(world, damped_later, stage, fused):
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def average_later(rank: int, world: int, stage: int, how: str) -> tuple[str, torch.Tensor]:
    """Rank 0 alone has a gradient, of 1; one step at each kind of average."""
    model = model_ab()
    options = dict(optimizer_class=torch.optim.SGD, lr=1.0, stage=stage)
    opt = dynzero.ZeroOptimizer(model.named_parameters(), **options)
    for average in ("world", "present"):
        if average == "present" and how == "set":
            opt.param_groups[0]["average"] = average
        elif average == "present":
            other = model_ab().named_parameters()
            saved = dynzero.ZeroOptimizer(other, average=average, **options).full_state_dict()
            opt.load_state_dict(saved)
        if rank == 0:
            opt.backward(model.a.sum())
        opt.step()
        opt.zero_grad()
    return opt.param_groups[0]["average"], model_ab().a.detach() - model.a.detach()


@stages
@pytest.mark.parametrize("how", ["set", "loaded"])
def test_another_average_is_followed(stage: int, how: str) -> None:
    for average, moved in run_world(2, average_later, stage, how):
        assert average == "present"
        assert torch.equal(moved, torch.full_like(moved, 0.5 + 1.0))


def bad_option(rank: int, world: int, stage: int) -> list[Any]:
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.1, stage=stage)
    opt.param_groups[0]["betas"] = (0.5,)
    opt.backward(model.a.sum()) if stage < 2 or world == 1 else None
    message = message_of(ValueError, opt.step)
    opt.param_groups[0]["betas"] = (0.9, 0.999)
    opt.zero_grad()
    opt.backward(model.a.sum())
    opt.step()
    return [message, opt.counters, opt.last_step.iteration, model.a.detach()]


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_option_changes_nothing(world: int, stage: int) -> None:
    p = torch.nn.Parameter(torch.ones(5))
    plain = torch.optim.Adam([p], lr=0.1)
    p.grad = torch.ones(5)
    plain.step()
    for message, counters, iteration, a in run_world(world, bad_option, stage):
        assert "param_groups" in message
        assert counters == {"taken": 1, "skipped": 0} and iteration == 0
        torch.testing.assert_close(a, p.detach())


def load_other(rank: int, world: int, stage: int) -> tuple[str, Any]:
    """The last rank loads a dictionary that is one step older."""
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.1, stage=stage)
    saved = []
    for _ in range(2):
        opt.backward(model.a.sum())
        opt.step()
        opt.zero_grad()
        saved.append(opt.full_state_dict())
    mine = saved[0 if rank == world - 1 else 1]
    message = message_of(ValueError, opt.load_state_dict, mine)
    return message, opt.full_state_dict()["state"][0]["step"]


@stages
def test_ranks_that_load_different_states_are_refused(stage: int) -> None:
    for message, step in run_world(2, load_other, stage):
        assert "rank 0" in message and "rank 1" in message and "loaded state" in message
        assert step == 2, "nothing was loaded"


@pytest.mark.parametrize("fused", [True, False])
def test_options_changed_inside_are_followed(fused: bool) -> None:
    """A list and a tensor remain the same objects when their contents change."""
    values = []
    for sharded in (True, False):
        p = torch.nn.Parameter(torch.ones(5))
        lr = torch.tensor(0.1)
        if sharded:
            opt: Any = dynzero.ZeroOptimizer([p], torch.optim.AdamW, lr=lr, fused=fused)
        else:
            opt = torch.optim.AdamW([p], lr=lr)
        (group,) = opt.param_groups
        group["betas"] = [0.9, 0.99]
        for step in range(4):
            p.grad = torch.linspace(1.0, 2.0 + step, 5)
            opt.step()
            if step == 1:
                group["betas"][0] = 0.5
            if step == 2:
                group["lr"].mul_(3.0)
        values.append(p.detach())
    torch.testing.assert_close(*values, rtol=1e-6, atol=0)
