"""Ranks that build different optimizers get one and the same error, naming the first difference."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from play import assert_close, assert_same_bits
from scenario import snapshot
from test_bad_input import OPTIM, Call, construct, model_of_rank, with_option
from torch import Tensor, nn
from world import check_words, expect_error, message_of, outcome_of, run_world

import dynzero
from dynzero.construction import Options


# Arguments that are good alone, but not together: what rank 1 has, and what the error must say.
class Differs(NamedTuple):
    call: Call
    words: tuple[str, ...]


def renamed(model: nn.Module) -> Any:
    return [("u", model.u), ("other", model.v), ("w", model.w)]


def reshaped(model: nn.Module) -> Any:
    return [("u", model.u), ("v", nn.Parameter(torch.zeros(6))), ("w", model.w)]


def retyped(model: nn.Module) -> Any:
    return [("u", model.u), ("v", nn.Parameter(torch.zeros(5).bfloat16())), ("w", model.w)]


def reordered(model: nn.Module) -> Any:
    return [("v", model.v), ("u", model.u), ("w", model.w)]


def fewer(model: nn.Module) -> Any:
    return [("u", model.u), ("v", model.v)]


def regrouped(model: nn.Module) -> Any:
    return [{"params": [("u", model.u), ("v", model.v)]}, {"params": [("w", model.w)]}]


def own_absent(model: nn.Module) -> Any:
    return [{"params": model.named_parameters(), "absent": "zero"}]


DIFFERENCES: dict[str, Differs] = {
    "names": Differs(Call(renamed), ("'v'", "'other'")),
    "shape": Differs(Call(reshaped), ("'v'", "(5,)", "(6,)")),
    "dtype": Differs(Call(retyped), ("'v'", "float32", "bfloat16")),
    "order": Differs(Call(reordered), ("'u'", "'v'")),
    "number": Differs(Call(fewer), ("3 parameters", "2 parameters")),
    "groups": Differs(Call(regrouped), ("1 parameter groups", "2 parameter groups")),
    "group option": Differs(Call(own_absent), ("absent", "skip", "zero")),
    "class": Differs(Call(optimizer=OPTIM.Adam), ("AdamW", "Adam")),
} | {
    name: Differs(with_option(**{name: value}), (name, str(value)))
    for name, value in {
        "lr": 0.2,
        "weight_decay": 0.5,
        "betas": (0.5, 0.6),
        "stage": 1,
        "absent": "zero",
        "average": "present",
        "max_grad_norm": 2.5,
        "loss_scale": 64.0,
        "check_finite": False,
        "wire_dtype": torch.bfloat16,
        "bucket_bytes": 4096,
        "fused": False,
        "sync_params": False,
        "presence": "static",
        "gather": "lazy",
    }.items()
}


def test_every_option_is_compared() -> None:
    assert {f.name for f in dataclasses.fields(Options)} - {"transport"} <= DIFFERENCES.keys()


def different_on_last_rank(rank: int, world: int) -> dict[str, tuple[str, dict[str, Tensor]]]:
    results = {}
    for name, difference in DIFFERENCES.items():
        model = model_of_rank()
        call = difference.call if rank == world - 1 else Call()
        results[name] = outcome_of(construct, model, call), snapshot(model)
    return results


@pytest.fixture(scope="module")
def disagreements() -> list[dict[str, tuple[str, dict[str, Tensor]]]]:
    return run_world(3, different_on_last_rank, timeout=120.0)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_get_the_same_error(name: str, disagreements: list[Any]) -> None:
    messages = [results[name][0] for results in disagreements]
    assert len(set(messages)) == 1, messages
    check_words(messages[0], ["ValueError", "rank 0", "rank 2", *DIFFERENCES[name].words])
    for rank, results in enumerate(disagreements):
        for parameter, value in snapshot(model_of_rank()).items():
            assert_same_bits(results[name][1][parameter], value, f"rank {rank}, {parameter}")


def other_values(rank: int, world: int, sync: bool) -> tuple[str, dict[str, Tensor]]:
    model, text = model_of_rank(), ""
    if rank == 1:
        with torch.no_grad():
            model.v[2] = 7.0
    if sync:
        construct(model, with_option(sync_params=True))
    else:
        text = message_of(ValueError, construct, model, with_option(sync_params=False))
    return text, snapshot(model)


def test_other_values_are_refused_without_sync_params() -> None:
    for text, _ in run_world(2, other_values, False):
        check_words(text, ["differ", "rank 1", "v", "sync_params=True"])
        assert "u" not in text.split("'"), text


def test_other_values_are_overwritten_with_sync_params() -> None:
    expected = snapshot(model_of_rank())
    for _, params in run_world(2, other_values, True):
        for name, value in expected.items():
            assert_same_bits(params[name], value, name)


def other_values_added(rank: int, world: int, stage: int) -> tuple[str, int, int, nn.Module]:
    """A group whose values differ is refused; then one step, the same group added, another step."""
    model = model_of_rank()
    added = {"params": [("v", model.v)], "lr": 0.5}
    only_u = Call(lambda m: [("u", m.u)], torch.optim.SGD, {"sync_params": False, "stage": stage})
    opt = construct(model, only_u)
    start = model.v.detach().clone()
    model.v.data[2] += rank
    text = message_of(ValueError, opt.add_param_group, added)
    groups = len(opt.param_groups)
    model.v.data.copy_(start)
    for step in range(2):
        opt.backward((rank + 1) * (model.u.sum() + model.v.sum()))
        opt.step()
        opt.zero_grad()
        model.v.grad = None
        if step == 0:
            opt.add_param_group(added)
    return text, groups, len(opt.param_groups), model


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_group_of_other_values_is_refused_and_not_added(stage: int) -> None:
    model = model_of_rank()
    opt = torch.optim.SGD([model.u], lr=0.1)
    for step in range(2):
        for p in (model.u, model.v):
            p.grad = torch.full_like(p, 1.5)
        opt.step()
        if step == 0:
            opt.add_param_group({"params": [model.v], "lr": 0.5})
    for text, refused, added, trained in run_world(2, other_values_added, stage):
        check_words(text, ["differ", "rank 1", "v", "sync_params=True"])
        assert (refused, added) == (1, 2)
        for name, value in snapshot(model).items():
            assert_close(snapshot(trained)[name], value, name)


class Schedule:
    """Known by where it is only."""


def with_objects(rank: int, world: int, other: bool) -> list[float]:
    """The groups hold objects of the user's; with `other` of different kinds."""
    keep = [Schedule() for _ in range(5 * rank)]  # so that addresses differ
    model = model_of_rank()
    odd = model_of_rank if other and rank else Schedule()
    group = {"params": list(model.parameters()), "schedule": odd, "of": [Schedule(), lambda: keep]}
    opt = dynzero.ZeroOptimizer([group], torch.optim.SGD, lr=1.0)
    for _ in range(2):
        opt.backward(model.u.sum())
        opt.step()
        opt.zero_grad()
        group = opt.param_groups[0]
        group["schedule"] = Schedule()
    return model.u.flatten().tolist()


def test_objects_in_groups_are_compared_by_kind() -> None:
    first, second = run_world(2, with_objects, False)
    assert first == second
    expect_error(2, with_objects, True, words=["schedule", "Schedule", "model_of_rank"])
