"""estimate_memory against the bytes that a ZeroOptimizer really holds, on the CPU and on CUDA."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

import pytest
import torch
from allocations import Allocations, storage_bytes
from gpus import nccl_worlds
from play import stages
from scenario import Parameters
from torch import Tensor, nn
from world import check_words, message_of, rank_device, run_world

import dynzero
from dynzero._C import Transfer, Transport

SHAPES = ((300, 70), (1,), (257,), (128, 129), (5, 3), (64, 1024))
# Of the model, for pointers, sums of chunks and the like, which peak counts only in part.
SLACK = 0.02
ADAM = {"optimizer_class": torch.optim.AdamW, "lr": 0.1}
SETTINGS = [
    ADAM,
    ADAM | {"bucket_bytes": 50_000},
    ADAM | {"bucket_bytes": 50_000, "gather": "lazy"},
    ADAM | {"wire_dtype": torch.float32, "bucket_bytes": 100_000},
    ADAM | {"wire_dtype": torch.bfloat16, "bucket_bytes": 100_000},
    {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
    {"optimizer_class": torch.optim.SGD, "lr": 0.1},
    {"optimizer_class": dynzero.Lion, "lr": 0.1},
    ADAM | {"fused": False, "amsgrad": True, "max_grad_norm": 1.0},
    ADAM | {"loss_scale": dynzero.LossScale(init=8.0), "fused": False},
]
DTYPES = [
    (torch.float16,),
    (torch.bfloat16,),
    (torch.float32,),
    (torch.float16, torch.float32, torch.bfloat16, torch.float64),
    (torch.complex64, torch.float32),
]
ALL = tuple(f"p{i}" for i in range(len(SHAPES)))


def bag(dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...] = SHAPES) -> nn.Module:
    tensors = {
        f"p{i}": torch.ones(shape, dtype=dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)
    }
    return Parameters(**tensors)


def loss_of(model: nn.Module, names: set[str]) -> Tensor:
    """Gives each named parameter a whole gradient, and needs no memory besides."""
    corners = [p.view(-1)[0].float() for name, p in model.named_parameters() if name in names]
    return torch.stack(corners).sum()


def train_once(
    opt: dynzero.ZeroOptimizer, model: nn.Module, names: set[str], *, overlap: bool = False
) -> None:
    """Without overlap all gradients are there before the first bucket leaves."""
    opt.wait_for_parameters()  # no module's forward does
    with contextlib.nullcontext() if overlap else opt.no_sync():
        opt.backward(loss_of(model, names))
    opt.step()
    opt.zero_grad()


def held(opt: dynzero.ZeroOptimizer) -> tuple[int, int]:
    """Bytes of masters and of optimizer state, as the optimizer holds them."""
    shard = opt._shard
    if hasattr(shard, "state"):
        state = [piece for pieces in shard.state.values() for piece in pieces.values()]
    else:
        entries = [value for state in shard.inner.state.values() for value in state.values()]
        state = [value for value in entries if isinstance(value, Tensor) and value.dim() > 0]
    return storage_bytes(shard.masters.values()), storage_bytes(state)


class Case(NamedTuple):
    dtypes: tuple[torch.dtype, ...]
    options: dict[str, Any]
    active: tuple[str, ...] = ALL


def measure_all(rank: int, world: int, cases: list[Case]) -> list[tuple[int, int, int, int]]:
    return [measure_on_cpu(world, case) for case in cases]


def measure_on_cpu(world: int, case: Case) -> tuple[int, int, int, int]:
    """Masters, moments, all between steps, peak."""
    model = bag(case.dtypes)
    opt = dynzero.ZeroOptimizer(model.named_parameters(), **case.options)
    if world > 1:
        opt._mover.collective.transport = Unhurried(opt._mover.collective.transport)
    peaks = []
    with Allocations() as allocated:
        for _ in range(3):
            allocated.most = allocated.now
            train_once(opt, model, set(case.active))
            peaks.append(allocated.most)
        opt.wait_for_parameters()
    return *held(opt), allocated.now, min(peaks[1:])


class Unhurried(Transport):
    """Gloo's threads let go of a finished call's tensors a little later: gives them time."""

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self.inner = inner

    def all_to_all(self, received: Tensor, sent: Tensor) -> Transfer:
        return self.finish(self.inner.all_to_all(received, sent))

    def all_gather(self, everybody: Tensor, mine: Tensor) -> Transfer:
        return self.finish(self.inner.all_gather(everybody, mine))

    def finish(self, transfer: Transfer) -> Transfer:
        while not transfer.ready():  # wait() would let go of the buffers, too
            time.sleep(1e-4)
        time.sleep(0.003)
        return transfer


def check_on_cpu(world: int, cases: list[Case]) -> None:
    ranks = run_world(world, measure_all, cases)
    for number, case in enumerate(cases):
        model = bag(case.dtypes)
        estimate = dynzero.estimate_memory(model, world, active=case.active, **case.options)
        masters, moments, between, peak = ranks[0][number]  # holds most
        assert all(rank[number][:2] <= (masters, moments) for rank in ranks)
        assert (estimate.masters, estimate.moments) == (masters, moments), case
        slack = SLACK * storage_bytes(model.parameters())
        assert abs(estimate.between_steps - between) <= slack, f"{case}: {between}, not {estimate}"
        # The torch class's own temporaries, of one parameter at a time on the CPU, do not count.
        scratch = 3 * 4 * 64 * 1024 if case.options.get("fused") is False else 0
        assert -slack <= peak - estimate.peak <= slack + scratch, f"{case}: {peak}, not {estimate}"


@stages
@pytest.mark.parametrize("world", [1, 2, 3])
def test_estimate_is_what_is_held_by_dtype(world: int, stage: int) -> None:
    check_on_cpu(world, [Case(dtypes, ADAM | {"stage": stage}) for dtypes in DTYPES])


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_estimate_is_what_is_held_by_option(world: int, stage: int, dtype: torch.dtype) -> None:
    check_on_cpu(world, [Case((dtype,), options | {"stage": stage}) for options in SETTINGS])


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_estimate_is_what_is_held_by_active_set(world: int, stage: int) -> None:
    some = [("p1", "p3", "p4"), ("p1",)]
    check_on_cpu(world, [Case((torch.bfloat16,), ADAM | {"stage": stage}, a) for a in some])


def test_estimate_accepts_what_the_optimizer_accepts() -> None:
    model = bag((torch.float16,))
    estimate = dynzero.estimate_memory(model, 4, 2)
    named, plain = list(model.named_parameters()), list(model.parameters())
    groups = [{"params": plain[:2], "lr": 0.1}, {"params": plain[2:], "absent": "zero"}]
    rows = estimate.tables, dynzero.estimate_memory(groups, 4, 2).tables
    for params in (named, plain, iter(named)):
        assert dynzero.estimate_memory(params, 4, 2) == estimate
    assert dynzero.estimate_memory(groups, 4, 2).peak - estimate.peak == rows[1] - rows[0] > 0
    assert dynzero.estimate_memory(bag((torch.float16,)).to("meta"), 4, 2) == estimate
    assert dynzero.estimate_memory(model, 4, 2, process_group=None) == estimate


def test_estimate_counts_what_trains() -> None:
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
    whole = dynzero.estimate_memory(layers, 2)
    quarter = dynzero.estimate_memory(layers, 2, active=0.25)
    assert quarter.moments == pytest.approx(whole.moments / 4, rel=0.02)
    assert quarter.peak == pytest.approx(whole.peak / 4, rel=0.05)
    chosen = [p for name, p in layers.named_parameters() if name.startswith("3.")]
    for layer in (chosen, ["3.weight", "3.bias"]):
        assert dynzero.estimate_memory(layers, 2, active=layer).moments == whole.moments / 20
    for p in list(layers.parameters())[20:]:
        p.requires_grad_(False)
    assert dynzero.estimate_memory(layers, 2).moments == whole.moments / 2
    nothing = dynzero.estimate_memory(layers, 2, active=0.0)
    assert (nothing.masters, nothing.moments, nothing.gradients, nothing.buckets) == (0, 0, 0, 0)


def test_estimate_adds_up_and_reads_well() -> None:
    estimate = dynzero.MemoryEstimate(1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20, 6 << 20)
    assert (estimate.between_steps, estimate.peak) == (6 << 20, 21 << 20)
    lines = dict(line.split(maxsplit=1) for line in str(estimate).splitlines())
    assert lines["peak"] == "21.0 MiB" and lines["buckets"] == "6.0 MiB"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, ("world_size", "from 1", "0")),
        ({"stage": 3}, ("stage", "0, 1 or 2", "3")),
        ({"active": 1.5}, ("active", "fraction", "1.5")),
        ({"active": ["p0", "head"]}, ("active", "head")),
        ({"active": [torch.ones(2)]}, ("active", "parameters of the model")),
        ({"wire_dtype": torch.int8}, ("wire_dtype", "torch.int8")),
        ({"optimizer_class": torch.optim.LBFGS}, ("LBFGS",)),
        ({"fused": True, "optimizer_class": torch.optim.RMSprop}, ("RMSprop", "fused")),
    ],
)
def test_estimate_refuses(options: dict[str, Any], words: tuple[str, ...]) -> None:
    model = bag((torch.float32,))
    check_words(message_of(ValueError, dynzero.estimate_memory, model, **options), words)


# On CUDA, against the allocator's own count.

BIG = tuple((2048, 2048) for _ in range(26))  # 218 MB in 16 bits


def measure_on_cuda(rank: int, world: int, dtype: torch.dtype, stage: int) -> tuple[int, ...]:
    """Between steps; peak without and with buckets that leave during backward."""
    model = bag((dtype,), BIG).to(rank_device())
    names = {name for name, _ in model.named_parameters()}
    loss_of(model, names).backward()  # loads what torch itself keeps
    model.zero_grad()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    params = model.named_parameters()
    opt = dynzero.ZeroOptimizer(params, torch.optim.AdamW, lr=1e-3, stage=stage, max_grad_norm=1.0)
    train_once(opt, model, names)
    peaks = []
    for overlap in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            train_once(opt, model, names, overlap=overlap)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - start)
    return torch.cuda.memory_allocated() - start, *peaks


@stages
@nccl_worlds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_estimate_is_what_cuda_allocates(world: int, stage: int, dtype: torch.dtype) -> None:
    estimate = dynzero.estimate_memory(bag((dtype,), BIG).to("meta"), world, stage)
    between, peak, overlapped = run_world(world, measure_on_cuda, dtype, stage, backend="nccl")[0]
    assert between == pytest.approx(estimate.between_steps, rel=0.05), f"{estimate}"
    assert peak == pytest.approx(estimate.peak, rel=0.05), f"{estimate}"
    assert overlapped <= 1.05 * estimate.peak, f"{estimate}"
