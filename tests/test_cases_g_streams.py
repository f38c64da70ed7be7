"""Case 30 of the public reports: gradients written on other streams, memory in use when freed."""

from __future__ import annotations

import hashlib
import random
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from gpus import nccl_worlds
from oracle import Replica
from play import stages
from torch import Tensor, nn
from world import rank_device, run_world

import dynzero

STEPS, WIDTH, LAYERS, LR = 50, 256, 20, 1e-3
LOOKED = (0, 5, STEPS - 1)  # steps whose values are compared with torch's
TOLERANCE = 0.05  # of a step of size LR; on a CPU the difference is 0.0002 of it
SLEEP = 4_000_000  # clock cycles, about 2 ms
BUCKET = 3 * WIDTH * WIDTH * 4  # several layers in each, and several buckets


class Disturbance(NamedTuple):
    """side: a stream for every third layer, delays before their gradients; junk: seed or None."""

    side: bool
    junk: int | None


CALM, STORM = Disturbance(False, None), Disturbance(True, 1)


class Hold(torch.autograd.Function):
    """Identity whose backward keeps its stream busy, then fills memory that looks free with NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lot: random.Random) -> Tensor:
        ctx.lot = lot
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(SLEEP)
        litter(ctx.lot)
        return grad, None


def litter(lot: random.Random) -> None:
    """Takes memory of random sizes, a layer's among them, writes NaN to it and gives it back."""
    sizes = [lot.choice([WIDTH, WIDTH * WIDTH, lot.randrange(1, 1 << 20)]) for _ in range(6)]
    kept = [torch.full((size,), float("nan"), device=rank_device()) for size in sizes]
    del kept


def forward(model: nn.ModuleList, step: int, rank: int, how: Disturbance, side: Any) -> Tensor:
    x = torch.sin(torch.arange(8.0 * WIDTH, device=rank_device()).view(8, WIDTH) * (step + 1))
    lot = random.Random(f"{how.junk} {step} {rank}")
    main = torch.cuda.current_stream()
    for i, layer in enumerate(model):
        if (i + step + rank) % 7 == 0:  # left out here, as with LayerDrop
            continue
        if how.side and i % 3 == 1:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y = Hold.apply(layer(x), lot)
            main.wait_stream(side)
            # Each is used on a stream that has not allocated it, as torch asks.
            x.record_stream(side)
            y.record_stream(main)
            x = x + y
        else:
            x = x + layer(x)
        if how.junk is not None and i % 5 == 0:
            litter(lot)
    return x.square().mean()


def layers(compiled: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.ModuleList(blocks).to(rank_device())
    for block in model if compiled else []:
        block.compile()
    return model


def micros(step: int) -> list[int]:
    """The numbers of a step's batches: in every fifth there are two, the second adds in place."""
    return [step, step + 100] if step % 5 == 0 else [step]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(
    rank: int, world: int, stage: int, how: Disturbance, bucket_bytes: int, compiled: bool
) -> tuple[list[str], list[Tensor]]:
    """Digests of all parameters after each step; on the first rank also the calm run's values."""
    model = layers(compiled)
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=LR, stage=stage, max_grad_norm=1.0,
        bucket_bytes=bucket_bytes,
    )  # fmt: skip
    side, after = torch.cuda.Stream(), []
    for step in range(STEPS):
        for number in micros(step):
            opt.backward(forward(model, number, rank, how, side))
        opt.step()
        opt.zero_grad()
        after.append(flat(model))
    after = [values.cpu() for values in after]
    looked = [after[step] for step in LOOKED] if rank == 0 and how == CALM else []
    return [hashlib.sha256(values.numpy().tobytes()).hexdigest() for values in after], looked


def train_plain(rank: int, world: int, by_round: bool) -> list[Tensor]:
    """The values by torch's AdamW, in this process alone."""
    model = layers(compiled=False)
    replica = Replica(
        model, model.named_parameters(), torch.optim.AdamW, {"lr": LR}, world=world,
        max_grad_norm=1.0, by_round=by_round,
    )  # fmt: skip
    looked = []
    for step in range(STEPS if rank == 0 else 0):
        replica.collect(
            [
                [partial(forward, model, number, r, CALM, None) for number in micros(step)]
                for r in range(world)
            ]
        )
        replica.step()
        if step in LOOKED:
            looked.append(flat(model).cpu())
    return looked


def assert_equals_plain(looked: list[Tensor], stage: int, world: int, **where: Any) -> None:
    """Rounding differs, and Adam makes steps of gradients that are nothing but rounding."""
    expected = run_world(world, train_plain, stage == 2 and world > 1, **where)[0]
    for step, ours, theirs in zip(LOOKED, looked, expected, strict=True):
        off = (ours - theirs).abs().max().item()
        assert off < TOLERANCE * LR, f"step {step}: {off}"


def check_storm(world: int, stage: int, compiled: bool) -> None:
    runs = [
        run_world(world, train, stage, how, bucket_bytes, compiled, backend="nccl", timeout=280.0)
        for how, bucket_bytes in ((CALM, 64 << 20), (STORM, BUCKET), (STORM, 1))
    ]
    assert_equals_plain(runs[0][0][1], stage, world, backend="nccl", timeout=280.0)
    calm, storm, tiny = ([digests for digests, _ in results] for results in runs)
    assert len(set(calm[0])) == STEPS, "every step changes the parameters"
    for rank in range(world):
        assert calm[rank] == calm[0]
        assert storm[rank] == calm[0], "delays or reused memory reach the result"
        assert tiny[rank] == calm[0]


@stages
@nccl_worlds
def test_case_30_streams_and_lifetimes(world: int, stage: int) -> None:
    check_storm(world, stage, compiled=False)


def inductor_works(rank: int, world: int) -> str:
    """Why not, or nothing."""
    try:
        torch.compile(lambda x: torch.tanh(x) + 1)(torch.ones(8, device=rank_device()))
    except Exception as error:
        return f"torch.compile with inductor cannot run here: {type(error).__name__}: {error}"
    return ""


@stages
@nccl_worlds
def test_case_30_compiled(world: int, stage: int) -> None:
    reason = run_world(world, inductor_works, backend="nccl", timeout=200.0)[0]
    if reason:
        pytest.skip(reason)
    check_storm(world, stage, compiled=True)
