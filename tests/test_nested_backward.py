"""Re-entrant checkpointing runs a backward inside a backward: still one round, with equal bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from world import run_world

import dynzero


def checkpointed(
    rank: int, world: int, stage: int, head: bool, reentrant: bool
) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(6, 2)})
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=0.1, stage=stage, fused=False
    )
    torch.manual_seed(1 + rank)
    rounds = 0
    for _ in range(3):
        y = torch.randn(4, 6, requires_grad=True)
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=reentrant)
        opt.backward((model["head"](y) if head else y).square().sum())
        rounds = max(rounds, opt._window.rounds)
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()], rounds


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_has_the_bits_of_stage_1(world: int, head: bool, reentrant: bool) -> None:
    expected = run_world(world, checkpointed, 1, head, reentrant)[0][0]
    for params, rounds in run_world(world, checkpointed, 2, head, reentrant):
        assert rounds <= 1, "a nested backward is no round of its own"
        assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def clip_a_bad_window(rank: int, world: int, stage: int) -> object:
    p = nn.Parameter(torch.ones(3))
    q = nn.Parameter(torch.ones(2))
    opt = dynzero.ZeroOptimizer([("p", p), ("q", q)], torch.optim.SGD, lr=1.0, stage=stage)
    opt.backward(p.sum() + (q * (float("inf") if rank == world - 1 else 1.0)).sum())
    assert not torch.isfinite(opt.clip_grad_norm_(1.0))
    opt.step()
    return opt.last_step.overflow


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_clipping_blames_nobody_else(world: int, stage: int) -> None:
    for overflow in run_world(world, clip_a_bad_window, stage):
        assert overflow == [("q", world - 1, "inf")]
