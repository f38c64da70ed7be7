"""State dictionaries that do not fit: refused on every rank, with the state intact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import TwoHeads, mixed, two_heads
from play import assert_same_bits, assert_states_equal, make, stages
from scenario import Turn, snapshot, state_by_name
from world import check_words, outcome_of, run_world

SCENARIO = two_heads(mixed)


def drop_group(state: dict[str, Any]) -> None:
    state["param_groups"] = []


def drop_parameter(state: dict[str, Any]) -> None:
    group = state["param_groups"][0]
    group["params"].pop()
    group["param_names"].pop()


def rename(state: dict[str, Any]) -> None:
    state["param_groups"][0]["param_names"][0] = "stem.weight"


def reshape(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(5, 5)


def drop_entry(state: dict[str, Any]) -> None:
    del state["state"][0]["exp_avg_sq"]


def drop_state(state: dict[str, Any]) -> None:
    del state["state"]


def surplus_state(state: dict[str, Any]) -> None:
    state["state"][17] = state["state"][0]


def moment_is_no_tensor(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = [1.0, 2.0]


def two_steps(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = torch.ones(2)


def step_in_words(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = "a"


def drop_counters(state: dict[str, Any]) -> None:
    del state["dynzero"]["loss_scale"]["taken"]


def drop_our_groups(state: dict[str, Any]) -> None:
    state["dynzero"]["groups"] = []


def unknown_option(state: dict[str, Any]) -> None:
    state["dynzero"]["groups"][0]["absent"] = "bogus"


def iteration_in_words(state: dict[str, Any]) -> None:
    state["dynzero"]["iteration"] = "5"


def half_an_iteration(state: dict[str, Any]) -> None:
    state["dynzero"]["iteration"] = 2.5


def many_iterations(state: dict[str, Any]) -> None:
    state["dynzero"]["iteration"] = 1 << 63


def no_count(state: dict[str, Any]) -> None:
    state["dynzero"]["loss_scale"]["taken"] = float("nan")


def drop_our_option(state: dict[str, Any]) -> None:
    del state["dynzero"]["groups"][0]["average"]


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], tuple[str, ...]]] = {
    "group missing": (drop_group, ("parameter groups", "1", "0")),
    "parameter missing": (drop_parameter, ("parameters", "6", "5")),
    "renamed": (rename, ("stem.weight",)),
    "other shape": (reshape, ("exp_avg", "trunk.weight", "(4, 4)", "(5, 5)")),
    "entry missing": (drop_entry, ("exp_avg_sq", "trunk.weight")),
    "no state": (drop_state, ("state",)),
    "surplus state": (surplus_state, ("17",)),
    "moment is no tensor": (moment_is_no_tensor, ("exp_avg", "trunk.weight", "tensor")),
    "two steps": (two_steps, ("step", "trunk.weight", "(2,)")),
    "step in words": (step_in_words, ("step", "trunk.weight", "'a'")),
    "no counters": (drop_counters, ("taken",)),
    "no groups of ours": (drop_our_groups, ("groups", "1", "0")),
    "iteration in words": (iteration_in_words, ("iteration", "'5'")),
    "half an iteration": (half_an_iteration, ("iteration", "2.5")),
    "many iterations": (many_iterations, ("iteration", str(1 << 63))),
    "no count": (no_count, ("taken", "nan")),
    "no option of ours": (drop_our_option, ("average",)),
    "unknown option": (unknown_option, ("absent", "bogus", "'skip'")),
}


def load_broken(rank: int, world: int, stage: int, fused: bool | None) -> Any:
    """Only the last rank's dictionary is broken. One refusal after another, then one more step."""
    model = SCENARIO.model()
    opt = make(SCENARIO, model, stage=stage, fused=fused)
    texts, states = {}, {}
    for step in range(2):
        opt.backward(SCENARIO.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        if step == 0:
            before = state_by_name(opt.full_state_dict())
            for name, (spoil, _) in BROKEN.items():
                state = opt.full_state_dict()
                if rank == world - 1:
                    spoil(state)
                texts[name] = outcome_of(opt.load_state_dict, state)
                states[name] = state_by_name(opt.full_state_dict())
    return texts, before, states, snapshot(model)


def two_good_steps(rank: int, world: int, stage: int, fused: bool | None) -> Any:
    model = SCENARIO.model()
    opt = make(SCENARIO, model, stage=stage, fused=fused)
    for step in range(2):
        opt.backward(SCENARIO.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
    return snapshot(model)


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fused", [None, False])
def test_broken_state_is_refused(world: int, stage: int, fused: bool | None) -> None:
    expected = run_world(world, two_good_steps, stage, fused)[0]
    for rank, (texts, before, states, params) in enumerate(
        run_world(world, load_broken, stage, fused)
    ):
        for name, (_, words) in BROKEN.items():
            check_words(texts[name], ["ValueError", *words], f"rank {rank}, {name}")
            assert_states_equal(states[name], before, assert_same_bits)
        for parameter, value in expected.items():
            assert_same_bits(params[parameter], value, parameter)


def picky(opt: Any, state: dict[str, Any]) -> None:
    assert not state["state"], "wants no state"


def refused_by_a_hook(rank: int, world: int, stage: int) -> str:
    """The hook of the last rank raises what no optimizer does."""
    model = SCENARIO.model()
    opt = make(SCENARIO, model, stage=stage)
    opt.backward(SCENARIO.loss(model, Turn(0, 0, rank, world)))
    opt.step()
    before = opt.full_state_dict()
    if rank == world - 1:
        opt.register_load_state_dict_pre_hook(picky)
    text = outcome_of(opt.load_state_dict, before)
    after = opt.full_state_dict()
    assert_states_equal(state_by_name(after), state_by_name(before), assert_same_bits)
    return text


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_an_error_of_any_type_in_a_hook_reaches_all_ranks(world: int, stage: int) -> None:
    kind = "AssertionError" if world == 1 else "RuntimeError: rank 1: AssertionError"
    for text in run_world(world, refused_by_a_hook, stage, timeout=20.0):
        assert text.startswith(f"{kind}: wants no state")


def load_permuted(rank: int, world: int, stage: int) -> Any:
    """The same parameters listed in another order: state goes by name where there are names."""
    model = SCENARIO.model()
    opt = make(SCENARIO, model, stage=stage)
    opt.backward(SCENARIO.loss(model, Turn(0, 0, rank, world)))
    opt.step()
    turned = TwoHeads()
    backwards = list(turned.named_parameters())[::-1]
    other = type(opt)(backwards, SCENARIO.optimizer, stage=stage, **SCENARIO.options)
    state = opt.full_state_dict()
    other.load_state_dict(state)
    return state_by_name(state), state_by_name(other.full_state_dict())


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_state_goes_by_name(world: int, stage: int) -> None:
    for saved, loaded in run_world(world, load_permuted, stage):
        assert_states_equal(loaded, saved, assert_same_bits)
