"""Cases 25-27 of the public reports: kinds of parameters and of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import HALVES
from play import check, make, play, stages, worlds
from scenario import Parameters, Scenario, Turn, data, named
from torch import Tensor, nn
from world import rank_device, run_world

ADAMW = (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1})
KINDS = ("fp16", "bf16", "norm", "scale", "wave", "fp64")


class MixedKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp16 = nn.Linear(4, 4, dtype=torch.float16)
        self.bf16 = nn.Linear(4, 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.wave = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.fp64 = nn.Linear(4, 2, dtype=torch.float64)

    def term(self, kind: str, turn: Turn) -> Tensor:
        if kind in ("fp16", "bf16", "fp64", "norm"):
            layer = getattr(self, kind)
            inputs = data(turn, 3, 4, like=layer.weight)
            return (layer(inputs) - inputs[:, :1]).float().square().mean()
        if kind == "scale":
            return (self.scale - data(turn, like=self.scale)).square()
        target = data(turn, 5, 2, like=self.scale)
        return (torch.view_as_real(self.wave) - target).square().mean()


def all_but_one(model: nn.Module, turn: Turn) -> Tensor:
    """Each kind is absent in turn, on all ranks; another one on rank 1 only."""
    left_out = {KINDS[turn.step % len(KINDS)]}
    if turn.rank == 1:
        left_out.add(KINDS[(turn.step + 2) % len(KINDS)])
    terms = [model.term(kind, turn).double() for kind in KINDS if kind not in left_out]
    return torch.stack(terms).sum()


def split_groups(model: nn.Module) -> list[dict[str, Any]]:
    """A group per kind, in another order and each with its own rate."""
    return [
        {
            "params": [(n, p) for n, p in model.named_parameters() if n.split(".")[0] == kind],
            "lr": 0.02 * (number + 1),
        }
        for number, kind in enumerate(reversed(KINDS))
    ]


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("groups", [named, split_groups])
@pytest.mark.parametrize("fused", [None, False])
def test_case_25_mixed_kinds(
    world: int, backend: str, stage: int, groups: Any, fused: bool | None
) -> None:
    scenario = Scenario(MixedKinds, all_but_one, *ADAMW, steps=7, groups=groups)
    exact = fused is False and backend == "gloo" and world <= 2
    options = {"stage": stage, "fused": fused, "bucket_bytes": 100}
    record = check(scenario, world, backend=backend, exact=exact, every_state=True, **options)
    for name, value in record.params[0].items():
        assert record.params[-1][name].dtype == value.dtype
        assert record.params[-1][name].shape == value.shape
        assert ("master" in record.states[-1][name]) == (value.dtype in HALVES)


def strided() -> nn.Module:
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return Parameters(
        transposed_grad=torch.randn(3, 5),
        both_last=channels_last,
        param_last=channels_last.clone(),
        expanded_grad=torch.randn(4, 3),
        transposed=torch.randn(5, 3).t(),
        size_1=torch.randn(1, 4, 1),
        odd_offset=torch.randn(7),
        gaps=torch.randn(4, 6)[:, ::2],
        reordered=torch.randn(2, 3, 4).permute(2, 0, 1),
    )


def strided_grads(model: nn.Module, turn: Turn) -> None:
    """Writes `.grad` by hand, with strides of our choice; rank 1 lacks every other one."""
    like = model.size_1

    def numbers(*shape: int) -> Tensor:
        return data(turn, *shape, like=like)

    grads = {
        "transposed_grad": numbers(5, 3).t(),
        "both_last": numbers(2, 4, 4, 3).permute(0, 3, 1, 2),
        "param_last": numbers(2, 3, 4, 4),
        "expanded_grad": numbers(1, 1).expand(4, 3),
        "transposed": numbers(3, 5),
        "size_1": numbers(4, 1, 1).permute(1, 0, 2),
        "odd_offset": numbers(8)[1:],
        "gaps": numbers(4, 3),
        "reordered": numbers(4, 2, 3),
    }
    for number, (name, grad) in enumerate(grads.items()):
        if not (turn.rank == 1 and (number + turn.step) % 2):
            model.get_parameter(name).grad = grad


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [None, False])
def test_case_26_strides(
    world: int, backend: str, stage: int, dtype: torch.dtype, fused: bool | None
) -> None:
    scenario = Scenario(strided, strided_grads, *ADAMW, steps=3, dtype=dtype)
    exact = fused is False and backend == "gloo" and world <= 2
    check(scenario, world, backend=backend, exact=exact, every_state=True, stage=stage, fused=fused)


def strides_before_and_after(rank: int, world: int, stage: int) -> list[tuple[Any, Any]]:
    model = Scenario(strided, strided_grads, *ADAMW).model(rank_device())
    before = [(p.stride(), p.data_ptr()) for p in model.parameters()]
    opt = make(Scenario(strided, strided_grads, *ADAMW), model, stage=stage)
    strided_grads(model, Turn(0, 0, rank, world))
    opt.step()
    after = [(p.stride(), p.data_ptr()) for p in model.parameters()]
    return list(zip(before, after, strict=True))


@stages
@worlds(1, 2)
def test_case_26_strides_are_kept(world: int, backend: str, stage: int) -> None:
    for pairs in run_world(world, strides_before_and_after, stage, backend=backend):
        for before, after in pairs:
            assert before == after


def embedding() -> nn.Module:
    return nn.Embedding(6, 3, padding_idx=4, sparse=True)


def sparse_rows(model: nn.Module, turn: Turn) -> Tensor | None:
    """Step 0: rows 0 5 / 1 5; step 1: padding only; step 2: rank 1 has none; step 3: as step 0."""
    own = [0, 5] if turn.rank % 2 == 0 else [1, 5]
    rows = [own, [4], [2] if turn.rank % 2 == 0 else None, own][turn.step]
    if rows is None:
        return None
    return model(torch.tensor(rows, device=model.weight.device)).sum()


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("fused", [None, False])
def test_case_27_sparse(world: int, backend: str, stage: int, fused: bool | None) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    scenario = Scenario(embedding, sparse_rows, torch.optim.SGD, options)
    exact = fused is False and backend == "gloo" and world <= 2
    record = check(scenario, world, backend=backend, exact=exact, stage=stage, fused=fused)
    assert record.active == [{"weight"}] * 4, "an empty sparse gradient is present"


@stages
def test_case_27_mean_of_rows(stage: int) -> None:
    scenario = Scenario(embedding, sparse_rows, torch.optim.SGD, {"lr": 1.0}, steps=1)
    record = run_world(2, play, scenario, {"stage": stage})[0]
    moved = record.params[0]["weight"] - record.params[1]["weight"]
    expected = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 1.0])[:, None].expand(6, 3)
    torch.testing.assert_close(moved, expected, atol=1e-6, rtol=0)
