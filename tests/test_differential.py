"""Random models, presence, optimizers, schedulers and options against the oracle (design 2.4, 2.5).

The generic path must give the oracle's bits: sums run in rank order in float32 on both sides, so at
any W. The fused kernels may differ by rounding, bounded by what plain torch.optim errs itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draws import KERNELS, SMOOTH, STEPS, TORCH, Draw, draw
from models import mixed, two_heads
from oracle import play_oracle
from play import (
    assert_ranks_agree,
    assert_same_bits,
    assert_states_equal,
    check,
    oracle_options,
    play,
    stages,
)
from scenario import Parameters, Record, Scenario, Turn, weighted
from torch import Tensor, nn
from world import run_world

ALL_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXACT_SEEDS = range(3 * len(TORCH))
FUSED_SEEDS = range(5 * len(KERNELS))
CLIPPED_SEEDS = range(2 * len(SMOOTH))


@pytest.mark.parametrize("seed", EXACT_SEEDS)
def test_generic_path_has_the_bits_of_the_oracle(seed: int) -> None:
    case = draw(seed, TORCH[seed % len(TORCH)], ALL_DTYPES)
    # Seeds a multiple of len(TORCH) apart share the optimizer: each gets every stage.
    stage = seed // len(TORCH) % 3
    options = case.zero | {"stage": stage, "fused": False}
    check(case.scenario, case.world, exact=True, **options)


def assert_within_error(case: Draw, record: Record, zero: dict[str, Any]) -> None:
    options = oracle_options(zero, case.world)
    expected = play_oracle(case.scenario, case.world, **options)
    truth = play_oracle(case.scenario, case.world, dtype=torch.float64, **options)
    assert record.active == expected.active
    assert record.lrs == expected.lrs
    zeros = {name: torch.zeros_like(p) for name, p in truth.params[0].items()}
    for step in range(1, STEPS + 1):
        ours = error(record.params[step], truth.params[step])
        theirs = error(expected.params[step], truth.params[step])
        # The slack is for tiny models, in which torch may happen to err by nothing: one rounding
        # of the largest weight for each step so far.
        largest = error(truth.params[step], zeros)
        eps = torch.finfo(case.scenario.dtype).eps
        assert ours <= 2 * theirs + step * eps * largest, f"step {step - 1}: {ours} > 2 * {theirs}"


def error(params: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    gaps = [
        (params[name].double() - truth[name]).abs().max() for name in truth if truth[name].numel()
    ]
    return float(max(gaps))


@pytest.mark.parametrize("seed", FUSED_SEEDS)
def test_fused_path_errs_no_more_than_torch(seed: int) -> None:
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
    case = draw(1000 + seed, KERNELS[seed % len(KERNELS)], dtypes)
    zero = case.zero | {"stage": seed // len(KERNELS) % 3, "fused": [None, True][seed % 2]}
    if seed % 3 == 0:
        zero |= {"max_grad_norm": 0.7}
    records = run_world(case.world, play, case.scenario, zero)
    assert_ranks_agree(records)
    assert_within_error(case, records[0], zero)


@pytest.mark.parametrize("seed", CLIPPED_SEEDS)
def test_generic_path_with_clipping_errs_no_more_than_torch(seed: int) -> None:
    case = draw(2000 + seed, SMOOTH[seed % len(SMOOTH)], (torch.float32,))
    zero = case.zero | {"stage": seed % 3, "max_grad_norm": 0.3}
    records = run_world(case.world, play, case.scenario, zero)
    assert_ranks_agree(records)
    assert_within_error(case, records[0], zero)


def assert_same_runs(got: Record, expected: Record, what: str) -> None:
    for step, (ours, theirs) in enumerate(zip(got.params, expected.params, strict=True)):
        for name in theirs:
            assert_same_bits(ours[name], theirs[name], f"{what}, step {step - 1}, {name}")
    assert_states_equal(got.states[-1], expected.states[-1], assert_same_bits)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("fused", [None, False])
def test_same_bits_whatever_bucket_bytes_and_stage(world: int, fused: bool | None) -> None:
    """One backward a window, so that stage 2 adds up in the same order, too."""
    case = draw(3001, KERNELS[0 if fused is None else 4], (torch.float32,))
    scenario = case.scenario
    single = Scenario(scenario.build, scenario.loss, scenario.optimizer, scenario.options)
    runs = {
        (stage, size): run_world(
            world, play, single, {"stage": stage, "bucket_bytes": size, "fused": fused}
        )
        for stage in (0, 1, 2)
        for size in (1, 5000, 1 << 26)
    }
    again = run_world(world, play, single, {"stage": 1, "bucket_bytes": 5000, "fused": fused})
    expected = runs[0, 1][0]
    assert_same_runs(again[0], runs[1, 5000][0], "run to run")
    for (stage, size), records in runs.items():
        assert_ranks_agree(records)
        assert_same_runs(records[0], expected, f"stage {stage}, bucket_bytes {size}")


def one_and_one_and_minus_two(model: nn.Module, turn: Turn) -> Tensor | None:
    return weighted(model, {"a": [0.7, 0.7, -1.4][turn.rank], "b": 1.0})


def two_vectors() -> nn.Module:
    return Parameters(a=torch.linspace(-1, 1, 9), b=torch.ones(9))


@stages
@pytest.mark.parametrize("fused", [None, False])
def test_a_mean_of_zero_is_exactly_zero(stage: int, fused: bool | None) -> None:
    """Dividing before the sum leaves residues, which Adam blows up to steps of size lr."""
    scenario = Scenario(two_vectors, one_and_one_and_minus_two, torch.optim.Adam, {"lr": 0.1})
    record = check(scenario, 3, stage=stage, fused=fused)
    assert_same_bits(record.params[-1]["a"], record.params[0]["a"], "a")
    assert not torch.equal(record.params[-1]["b"], record.params[0]["b"])


@stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [None, False])
def test_one_process_on_the_device(
    device: str, stage: int, dtype: torch.dtype, fused: bool | None
) -> None:
    """W = 1 without a process group, on the CPU and on CUDA where there is one."""
    options: dict[str, Any] = {"stage": stage, "fused": fused}
    if fused is False:
        scenario = two_heads(mixed, dtype=dtype)
        record = play(0, 1, scenario, options, False, device)
        assert_same_runs(record, play_oracle(scenario, 1, device=device), "torch.optim")
    for seed in range(len(KERNELS)):
        case = draw(4000 + seed, KERNELS[seed], (dtype,))
        clipped = options | {"max_grad_norm": 0.5} | case.zero
        record = play(0, 1, case.scenario, clipped, False, device)
        assert_within_error(case._replace(world=1), record, clipped)
