"""Weights that change behind the optimizer: loaded, replaced, edited, swapped, cast or moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mixed, two_heads
from oracle import HALVES, Replica
from play import (
    assert_close,
    assert_same_bits,
    assert_states_equal,
    make,
    oracle_options,
    stages,
    worlds,
)
from scenario import Scenario, Turn, snapshot, state_by_name
from torch import Tensor, nn
from world import check_words, message_of, rank_device, run_world

kinds = pytest.mark.parametrize(
    ("dtype", "fused"),
    [(torch.float32, None), (torch.bfloat16, False), (torch.float16, None), (torch.float16, False)],
)
Weights = dict[str, Tensor]


def other_weights(model: nn.Module, number: int) -> Weights:
    """The same on every rank and device, in the model's dtype."""
    lot = torch.Generator().manual_seed(number)
    made = {}
    for name, p in model.named_parameters():
        made[name] = (0.5 * torch.randn(p.shape, generator=lot)).to(p.device, p.dtype)
    return made


def load(model: nn.Module, number: int) -> None:
    model.load_state_dict(other_weights(model, number))


def replace(model: nn.Module, number: int) -> None:
    for name, value in other_weights(model, number).items():
        model.get_parameter(name).data = value


def copy(model: nn.Module, number: int) -> None:
    for name, value in other_weights(model, number).items():
        model.get_parameter(name).data.copy_(value)


def multiply(model: nn.Module, number: int) -> None:
    for p in model.parameters():
        p.data.mul_(0.75)


def edit_some(model: nn.Module, number: int) -> None:
    """Every second element only: masters of the others keep their fine bits."""
    for p in model.parameters():
        p.data.view(-1)[::2] = 0.25


def swap(model: nn.Module, number: int) -> None:
    """An EMA: weights stored, averages loaded and used, weights restored. Nothing has changed."""
    stored = {name: p.detach().clone() for name, p in model.named_parameters()}
    load(model, number)
    with torch.no_grad():
        model(torch.ones(2, 4).to(next(model.parameters())), "a")
    for name, p in model.named_parameters():
        p.data.copy_(stored[name])


def cast_and_back(model: nn.Module, number: int) -> None:
    """Exactly the same values, at other addresses."""
    dtype = next(model.parameters()).dtype
    model.to(torch.float64)
    model.to(dtype)


EDITS: list[Callable[[nn.Module, int], None]] = [
    load, replace, copy, multiply, edit_some, swap, cast_and_back,
]  # fmt: skip
SCENARIO = two_heads(mixed)


def scenario_of(dtype: torch.dtype) -> Scenario:
    return two_heads(mixed, dtype=dtype)


def train_with_edits(
    rank: int, world: int, stage: int, dtype: torch.dtype, fused: bool | None
) -> tuple[list[Weights], dict[str, Any]]:
    """An edit before every second step, the first of them right after construction."""
    scenario = scenario_of(dtype)
    model = scenario.model(rank_device())
    opt = make(scenario, model, stage=stage, fused=fused)
    seen = []
    for step in range(2 * len(EDITS)):
        if step % 2 == 0:
            EDITS[step // 2](model, step)
        opt.backward(scenario.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        seen.append(snapshot(model))
    return seen, state_by_name(opt.full_state_dict())


def follow(replica: Replica) -> None:
    """Masters whose rounding is not the weight's value any more take that value."""
    for p, master in replica.masters.values():
        if p is not master:
            fine = master.data.to(p.dtype) == p.data
            master.data.copy_(torch.where(fine, master.data, p.data.float()))


def oracle_with_edits(world: int, stage: int, dtype: torch.dtype, device: str) -> Any:
    scenario = scenario_of(dtype)
    model = scenario.model(device)
    options = oracle_options({"stage": stage}, world)
    replica = Replica(
        model, model.named_parameters(), scenario.optimizer, scenario.options, world=world,
        **options,
    )  # fmt: skip
    seen = []
    for step in range(2 * len(EDITS)):
        if step % 2 == 0:
            EDITS[step // 2](model, step)
            follow(replica)
        turns = [Turn(step, 0, rank, world) for rank in range(world)]
        replica.collect([[lambda turn=turn: scenario.loss(model, turn)] for turn in turns])
        replica.step()
        seen.append(snapshot(model))
    return seen, replica.state()


@stages
@worlds(1, 2)
@kinds
def test_edited_weights_are_followed(
    world: int, backend: str, stage: int, dtype: torch.dtype, fused: bool | None
) -> None:
    device = "cpu" if backend == "gloo" else "cuda:0"
    expected, state = oracle_with_edits(world, stage, dtype, device)
    compare = assert_same_bits if fused is False and backend == "gloo" else assert_close
    for seen, own_state in run_world(world, train_with_edits, stage, dtype, fused, backend=backend):
        for step, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
            for name, value in theirs.items():
                compare(ours[name], value, f"step {step}, {EDITS[step // 2].__name__}, {name}")
        if dtype not in HALVES or fused is False:
            assert_states_equal(own_state, state, compare)


def train_with_swaps(
    rank: int, world: int, stage: int, dtype: torch.dtype, fused: bool | None, swaps: bool
) -> tuple[Weights, dict[str, Any]]:
    scenario = scenario_of(dtype)
    model = scenario.model(rank_device())
    opt = make(scenario, model, stage=stage, fused=fused)
    for step in range(4):
        opt.backward(scenario.loss(model, Turn(step, 0, rank, world)))
        if swaps:
            swap(model, step)
        opt.step()
        if swaps:
            swap(model, step + 1)
        opt.zero_grad()
    return snapshot(model), state_by_name(opt.full_state_dict())


@stages
@worlds(1, 2)
@kinds
def test_an_ema_swap_leaves_every_bit(
    world: int, backend: str, stage: int, dtype: torch.dtype, fused: bool | None
) -> None:
    arguments = (stage, dtype, fused)
    without = run_world(world, train_with_swaps, *arguments, False, backend=backend)
    swapped = run_world(world, train_with_swaps, *arguments, True, backend=backend)
    for (params, state), (expected, expected_state) in zip(swapped, without, strict=True):
        for name, value in expected.items():
            assert_same_bits(params[name], value, name)
        assert_states_equal(state, expected_state, assert_same_bits)


def resume(
    rank: int, world: int, stage: int, dtype: torch.dtype, fused: bool | None, full: bool
) -> list[Weights]:
    """Six steps; and three in one optimizer, three in another that loads its state first."""
    scenario = scenario_of(dtype)

    def train(opt: Any, model: nn.Module, steps: range) -> None:
        for step in steps:
            opt.backward(scenario.loss(model, Turn(step, 0, rank, world)))
            opt.step()
            opt.zero_grad()

    model = scenario.model(rank_device())
    opt = make(scenario, model, stage=stage, fused=fused)
    train(opt, model, range(3))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = opt.full_state_dict() if full else opt.state_dict()
    later = scenario.model(rank_device())
    later_opt = make(scenario, later, stage=stage, fused=fused)
    later_opt.load_state_dict(state)
    later.load_state_dict(weights)
    train(opt, model, range(3, 6))
    train(later_opt, later, range(3, 6))
    return [snapshot(model), snapshot(later)]


@stages
@worlds(1, 2)
@kinds
def test_weights_loaded_after_the_state_keep_the_masters(
    world: int, backend: str, stage: int, dtype: torch.dtype, fused: bool | None
) -> None:
    """bf16 and fp16 weights say less than the float32 masters, which must not be rounded."""
    for full in (True, False):
        for whole, resumed in run_world(world, resume, stage, dtype, fused, full, backend=backend):
            for name, value in whole.items():
                assert_same_bits(resumed[name], value, name)


# Refused.


CASTS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "half": (lambda model: model.half(), "float16"),
    "bfloat16": (lambda model: model.to(torch.bfloat16), "bfloat16"),
    "double": (lambda model: model.to(torch.float64), "float64"),
    "cpu": (lambda model: model.to("cpu"), "device cpu"),
    "shape": (lambda model: set_data(model, lambda w: w.reshape(2, 8)), "shape (2, 8)"),
    "strides": (lambda model: set_data(model, lambda w: w.t().contiguous().t()), "strides (1, 4)"),
}


def set_data(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    model.trunk.weight.data = change(model.trunk.weight.data)


def convert(
    rank: int, world: int, stage: int, name: str, everywhere: bool
) -> tuple[str, Weights, Weights, Weights]:
    """One good step; then the model is converted on the last rank only, or on all."""
    model = SCENARIO.model(rank_device())
    opt = make(SCENARIO, model, stage=stage, fused=False)

    def train(step: int) -> None:
        if name not in ("shape", "strides") or step != 1:
            opt.backward(SCENARIO.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()

    train(0)
    good = {name: p.data for name, p in model.named_parameters()}
    before = snapshot(model)
    if everywhere or rank == world - 1:
        CASTS[name][0](model)
    text = message_of(ValueError, train, 1)
    for parameter, value in good.items():
        model.get_parameter(parameter).data = value
    opt.zero_grad()
    after = snapshot(model)
    train(2)
    return text, before, after, snapshot(model)


@stages
@worlds(1, 2)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", CASTS)
def test_a_converted_model_is_refused_on_every_rank(
    world: int, backend: str, stage: int, name: str, everywhere: bool
) -> None:
    if name == "cpu" and backend == "gloo":
        pytest.skip("the model of a gloo rank is on the CPU already")
    results = run_world(world, convert, stage, name, everywhere, backend=backend)
    assert len({text for text, _, _, _ in results}) == 1
    words = ["trunk.weight", CASTS[name][1], "construction"]
    check_words(
        results[0][0], words + ([f"rank {world - 1}"] if world > 1 and not everywhere else [])
    )
    expected = convert_oracle(world, stage, "cpu" if backend == "gloo" else "cuda:0")
    for _, before, after, end in results:
        for parameter, value in before.items():
            assert_same_bits(after[parameter], value, parameter)
            assert_close(end[parameter], expected[parameter], parameter)


def convert_oracle(world: int, stage: int, device: str) -> Weights:
    """Steps 0 and 2 only."""
    model = SCENARIO.model(device)
    replica = Replica(
        model, model.named_parameters(), SCENARIO.optimizer, SCENARIO.options, world=world,
        **oracle_options({"stage": stage}, world),
    )  # fmt: skip
    for step in (0, 2):
        turns = [Turn(step, 0, rank, world) for rank in range(world)]
        replica.collect([[lambda turn=turn: SCENARIO.loss(model, turn)] for turn in turns])
        replica.step()
    return snapshot(model)
