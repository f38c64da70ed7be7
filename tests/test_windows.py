"""Windows of several backward passes, in and outside no_sync(), whose numbers differ by rank."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from oracle import Replica
from play import assert_close, assert_same_bits, stages, worlds
from scenario import Turn, data, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import rank_device, run_world

import dynzero

ADAMW = (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1})
STEPS = 3
# Backward passes by rank; in the last step rank 1 has none.
MICROS = ((3, 1, 2), (1, 3, 2), (2, 0, 1))
# Which optimizers there are, by the parts of the model that each has, and how the body runs.
KINDS: dict[str, tuple[tuple[tuple[str, ...], ...], bool | None]] = {
    "one optimizer over two models": ((("body", "heads"),), None),
    "two optimizers over one loss": ((("body",), ("heads",)), None),
    "re-entrant checkpointing": ((("body", "heads"),), True),
    "other checkpointing": ((("body", "heads"),), False),
    "two optimizers, re-entrant": ((("body",), ("heads",)), True),
}


def build() -> nn.ModuleDict:
    body = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    return nn.ModuleDict({"body": body, "heads": nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])})


def loss_of(model: nn.ModuleDict, reentrant: bool | None, turn: Turn) -> Tensor:
    """Another head by rank, step and micro-step; every third time only two layers."""
    body: Any = model["body"]
    heads: Any = model["heads"]
    x = data(turn, 5, 4, like=body[0].weight).requires_grad_()
    layers = body if (turn.step + turn.micro + turn.rank) % 3 else body[:2]
    for layer in layers:
        x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
    return heads[(turn.rank + turn.step + turn.micro) % 2](torch.tanh(x)).square().mean()


def model_of(device: torch.device | str = "cpu") -> nn.ModuleDict:
    torch.manual_seed(0)
    return build().to(device)


def train(rank: int, world: int, stage: int, kind: str, local: str) -> list[dict[str, Tensor]]:
    """local: which backward passes of a window are inside no_sync()."""
    parts, reentrant = KINDS[kind]
    model = model_of(rank_device())
    cls, options = ADAMW
    opts = [
        dynzero.ZeroOptimizer(
            [(f"{part}.{n}", p) for part in some for n, p in model[part].named_parameters()],
            cls, stage=stage, **options,
        )
        for some in parts
    ]  # fmt: skip
    seen = []
    for step in range(STEPS):
        micros = MICROS[step][rank]
        for micro in range(micros):
            deferred = local == "all" or (local == "all but the last" and micro < micros - 1)
            with contextlib.ExitStack() as stack:
                for opt in opts if deferred else []:
                    stack.enter_context(opt.no_sync())
                loss_of(model, reentrant, Turn(step, micro, rank, world)).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        seen.append(snapshot(model))
    return seen


def oracle(world: int, reentrant: bool | None, device: str) -> list[dict[str, Tensor]]:
    model = model_of(device)
    replica = Replica(model, model.named_parameters(), *ADAMW, world=world)
    seen = []
    for step in range(STEPS):
        turns = [
            [Turn(step, micro, rank, world) for micro in range(MICROS[step][rank])]
            for rank in range(world)
        ]
        replica.collect([[partial(loss_of, model, reentrant, t) for t in some] for some in turns])
        replica.step()
        seen.append(snapshot(model))
    return seen


@stages
@worlds(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("local", ["none", "all but the last", "all"])
def test_window_of_several_backwards(
    world: int, backend: str, stage: int, kind: str, local: str
) -> None:
    expected = oracle(world, KINDS[kind][1], "cpu" if backend == "gloo" else "cuda:0")
    results = run_world(world, train, stage, kind, local, backend=backend)
    for rank, seen in enumerate(results):
        for step, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
            for name, value in theirs.items():
                assert_close(ours[name], value, f"rank {rank}, step {step}, {name}")
                assert_same_bits(ours[name], results[0][step][name], f"rank {rank}, {name}")


def tiny_after_one(
    rank: int, world: int, stage: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    p = nn.Parameter(torch.zeros(9, dtype=dtype, device=rank_device()))
    opt = dynzero.ZeroOptimizer([p], torch.optim.SGD, lr=1.0, stage=stage)
    for value in [1.0] + [torch.finfo(dtype).eps / 4] * 8:
        opt.backward((p * value).sum())
    mean = opt.full_grad(p)
    assert mean is not None
    return mean.cpu(), None if p.grad is None else p.grad.float().cpu()


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_add_up_in_float32_in_stage_2(
    world: int, backend: str, stage: int, dtype: torch.dtype
) -> None:
    """1 and eight times a quarter of the last place: 16 bits stay at 1, as torch does."""
    whole = 1.0 + 2.0 * torch.finfo(dtype).eps
    in_float32 = stage == 2 and world > 1
    for mean, grad in run_world(world, tiny_after_one, stage, dtype, backend=backend):
        assert mean.tolist() == [whole if in_float32 else 1.0] * 9
        if grad is not None and not in_float32:
            assert grad.tolist() == [1.0] * 9
