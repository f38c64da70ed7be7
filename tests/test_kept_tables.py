"""What is kept from one call to the next is looked at again where it may have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpus import needs_gpus
from play import stages, worlds
from scenario import Parameters
from torch import nn
from world import message_of, rank_device, run_world

import dynzero
from dynzero.reduced import Uploaded


def fill(group: dict[str, Any], value: float) -> None:
    group["lr"].fill_(value)


def edit(group: dict[str, Any], value: float) -> None:
    group["lr"].data.numpy()[...] = value


def in_place(rank: int, world: int, stage: int, change: Callable[..., None]) -> tuple[str, Any]:
    """A learning rate in a tensor on the CPU, changed after a step on the last rank alone."""
    a = nn.Parameter(torch.ones(5, device=rank_device()))
    lr = torch.tensor(0.5)
    opt = dynzero.ZeroOptimizer([("a", a)], torch.optim.Adam, lr=lr, stage=stage)
    opt.backward(a.sum())
    opt.step()
    opt.zero_grad()
    if rank == world - 1:
        change(opt.param_groups[0], 0.25)
    opt.backward(a.sum())
    message = message_of(ValueError, opt.step)
    change(opt.param_groups[0], 0.5)
    opt.step()
    return message, a.detach().cpu()


@worlds(2)
@stages
@pytest.mark.parametrize("change", [fill, edit])
def test_a_tensor_lr_changed_on_one_rank_is_noticed(
    world: int, backend: str, stage: int, change: Callable[..., None]
) -> None:
    a = nn.Parameter(torch.ones(5))
    plain = torch.optim.Adam([a], lr=0.5)
    for _ in range(2):
        a.grad = torch.ones(5)
        plain.step()
    for message, got in run_world(world, in_place, stage, change, backend=backend):
        assert "lr" in message and "0.25" in message and f"rank {world - 1}" in message
        torch.testing.assert_close(got, a.detach())


def test_a_refused_option_is_refused_again() -> None:
    a = nn.Parameter(torch.ones(5))
    opt = dynzero.ZeroOptimizer([("a", a)], torch.optim.AdamW, lr=1.0)
    opt.param_groups[0]["amsgrad"] = True
    a.grad = torch.ones(5)
    for _ in range(3):
        with pytest.raises(ValueError, match="amsgrad"):
            opt.step()
    assert torch.equal(a.detach(), torch.ones(5))


def test_zeros_of_absent_parameters_are_of_this_step() -> None:
    a, b = nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(5000))
    opt = dynzero.ZeroOptimizer([("a", a), ("b", b)], torch.optim.SGD, lr=1.0, absent="zero")
    taken = []  # the memory where the zeros were
    for _ in range(6):
        a.grad = torch.ones(5000) if a.grad is None else a.grad
        opt.step()
        taken += [torch.full((5000,), 7.0) for _ in range(3)]
    assert torch.equal(a.detach(), torch.full((5000,), -5.0))
    assert torch.equal(b.detach(), torch.ones(5000))


def grown_in_a_window(rank: int, world: int) -> tuple[Any, Any]:
    """Reduced for a norm, then more parameters, then a step with nothing more to reduce."""
    device = rank_device()
    model = Parameters(a=torch.ones(9, device=device), b=torch.ones(3, device=device))
    opt = dynzero.ZeroOptimizer([("a", model.a)], torch.optim.SGD, lr=1.0, stage=2)
    opt.backward((model.a * (rank + 1.0)).sum())
    opt.grad_norm()
    more = [(f"more{i}", nn.Parameter(torch.ones(3, device=device))) for i in range(9)]
    opt.add_param_group({"params": [("b", model.b), *more]})
    opt.step()
    return model.a.detach().cpu(), model.b.detach().cpu()


@worlds(2)
def test_a_window_grows_after_its_last_reduction(world: int, backend: str) -> None:
    for a, b in run_world(world, grown_in_a_window, backend=backend):
        assert torch.equal(a, torch.full((9,), 1 - 1.5))
        assert torch.equal(b, torch.ones(3))


@pytest.mark.cuda
@needs_gpus(1)
def test_a_table_is_not_used_again_while_another_stream_reads_it() -> None:
    device = torch.device("cuda")
    first, second = torch.arange(100_000), torch.arange(100_000) + 7
    side = torch.cuda.Stream()
    for _ in range(2):  # the first time kernels are loaded, which waits for those that run
        uploaded = Uploaded(device)
        uploaded.of(first)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)  # cycles, more than half a second
            read = uploaded.of(first).clone()
        uploaded.of(second)
        others = [torch.full_like(second, -1, device=device) for _ in range(8)]
        torch.cuda.synchronize()
        assert torch.equal(read.cpu(), first)
        del others
