"""State dictionaries: saved, loaded, at another world size, to and from plain torch.optim."""

from __future__ import annotations

import gc
import io
import weakref
from typing import Any

import pytest
import torch
from draws import KERNELS, SMOOTH
from models import TwoHeads, by_iteration, head_loss, mixed, two_heads
from oracle import Replica
from play import (
    assert_same_bits,
    assert_states_equal,
    make,
    stages,
    worlds,
    zero_class,
)
from scenario import Scenario, Turn, snapshot, state_by_name
from torch import Tensor, nn
from world import check_words, close_worlds, message_of, rank_device, run_world

import dynzero
import dynzero.state


def to_bytes(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def from_bytes(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), weights_only=True)


def train_part(
    rank: int,
    world: int,
    scenario: Scenario,
    zero: dict[str, Any],
    steps: range,
    saved: list[bytes] | None,
    full: bool,
) -> tuple[bytes, dict[str, Tensor], dict[str, Any]]:
    """Loads model, optimizer and scheduler (one file a rank), trains, saves."""
    model = scenario.model(rank_device())
    opt = make(scenario, model, **zero)
    scheduler = scenario.scheduler(opt) if scenario.scheduler else None
    if saved is not None:
        weights, state, schedule = from_bytes(saved[rank % len(saved)])
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
    for step in steps:
        opt.backward(scenario.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
    state = opt.full_state_dict() if full else opt.state_dict()
    schedule = scheduler.state_dict() if scheduler else None
    parts = [model.state_dict(), state, schedule]
    return to_bytes(parts), snapshot(model), state_by_name(opt.full_state_dict())


RESUMED = [KERNELS[0], KERNELS[3], KERNELS[4], KERNELS[7], *SMOOTH[:4]]


@stages
@worlds(2)
@pytest.mark.parametrize("optimizer", RESUMED, ids=lambda entry: entry[0].__name__)
def test_resume_is_bit_exact(world: int, backend: str, stage: int, optimizer: Any) -> None:
    """Three steps, saved, three more in a new optimizer, against six in a row.

    float32 weights with each rank's shard, bf16 weights with the full dictionary."""
    for dtype, full in ((torch.float32, False), (torch.bfloat16, True)):
        scenario = two_heads(mixed, optimizer=optimizer[0], options=optimizer[1], dtype=dtype)
        arguments = (scenario, {"stage": stage})
        first = run_world(world, train_part, *arguments, range(3), None, full, backend=backend)
        saved = [raw for raw, _, _ in first]
        rest = run_world(world, train_part, *arguments, range(3, 6), saved, full, backend=backend)
        whole = run_world(world, train_part, *arguments, range(6), None, full, backend=backend)
        for (_, params, state), (_, other_params, other_state) in zip(rest, whole, strict=True):
            for name, value in other_params.items():
                assert_same_bits(params[name], value, name)
            assert_states_equal(state, other_state, assert_same_bits)


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_case_29_step_count_on_resume(
    world: int, backend: str, stage: int, dtype: torch.dtype
) -> None:
    """Adam, 5 + 5 against 10; heads present in every second step only; counters beyond 2048."""
    options = {"lr": 0.01}
    scenario = two_heads(by_iteration, optimizer=torch.optim.Adam, options=options, dtype=dtype)
    arguments = (scenario, {"stage": stage})
    first = run_world(world, train_part, *arguments, range(5), None, True, backend=backend)
    whole = run_world(world, train_part, *arguments, range(10), None, True, backend=backend)
    saved = [raw for raw, _, _ in first]
    if (world, stage, dtype) == (2, 2, torch.float16):  # once: new processes take seconds
        close_worlds()
    rest = run_world(world, train_part, *arguments, range(5, 10), saved, True, backend=backend)
    for (_, params, state), (_, expected, expected_state) in zip(rest, whole, strict=True):
        assert {int(s["step"]) for n, s in state.items() if n[0] == "t"} == {10}
        assert {int(s["step"]) for n, s in state.items() if n[0] != "t"} == {5}
        for name, value in expected.items():
            assert_same_bits(params[name], value, name)
        assert_states_equal(state, expected_state, assert_same_bits)
    weights, state, schedule = from_bytes(saved[0])
    for entries in state["state"].values():
        entries["step"] = torch.tensor(4097.0)
    late = [to_bytes([weights, state, schedule])]
    for _, _, state in run_world(
        world, train_part, *arguments, range(5, 7), late, True, backend=backend
    ):
        assert {int(s["step"]) for n, s in state.items() if n[0] == "t"} == {4099}


@stages
@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 3), (3, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_world_size(saved_at: int, loaded_at: int, stage: int, dtype: torch.dtype) -> None:
    """Saved at one size and stage, loaded at another: as if the ranks had changed in mid-run."""
    scenario = two_heads(mixed, dtype=dtype)
    zero = {"stage": (stage + 1) % 3, "fused": False}
    first = run_world(saved_at, train_part, scenario, zero, range(3), None, True)
    zero = {"stage": stage, "fused": False}
    saved = [first[0][0]]
    rest = run_world(loaded_at, train_part, scenario, zero, range(3, 6), saved, True)
    model = scenario.model()
    replica = Replica(
        model, model.named_parameters(), scenario.optimizer, scenario.options, world=saved_at
    )
    for step in range(6):
        replica.world = saved_at if step < 3 else loaded_at
        turns = [Turn(step, 0, rank, replica.world) for rank in range(replica.world)]
        replica.collect([[lambda turn=turn: scenario.loss(model, turn)] for turn in turns])
        replica.step()
    for rank, (_, params, state) in enumerate(rest):
        for name, value in snapshot(model).items():
            assert_same_bits(params[name], value, f"rank {rank}, {name}")
        assert_states_equal(state, replica.state(), assert_same_bits)


def same_on_all_ranks(model: nn.Module, turn: Turn) -> Tensor:
    """The mean over two ranks is then exactly what one process computes."""
    return head_loss(mixed, model, turn._replace(rank=0))


def train_plain(scenario: Scenario, steps: range, saved: bytes | None, names: bool) -> Any:
    """One process of torch.optim: model, optimizer."""
    model = scenario.model()
    params = model.named_parameters() if names else model.parameters()
    opt = scenario.optimizer(params, **scenario.options)
    if saved is not None:
        weights, state, _ = from_bytes(saved)
        model.load_state_dict(weights)
        opt.load_state_dict(state)
    for step in steps:
        opt.zero_grad()
        scenario.loss(model, Turn(step, 0, 0, 1)).backward()
        opt.step()
    return model, opt


PLAIN = [KERNELS[0], KERNELS[4], SMOOTH[0], SMOOTH[2], SMOOTH[3]]


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("optimizer", PLAIN, ids=lambda entry: entry[0].__name__)
def test_plain_torch_state_in_and_out(world: int, stage: int, names: bool, optimizer: Any) -> None:
    """torch -> dynzero -> torch, two steps each, against six steps of torch."""
    scenario = Scenario(TwoHeads, same_on_all_ranks, *optimizer)
    model, opt = train_plain(scenario, range(2), None, names)
    saved = [to_bytes([model.state_dict(), opt.state_dict(), None])]
    arguments = (scenario, {"stage": stage, "fused": False}, range(2, 4), saved, True)
    raw = run_world(world, train_part, *arguments)[0][0]
    model, opt = train_plain(scenario, range(4, 6), raw, True)
    expected, expected_opt = train_plain(scenario, range(6), None, True)
    for name, value in snapshot(expected).items():
        assert_same_bits(snapshot(model)[name], value, name)
    assert_states_equal(
        state_by_name(opt.state_dict()), state_by_name(expected_opt.state_dict()), assert_same_bits
    )


@stages
@pytest.mark.parametrize("optimizer", KERNELS + SMOOTH, ids=lambda entry: entry[0].__name__)
def test_full_state_dict_has_the_layout_of_torch(stage: int, optimizer: Any) -> None:
    scenario = two_heads(mixed, optimizer=optimizer[0], options=optimizer[1])
    results = run_world(2, train_part, scenario, {"stage": stage}, range(2), None, True)
    model = scenario.model()
    plain = zero_class(scenario.optimizer)(model.named_parameters(), **scenario.options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    layout = plain.state_dict()
    for raw, _, _ in results:
        _, state, _ = from_bytes(raw)
        assert set(state) == {"state", "param_groups", "dynzero"}
        for ours, theirs in zip(state["param_groups"], layout["param_groups"], strict=True):
            assert ours == theirs
        for number, entries in state["state"].items():
            shapes = {k: v.shape for k, v in entries.items() if isinstance(v, Tensor)}
            theirs = layout["state"][number]
            assert shapes == {k: v.shape for k, v in theirs.items() if isinstance(v, Tensor)}
        plain.load_state_dict(state)  # as it is


def rank_0_only(rank: int, world: int, stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    scenario = two_heads(mixed)
    model = scenario.model()
    opt = make(scenario, model, stage=stage)
    opt.backward(scenario.loss(model, Turn(0, 0, rank, world)))
    opt.step()
    return opt.full_state_dict(rank0_only=True), opt.full_state_dict()


@stages
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rank0_only(world: int, stage: int) -> None:
    for rank, (mine, everybody) in enumerate(run_world(world, rank_0_only, stage)):
        if rank == 0:
            compared = state_by_name(mine), state_by_name(everybody)
            assert_states_equal(*compared, assert_same_bits)
            assert mine["param_groups"] == everybody["param_groups"]
        else:
            assert not mine


def with_state_hooks(rank: int, world: int, stage: int) -> dict[str, dict[str, Any]]:
    """A hook that adds a key and one that replaces the dictionary, which counts what it sees."""
    scenario = two_heads(mixed)
    model = scenario.model()
    opt = make(scenario, model, stage=stage)

    def add(opt: Any, state: dict[str, Any]) -> None:
        state["note"] = "added"

    def replace(opt: Any, state: dict[str, Any]) -> dict[str, Any]:
        shapes = [tuple(entries["exp_avg"].shape) for entries in state["state"].values()]
        return {**state, "shapes": shapes}

    opt.register_state_dict_post_hook(add)
    opt.register_state_dict_post_hook(replace)
    opt.backward(scenario.loss(model, Turn(0, 0, rank, world)))
    opt.step()
    opt.state_dict()
    shown = dict(opt.state)
    full = opt.full_state_dict()
    assert opt.state == shown, "not left behind"
    opt.load_state_dict(full)
    return {"full": full, "shard": opt.state_dict()}


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_what_hooks_add_is_saved(world: int, stage: int) -> None:
    shapes = [tuple(p.shape) for p in two_heads(mixed).model().parameters()]
    for saved in run_world(world, with_state_hooks, stage):
        for state in saved.values():
            assert state["note"] == "added" and len(state["shapes"]) == len(state["state"])
        numbers = saved["full"]["state"]
        assert saved["full"]["shapes"] == [shapes[i] for i in numbers] != []


@pytest.mark.parametrize("fused", [None, False])
def test_loading_keeps_no_old_moments(fused: bool | None) -> None:
    p = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    opt = dynzero.ZeroOptimizer([p], torch.optim.AdamW, lr=0.1, fused=fused)
    opt.backward(p.sum())
    opt.step()
    saved = opt.full_state_dict()
    opt.state_dict()
    shown = opt.state[p]
    assert set(shown) == {"step", "exp_avg", "exp_avg_sq", "master"}, "as with torch"
    moments = [weakref.ref(shown[key]) for key in ("exp_avg", "exp_avg_sq", "master")]
    del shown
    opt.load_state_dict(saved)
    gc.collect()
    assert [moment() for moment in moments] == [None] * 3


def load_other_shard(rank: int, world: int, stage: int, saved: list[bytes], shift: int) -> Any:
    """Loads a shard that is not this rank's; the refusal must change nothing."""
    scenario = two_heads(mixed)
    model = scenario.model()
    opt = make(scenario, model, stage=stage)
    opt.backward(scenario.loss(model, Turn(0, 0, rank, world)))
    opt.step()
    before = state_by_name(opt.full_state_dict())
    _, state, _ = from_bytes(saved[(rank + shift) % len(saved)])
    text = message_of(ValueError, opt.load_state_dict, state)
    return text, before, state_by_name(opt.full_state_dict())


@stages
@pytest.mark.parametrize(("world", "shift"), [(3, 0), (1, 0), (2, 1)])
def test_foreign_shard_is_refused_with_the_remedy(world: int, shift: int, stage: int) -> None:
    scenario = two_heads(mixed)
    first = run_world(2, train_part, scenario, {"stage": stage}, range(2), None, False)
    saved = [raw for raw, _, _ in first]
    what = "rank" if shift else "world"
    for text, before, after in run_world(world, load_other_shard, stage, saved, shift):
        check_words(text, ["load_state_dict", what, "expected", "full_state_dict"])
        assert_states_equal(after, before, assert_same_bits)


def first_step_skipped(rank: int, world: int, stage: int, dtype: torch.dtype) -> Any:
    """The only step of b was skipped; then saved and loaded (or neither), and one more step."""
    finals, with_state = {}, []
    for form in ("", "state_dict", "full_state_dict"):
        torch.manual_seed(0)
        model = TwoHeads().to(dtype)
        options = {"lr": 0.1, "stage": stage}
        opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, **options)
        for head, factor in (("a", 1.0), ("b", float("inf")), ("b", 1.0)):
            if form and opt.counters["skipped"]:
                saved = getattr(opt, form)()
                opt.load_state_dict(saved)
            opt.backward(model(torch.ones(2, 4, dtype=dtype), head).sum() * factor)
            opt.step()
            opt.zero_grad()
        finals[form] = snapshot(model)
    plain = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    plain.load_state_dict(saved)
    for i, p in enumerate(model.parameters()):
        if plain.state[p]:
            with_state.append(plain.param_groups[0]["param_names"][i])
    return finals, with_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (2, 2)])
def test_a_state_whose_first_step_was_skipped(world: int, stage: int, dtype: torch.dtype) -> None:
    for finals, with_state in run_world(world, first_step_skipped, stage, dtype):
        assert with_state == ["trunk.weight", "trunk.bias", "a.weight", "a.bias"]
        for form in ("state_dict", "full_state_dict"):
            for name, value in finals[""].items():
                assert_same_bits(finals[form][name], value, f"{form}: {name}")


def bytes_to_keep(rank: int, world: int, stage: int) -> list[int]:
    """Of the memory behind what load_state_dict() takes of a full state, and of a piece."""
    p = nn.Parameter(torch.ones(64, 8))
    opt = dynzero.ZeroOptimizer([p], torch.optim.AdamW, lr=0.1, stage=stage)
    opt.backward(p.sum())
    opt.step()
    saved = opt.full_state_dict()["state"][0]["exp_avg"]
    piece = dynzero.state.piece_of(opt, 0, "exp_avg", saved, "full")
    saved.fill_(7.0)
    assert not (piece == 7.0).any(), "a copy"
    return [piece.untyped_storage().nbytes(), piece.numel() * piece.itemsize]


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_loading_holds_no_more_than_pieces(world: int, stage: int) -> None:
    """Each rank gets all of the full state, and would hold it until the last entry is cut."""
    for held, needed in run_world(world, bytes_to_keep, stage):
        assert held == needed == 64 * 8 * 4 // (1 if stage == 0 else world)
