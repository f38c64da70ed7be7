"""Cases 32 and 33 of the public reports: process groups and backends; copies, pickles, EMA."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import needs_gpus
from models import by_iteration, mixed, two_heads
from oracle import play_oracle
from play import assert_equals_oracle, assert_same_bits, check, make, play, stages
from scenario import Record, Turn, snapshot
from torch import nn
from world import message_of, rank_device, run_world


@stages
def test_case_32_one_process_needs_no_group(device: str, stage: int) -> None:
    assert not dist.is_initialized()
    record = play(0, 1, two_heads(by_iteration), {"stage": stage, "fused": False}, True, device)
    expected = play_oracle(two_heads(by_iteration), 1, device=device)
    assert_equals_oracle(record, expected, exact=True)
    assert not dist.is_initialized()


@stages
def test_case_32_group_of_one(stage: int) -> None:
    check(two_heads(by_iteration), 1, exact=True, stage=stage, fused=False)


@stages
@pytest.mark.parametrize("world", [2, 3])
def test_case_32_gloo_and_bf16(world: int, stage: int) -> None:
    scenario = two_heads(mixed, dtype=torch.bfloat16)
    check(scenario, world, exact=True, stage=stage, fused=False)


@pytest.mark.cuda
@needs_gpus(1)
def test_case_32_gloo_and_cuda_tensors() -> None:
    for text in run_world(2, gloo_on_cuda):
        assert "gloo" in text.lower() and "cuda" in text.lower()


def gloo_on_cuda(rank: int, world: int) -> str:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model = two_heads(mixed).model(device)
    return message_of(ValueError, make, two_heads(mixed), model, stage=1)


def pair_out_of_three(rank: int, world: int, stage: int, pair: list[int]) -> Record | str:
    group = dist.new_group(pair)
    zero = {"stage": stage, "fused": False, "process_group": group}
    if rank in pair:
        return play(pair.index(rank), len(pair), two_heads(mixed), zero, True)
    # The third rank takes no part in anything, and is told so if it tries.
    model = two_heads(mixed).model()
    return message_of(ValueError, make, two_heads(mixed), model, **zero)


@stages
@pytest.mark.parametrize("pair", [[0, 1], [0, 2], [1, 2]])
def test_case_32_subgroup_with_a_rank_outside(stage: int, pair: list[int]) -> None:
    results = run_world(3, pair_out_of_three, stage, pair)
    expected = play_oracle(two_heads(mixed), 2)
    for rank, result in enumerate(results):
        if rank in pair:
            assert_equals_oracle(result, expected, exact=True)
        else:
            assert "process_group" in result and f"rank {rank}" in result


WITHOUT_EXTENSION = """
import sys
import time
sys.modules["dynzero._C"] = None  # what an extension that was never built looks like
import dynzero
"""


def test_case_32_missing_extension_names_the_build_command() -> None:
    command = [sys.executable, "-c", WITHOUT_EXTENSION]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    last_line = done.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError"), done.stderr
    assert "pip install --no-build-isolation" in done.stderr


def saved_bytes(thing: Any) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getbuffer().nbytes


def train_with_copies(rank: int, world: int, stage: int) -> dict[str, Any]:
    scenario = two_heads(by_iteration)
    model = scenario.model(rank_device())
    size_before = saved_bytes(model.state_dict())
    ids = [id(p) for p in model.parameters()]
    early = copy.deepcopy(model)
    opt = make(scenario, model, stage=stage)
    late = copy.deepcopy(model)
    start = snapshot(model)
    averages = [snapshot(early)]
    for step in range(3):
        opt.backward(scenario.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for mean, p in zip(early.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.5)
        averages.append(snapshot(early))
    twin = copy.deepcopy(model)
    turn = Turn(9, 0, rank, world)
    return {
        "start": start,
        "late": snapshot(late),
        "params": snapshot(model),
        "averages": averages,
        "same_ids": ids == [id(p) for p in model.parameters()],
        "same_loss": torch.equal(scenario.loss(twin, turn), scenario.loss(model, turn)),
        "shared": shared_storages([model, early, late, twin]),
        "sizes": (size_before, saved_bytes(model.state_dict())),
    }


def shared_storages(models: list[nn.Module]) -> int:
    """Parameters beyond the first on the same storage, over all models together."""
    pointers = [p.untyped_storage().data_ptr() for m in models for p in m.parameters()]
    return len(pointers) - len(set(pointers))


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_case_33_ema_and_deepcopy(world: int, stage: int) -> None:
    expected = play_oracle(two_heads(by_iteration, steps=3), world).params
    for result in run_world(world, train_with_copies, stage):
        assert result["same_ids"] and result["same_loss"]
        assert result["shared"] == 0
        before, after = result["sizes"]
        assert abs(after - before) < 512, "a checkpoint holds the parameters, no larger buffer"
        mean = expected[0]
        for step in range(4):
            mean = {n: torch.lerp(mean[n], expected[step][n], 0.5 if step else 0.0) for n in mean}
            for name, value in mean.items():
                torch.testing.assert_close(result["averages"][step][name], value)
        for name, value in result["start"].items():
            assert_same_bits(result["late"][name], value, f"copy made before training, {name}")


def copy_optimizer(rank: int, world: int, stage: int, how: str) -> dict[str, Any]:
    """The error of copying an optimizer, and one more step of the original after it."""
    scenario = two_heads(by_iteration)
    model = scenario.model()
    opt = make(scenario, model, stage=stage)
    texts = []
    for step in range(2):
        opt.backward(scenario.loss(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        call = copy.deepcopy if how == "deepcopy" else pickle.dumps
        texts.append(message_of(TypeError, call, opt))
    return {"texts": texts, "params": snapshot(model)}


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_case_33_copying_the_optimizer_is_refused(world: int, stage: int, how: str) -> None:
    """Hooks and process groups cannot be in two places; the state dictionaries can."""
    expected = play_oracle(two_heads(by_iteration, steps=2), world).params[-1]
    for result in run_world(world, copy_optimizer, stage, how):
        for text in result["texts"]:
            assert "state_dict" in text
        for name, value in expected.items():
            torch.testing.assert_close(result["params"][name], value, atol=1e-6, rtol=1e-5)


def test_case_33_no_hook_keeps_the_optimizer_alive() -> None:
    for alive in run_world(2, optimizer_survives):
        assert not alive


def optimizer_survives(rank: int, world: int) -> bool:
    scenario = two_heads(by_iteration)
    model = scenario.model()
    opt = make(scenario, model, stage=2)
    opt.backward(scenario.loss(model, Turn(0, 0, rank, world)))
    opt.step()
    watch = weakref.ref(opt)
    del opt
    gc.collect()
    # The model goes on without it: its hooks must be gone, too.
    scenario.loss(model, Turn(1, 0, rank, world)).backward()
    return watch() is not None


def optimizer_given_up_survives(rank: int, world: int) -> bool:
    """Rank 0 announces a round that the other never answers, clears, and drops its optimizer."""
    scenario = two_heads(by_iteration)
    model = scenario.model()
    opt = make(scenario, model, stage=2)
    if rank == 0:
        opt.backward(scenario.loss(model, Turn(0, 0, rank, world)))
        opt.zero_grad()
    dist.barrier()
    watch = weakref.ref(opt)
    del opt
    for _ in range(50):  # a thread may be looking at the round just now
        gc.collect()
        if watch() is None:
            return False
        time.sleep(0.02)
    return True


def test_case_33_no_round_keeps_the_optimizer_alive() -> None:
    for alive in run_world(2, optimizer_given_up_survives):
        assert not alive
