"""The allocator's own count on CUDA: no growth over many steps, nothing left at the end."""

from __future__ import annotations

import gc
import random

import torch
from gpus import nccl_worlds
from play import stages
from scenario import Parameters
from world import rank_device, run_world

import dynzero

STEPS = 200
SIDE = 700_000  # elements of each of 24 parameters: 64 MB in float32
BUCKET = 8 << 20


def corner_loss(model: Parameters, step: int, rank: int) -> torch.Tensor:
    """Others than in the step before, all in the first two; inf now and then, on one rank.

    Twenty active sets come again and again, so that all their plans are cached early on.
    """
    lot = random.Random(f"{step % 20} {rank}")
    params = [p for p in model.parameters() if step < 2 or lot.random() < 0.5]
    factor = float("inf") if step % 7 == 3 and (step + rank) % 2 else 1.0
    return sum((p[0] for p in params), next(model.parameters())[0]) * factor


def irregular_run(rank: int, world: int, stage: int) -> tuple[int, list[int], int]:
    """Bytes allocated before there is a model, after each step, and after all is deleted."""
    (torch.ones(8, device=rank_device(), requires_grad=True) * 2).sum().backward()
    gc.collect()
    start = torch.cuda.memory_allocated()
    tensors = {f"p{i}": torch.ones(SIDE, dtype=torch.float16) for i in range(12)}
    tensors |= {f"q{i}": torch.ones(SIDE) for i in range(12)}
    model = Parameters(**tensors).to(rank_device())
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=1e-3, stage=stage, bucket_bytes=BUCKET,
        loss_scale=dynzero.LossScale(init=8.0, window=5, on_minimum="continue"), max_grad_norm=1.0,
    )  # fmt: skip
    after = []
    for step in range(STEPS):
        opt.backward(corner_loss(model, step, rank))
        opt.step()
        opt.zero_grad()
        after.append(torch.cuda.memory_allocated())
    assert opt.counters["skipped"] > STEPS // 20, "overflows are part of the run"
    del opt, model, tensors
    gc.collect()
    return start, after, torch.cuda.memory_allocated()


@stages
@nccl_worlds
def test_case_31_memory_on_cuda(world: int, stage: int) -> None:
    # Ranks that share a GPU send 20 GB through sockets.
    runs = run_world(world, irregular_run, stage, backend="nccl", timeout=240.0)
    for start, after, end in runs:
        assert max(after[2:]) - min(after[2:]) < BUCKET
        assert max(after[-20:]) <= max(after[20:60]) + (64 << 10), "grows"
        assert end == start, "left after the optimizer and the model are gone"


def building(rank: int, world: int, stage: int) -> tuple[int, int, int]:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
    model.to(rank_device())
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, stage=stage)
    peak, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del opt
    return start, peak, now


@stages
@nccl_worlds
def test_case_31_construction_on_cuda(world: int, stage: int) -> None:
    """64 MB of parameters: one of them is copied at a time, and no state is made yet."""
    for start, peak, now in run_world(world, building, stage, backend="nccl"):
        assert peak - start < 2 * (4 << 20)
        assert now - start < 1 << 20
