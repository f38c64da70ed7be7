"""Buckets leave while backward runs, on an early answer about presence that can be wrong.

Every way in which it can be wrong is compared with one process of torch.optim.
"""

from __future__ import annotations

import ctypes
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from play import weigh, worlds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import check_words, message_of, rank_device, run_world

import dynzero.rounds
from dynzero._C import (
    BucketFeed,
    GradStore,
    GradWatch,
    ParamScan,
    Transfer,
    Transport,
    begin_reduction,
)
from dynzero.layout import build_layout
from dynzero.plan import make_plan
from dynzero.transports import control
from dynzero.transports.control import Exchange

SIZES = (5, 33, 7, 64)
OPTIONS = dict(lr=0.1, weight_decay=0.1)


class Withheld(torch.autograd.Function):
    """Passes x on; in backward gives w no gradient, although the graph lists it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + 0 * w.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Step(torch.autograd.Function):
    """Passes x on; in backward calls something first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def parameters(device: Any = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(n).to(device)) for n in SIZES]


def build(params: list[nn.Parameter], **options: Any) -> dynzero.ZeroOptimizer:
    options = {"stage": 2, "bucket_bytes": 1, "fused": False, **OPTIONS, **options}
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    return dynzero.ZeroOptimizer(named, torch.optim.AdamW, **options)


def chain(params: list[nn.Parameter], factor: float, x: Tensor | None = None) -> Tensor:
    """Uses the parameters in order, so that backward reaches the last one first."""
    total = params[0].new_zeros(()) if x is None else x
    for p in params:
        total = total + factor * (p * p.detach().cos()).sum() + 0 * total
    return total


def same(params: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def oracle_step(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer, grads: list[Tensor | None]
) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()


def mean_grads(factors: list[list[float | None]], divisors: list[int]) -> list[Tensor | None]:
    """Averages of the gradients that chain() gives; factors [rank][param]."""
    out: list[Tensor | None] = []
    for i, p in enumerate(parameters()):
        used = [f[i] for f in factors if f[i] is not None]
        total = sum(f * p.detach().cos() for f in used) if used else None
        out.append(None if total is None else total / divisors[i])
    return out


def until_announced(opt: dynzero.ZeroOptimizer) -> None:
    """In backward: long enough for the other ranks to announce their pass, too."""
    deadline = time.monotonic() + 20
    while isinstance(asked := opt._rounds._waits_for, Exchange) and not asked.ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def sent_before_the_end(rank: int, world: int) -> tuple[list[Tensor], int, int]:
    params = parameters(rank_device())
    opt = build(params)
    sent = weigh(opt).reduced
    early = 0

    def count() -> None:
        nonlocal early
        deadline = time.monotonic() + 20
        while not sent and time.monotonic() < deadline:  # on a GPU another thread sends
            time.sleep(0.001)
        early = len(sent)

    x = Step.apply(chain(params[:1], rank + 1.0), count)
    x = chain(params[1:2], rank + 1.0, x)
    x = Step.apply(x, lambda: until_announced(opt))
    chain(params[2:], rank + 1.0, x).backward()
    opt.step()
    return [p.detach().cpu() for p in params], early, len(sent)


@worlds(2, 3)
def test_buckets_leave_while_backward_runs(world: int, backend: str) -> None:
    results = run_world(world, sent_before_the_end, backend=backend)
    params = parameters()
    factors = [[r + 1.0] * 4 for r in range(world)]
    oracle_step(params, torch.optim.AdamW(params, **OPTIONS), mean_grads(factors, [world] * 4))
    for got, early, sent in results:
        assert sent == len(SIZES)
        assert 0 < early < sent
        if world == 2 and backend == "gloo":  # both on the CPU
            assert same(got, params)
        assert same(got, results[0][0])


def beside_gloo_freeing(rank: int, world: int) -> list[Tensor]:
    """A bucket leaves in a hook while a thread of Gloo waits for the GIL.

    The thread frees the tensor of a call from Python under the lock that the next call takes.
    """
    params = parameters()
    keeping_the_gil = ctypes.PyDLL(None)

    def occupy(p: Tensor) -> None:
        dist.broadcast(torch.ones(1), 0, group=opt._mover.collective.group, async_op=True)
        keeping_the_gil.usleep(100_000)

    # Before our own hook: torch runs all those of one parameter without giving up the GIL between.
    handle = params[1].register_post_accumulate_grad_hook(occupy)
    opt = build(params)
    x = Step.apply(chain(params[:3], rank + 1.0), lambda: until_announced(opt))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # nobody is made to give it up
    try:
        chain(params[3:], rank + 1.0, x).backward()
    finally:
        sys.setswitchinterval(interval)
        handle.remove()  # else parameter, hook and optimizer keep each other, unseen by the gc
    opt.step()
    return [p.detach() for p in params]


def test_hooks_do_not_send_under_the_gil() -> None:
    params = parameters()
    factors = [[1.0] * 4, [2.0] * 4]
    oracle_step(params, torch.optim.AdamW(params, **OPTIONS), mean_grads(factors, [2] * 4))
    for got in run_world(2, beside_gloo_freeing):
        assert same(got, params)


def withdrawn(rank: int, world: int, average: str, real: tuple[int, ...]) -> tuple[Any, ...]:
    params = parameters(rank_device())
    opt = build(params, average=average)
    actives, norms = [], []
    for _ in range(2):
        x = chain(params[:1], 1.0)
        x = x + params[1].sum() if rank in real else Withheld.apply(x, params[1])
        chain(params[2:], 1.0, x).backward()
        norms.append(float(opt.grad_norm()))
        opt.step()
        actives.append(list(opt.last_step.active))
        opt.zero_grad()
    return [p.detach().cpu() for p in params], actives, norms, list(opt.full_state_dict()["state"])


@worlds(2, 3)
@pytest.mark.parametrize("average", ["world", "present"])
@pytest.mark.parametrize("real", [(), (1,)])
def test_a_withdrawn_gradient_is_not_present(
    world: int, backend: str, average: str, real: tuple[int, ...]
) -> None:
    results = run_world(world, withdrawn, average, real, backend=backend)
    params = parameters()
    reference = torch.optim.AdamW(params, **OPTIONS)
    ones = torch.ones(SIZES[1])
    for _ in range(2):
        x = chain(params, 1.0)
        grads = list(torch.autograd.grad(x, params))
        mean = ones / (len(real) if average == "present" else world) if real else None
        oracle_step(params, reference, [grads[0], mean, *grads[2:]])
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    names = ["p0", "p1", "p2", "p3"] if real else ["p0", "p2", "p3"]
    for got, actives, norms, keys in results:
        assert actives == [names, names]
        assert keys == [int(name[1]) for name in names]
        assert norms[1] == pytest.approx(float(norm), rel=1e-6)
        for p, q in zip(got, params, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)
        if not real:
            assert torch.equal(got[1], parameters()[1]), "untouched, bit for bit"


def late(rank: int, world: int, stage: int) -> list[Tensor]:
    params = parameters(rank_device())
    opt = build(params, stage=stage)
    for i in range(3):
        x = torch.ones((), device=rank_device(), requires_grad=True)
        # On rank 0 the last parameter comes once more, from inside, when its bucket has left; the
        # second comes only from inside, so that this rank never announced it.
        if rank == 0:
            x = checkpoint(lambda x: x + chain(params[1:2], 2.0), x, use_reentrant=True)
            x = checkpoint(lambda x: x + chain(params[3:], 3.0), x, use_reentrant=True)
        elif i != 1:
            x = chain(params[1:2], 5.0, x)
        x = chain(params[:1] + params[2:], 1.0, x)
        opt.backward(x)
        opt.step()
        opt.zero_grad()
    return [p.detach().cpu() for p in params]


@worlds(2, 3)
def test_a_late_gradient_is_not_lost(world: int, backend: str) -> None:
    results = run_world(world, late, 2, backend=backend)
    params = parameters()
    reference = torch.optim.AdamW(params, **OPTIONS)
    for i in range(3):
        total = chain(params[:1] + params[2:], float(world))
        total = total + chain(params[3:], 3.0) + chain(params[1:2], 2.0)
        if i != 1:
            total = total + chain(params[1:2], 5.0 * (world - 1))
        grads = torch.autograd.grad(total, params)
        oracle_step(params, reference, [g / world for g in grads])
    for got in results:
        assert same(got, results[0])
        for p, q in zip(got, params, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


def cut_short(rank: int, world: int, clear: bool) -> tuple[list[Tensor], list[str]]:
    """Rank 1's backward raises on the way; it goes on with what has come, or clears, as all do."""
    params = parameters(rank_device())
    opt = build(params)

    def fail() -> None:
        raise RuntimeError("on the way")

    x = chain(params[:2], 1.0 + rank)
    if rank == 1:
        x = Step.apply(x, fail)
    x = chain(params[2:], 1.0 + rank, x)
    try:
        x.backward()
    except RuntimeError as error:
        assert "on the way" in str(error)
    if clear:
        opt.zero_grad()
        chain(params, 2.0).backward()
    opt.step()
    return [p.detach().cpu() for p in params], list(opt.last_step.active)


@worlds(2, 3)
@pytest.mark.parametrize("clear", [True, False])
def test_a_pass_cut_short_leaves_what_it_brought(world: int, backend: str, clear: bool) -> None:
    results = run_world(world, cut_short, clear, backend=backend)
    params = parameters()
    factors: list[list[float | None]] = [[1.0 + r] * 4 for r in range(world)]
    factors[1][:2] = None, None
    if clear:
        factors = [[2.0] * 4 for _ in range(world)]
    oracle_step(params, torch.optim.AdamW(params, **OPTIONS), mean_grads(factors, [world] * 4))
    for got, active in results:
        assert active == ["p0", "p1", "p2", "p3"]
        assert same(got, results[0][0])
        for p, q in zip(got, params, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


def later_hooks(rank: int, world: int, stage: int) -> list[Tensor]:
    """Hooks that come after the optimizer's: one changes each gradient, one puts in another."""
    params = parameters(rank_device())
    opt = build(params, stage=stage)

    def change(p: Tensor) -> None:
        p.grad *= 2.0

    def replace(p: Tensor) -> None:
        p.grad = 2.0 * p.grad

    for i, p in enumerate(params):
        p.register_post_accumulate_grad_hook(change if i < 2 else replace)
    for _ in range(2):
        chain(params, 1.0 + rank).backward()
        opt.step()
        opt.zero_grad()
    return [p.detach().cpu() for p in params]


@worlds(2, 3)
def test_hooks_of_the_user_see_the_gradient_first(world: int, backend: str) -> None:
    results = run_world(world, later_hooks, 2, backend=backend)
    expected = run_world(world, later_hooks, 1, backend=backend)
    params = parameters()
    reference = torch.optim.AdamW(params, **OPTIONS)
    for _ in range(2):
        grads = torch.autograd.grad(chain(params, world + 1.0), params)  # 2 * mean of 1 .. world
        oracle_step(params, reference, list(grads))
    for got, also in zip(results, expected, strict=True):
        assert same(got, also)
        for p, q in zip(got, params, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


def some_inputs(rank: int, world: int) -> tuple[list[Tensor], list[str], int]:
    params = parameters(rank_device())
    opt = build(params)
    y = chain(params, 1.0)
    torch.autograd.grad(y, params, retain_graph=True)
    rounds = opt._window.rounds
    y.backward(inputs=params[1:3])
    opt.step()
    return [p.detach().cpu() for p in params], list(opt.last_step.active), rounds


def test_only_the_inputs_of_backward_are_announced() -> None:
    params = parameters()
    oracle_step(
        params,
        torch.optim.AdamW(params, **OPTIONS),
        mean_grads([[None, 1.0, 1.0, None]], [1] * 4),
    )
    for got, active, rounds in run_world(2, some_inputs):
        assert active == ["p1", "p2"]
        assert rounds == 0, "torch.autograd.grad leaves no gradients to reduce"
        assert same(got, params)


class Mirror(Transport):
    """One rank that sends to itself; notes which parameters still had gradients."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__()
        self.params, self.left = params, []

    def all_to_all(self, received: Tensor, sent: Tensor) -> Transfer:
        received.copy_(sent)
        self.left.append([p.grad is not None for p in self.params])
        return Transfer()


def feed_of(
    params: list[Tensor], active: list[int], mirror: Mirror, aside: bool
) -> tuple[BucketFeed, list[Tensor]]:
    """A feed with one bucket for each active parameter, and the pieces that it fills."""
    size = len(params)
    layout = build_layout(params, [""] * size, [0] * size, world=1, rank=0, wire_dtype=None)
    ones = torch.ones(len(active), dtype=torch.int64)
    plan = make_plan(layout, torch.tensor(active), ones, bucket_bytes=1)
    shard = [torch.zeros_like(p) for p in params]
    at = torch.tensor([piece.data_ptr() for piece in shard])
    everybody = torch.full((1, layout.bit_bytes), 255, dtype=torch.uint8)
    flags = torch.zeros(size, dtype=torch.int32)
    reduction, _, _ = begin_reduction(
        plan.compiled, mirror, [], torch.zeros_like(at), at, everybody, flags, aside, None
    )
    opened = torch.ones(size, dtype=torch.bool)
    here = torch.zeros(size, dtype=torch.int64), torch.zeros(layout.bit_bytes, dtype=torch.uint8)
    feed = BucketFeed(reduction, ParamScan(params), GradStore(), *here, opened, plan.places)
    return feed, shard


def follow_one_pass(mirror: Transport, params: list[Tensor], aside: bool) -> list[Any]:
    """Backward over parameters 0, 1 and 3: announced bits, feed, pieces, watch."""
    found: list[Any] = []

    def meet() -> bool:
        announced = torch.empty(1, dtype=torch.uint8)
        watch.begin(announced, torch.empty(len(params), dtype=torch.bool))
        found.extend([announced, *feed_of(params, [0, 1, 3], mirror, aside), watch])
        watch.follow(found[1])
        return True

    watch = GradWatch(meet, lambda: None, 0)
    for p, hook in zip(params, watch.add(params), strict=True):
        p.register_post_accumulate_grad_hook(hook)
    chain(params[:2] + params[3:], 1.0).backward()
    return found


@pytest.mark.parametrize("aside", [False, True])
def test_a_bucket_leaves_in_the_hook_after_its_last_gradient(aside: bool) -> None:
    params = parameters()
    mirror = Mirror(params)
    announced, feed, pieces, watch = found = follow_one_pass(mirror, params, aside)
    assert announced.item() == 0b1011
    deadline = time.monotonic() + 20
    while aside and len(mirror.left) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(mirror.left) == 2
    if not aside:
        # The user's own hooks on a parameter may still run when ours has.
        assert mirror.left == [[False, True, False, False], [True, False, False, False]]
    watch.end()
    feed.close()
    while not feed.done:
        assert feed.push() == []
    assert all(p.grad is None for p in params)
    assert len(mirror.left) == 3
    for i in (0, 1, 3):
        assert torch.equal(pieces[i], params[i].detach().cos())

    watch.paused = True
    chain(params, 1.0).backward()
    assert len(found) == 4


class Broken(Transport):
    def all_to_all(self, received: Tensor, sent: Tensor) -> Transfer:
        raise ValueError("no way out")


@pytest.mark.parametrize("aside", [False, True])
def test_what_fails_in_a_hook_is_raised_where_the_round_is_finished(aside: bool) -> None:
    params = parameters()
    _, feed, _, watch = follow_one_pass(Broken(), params, aside)
    watch.end()
    feed.close()
    with pytest.raises(ValueError, match="no way out"):
        while not feed.done:
            assert feed.push() == []


def test_grad_watch_and_feed_refuse_tables_of_another_size() -> None:
    params = parameters()
    watch = GradWatch(lambda task: True, lambda: None, 0)
    watch.add(params)
    with pytest.raises(RuntimeError, match=r"expected bits contiguous uint8 \[1\] on cpu, got"):
        watch.begin(torch.empty(2, dtype=torch.uint8), torch.empty(1, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="expected a list of tensors, got a int"):
        watch.add([1])


def late_after_a_norm(rank: int, world: int, ask: bool) -> tuple[list[Tensor], list[str]]:
    """Announced, withdrawn, and then brought by a pass in no_sync()."""
    params = parameters(rank_device())
    opt = build(params)
    Withheld.apply(chain(params[1:], 1.0), params[0]).backward()
    with opt.no_sync():
        chain(params[:1], 1.0).backward()
    if ask:
        opt.grad_norm()
    opt.step()
    return [p.detach().cpu() for p in params], list(opt.last_step.active)


@worlds(2)
def test_a_norm_between_loses_no_gradient(world: int, backend: str) -> None:
    asked = run_world(world, late_after_a_norm, True, backend=backend)
    for (got, active), (plain, _) in zip(
        asked, run_world(world, late_after_a_norm, False, backend=backend), strict=True
    ):
        assert active == ["p0", "p1", "p2", "p3"]
        assert same(got, plain)
        assert not torch.equal(got[0], parameters()[0])


def given_up_during_a_pass(rank: int, world: int) -> tuple[list[Tensor], list[str]]:
    """Rank 0 learns in the middle of its pass that rank 1 has given up the window."""
    params = parameters(rank_device())
    opt = build(params)
    if rank == 1:
        handle = params[3].register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.backward(chain(params, 1.0))
    else:
        handle = params[1].register_hook(lambda g: time.sleep(0.7))
        opt.backward(chain(params, 1.0))
    handle.remove()
    opt.zero_grad()
    opt.backward(Withheld.apply(chain(params[1:], 1.0), params[0]))
    opt.step()
    return [p.detach().cpu() for p in params], list(opt.last_step.active)


@worlds(2)
def test_a_dead_pass_makes_nothing_present(world: int, backend: str) -> None:
    for got, active in run_world(world, given_up_during_a_pass, backend=backend):
        assert active == ["p1", "p2", "p3"]
        assert torch.equal(got[0], parameters()[0])


def set_anew(rank: int, world: int, stage: int) -> Tensor:
    """A hook puts in a gradient for a parameter whose bucket has left (if others were quick)."""
    params = parameters(rank_device())
    opt = build(params, stage=stage)

    def late(p: Tensor) -> None:
        params[3].grad = torch.ones_like(params[3])

    params[0].register_post_accumulate_grad_hook(late)
    for p in params[:3]:
        p.register_hook(lambda g: time.sleep(0.1))
    opt.backward(chain(params, 1.0))
    grad = opt.full_grad(params[3])
    return grad.cpu()


@worlds(2)
def test_a_gradient_set_after_its_bucket_left_counts(world: int, backend: str) -> None:
    for grad in run_world(world, set_anew, 2, backend=backend):
        # As in torch, it replaces one that still waits, and adds to one that has been sent.
        first = parameters()[3].detach().cos()
        both = torch.allclose(grad, first + 1, rtol=1e-5, atol=1e-6)
        assert both or torch.equal(grad, torch.ones_like(grad))


def collective_inside_and_after(rank: int, world: int) -> list[Tensor]:
    """Rank 0's pass is over when rank 1 announces its own, which has a collective of the user.

    Rank 0 makes the same one after its backward.
    """
    params = parameters(rank_device())
    opt = build(params)

    def meet() -> None:
        dist.all_reduce(torch.ones(1, device=rank_device()))

    dist.barrier()
    if rank == 1:
        time.sleep(0.1)  # within rank 0's patience
        x = Step.apply(chain(params[:3], rank + 1.0), meet)
        opt.backward(chain(params[3:], rank + 1.0, x))
    else:
        opt.backward(chain(params, rank + 1.0))
        meet()
    opt.step()
    return [p.detach().cpu() for p in params]


def test_buckets_do_not_block_a_finished_pass() -> None:
    """Under Gloo: NCCL asks for one order of collectives where ranks have the same gradients."""
    params = parameters()
    grads = mean_grads([[1.0] * 4, [2.0] * 4], [2] * 4)
    oracle_step(params, torch.optim.AdamW(params, **OPTIONS), grads)
    for got in run_world(2, collective_inside_and_after):
        assert same(got, params)


def opposite_optimizers(rank: int, world: int) -> list[Tensor]:
    """Rank 0 has gradients for all of the first optimizer's parameters, and one of the second's.

    On rank 1 it is the other way round. Each rank's backward can send at once what the other's has
    to compute first; had it to wait for that, the two would wait for each other.
    """
    device = rank_device()
    first, second = parameters(device), parameters(device)
    optimizers = [build(first), build(second)]
    used = first + second[:1] if rank == 0 else second + first[:1]
    for p in used:
        p.register_hook(lambda g: time.sleep(0.02))  # the other rank's answer arrives meanwhile
    chain(used, 1.0).backward()
    for opt in optimizers:
        opt.step()
    return [p.detach().cpu() for p in first + second]


@worlds(2)
def test_optimizers_that_ranks_use_differently_do_not_wait_for_each_other(
    world: int, backend: str
) -> None:
    params = parameters()
    oracle_step(
        params,
        torch.optim.AdamW(params, **OPTIONS),
        mean_grads([[1.0] * 4, [1.0, None, None, None]], [2] * 4),
    )
    for got in run_world(world, opposite_optimizers, backend=backend):
        for p, q in zip(got, params + params, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=0, atol=0 if backend == "gloo" else 1e-6)


def rounds_in_step(rank: int, world: int) -> list[bool]:
    with (
        mock.patch.object(dynzero.rounds, "LIVE", weakref.WeakSet()),  # of this test alone
        mock.patch.object(control, "TOGETHER_S", 60.0),
    ):
        return in_step_by_round(rank)


def in_step_by_round(rank: int) -> list[bool]:
    params = parameters()
    opt = build(params)
    seen: list[bool] = []
    reduce = opt._mover.reduce

    def noting(*args: Any, in_step: bool) -> Any:
        seen.append(in_step)
        return reduce(*args, in_step=in_step)

    def train(number: int) -> None:
        chain(params[:number], 1.0).backward()
        opt.step()

    opt._mover.reduce = noting
    train(4)
    train(2 + rank)
    time.sleep(0.1 * rank)
    with mock.patch.object(control, "TOGETHER_S", 0.05):
        train(4)
    train(4)
    other = build(parameters())
    if rank == 0:
        dynzero.rounds.LIVE.discard(other._rounds)  # as if only rank 1 had it
    train(4)
    return seen


def test_streams_wait_in_backward_only_where_all_ranks_do_the_same() -> None:
    """Not where gradients differ, one rank is late, or one has another optimizer."""
    assert run_world(2, rounds_in_step) == [[True, False, False, True, False]] * 2


def other_rate_found_in_a_hook(rank: int, world: int) -> str:
    """Rank 0 has lost its patience, and is in a collective of the user, when rank 1 finds out."""
    params = parameters(rank_device())
    opt = build(params)
    if rank == 1:
        opt.param_groups[0]["lr"] = 0.2
        time.sleep(0.5)
    opt.backward(chain(params, 1.0))
    dist.all_reduce(torch.ones(1, device=rank_device()))
    message = message_of(ValueError, opt.step)
    assert same(params, parameters(rank_device()))
    return message


@worlds(2)
def test_an_error_found_in_a_hook_waits_for_the_step(world: int, backend: str) -> None:
    messages = run_world(world, other_rate_found_in_a_hook, backend=backend)
    assert len(set(messages)) == 1
    check_words(messages[0], ["rank 0 has group 0: lr = 0.1", "rank 1 has group 0: lr = 0.2"])
