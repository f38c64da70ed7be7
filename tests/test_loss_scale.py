"""Loss scaling, overflow and torch's AMP loop: cases 20 to 23, agreed on all ranks."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, NamedTuple

import pytest
import torch
from play import Lines, assert_close, assert_same_bits, assert_states_equal, stages, worlds
from scenario import Parameters, snapshot, state_by_name
from world import check_words, message_of, rank_device, run_world

import dynzero

# The scale after each step, for overflows O and good steps: start 16, factor 2, minimum 2,
# hysteresis 2, window 3. A growth gives the hysteresis back, a mere good step does not.
PATTERN = "OOO...OOOOO"
SCALES = [16, 8, 4, 4, 4, 8, 8, 4, 2, 2, 2]
SCALE = dynzero.LossScale(init=16, minimum=2, hysteresis=2, window=3, on_minimum="continue")


def model_ab() -> Parameters:
    return Parameters(a=torch.ones(4), b=torch.ones(3)).to(rank_device())


def factor(overflow: bool) -> float:
    return float("inf") if overflow else 1.0


def scales(rank: int, world: int, stage: int, scale: Any, pattern: str) -> dict[str, Any]:
    """Only the last rank overflows, in `b`; other ranks' gradients are always fine."""
    model = model_ab()
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=0.1, stage=stage, loss_scale=scale
    )
    seen: dict[str, Any] = {"used": [], "scale": [], "overflow": [], "kept": True, "error": None}
    for mark in pattern:
        before = [p.detach().clone() for p in model.parameters()]
        bad = mark == "O" and rank == world - 1
        opt.backward((model.a * 2).sum() + (model.b * factor(bad)).sum())
        try:
            opt.step()
        except RuntimeError as error:
            seen["error"] = str(error)
            break
        opt.zero_grad()
        same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        seen["kept"] &= same == (mark == "O") and opt.last_step.stepped == (mark != "O")
        seen["used"].append(opt.last_step.loss_scale)
        seen["scale"].append(opt.loss_scale)
        seen["overflow"].append(opt.last_step.overflow)
    return seen | {"counters": opt.counters}


@stages
@worlds(1, 2)
def test_case_20_scale_at_its_minimum_and_hysteresis(world: int, backend: str, stage: int) -> None:
    for result in run_world(world, scales, stage, SCALE, PATTERN, backend=backend):
        assert result["scale"] == SCALES
        assert result["used"] == [16, *SCALES[:-1]], "last_step tells what the gradients carried"
        assert result["kept"], "a skipped step changes nothing, a good one does"
        assert result["counters"] == {"taken": 3, "skipped": 8}
        for mark, overflow in zip(PATTERN, result["overflow"], strict=True):
            assert overflow == ([("b", world - 1, "inf")] if mark == "O" else None)


@stages
@worlds(1, 2)
def test_case_20_a_good_step_does_not_restore_hysteresis(
    world: int, backend: str, stage: int
) -> None:
    for result in run_world(world, scales, stage, SCALE, "O.O.O.O", backend=backend):
        assert result["scale"] == [16, 16, 8, 8, 4, 4, 2]


@stages
@worlds(1, 2)
def test_other_factors_than_two_and_one_half(world: int, backend: str, stage: int) -> None:
    scale = dynzero.LossScale(init=16, growth=4, backoff=0.25, minimum=2, window=2)
    for result in run_world(world, scales, stage, scale, "..OOO..", backend=backend):
        assert result["scale"] == [16, 64, 16, 4, 2, 2, 8]
        assert result["used"] == [16, 16, 64, 16, 4, 2, 2]
        assert result["kept"]


@stages
@worlds(1, 2)
def test_case_20_raises_at_its_minimum(world: int, backend: str, stage: int) -> None:
    """The tenth step overflows at the minimum, so the eleventh says so."""
    scale = dataclasses.replace(SCALE, on_minimum="raise")
    results = run_world(world, scales, stage, scale, PATTERN, backend=backend)
    for result in results:
        assert result["scale"] == SCALES[:10]
        assert result["error"] == results[0]["error"]
        assert "minimum of 2" in result["error"]


@stages
@worlds(1, 2)
def test_case_20_one_more_overflow_raises_everywhere(world: int, backend: str, stage: int) -> None:
    scale = dynzero.LossScale(init=4, minimum=2)
    results = run_world(world, scales, stage, scale, "OOOO.", backend=backend)
    assert len({result["error"] for result in results}) == 1
    assert "minimum of 2" in results[0]["error"]
    assert results[0]["scale"] == [2, 2]


SKIPPED = {
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.5, "weight_decay": 0.1}),
}


def two_overflows(
    rank: int, world: int, stage: int, which: str, dtype: torch.dtype
) -> dict[str, Any]:
    p = torch.nn.Parameter(torch.ones(5, dtype=dtype, device=rank_device()))
    cls, options = SKIPPED[which]
    opt = dynzero.ZeroOptimizer([("p", p)], cls, stage=stage, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    seen = []
    with Lines() as log:
        for step in range(4):
            values = (1.0, math.inf, math.nan, 1.0) if rank == 0 else (1.0,) * 4
            opt.backward((p * values[step]).sum())
            opt.step()
            seen.append((p.detach().cpu().clone(), state_by_name(opt.full_state_dict())))
            if opt.last_step.stepped:
                scheduler.step()
            opt.zero_grad()
        opt.grad_norm()  # a call that meets the others: outcomes that have arrived are logged
    return {
        "log": log.lines,
        "counters": opt.counters,
        "lr": opt.param_groups[0]["lr"],
        "seen": seen,
    }


@stages
@worlds(1, 2)
@pytest.mark.parametrize("which", SKIPPED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_case_21_a_skipped_step_nobody_sees(
    world: int, backend: str, stage: int, which: str, dtype: torch.dtype
) -> None:
    expected = torch.nn.Parameter(torch.ones(5))
    cls, options = SKIPPED[which]
    plain = cls([expected], **options)
    for lr in (0.5, 0.25):
        plain.param_groups[0]["lr"] = lr
        expected.grad = torch.ones(5)
        plain.step()
    for result in run_world(world, two_overflows, stage, which, dtype, backend=backend):
        assert result["counters"] == {"taken": 2, "skipped": 2}
        assert result["lr"] == 0.125
        (start, state), *skipped, (end, _) = result["seen"]
        assert_close(end, expected.detach().to(dtype), "p")
        assert state["p"] and len(skipped) == 2
        for p, after in skipped:
            assert_same_bits(p, start, "p")
            assert_states_equal(after, state, assert_same_bits)
        assert len(result["log"]) == 2
        assert "iteration 1" in result["log"][0] and "inf in 'p' on rank 0" in result["log"][0]
        assert "iteration 2" in result["log"][1] and "nan in 'p' on rank 0" in result["log"][1]


def resume_twice(
    rank: int, world: int, stage: int, form: str
) -> tuple[list[float], list[dict[str, int]]]:
    """Saved and loaded after the second good step of three, and between two overflows."""
    model = model_ab()
    made = []

    def build() -> dynzero.ZeroOptimizer:
        made.append(
            dynzero.ZeroOptimizer(
                model.named_parameters(), torch.optim.AdamW, lr=0.1, stage=stage,
                loss_scale=dynzero.LossScale(init=8, window=3, hysteresis=2),
            )
        )  # fmt: skip
        return made[-1]

    opt = build()
    scales, counters = [], []
    for step, mark in enumerate("...OO."):
        if rank == 0 or step % 2:  # the other rank has no backward in every second step
            opt.backward(model.a.sum() + (model.b * factor(mark == "O" and rank == 0)).sum())
        opt.step()
        opt.zero_grad()
        if step in (1, 3):
            saved = getattr(opt, form)()
            opt = build()
            opt.load_state_dict(saved)
        scales.append(opt.loss_scale)
        counters.append(opt.counters)
    return scales, counters


@stages
@worlds(1, 2)
@pytest.mark.parametrize("form", ["state_dict", "full_state_dict"])
def test_case_22_scaler_state_is_equal_and_saved(
    world: int, backend: str, stage: int, form: str
) -> None:
    """The second overflow finds no hysteresis left, as without the loads."""
    taken, skipped = [1, 2, 3, 3, 3, 4], [0, 0, 0, 1, 2, 2]
    for scales, counters in run_world(world, resume_twice, stage, form, backend=backend):
        assert scales == [8, 8, 16, 16, 8, 8]
        assert [c["taken"] for c in counters] == taken
        assert [c["skipped"] for c in counters] == skipped


def fp16_average(rank: int, world: int, stage: int, value: float, wire: Any) -> Any:
    p = torch.nn.Parameter(torch.zeros(9, dtype=torch.float16))
    opt = dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0, stage=stage, wire_dtype=wire)
    p.grad = torch.full_like(p, value)
    mean = opt.full_grad(p)
    opt.step()
    return mean, opt.last_step.overflow, p.detach()


@stages
@pytest.mark.parametrize("value", [40000.0, 60000.0, 6e-8])
@pytest.mark.parametrize("wire", [None, torch.float32])
def test_case_23_averaging_in_fp16(stage: int, value: float, wire: Any) -> None:
    exact = torch.full((9,), value, dtype=torch.float16)
    for mean, overflow, p in run_world(4, fp16_average, stage, value, wire):
        assert overflow is None
        assert_same_bits(mean, exact.float(), "mean")
        assert_same_bits(p, -exact, "p")


def fp16_rounds(rank: int, world: int, value: float, wire: Any, rounds: int) -> Any:
    """Stage 2; each backward gives `value` everywhere, so they sum up to `rounds` times that."""
    p = torch.nn.Parameter(torch.zeros(9, dtype=torch.float16))
    opt = dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1 / rounds, stage=2, wire_dtype=wire)
    for _ in range(rounds):
        opt.backward((p * value).sum())
        assert p.grad is None
    mean = opt.full_grad(p)
    opt.step()
    return mean, opt.last_step.overflow, p.detach()


@pytest.mark.parametrize("value", [40000.0, 6e-8])
@pytest.mark.parametrize("wire", [None, torch.float32])
@pytest.mark.parametrize("rounds", [1, 2])
def test_case_23_averaging_in_fp16_while_backward_runs(
    value: float, wire: Any, rounds: int
) -> None:
    """Two rounds of 40000 are more than float16 holds; but they are summed in float32."""
    exact = torch.full((9,), value, dtype=torch.float16)
    for mean, overflow, p in run_world(4, fp16_rounds, value, wire, rounds):
        assert overflow is None
        assert_same_bits(mean, exact.float() * rounds, "mean")
        assert_same_bits(p, -exact, "p")


def amp_loop(rank: int, world: int, stage: int) -> dict[str, Any]:
    device = rank_device()
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.5, stage=stage)
    scaler = dynzero.GradScaler(device.type, init_scale=8.0, growth_interval=2)
    norms, scale = [], []
    for step in range(4):
        bad = step == 1 and rank == world - 1
        loss = (model.a * (rank + 1)).sum() + (model.b * factor(bad)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norms.append(float(opt.clip_grad_norm_(1.0)))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scale.append(scaler.get_scale())
    return {"norms": norms, "scale": scale, "a": model.a.tolist(), "b": model.b.tolist()}


@stages
@worlds(1, 2, 3)
def test_grad_scaler_agrees_across_ranks(world: int, backend: str, stage: int) -> None:
    mean = (world + 1) / 2
    norm = (4 * mean**2 + 3) ** 0.5
    clip = min(1.0, 1.0 / (norm + 1e-6))
    for result in run_world(world, amp_loop, stage, backend=backend):
        assert result["scale"] == [8, 4, 4, 8]
        assert [result["norms"][i] for i in (0, 2, 3)] == pytest.approx([norm] * 3, rel=1e-6)
        assert result["a"] == pytest.approx([1 - 3 * 0.5 * mean * clip] * 4, rel=1e-5)
        assert result["b"] == pytest.approx([1 - 3 * 0.5 * clip] * 3, rel=1e-5)


def late_inf(rank: int, world: int, stage: int, how: str) -> dict[str, Any]:
    """In step 1 the last rank gets an inf or nan in `b` after unscale_, in step 2 before it."""
    device = rank_device()
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1, stage=stage)
    scaler = dynzero.GradScaler(device.type, init_scale=8.0, growth_interval=2)
    scale, stepped, params, states = [], [], [], []
    for step in range(6):
        bad = rank == world - 1
        loss = model.a.sum() + (model.b * factor(bad and step == 2)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        if how == "backward" and step == 1:
            scaler.scale((model.b * factor(bad)).sum()).backward()
        elif how == "by hand" and step == 1 and bad:
            model.b.grad = torch.full_like(model.b, float("nan"))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scale.append(scaler.get_scale())
        stepped.append(opt.counters["taken"])
        params.append(snapshot(model))
        states.append(state_by_name(opt.full_state_dict()))
    return {"scale": scale, "taken": stepped, "params": params, "states": states}


@stages
@worlds(1, 2)
@pytest.mark.parametrize("how", ["backward", "by hand"])
def test_grad_scaler_backs_off_for_an_inf_after_unscale(
    world: int, backend: str, stage: int, how: str
) -> None:
    """torch's own would step with it, its scale none the wiser."""
    expected = model_ab()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1)
    wanted = []
    for step in range(6):
        if step not in (1, 2):
            (expected.a.sum() + expected.b.sum()).backward()
            plain.step()
            plain.zero_grad()
        wanted.append(snapshot(expected))
    for result in run_world(world, late_inf, stage, how, backend=backend):
        assert result["scale"] == [8, 4, 2, 2, 4, 4]
        assert result["taken"] == [1, 1, 1, 2, 3, 4]
        for ours, theirs in zip(result["params"], wanted, strict=True):
            for name, value in theirs.items():
                assert_close(ours[name], value, name)
        for skipped in (1, 2):
            before, after = result["states"][skipped - 1 : skipped + 1]
            assert_states_equal(after, before, assert_same_bits)


def stock_scaler(rank: int, world: int, stage: int) -> str:
    model = model_ab()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.5, stage=stage)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.a.sum()).backward()
    return message_of(RuntimeError, scaler.step, opt)


@stages
def test_the_stock_grad_scaler_is_refused(stage: int) -> None:
    for message in run_world(2, stock_scaler, stage):
        assert "dynzero.GradScaler" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("init", 0.5), ("init", math.inf), ("growth", 0.5), ("growth", math.inf), ("backoff", 0.0),
     ("window", 0), ("hysteresis", 0),
     ("minimum", 0.0), ("on_minimum", "stop")],
)  # fmt: skip
def test_loss_scale_refuses_bad_options(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        dynzero.LossScale(**{field: value})


@pytest.mark.parametrize("field", ["init", "growth", "backoff", "window", "hysteresis", "minimum"])
@pytest.mark.parametrize("value", ["2", None, True])
def test_loss_scale_refuses_what_is_no_number(field: str, value: Any) -> None:
    message = message_of(TypeError, dynzero.LossScale, **{field: value})
    check_words(message, [field, "expected", repr(value)])


def test_loss_scale_counts_whole_steps() -> None:
    check_words(message_of(TypeError, dynzero.LossScale, window=1.5), ["window", "int", "1.5"])


class Losses(NamedTuple):
    first: torch.Tensor


@pytest.mark.parametrize("kind", [lambda loss: {"a": loss}, Losses])
def test_only_lists_and_tuples_of_losses_are_scaled(kind: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    opt = dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0, loss_scale=8.0)
    losses = kind(p.sum())
    check_words(message_of(TypeError, opt.scale, losses), ["loss", type(losses).__name__])
    assert [float(loss) for loss in opt.scale((p.detach().sum(), 2.0))] == [24.0, 16.0]


def warnings_of(rank: int, world: int, stage: int, scaled: bool) -> list[str]:
    """Of three steps, the first without gradients; rank 1 has none at all."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dynzero").addHandler(handler)
    p = torch.nn.Parameter(torch.ones(3))
    opt = dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0, stage=stage, loss_scale=8.0)
    for step in range(3):
        if step > 0 and rank == 0:
            (opt.scale(p.sum()) if scaled else p.sum()).backward()
        opt.step()
        opt.zero_grad()
    logging.getLogger("dynzero").removeHandler(handler)
    return told


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_losses_that_are_never_scaled_are_noticed(world: int, stage: int) -> None:
    first, *others = run_world(world, warnings_of, stage, False)
    assert len(first) == 1 and "opt.scale(loss).backward()" in first[0]
    assert others == [[]] * (world - 1)
    assert run_world(world, warnings_of, stage, True) == [[]] * world
