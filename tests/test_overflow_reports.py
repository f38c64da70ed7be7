"""What ranks say of overflows: once, on all ranks, also after join() and load_state_dict()."""

from __future__ import annotations

import contextlib
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from play import Lines, stages
from scenario import Parameters
from world import check_words, message_of, run_world

import dynzero
from dynzero.report import Outcome

AT_MINIMUM = dynzero.LossScale(init=2.0, minimum=2.0)


def model_ab() -> Parameters:
    return Parameters(a=torch.ones(4), b=torch.ones(3))


def make(model: Parameters, stage: int, **options: Any) -> dynzero.ZeroOptimizer:
    params = model.named_parameters()
    return dynzero.ZeroOptimizer(params, torch.optim.SGD, lr=0.5, stage=stage, **options)


def iterate(opt: dynzero.ZeroOptimizer, model: Parameters, bad: bool) -> str:
    """One training iteration. Returns the error with which it ended, or an empty text."""
    try:
        opt.backward(model.a.sum() * (math.inf if bad else 1.0))
        opt.step()
    except RuntimeError as error:
        return str(error)
    finally:
        opt.zero_grad()
    return ""


def assert_errors(errors: list[str], pattern: str) -> None:
    """`E` where the error of an exhausted loss scale is due."""
    assert len(errors) == len(pattern)
    for error, mark in zip(errors, pattern, strict=True):
        assert ("at its minimum" in error) if mark == "E" else not error, errors


def late_readback(rank: int, world: int, stage: int) -> list[str]:
    """The second rank learns one call later than the first what its steps have done."""
    model, calls = model_ab(), []
    opt = make(model, stage, loss_scale=AT_MINIMUM)
    ready = Outcome.ready

    def late(outcome: Outcome) -> bool:
        calls.append(outcome)
        return ready(outcome) and (rank == 0 or len(calls) > 2)

    with mock.patch.object(Outcome, "ready", late):
        return [iterate(opt, model, bad=step == 0) for step in range(5)]


@stages
def test_an_overflow_at_the_minimum_is_raised_once(stage: int) -> None:
    first, second = run_world(2, late_readback, stage)
    assert first == second
    assert_errors(first, ".E...")


def roll_back(rank: int, world: int, stage: int) -> tuple[list[str], list[str]]:
    """Load what was saved before the overflow; and, elsewhere, what was saved after it."""
    model = model_ab()
    opt = make(model, stage, loss_scale=AT_MINIMUM)
    errors = [iterate(opt, model, bad=False)]
    before = opt.full_state_dict()
    for _ in range(2):
        errors += [iterate(opt, model, bad=True), iterate(opt, model, bad=False)]
        after = opt.full_state_dict()
        opt.load_state_dict(before)
    other = make(model, stage, loss_scale=AT_MINIMUM)
    other.load_state_dict(after)
    return errors, [iterate(other, model, bad=step == 2) for step in range(5)]


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_exhaustion_follows_the_loaded_state(world: int, stage: int) -> None:
    for rolled_back, resumed in run_world(world, roll_back, stage):
        assert_errors(rolled_back, "..E.E")
        assert_errors(resumed, "...E.")


def joined_early(rank: int, world: int, stage: int) -> tuple[list[str], int]:
    """Rank 0 leaves after one step; the other overflows in its fourth."""
    model = model_ab()
    opt = make(model, stage)
    with Lines() as log, opt.join():
        for step in range(1 if rank == 0 else 30):
            iterate(opt, model, bad=step == 3)
    return log.lines, len(opt._outcomes._queue)


@stages
def test_a_rank_that_has_joined_reports_and_forgets(stage: int) -> None:
    for lines, waiting in run_world(2, joined_early, stage):
        assert lines == ["iteration 3 skipped: inf in 'a' on rank 1"]
        assert waiting <= 1


def exhausted_after_join(rank: int, world: int, stage: int) -> list[str]:
    model = model_ab()
    opt = make(model, stage, loss_scale=AT_MINIMUM)
    errors = []
    try:
        with opt.join():
            for step in range(1 if rank == 0 else 3):
                opt.backward(model.a.sum() * (math.inf if step == 1 else 1.0))
                opt.step()
                opt.zero_grad()
    except RuntimeError as error:
        errors.append(str(error))
    opt.zero_grad()
    return errors + [iterate(opt, model, bad=False) for _ in range(2)]


@stages
def test_exhaustion_is_not_raised_again_after_join(stage: int) -> None:
    for errors in run_world(2, exhausted_after_join, stage):
        assert_errors(errors, "E..")


def micro_batch_overflows(
    rank: int, world: int, stage: int, bad: float, local: bool
) -> tuple[Any, list[str], list[float]]:
    """On the last rank, in the first of two micro-batches; local: inside no_sync()."""
    model = model_ab()
    opt = make(model, stage)
    factor = bad if rank == world - 1 else 1.0
    with Lines() as log:
        with opt.no_sync() if local else contextlib.nullcontext():
            opt.backward(model.a.sum() + (model.b * factor).sum())
        opt.backward(model.a.sum() + model.b.sum())
        opt.step()
        assert opt.counters == {"taken": 0, "skipped": 1}
    assert opt.last_step is not None
    return opt.last_step.overflow, log.lines, [*model.a.tolist(), *model.b.tolist()]


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("local", [False, True])
def test_an_overflow_of_an_earlier_micro_batch_is_named(
    world: int, stage: int, bad: float, local: bool
) -> None:
    for result in run_world(world, micro_batch_overflows, stage, bad, local):
        overflow, lines, values = result
        assert overflow == [("b", world - 1, str(bad))]
        assert lines == [f"iteration 0 skipped: {bad} in 'b' on rank {world - 1}"]
        assert values == [1.0] * 7


def several_overflow(rank: int, world: int, stage: int, bucket_bytes: int) -> Any:
    model = Parameters(a=torch.ones(4), b=torch.ones(3), c=torch.ones(9))
    opt = make(model, stage, bucket_bytes=bucket_bytes)
    factors = [{"b": math.nan, "c": math.inf}, {"a": math.inf, "b": math.nan}][rank]
    with Lines() as log:
        opt.backward(sum(p[-1] * factors.get(name, 1.0) for name, p in model.named_parameters()))
        opt.step()
        assert opt.counters == {"taken": 0, "skipped": 1}
    assert opt.last_step is not None
    return opt.last_step.overflow, log.lines


@stages
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_each_rank_names_its_first_parameter(stage: int, bucket_bytes: int) -> None:
    """In the order of the parameters, whichever bucket comes first."""
    for overflow, lines in run_world(2, several_overflow, stage, bucket_bytes):
        assert overflow == [("a", 1, "inf"), ("b", 0, "nan")]
        assert lines == ["iteration 0 skipped: inf in 'a' on rank 1, nan in 'b' on rank 0"]


def both_kinds(rank: int, world: int, stage: int) -> Any:
    model = model_ab()
    opt = make(model, stage)
    opt.backward((model.a * torch.tensor([1.0, math.inf, math.nan, math.inf])).sum())
    opt.step()
    assert opt.last_step is not None
    return opt.last_step.overflow


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_inf_and_nan_in_one_gradient_count_as_nan(world: int, stage: int) -> None:
    expected = [("a", rank, "nan") for rank in range(world)]
    assert run_world(world, both_kinds, stage) == [expected] * world


def last_step_of_all(rank: int, world: int, stage: int) -> list[str]:
    model = model_ab()
    opt = make(model, stage)
    with Lines() as log:
        iterate(opt, model, bad=rank == world - 1)
        assert opt.counters == {"taken": 0, "skipped": 1}
    return log.lines


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_the_last_overflow_is_logged_too(world: int, stage: int) -> None:
    for lines in run_world(world, last_step_of_all, stage):
        where = f"inf in 'a' on rank {world - 1}"
        assert lines == [f"iteration 0 skipped: {where}"]


def in_a_subgroup(rank: int, world: int, stage: int) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = model_ab()
    opt = make(model, stage, process_group=group)
    iterate(opt, model, bad=rank == 2)
    assert opt.last_step is not None
    return opt.last_step.overflow


@stages
def test_overflow_names_the_rank_of_the_world(stage: int) -> None:
    assert run_world(3, in_a_subgroup, stage)[1:] == [[("a", 2, "inf")]] * 2


def nothing_to_do(rank: int, world: int) -> float:
    opt = make(model_ab(), 1, loss_scale=dynzero.LossScale(init=64.0))
    opt.step()
    assert opt.last_step is not None
    return opt.last_step.loss_scale


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_without_gradients_tells_the_loss_scale(world: int) -> None:
    assert run_world(world, nothing_to_do) == [64.0] * world


# GradScaler.


def no_loss_at_first(rank: int, world: int, stage: int) -> tuple[list[float], float]:
    model = model_ab()
    opt = make(model, stage)
    scaler = dynzero.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for step in range(2):
        if rank == 0 or step == 1:
            scaler.scale(model.a.sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return model.a.tolist(), scaler.get_scale()


@stages
def test_a_rank_without_a_loss_has_a_grad_scaler_too(stage: int) -> None:
    """Gradients 1 and 0, then 1 and 1; lr 0.5."""
    for values, scale in run_world(2, no_loss_at_first, stage):
        assert values == [1 - 0.5 * 0.5 - 0.5] * 4
        assert scale == 32.0


def scaled_differently(rank: int, world: int, stage: int) -> tuple[str, list[float]]:
    model = model_ab()
    opt = make(model, stage)
    scaler = dynzero.GradScaler("cpu", init_scale=(8.0, 4.0)[rank])
    scaler.scale(model.a.sum()).backward()
    return message_of(RuntimeError, scaler.step, opt), model.a.tolist()


@stages
def test_grad_scalers_that_differ_are_refused(stage: int) -> None:
    for message, values in run_world(2, scaled_differently, stage):
        check_words(message, ["GradScaler", "0: 8", "1: 4"])
        assert values == [1.0] * 4


def narrow_wire(rank: int, world: int, stage: int, wire: torch.dtype) -> tuple[str, float]:
    """A gradient of 1e-8, which float16 does not have."""
    model = model_ab()
    opt = make(model, stage, wire_dtype=wire)
    scaler = dynzero.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(model.a.sum() * 1e-8).backward()
    refused = world > 1 and wire is torch.float16 and stage < 2
    message = message_of(ValueError, scaler.unscale_, opt) if refused else ""
    if not refused:
        scaler.unscale_(opt)
        return message, float(opt.grad_norm())
    return message, 2e-8


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
def test_unscaled_gradients_do_not_travel_in_float16(
    world: int, stage: int, wire: torch.dtype
) -> None:
    refused = world > 1 and wire is torch.float16 and stage < 2
    for message, norm in run_world(world, narrow_wire, stage, wire):
        assert norm == pytest.approx(2e-8, rel=4e-3)
        if refused:
            check_words(message, ["wire_dtype", "float16", "float32", "bfloat16", "stage=2"])


# Arguments.


def test_a_dynamic_loss_scale_needs_the_check() -> None:
    with pytest.raises(ValueError, match="check_finite: expected True with a dynamic loss scale"):
        make(model_ab(), 1, loss_scale="dynamic", check_finite=False)


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, -1.0, True])
def test_a_loss_scale_is_a_finite_number(scale: Any) -> None:
    with pytest.raises(ValueError, match="loss_scale: expected"):
        make(model_ab(), 1, loss_scale=scale)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_scale_multiplies_in_float32(shape: tuple[int, ...]) -> None:
    opt = make(model_ab(), 1, loss_scale=65536.0)
    scaled = opt.scale(torch.full(shape, 2.0, dtype=torch.float16))
    assert scaled.dtype is torch.float32
    assert (scaled == 131072.0).all()
