"""Cases 14-17 of the public reports: accumulation, shared weights, several passes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from models import mixed, two_heads
from oracle import Replica
from play import assert_close, assert_same_bits, check, make, stages, worlds
from scenario import Parameters, Scenario, Turn, data, snapshot, weighted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import rank_device, run_world

SGD_1 = (torch.optim.SGD, {"lr": 1.0})
ADAMW = (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1})


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def quarter_loss(model: nn.Module, turn: Turn) -> Tensor:
    return model(data(turn, 3, 6, like=model[0].weight)).square().mean() / 4


def four(step: int, rank: int) -> int:
    return 4


def one_three_two(step: int, rank: int) -> int:
    return (1, 3, 2)[step]


def joined_loss(model: nn.Module, turn: Turn) -> Tensor:
    """The four micro-batches as one batch."""
    parts = [data(turn._replace(micro=m), 3, 6, like=model[0].weight) for m in range(4)]
    return model(torch.cat(parts)).square().mean()


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [None, False])
def test_case_14_accumulation(
    world: int, backend: str, stage: int, dtype: torch.dtype, fused: bool | None
) -> None:
    """bf16: a bf16 `p.grad` as torch in stages 0 and 1, a float32 shard in stage 2."""
    exact = fused is False and backend == "gloo"
    for micros, steps in ((four, 2), (one_three_two, 3)):
        scenario = Scenario(small_net, quarter_loss, *ADAMW, steps, micros, dtype=dtype)
        check(scenario, world, backend=backend, exact=exact, stage=stage, fused=fused)


@stages
@worlds(1, 2)
def test_case_14_equals_the_joined_batch(world: int, backend: str, stage: int) -> None:
    in_four = Scenario(small_net, quarter_loss, *SGD_1, steps=1, micros=four)
    at_once = Scenario(small_net, joined_loss, *SGD_1, steps=1)
    parts = check(in_four, world, backend=backend, stage=stage)
    whole = check(at_once, world, backend=backend, stage=stage)
    for name, value in whole.params[-1].items():
        assert_close(parts.params[-1][name], value, name)
    assert parts.norms == pytest.approx(whole.norms, rel=1e-5)


@stages
@worlds(1, 2, 3)
def test_case_14_other_heads_by_micro_step(world: int, backend: str, stage: int) -> None:
    scenario = two_heads(mixed, steps=3, micros=one_three_two)
    check(scenario, world, backend=backend, every_state=True, stage=stage)


class Identity3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(3))
            self.layer.bias.zero_()


def shared_loss(reentrant: bool | None, ranks: int, model: nn.Module, turn: Turn) -> Tensor:
    """checkpoint(L, x) + checkpoint(L, 2x) on the first `ranks` ranks, another layer elsewhere."""
    x = torch.ones(1, 3, device=model.layer.weight.device, requires_grad=True)
    if turn.rank >= ranks:
        return model.other(x).sum()
    if reentrant is None:
        return (model.layer(x) + model.layer(2 * x)).sum()
    once = checkpoint(model.layer, x, use_reentrant=reentrant)
    twice = checkpoint(model.layer, 2 * x, use_reentrant=reentrant)
    return (once + twice).sum()


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("reentrant", [True, False, None])
@pytest.mark.parametrize("everywhere", [True, False])
def test_case_15_weight_used_twice(
    world: int, backend: str, stage: int, reentrant: bool | None, everywhere: bool
) -> None:
    ranks = world if everywhere else 1
    scenario = Scenario(Identity3, partial(shared_loss, reentrant, ranks), *SGD_1, steps=2)
    record = check(scenario, world, backend=backend, stage=stage)
    expected = 1.0 - 3.0 * ranks / world
    assert float(record.params[1]["layer.weight"][0, 0]) == pytest.approx(expected, abs=1e-6)


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.a(hidden).square().mean(), self.b(hidden).square().mean()


def two_losses(model: nn.Module, turn: Turn) -> tuple[Tensor, Tensor]:
    return model(data(turn, 5, 4, like=model.a.weight))


def two_backwards(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Step 0: both losses count. Step 1: the first is read and cleared, the second counts."""
    scenario = Scenario(TwoLosses, two_losses, *ADAMW)
    model = scenario.model(rank_device())
    opt = make(scenario, model, stage=stage)
    first, second = two_losses(model, Turn(0, 0, rank, world))
    opt.backward(first, retain_graph=True)
    opt.backward(second)
    opt.step()
    opt.zero_grad()
    after_both = snapshot(model)
    first, second = two_losses(model, Turn(1, 0, rank, world))
    opt.backward(first, retain_graph=True)
    grads = {name: opt.full_grad(p) for name, p in model.named_parameters()}
    opt.zero_grad()
    opt.backward(second)
    opt.step()
    return {
        "both": after_both,
        "grads": {name: None if g is None else g.cpu() for name, g in grads.items()},
        "end": snapshot(model),
        "active": set(opt.last_step.active),
    }


@stages
@worlds(1, 2, 3)
def test_case_16_two_backwards_over_one_graph(world: int, backend: str, stage: int) -> None:
    results = run_world(world, two_backwards, stage, backend=backend)
    twin = Scenario(TwoLosses, two_losses, *ADAMW).model()
    replica = Replica(twin, twin.named_parameters(), *ADAMW, world=world)

    def loss(step: int, which: slice, rank: int) -> Tensor:
        return torch.stack(two_losses(twin, Turn(step, 0, rank, world))[which]).sum()

    replica.collect([[partial(loss, 0, slice(0, 2), rank)] for rank in range(world)])
    replica.step()
    both = snapshot(twin)
    replica.collect([[partial(loss, 1, slice(0, 1), rank)] for rank in range(world)])
    read = replica.average_grads()
    replica.collect([[partial(loss, 1, slice(1, 2), rank)] for rank in range(world)])
    active = replica.step()
    for rank, result in enumerate(results):
        assert result["active"] == active
        for name in both:
            assert_close(result["both"][name], both[name], f"after both losses, {name}")
            assert_close(result["end"][name], snapshot(twin)[name], f"at the end, {name}")
            assert_same_bits(result["end"][name], results[0]["end"][name], f"rank {rank}, {name}")
            grad = result["grads"][name]
            assert (grad is None) == (name not in read), f"full_grad of {name}"
            if grad is not None:
                assert_close(grad, read[name], f"full_grad of {name}")


def three_weights() -> nn.Module:
    return Parameters(w1=torch.tensor(1.5), w2=torch.tensor(1.5), w3=torch.tensor(1.5))


def two_forwards(model: nn.Module, turn: Turn) -> Tensor:
    x = float(2 + turn.rank)
    forwards = [partial(weighted, model, {"w1": x}), partial(weighted, model, {"w2": x * x})]
    if turn.rank % 2:
        forwards.reverse()
    return forwards[0]() + forwards[1]()


@stages
@worlds(1, 2, 3)
def test_case_17_two_forwards_one_backward(world: int, backend: str, stage: int) -> None:
    scenario = Scenario(three_weights, two_forwards, *SGD_1, steps=2)
    exact = backend == "gloo" and world == 2  # sums of small integers over 2 are exact
    record = check(
        scenario, world, backend=backend, exact=exact, every_state=True, stage=stage, fused=False
    )
    assert record.active == [{"w1", "w2"}] * 2
    if world == 2:
        assert [float(record.params[1][name]) for name in ("w1", "w2", "w3")] == [-1.0, -5.0, 1.5]


def no_sync_rounds(rank: int, world: int, stage: int, deferred: bool) -> dict[str, Tensor]:
    """Three backwards a step, the first two inside no_sync() if `deferred`."""
    scenario = Scenario(small_net, quarter_loss, *ADAMW)
    model = scenario.model(rank_device())
    opt = make(scenario, model, stage=stage)
    for step in range(2):
        if deferred:
            with opt.no_sync():
                opt.backward(quarter_loss(model, Turn(step, 0, rank, world)))
                opt.backward(quarter_loss(model, Turn(step, 1, rank, world)))
        else:
            opt.backward(quarter_loss(model, Turn(step, 0, rank, world)))
            opt.backward(quarter_loss(model, Turn(step, 1, rank, world)))
        opt.backward(quarter_loss(model, Turn(step, 2, rank, world)))
        opt.step()
        opt.zero_grad()
    return snapshot(model)


@stages
@worlds(1, 2)
def test_case_14_no_sync_changes_rounding_only(world: int, backend: str, stage: int) -> None:
    eager = run_world(world, no_sync_rounds, stage, False, backend=backend)
    deferred = run_world(world, no_sync_rounds, stage, True, backend=backend)
    for rank in range(world):
        for name, value in eager[0].items():
            assert_close(deferred[rank][name], value, f"rank {rank}, {name}")
            assert_same_bits(deferred[rank][name], deferred[0][name], f"rank {rank}, {name}")
