"""Cases 3, 11, 12 and 31 of the public reports: clearing, missing ranks, exceptions, leftovers."""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allocations import Allocations
from models import two_heads
from play import assert_close, assert_states_equal, stages, weigh, worlds
from scenario import Parameters, Turn, snapshot, state_by_name
from torch import Tensor, nn
from world import LATE_SECONDS, check_words, message_of, rank_device, run_world

import dynzero

SHORT = datetime.timedelta(seconds=6)


def two_params() -> Parameters:
    return Parameters(a=torch.ones(5), b=torch.arange(1.0, 8.0)).to(rank_device())


def adamw(model: nn.Module, **zero: Any) -> dynzero.ZeroOptimizer:
    options = {"lr": 0.1, "weight_decay": 0.1, "fused": False}
    params = model.named_parameters()
    return dynzero.ZeroOptimizer(params, torch.optim.AdamW, **(options | zero))


def sgd(model: nn.Module, **zero: Any) -> dynzero.ZeroOptimizer:
    """lr 1 and gradients that are small integers: after a step the values say what was added."""
    return dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, **zero)


def values(model: nn.Module) -> list[float]:
    """The first element of each parameter."""
    return [float(p.detach()[0]) for p in model.parameters()]


def fails(x: Tensor) -> Tensor:
    """`x`, whose backward raises."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("backward failed here")

    y = x * 1.0
    y.register_hook(fail)
    return y


# Case 3: cleared to zero or to None.


def a_then_b(turn: Turn) -> str:
    return "a" if turn.step == 0 else "b"


HEADS = two_heads(a_then_b, steps=3)


def cleared(
    optimizer: Any, model: nn.Module, ranks: list[int], world: int, clear: dict[str, bool]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    for step in range(HEADS.steps):
        losses = [HEADS.loss(model, Turn(step, 0, rank, world)) for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad(**clear)
    whole = getattr(optimizer, "full_state_dict", optimizer.state_dict)
    return snapshot(model), state_by_name(whole())


def play_cleared(rank: int, world: int, stage: int, clear: dict[str, bool]) -> Any:
    model = HEADS.model(rank_device())
    return cleared(adamw(model, stage=stage), model, [rank], world, clear)


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize(
    ("clear", "steps_of_a"),
    [({}, 1), ({"set_to_none": True}, 1), ({"set_to_none": False}, 3)],
    ids=["default", "none", "zero"],
)
def test_case_03_cleared_to_none_or_zero(
    world: int, backend: str, stage: int, clear: dict[str, bool], steps_of_a: int
) -> None:
    model = HEADS.model()
    plain = torch.optim.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.1)
    expected, expected_state = cleared(plain, model, list(range(world)), world, clear)
    counts = {"a": steps_of_a, "b": 2, "t": 3}
    for params, state in run_world(world, play_cleared, stage, clear, backend=backend):
        assert {n: int(s["step"]) for n, s in state.items()} == {n: counts[n[0]] for n in expected}
        for name, value in expected.items():
            assert_close(params[name], value, name)
        assert_states_equal(state, expected_state, assert_close)


def cleared_by_turns(optimizer: Any, model: nn.Module, ranks: list[int], world: int) -> Any:
    """Step 0 trains a, which the model clears; b's gradient of step 1 becomes zeros."""
    for step in range(HEADS.steps):
        losses = [HEADS.loss(model, Turn(step, 0, rank, world)) for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
        if step == 0:
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=False)
    return {n: [p.grad is None, float(p.detach().sum())] for n, p in model.named_parameters()}


def play_cleared_by_turns(rank: int, world: int, stage: int) -> Any:
    model = HEADS.model(rank_device())
    return cleared_by_turns(adamw(model, stage=stage), model, [rank], world)


@stages
@worlds(2)
def test_case_03_zeros_are_left_for_the_last_window(world: int, backend: str, stage: int) -> None:
    model = HEADS.model()
    plain = torch.optim.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.1)
    expected = cleared_by_turns(plain, model, list(range(world)), world)
    for params in run_world(world, play_cleared_by_turns, stage, backend=backend):
        assert params == {n: [none, pytest.approx(x)] for n, (none, x) in expected.items()}


# Case 11: a step without backward, a rank that stops calling, uneven data.


def half_used(rank: int, world: int, stage: int) -> list[float]:
    """Rank 0 has one batch, rank 1 two."""
    model = two_params()
    opt = sgd(model, stage=stage)
    for step in range(2):
        if rank == 1 or step == 0:
            opt.backward(model.a.sum())
        opt.step()
        opt.zero_grad()
    return values(model)


@stages
@worlds(2)
def test_case_11_step_without_backward_halves(world: int, backend: str, stage: int) -> None:
    assert run_world(world, half_used, stage, backend=backend) == [[1.0 - 1.0 - 0.5, 1.0]] * 2


def one_rank_stops(rank: int, world: int, stage: int, stray: int) -> tuple[str, float]:
    """It makes two steps and lives on, its optimizer too: the others only miss it."""
    model = two_params()
    opt = sgd(model, stage=stage, process_group=dist.new_group(timeout=SHORT))
    for _ in range(2):
        opt.backward(model.a.sum())
        opt.step()
        opt.zero_grad()
    start = time.monotonic()
    message = message_of(RuntimeError, opt.step) if rank != stray else ""
    seconds = time.monotonic() - start
    dist.barrier()
    return message, seconds


@stages
@worlds(2, 3)
def test_case_11_a_rank_that_stops_is_named(world: int, backend: str, stage: int) -> None:
    stray = 0 if world == 2 else world - 1
    results = run_world(world, one_rank_stops, stage, stray, backend=backend)
    for message, seconds in results[:stray] + results[stray + 1 :]:
        check_words(message, [f"rank(s) [{stray}]", "step()", "iteration 2", "join"])
        assert seconds < SHORT.total_seconds() + LATE_SECONDS


def uneven(rank: int, world: int, stage: int) -> tuple[list[float], list[float]]:
    model = two_params()
    opt = sgd(model, stage=stage)
    norms = []
    with opt.join():
        for _ in range(1 + 2 * rank):
            opt.backward(world * (rank + 1) * model.a.sum())
            norms.append(float(opt.grad_norm()))
            opt.step()
            opt.zero_grad()
    return values(model), norms


@stages
@worlds(2, 3)
def test_case_11_join_with_uneven_data(world: int, backend: str, stage: int) -> None:
    """Rank r has 1 + 2 r batches with the averaged gradient r + 1."""
    sums = {2: [1 + 2, 2, 2], 3: [1 + 2 + 3, 2 + 3, 2 + 3, 3, 3]}[world]
    for rank, (got, norms) in enumerate(run_world(world, uneven, stage, backend=backend)):
        assert got == [1.0 - sum(sums), 1.0]
        expected = [total * 5**0.5 for total in sums[: 1 + 2 * rank]]
        assert norms == pytest.approx(expected, rel=1e-6)


# Case 12: an exception in one rank's backward.


def one_raises(rank: int, world: int, stage: int, micros: int) -> dict[str, Any]:
    """In step 1 rank 1 raises in its last backward, after the gradient of b, and clears."""
    model = two_params()
    opt = sgd(model, stage=stage)
    seen, errors = [], []
    for step in range(4):
        try:
            for micro in range(micros):
                last = step == 1 and rank == 1 and micro == micros - 1
                a = fails(model.a) if last else model.a
                opt.backward(2.0 * a.sum() + 2.0 * model.b.sum())
        except ArithmeticError:
            opt.zero_grad()
        try:
            opt.step()
        except RuntimeError as error:
            errors.append((step, str(error)))
        opt.zero_grad()
        seen.append([p.detach().cpu().clone() for p in model.parameters()])
    return {"seen": seen, "errors": errors}


@stages
@worlds(2)
@pytest.mark.parametrize("micros", [1, 2])
def test_case_12_one_rank_raises_in_backward(
    world: int, backend: str, stage: int, micros: int
) -> None:
    """Step 1 is an error on both ranks and changes nothing; all others are whole."""
    results = run_world(world, one_raises, stage, micros, backend=backend)
    for result in results:
        ((step, text),) = result["errors"]
        assert step == 1
        check_words(text, ["out of step", "rank 1 gave up", "iteration 1", "rank 0 did not"])
        assert result["errors"] == results[0]["errors"]
        for seen, taken in zip(result["seen"], [1, 1, 2, 3], strict=True):
            for got, start in zip(seen, two_params().parameters(), strict=True):
                assert torch.equal(got, start - 2.0 * micros * taken)


def one_lets_it_escape(rank: int, world: int, stage: int) -> tuple[str, float, bool]:
    """As above, but rank 1 never calls the optimizer again, although it lives on."""
    model = two_params()
    group = dist.new_group(timeout=SHORT)
    opt = sgd(model, stage=stage, process_group=group, bucket_bytes=1)

    def train() -> None:
        a = fails(model.a) if step == rank == 1 else model.a
        opt.backward(2.0 * a.sum() + 2.0 * model.b.sum())
        opt.step()
        opt.zero_grad()

    step = 0
    train()
    step, before, start = 1, snapshot(model), time.monotonic()
    text = message_of((RuntimeError, ArithmeticError)[rank], train)
    seconds = time.monotonic() - start
    dist.barrier()
    return text, seconds, all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_case_12_one_rank_lets_it_escape() -> None:
    """Stage 2, whose buckets leave in backward; otherwise rank 1 has just stopped (case 11)."""
    (text, seconds, kept), (_, _, others_kept) = run_world(2, one_lets_it_escape, 2)
    check_words(text, ["rank(s) [1]", "iteration 1", "did not arrive"])
    assert seconds < SHORT.total_seconds() + LATE_SECONDS
    assert kept and others_kept


# Backward calls that differ, norms in the middle, several optimizers.


def unequal(rank: int, world: int, stage: int, ask: str) -> tuple[list[float], list[float]]:
    """Rank 0 has one backward, rank 1 three (the second local), rank 2 none."""
    model = two_params()
    opt = sgd(model, stage=stage)
    for micro in range((1, 3, 0)[rank]):
        with opt.no_sync() if micro == 1 else contextlib.nullcontext():
            opt.backward(world * (micro + 1.0) * (model.a if rank else model.b).sum())
    asked = []
    if ask == "grad_norm":
        asked = [float(opt.grad_norm()), float(opt.grad_norm(float("inf")))]
    elif ask == "clip":
        asked = [float(opt.clip_grad_norm_(1e6))]
    elif ask == "full_grad":
        grads = [opt.full_grad(p) for p in model.parameters()]
        asked = [float(grad[0]) for grad in grads if grad is not None]
    opt.step()
    return values(model), asked


@stages
@pytest.mark.parametrize("ask", ["", "grad_norm", "clip", "full_grad"])
def test_unequal_numbers_of_backward_calls(stage: int, ask: str) -> None:
    norm = (5 * 6.0**2 + 7 * 1.0**2) ** 0.5
    asked = {"": [], "grad_norm": [norm, 6.0], "clip": [norm], "full_grad": [6.0, 1.0]}[ask]
    for got, answers in run_world(3, unequal, stage, ask):
        assert got == [1.0 - 6.0, 1.0 - 1.0]
        assert answers == pytest.approx(asked, rel=1e-6)


def kept_local(rank: int, world: int) -> tuple[list[float], dict[str, Any]]:
    """Stage 2. Two backwards in no_sync(), which only this rank may notice, then one outside."""
    model = two_params()
    opt = sgd(model, stage=2)
    sent = weigh(opt)
    with opt.no_sync():
        for factor in (2.0, 4.0):
            opt.backward(factor * (rank + 1) * model.a.sum() + factor * model.b.sum())
    grads = [None if p.grad is None else float(p.grad[0]) for p in model.parameters()]
    seen = {"grads": grads, "used": opt._window.used, "sent": list(sent.reduced)}
    opt.backward(8.0 * model.a.sum())  # which takes along what is there of a
    seen["a left"] = model.a.grad is None
    opt.step()
    seen["sent later"] = sum(sent.reduced) > 0
    return values(model), seen


@worlds(2)
def test_no_sync_keeps_gradients_local(world: int, backend: str) -> None:
    """The means over two ranks: a 6 * 1.5 + 8, b 6."""
    for rank, (got, seen) in enumerate(run_world(world, kept_local, backend=backend)):
        assert seen == {
            "grads": [6.0 * (rank + 1), 6.0],
            "used": False,
            "sent": [],
            "a left": True,
            "sent later": True,
        }
        assert got == [1.0 - 17.0, 1.0 - 6.0]


def two_optimizers(rank: int, world: int, stage: int, order: str) -> list[float]:
    """One loss over both; the last rank has no backward in step 1. A user collective between."""
    left, right = two_params(), two_params()
    opts = {"l": sgd(left, stage=stage), "r": sgd(right, stage=stage)}
    for step in range(2):
        loss = world * (left.a.sum() + 2.0 * right.b.sum())
        if step == 0 or rank != world - 1:
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        for which in order:
            opts[which].step()
            opts[which].zero_grad()
    return [values(left)[0], values(right)[1]]


@stages
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("order", ["lr", "rl"])
def test_two_optimizers_and_a_collective_between(world: int, stage: int, order: str) -> None:
    steps = world + (world - 1)
    expected = [1.0 - steps, 1.0 - 2.0 * steps]
    assert run_world(world, two_optimizers, stage, order) == [expected] * world


# Case 31: nothing is left.

SIDE = 1 << 18  # elements of each of 8 parameters, of which each has a bucket to itself
BUCKET = 2 * SIDE * 4  # bytes of one that travels: sent and received, in float32


def settled(allocated: Allocations, limit: int) -> int:
    """Bytes that are alive; Gloo's threads let go of a finished call's tensors a little later."""
    for _ in range(200):
        if allocated.now <= limit:
            break
        time.sleep(0.01)
    return allocated.now


def eight_params(dtype: torch.dtype) -> Parameters:
    return Parameters(**{f"p{i}": torch.ones(SIDE, dtype=dtype) for i in range(8)})


def irregular_step(
    opt: dynzero.ZeroOptimizer, model: nn.Module, step: int, rank: int, world: int
) -> None:
    """Every fourth step overflows, on one rank; every other fourth uses half of the model.

    The ranks use the same half and different ones by turns.
    """
    turn = step // 4
    half, shift = step % 4 == 1, turn // 2 + rank * (turn % 2)
    used = [p for i, p in enumerate(model.parameters()) if not half or (i + shift) % 2]
    inf = step % 4 == 3 and rank == turn % world
    opt.backward(sum(p[0] for p in used) * (float("inf") if inf else 1.0))
    opt.step()
    opt.zero_grad()


def leftovers(
    rank: int, world: int, stage: int, dtype: torch.dtype, kept: int
) -> tuple[int, list[int], int, list[bool]]:
    """Bytes: at most during construction, after each of 20 steps, after the end; what is gone."""
    model = eight_params(dtype)
    with Allocations() as allocated:
        opt = adamw(
            model, stage=stage, loss_scale=dynzero.LossScale(init=8.0, minimum=2.0**-9), fused=None,
            bucket_bytes=1,
        )  # fmt: skip
        construction = allocated.most
        after = []
        for step in range(20):
            irregular_step(opt, model, step, rank, world)
            after.append(settled(allocated, kept + BUCKET // 8))
        watches = [weakref.ref(opt), weakref.ref(opt._window), weakref.ref(opt._shard)]
        del opt
        gc.collect()
        # The model goes on without it: no hook must keep the optimizer.
        sum(p[0] for p in model.parameters()).backward()
        del model
        gc.collect()
        end = settled(allocated, 0)
    return construction, after, end, [watch() is None for watch in watches]


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_case_31_nothing_is_left(world: int, stage: int, dtype: torch.dtype) -> None:
    kept = dynzero.estimate_memory(eight_params(dtype), world, stage).between_steps
    for construction, after, end, gone in run_world(world, leftovers, stage, dtype, kept):
        assert construction <= BUCKET + 10_000, "the weights are not there twice"
        assert max(after[2:]) - min(after[2:]) < BUCKET, after
        assert after[-1] == pytest.approx(kept, abs=BUCKET), "more than masters and moments"
        assert end == 0
        assert gone == [True] * 3


class EngineThatKeepsCallbacks:
    """The engine of autograd; as with CUDA, where a thread of its own drops callbacks late."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.kept = engine, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Any) -> None:
        self.kept.append(callback)
        self._engine.queue_callback(callback)


def windows_behind_late_callbacks(rank: int, world: int) -> list[bool]:
    """After each step, if the window that it closed is gone."""
    model = eight_params(torch.float32)
    opt = adamw(model, stage=2)
    engine = EngineThatKeepsCallbacks(torch.autograd.Variable._execution_engine)
    gone = []
    with mock.patch.object(torch.autograd.Variable, "_execution_engine", engine):
        for _ in range(3):
            window = weakref.ref(opt._window)
            sum(p[0] for p in model.parameters()).backward()
            opt.step()
            opt.zero_grad()
            gone.append(settled_gone(window))
    assert len(engine.kept) == 3
    return gone


def settled_gone(watch: weakref.ref[Any]) -> bool:
    """Whether it is gone, given some time: gloo's threads drop what they hold a little later."""
    deadline = time.monotonic() + 5
    while watch() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return watch() is None


def test_case_31_callbacks_of_autograd_keep_no_gradients() -> None:
    for gone in run_world(2, windows_behind_late_callbacks):
        assert gone == [True] * 3
