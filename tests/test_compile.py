"""torch.compile'd models with LayerDrop-like branches train as the eager oracle says."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from oracle import play_oracle
from play import assert_equals_oracle, assert_ranks_agree, oracle_options, play, stages
from scenario import Scenario, Turn, data
from torch import Tensor, nn
from world import run_world

# torch.compile gives up after 8 recompilations of one function; each pattern costs one.
PATTERNS = ((True, False, True), (False, True, False), (True, False, False))


class Blocks(nn.Module):
    """Residual blocks, of which some are left out, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in PATTERNS[0]])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, kept: tuple[bool, ...]) -> Tensor:
        for block, keep in zip(self.blocks, kept, strict=True):
            if keep:
                x = x + torch.tanh(block(x))
        return self.head(x)


def build(backend: str | None) -> nn.Module:
    model = Blocks()
    if backend == "inductor":
        torch._inductor.config.compile_threads = 1  # rank processes may have no children
    if backend is not None:
        torch._dynamo.reset()
        model.compile(backend=backend, fullgraph=True)
    return model


def dropped_loss(model: nn.Module, turn: Turn) -> Tensor:
    """Each rank draws its own blocks; with accumulation, each micro-step again."""
    kept = random.Random(f"{turn.step} {turn.rank} {turn.micro}").choice(PATTERNS)
    x = data(turn, 5, 6, like=next(model.parameters()))
    return model(x, kept).square().mean()


def two_rounds(step: int, rank: int) -> int:
    return 1 + step % 2


def scenario(backend: str | None) -> Scenario:
    return Scenario(
        build=partial(build, backend),
        loss=dropped_loss,
        optimizer=torch.optim.AdamW,
        options={"lr": 0.05, "weight_decay": 0.1},
        steps=6,
        micros=two_rounds,
    )


def check_compiled(stage: int, backend: str) -> None:
    zero = {"stage": stage, "max_grad_norm": 1.0}
    records = run_world(2, play, scenario(backend), zero, timeout=280.0)
    assert_ranks_agree(records)
    expected = play_oracle(scenario(None), 2, **oracle_options(zero, 2))
    assert any(len(active) < 8 for active in expected.active), "some block is dropped by all"
    assert_equals_oracle(records[0], expected, exact=False)


@stages
def test_compiled_with_aot_eager(stage: int) -> None:
    check_compiled(stage, "aot_eager")


def inductor_works(rank: int, world: int) -> str:
    """Why not, or nothing."""
    model = build("inductor")
    try:
        model(torch.ones(2, 6), PATTERNS[0]).sum().backward()
    except Exception as error:
        return f"torch.compile with inductor cannot run here: {type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(600)
def test_compiled_with_inductor() -> None:
    """In the stage whose hooks run in backward; the C++ compiler takes long for each pattern."""
    reason = run_world(2, inductor_works, timeout=280.0)[0]
    if reason:
        pytest.skip(reason)
    check_compiled(2, "inductor")
