"""Misuse after construction: every rank gets an error, nothing changes, and training can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import by_rank, two_heads
from oracle import play_oracle
from play import assert_same_bits, assert_states_equal, make, stages
from scenario import Turn, snapshot, state_by_name
from torch import Tensor, nn
from world import check_words, message_of, run_world

import dynzero

SCENARIO = two_heads(by_rank, steps=2)


class Place(NamedTuple):
    """What a misuse can get hold of."""

    opt: dynzero.ZeroOptimizer
    model: nn.Module
    rank: int
    last: bool  # the rank with the highest number is the one that strays


def nothing(place: Place) -> None:
    pass


class Misuse(NamedTuple):
    """`stray` breaks something on the last rank, `call` must then raise on all ranks."""

    stray: Callable[[Place], Any] = nothing
    call: Callable[[Place], Any] = lambda place: place.opt.step()
    kind: type[Exception] = ValueError
    words: tuple[str, ...] = ()
    mend: Callable[[Place], Any] = nothing
    alone: bool = True  # is it an error at W = 1, too?


def set_rate(value: float) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.opt.param_groups[0]["lr"] = value

    return change


def replace_data(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        p = place.model.get_parameter(name)
        p.grad = None
        p.data = value(p.data)

    return change


def replace_object(place: Place) -> None:
    group = place.opt.param_groups[0]
    place.model.kept = list(group["params"])
    group["params"][1] = torch.zeros(4, requires_grad=True)


def restore_object(place: Place) -> None:
    place.opt.param_groups[0]["params"][:] = place.model.kept


def drop_option(key: str) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.model.dropped = place.opt.param_groups[0].pop(key)

    return change


def restore_option(key: str) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.opt.param_groups[0][key] = place.model.dropped

    return change


def append_group(place: Place) -> None:
    place.opt.param_groups.append({"params": [], "lr": 0.05})


def remove_group(place: Place) -> None:
    place.opt.param_groups.pop()


def add(params: Callable[[Place], Any], **options: Any) -> Callable[[Place], None]:
    def call(place: Place) -> None:
        place.opt.add_param_group({"params": params(place), **options})

    return call


def extra(size: int) -> list[tuple[str, nn.Parameter]]:
    return [("extra", nn.Parameter(torch.zeros(size)))]


def otherwise(usual: Callable[[Place], Any], stray: Callable[[Place], Any]) -> Any:
    return lambda place: stray(place) if place.last else usual(place)


WEIGHT = "trunk.weight"
MISUSES: dict[str, Misuse] = {
    "other rate": Misuse(
        set_rate(0.25),
        words=("lr", "0.05", "0.25", "same options", "scheduler"),
        mend=set_rate(0.05),
        alone=False,
    ),
    "weight to be negated": Misuse(
        replace_data(WEIGHT, torch._neg_view), words=(WEIGHT, "has become", "resolve_neg")
    ),
    "weight cast to bf16": Misuse(
        replace_data(WEIGHT, Tensor.bfloat16),
        words=(WEIGHT, "float32", "bfloat16", "construction"),
    ),
    "weight of another shape": Misuse(
        replace_data(WEIGHT, lambda w: w.reshape(2, 8)),
        words=(WEIGHT, "shape", "(2, 8)"),
    ),
    "another parameter object": Misuse(
        replace_object, words=("trunk.bias", "object"), mend=restore_object
    ),
    "option dropped": Misuse(
        drop_option("weight_decay"),
        words=("param_groups", "'weight_decay'"),
        mend=restore_option("weight_decay"),
    ),
    "absent dropped": Misuse(
        drop_option("absent"), words=("param_groups", "'absent'"), mend=restore_option("absent")
    ),
    "parameters dropped": Misuse(
        drop_option("params"), words=("param_groups", "'params'"), mend=restore_option("params")
    ),
    "group appended by hand": Misuse(
        append_group, words=("param_groups", "group 1"), mend=remove_group
    ),
    "neither all ranks nor one": Misuse(
        call=lambda p: p.opt.full_state_dict(rank0_only="no"),
        kind=TypeError,
        words=("rank0_only", "'no'"),
    ),
    "other group added": Misuse(
        call=otherwise(add(lambda p: extra(3)), add(lambda p: extra(4))),
        words=("extra", "(3,)", "(4,)"),
        alone=False,
    ),
    "group added with another rate": Misuse(
        call=otherwise(add(lambda p: extra(3)), add(lambda p: extra(3), lr=0.5)),
        words=("lr", "0.05", "0.5"),
        alone=False,
    ),
    "known parameter added": Misuse(
        call=otherwise(add(lambda p: extra(3)), add(lambda p: [(WEIGHT, p.model.trunk.weight)])),
        words=(WEIGHT,),
    ),
    "nonsense added": Misuse(
        call=otherwise(add(lambda p: extra(3)), add(lambda p: [("x", "y")])),
        kind=TypeError,
        words=("Tensor", "str"),
    ),
    "group added on one rank only": Misuse(
        call=otherwise(lambda p: p.opt.step(), add(lambda p: extra(3))),
        kind=RuntimeError,
        words=("out of step", "step()", "add_param_group()", "rank"),
        alone=False,
    ),
    "norm on one rank only": Misuse(
        call=otherwise(lambda p: p.opt.step(), lambda p: p.opt.grad_norm()),
        kind=RuntimeError,
        words=("out of step", "step()", "grad_norm()", "rank"),
        alone=False,
    ),
    "other limit": Misuse(
        call=otherwise(lambda p: p.opt.clip_grad_norm_(1.0), lambda p: p.opt.clip_grad_norm_(2.0)),
        kind=RuntimeError,
        words=("clip_grad_norm_()", "max_norm = 1,", "max_norm = 2,", "rank"),
        alone=False,
    ),
    "other parameter read": Misuse(
        call=otherwise(
            lambda p: p.opt.full_grad(p.model.trunk.weight),
            lambda p: p.opt.full_grad(p.model.a.weight),
        ),
        kind=RuntimeError,
        words=("full_grad()", "rank"),
        alone=False,
    ),
    "foreign parameter read": Misuse(
        call=lambda p: p.opt.full_grad(nn.Parameter(torch.zeros(3))),
        words=("full_grad", "optimizer"),
    ),
    "foreign parameter read on one rank": Misuse(
        call=otherwise(
            lambda p: p.opt.full_grad(p.model.trunk.weight), lambda p: p.opt.full_grad(None)
        ),
        words=("rank", "full_grad", "optimizer"),
        alone=False,
    ),
    "norm of no order on one rank": Misuse(
        call=otherwise(lambda p: p.opt.grad_norm(), lambda p: p.opt.grad_norm("two")),
        words=("rank", "p: expected", "'two'"),
        alone=False,
    ),
    "negative limit on one rank": Misuse(
        call=otherwise(lambda p: p.opt.clip_grad_norm_(1.0), lambda p: p.opt.clip_grad_norm_(-1)),
        words=("rank", "max_norm", "-1"),
        alone=False,
    ),
    "no closure": Misuse(
        call=lambda p: p.opt.step(3), kind=TypeError, words=("closure", "callable", "3")
    ),
    "no closure on one rank": Misuse(
        call=otherwise(lambda p: p.opt.step(), lambda p: p.opt.step(3)),
        kind=TypeError,
        words=("rank", "closure", "callable", "3"),
        alone=False,
    ),
    "a group that fails on one rank": Misuse(
        call=otherwise(add(lambda p: extra(3)), add(lambda p: (1 / 0 for _ in range(1)))),
        kind=RuntimeError,
        words=("rank", "ZeroDivisionError"),
        alone=False,
    ),
    "unknown average added": Misuse(
        call=otherwise(add(lambda p: extra(3)), add(lambda p: extra(3), average="median")),
        words=("average", "median"),
    ),
    "norm of order 0": Misuse(call=lambda p: p.opt.grad_norm(0), words=("p: expected", "0")),
    "negative limit": Misuse(
        call=lambda p: p.opt.clip_grad_norm_(-1.0), words=("max_norm", "-1.0")
    ),
}


def misuse_between_steps(
    rank: int, world: int, stage: int, name: str
) -> tuple[str, list[dict[str, Tensor]], list[dict[str, Any]]]:
    """One good step, the misuse with a gradient waiting, one good step."""
    misuse = MISUSES[name]
    model = SCENARIO.model()
    opt = make(SCENARIO, model, stage=stage, fused=False)
    place = Place(opt, model, rank, rank == world - 1)
    params, states, text = [], [], ""
    for step in range(2):
        if step == 1:
            opt.backward(SCENARIO.loss(model, Turn(7, 0, rank, world)))
            weights = [p.data for p in model.parameters()]
            if place.last:
                misuse.stray(place)
            text = message_of(misuse.kind, misuse.call, place)
            if place.last:
                misuse.mend(place)
            for p, weight in zip(model.parameters(), weights, strict=True):
                p.data = weight
            opt.zero_grad()
            params.append(snapshot(model))
            states.append(state_by_name(opt.full_state_dict()))
        opt.backward(SCENARIO.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        params.append(snapshot(model))
        states.append(state_by_name(opt.full_state_dict()))
    return text, params, states


RUNS = [(w, name) for name, misuse in MISUSES.items() for w in (1, 3) if w > 1 or misuse.alone]


@stages
@pytest.mark.parametrize(("world", "name"), RUNS)
def test_misuse_raises_everywhere_and_changes_nothing(world: int, stage: int, name: str) -> None:
    misuse = MISUSES[name]
    results = run_world(world, misuse_between_steps, stage, name)
    expected = play_oracle(SCENARIO, world)
    for rank, (text, params, states) in enumerate(results):
        check_words(text, misuse.words, f"rank {rank}")
        for value, wanted in ((params[0], 1), (params[1], 1), (params[2], 2)):
            for parameter, weight in expected.params[wanted].items():
                assert_same_bits(value[parameter], weight, f"rank {rank}, {parameter}")
        assert_states_equal(states[1], expected.states[1], assert_same_bits)
        assert_states_equal(states[2], expected.states[2], assert_same_bits)


def step_on_one_rank_twice(rank: int, world: int, stage: int) -> str:
    """Rank 0 steps twice where the others read a norm: iteration numbers differ from then on."""
    model = SCENARIO.model()
    opt = make(SCENARIO, model, stage=stage)
    opt.backward(SCENARIO.loss(model, Turn(0, 0, rank, world)))
    opt.step()
    if rank == 0:
        return message_of(RuntimeError, opt.step)
    return message_of(RuntimeError, opt.grad_norm)


@stages
@pytest.mark.parametrize("world", [2, 3])
def test_error_names_place_and_rank(world: int, stage: int) -> None:
    messages = run_world(world, step_on_one_rank_twice, stage)
    assert len(set(messages)) == 1
    check_words(messages[0], ["rank 0", "rank 1", "step()", "grad_norm()", "iteration 1"])


def test_moved_model_is_refused(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a second device to move to")
    model = SCENARIO.model(device)
    opt = make(SCENARIO, model, stage=1)
    SCENARIO.loss(model, Turn(0, 0, 0, 1)).backward()
    model.cpu()
    check_words(message_of(ValueError, opt.step), [WEIGHT, "device", "cuda", "cpu"])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("loss", [3.0, None, [torch.ones(())]])
def test_a_loss_that_is_no_tensor_is_refused(stage: int, loss: Any) -> None:
    p = nn.Parameter(torch.ones(3))
    opt = dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0, stage=stage)
    opt.backward(p.sum())
    check_words(message_of(TypeError, opt.backward, loss), ["loss", type(loss).__name__])
    opt.step()
    assert p.tolist() == [0.0] * 3, "the window is as it was"
