"""Options that change between steps: what torch keeps and what it starts anew."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from play import stages
from scenario import Parameters, weighted
from world import check_words, message_of, run_world

import dynzero

# What `a` and `b` get at each step: b rests while momentum is away, and an overflow is skipped.
GRADIENTS = [{"a": 1.0, "b": 1.0}, {"a": 2.0}, {"a": 3.0}, {"a": 4.0, "b": 4.0}, {"a": 5.0}]
MOMENTA = {"away for a step": [0.9, 0.9, 0.0, 0.9, 0.9], "away at once": [0.9, 0.0, 0.0, 0.9, 0.9],
           "later": [0.0, 0.0, 0.9, 0.0, 0.9]}  # fmt: skip


def model_ab() -> Parameters:
    return Parameters(a=torch.ones(5), b=torch.ones(3))


def plain(momenta: list[float]) -> tuple[Parameters, torch.optim.SGD]:
    model = model_ab()
    opt = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for momentum, factors in zip(momenta, GRADIENTS, strict=False):
        opt.param_groups[0]["momentum"] = momentum
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, factors[name]) if name in factors else None
        opt.step()
    return model, opt


def build(model: Parameters, momentum: float, **zero: Any) -> dynzero.ZeroOptimizer:
    sgd = {"lr": 0.1, "momentum": momentum}
    return dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, **sgd, **zero)


def one_step(opt: dynzero.ZeroOptimizer, model: Parameters, factors: dict[str, float]) -> None:
    for factor in (float("inf"), 1.0):  # a skipped step counts for nothing
        opt.backward(weighted(model, factors) * factor)
        opt.step()
        opt.zero_grad()


def momentum_away(
    rank: int, world: int, momenta: list[float], zero: dict[str, Any], form: str, at_first: float
) -> tuple[Parameters, list[dict[int, Any]]]:
    """Trains, saved by `form` before each step into a new optimizer; what each had of state."""
    model = model_ab()
    opt = build(model, momenta[0], **zero)
    states = []
    for momentum, factors in zip(momenta, GRADIENTS, strict=True):
        if form:
            saved = getattr(opt, form)()
            opt = build(model, at_first, **zero)
            opt.load_state_dict(saved)
        opt.param_groups[0]["momentum"] = momentum
        one_step(opt, model, factors)
        states.append(opt.full_state_dict()["state"])
    return model, states


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("momenta", MOMENTA)
@pytest.mark.parametrize("fused", [None, False])
def test_a_buffer_outlives_momentum_0(
    world: int, stage: int, momenta: str, fused: bool | None
) -> None:
    values = MOMENTA[momenta]
    zero = {"stage": stage, "fused": fused}
    for form, at_first in (("", 0.9), ("full_state_dict", 0.0), ("state_dict", 0.9)):
        results = run_world(world, momentum_away, values, zero, form, at_first)
        for model, states in results:
            for step, state in enumerate(states):
                reference, opt = plain(values[: step + 1])
                for i, p in enumerate(opt.param_groups[0]["params"]):
                    expected = opt.state[p].get("momentum_buffer")
                    actual = state.get(i, {}).get("momentum_buffer")
                    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
            for name, p in reference.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-6, atol=1e-6)


def test_a_number_is_no_buffer() -> None:
    saved = plain([0.9])[1].state_dict()
    saved["state"][0]["momentum_buffer"] = torch.zeros(())
    text = message_of(ValueError, build(model_ab(), 0.0).load_state_dict, saved)
    check_words(text, ["momentum_buffer", "expected shape (5,)", "got ()"])


@pytest.mark.parametrize("fused", [None, False])
def test_torchs_buffers_load_while_momentum_is_0(fused: bool | None) -> None:
    values = MOMENTA["away for a step"]
    model, before = plain(values[:3])
    opt = build(model, 0.0, fused=fused)
    opt.load_state_dict(before.state_dict())
    for momentum, factors in zip(values[3:], GRADIENTS[3:], strict=True):
        opt.param_groups[0]["momentum"] = momentum
        one_step(opt, model, factors)
    for name, p in plain(values)[0].named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-6, atol=1e-6)


def trained_by(lr: torch.Tensor, fused: bool | None, saved: Any = None) -> tuple[Any, Any]:
    """An optimizer after one step with a tensor as learning rate, and its parameter."""
    p = torch.nn.Parameter(torch.ones(5))
    opt = dynzero.ZeroOptimizer([p], torch.optim.AdamW, lr=lr, fused=fused)
    if saved is not None:
        opt.load_state_dict(saved)
    p.grad = torch.ones(5)
    opt.step()
    return opt, p


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("form", ["state_dict", "full_state_dict", "plain"])
def test_a_tensor_lr_is_copied_both_ways(form: str, fused: bool | None) -> None:
    """As torch does it at load; a saved dictionary is the caller's own, too."""
    first, _ = trained_by(torch.tensor(0.1), fused)
    if form == "plain":
        saved = torch.optim.AdamW([torch.nn.Parameter(torch.ones(5))], lr=torch.tensor(0.1))
        saved = saved.state_dict()
    else:
        saved = getattr(first, form)()
    lr = torch.tensor(0.3)
    second, p = trained_by(lr, fused, saved)
    (group,) = second.param_groups
    assert group["lr"] is not lr and float(group["lr"]) == float(torch.tensor(0.1))
    first.param_groups[0]["lr"].fill_(5.0)
    saved["param_groups"][0]["lr"].fill_(7.0)
    assert float(group["lr"]) == float(torch.tensor(0.1)) and float(lr) == float(torch.tensor(0.3))
    group["lr"].fill_(0.0)
    assert float(first.param_groups[0]["lr"]) == 5.0
    assert float(saved["param_groups"][0]["lr"]) == 7.0
    before = p.detach().clone()
    second.step()
    torch.testing.assert_close(p.detach(), before)


def rate_changed_between(rank: int, world: int, stage: int, where: str) -> list[float]:
    """All ranks set the rate at the same place, but their backward calls are at others."""
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, stage=stage)
    if rank == 1:
        opt.backward(model.a.sum())
    if where == "discarded":
        opt.zero_grad()
        time.sleep(0.2 * rank)  # the other rank is at its next call by then
    opt.param_groups[0]["lr"] = 0.5
    if where == "counted" and rank == 0 or where == "discarded":
        opt.backward(model.a.sum())
    opt.step()
    return [model.a[0].item(), model.b[0].item()]


@stages
@pytest.mark.parametrize(("where", "a"), [("counted", 0.5), ("alone", 0.75), ("discarded", 0.5)])
def test_a_rate_may_change_between_backward_calls(stage: int, where: str, a: float) -> None:
    assert run_world(2, rate_changed_between, stage, where) == [[a, 1.0]] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("eps", "small"), ("betas", (0.9,)), ("betas", 0.9), ("lr", None), ("weight_decay", [])],
)
def test_an_option_that_is_no_number_is_named(key: str, value: Any) -> None:
    model = model_ab()
    groups = [{"params": [model.a]}, {"params": [model.b]}]
    opt = dynzero.ZeroOptimizer(groups, torch.optim.AdamW, lr=0.1)
    for step in range(2):  # the second time the options have been seen
        opt.backward(model.a.sum())
        if step == 1:
            kept = opt.param_groups[1][key]
            opt.param_groups[1][key] = value
            text = message_of(ValueError, opt.step)
            check_words(text, ["group 1", key, "expected", repr(value)])
            opt.param_groups[1][key] = kept
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(model.a.detach(), torch.full((5,), 0.7982), atol=1e-3, rtol=0.0)


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_an_option_under_another_name_is_missed(world: int, stage: int) -> None:
    for text in run_world(world, renamed_option, stage):
        check_words(text, ["group 0", "average"])


def renamed_option(rank: int, world: int, stage: int) -> str:
    model = model_ab()
    opt = build(model, 0.0, stage=stage)
    one_step(opt, model, {"a": 1.0})
    group = opt.param_groups[0]
    group["renamed"] = group.pop("average")
    opt.backward(model.a.sum())
    return message_of(ValueError, opt.step)
