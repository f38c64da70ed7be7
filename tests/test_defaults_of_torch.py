"""torch's default dtype and device are the user's business."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from play import stages, worlds
from scenario import Parameters, weighted
from world import rank_device, run_world

import dynzero
from dynzero import construction


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("fused", [None, False])
def test_a_group_is_added_under_another_default_dtype(fused: bool | None) -> None:
    finals = []
    for sharded in (True, False):
        model = Parameters(a=torch.ones(5), b=torch.ones(3, dtype=torch.float32))
        if sharded:
            opt = dynzero.ZeroOptimizer([model.a], torch.optim.AdamW, lr=0.1, fused=fused)
        else:
            opt = torch.optim.AdamW([model.a], lr=0.1)
        for step in range(3):
            if step == 1:
                opt.add_param_group({"params": [model.b]})
            weighted(model, {"a": 1.0 + step, "b": 2.0}).backward()
            opt.step()
            opt.zero_grad()
            model.b.grad = None
        finals.append(model)
    for name, p in finals[1].named_parameters():
        torch.testing.assert_close(finals[0].get_parameter(name), p, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "ASGD", "Adagrad", "Rprop"])
def test_a_class_is_tried_out_on_the_cpu(name: str) -> None:
    cls = getattr(torch.optim, name)
    _, expected = construction.probe(cls, {"lr": 0.1})
    with torch.device("meta"):
        _, state = construction.probe(cls, {"lr": 0.1})
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def under_a_default_device(rank: int, world: int, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All calls while tensors are made elsewhere: on the GPU, or nowhere where there is none."""
    device = rank_device()
    model = Parameters(a=torch.ones(5, device=device), b=torch.ones(3, device=device))
    with torch.device(device if device.type == "cuda" else "meta"):
        opt = dynzero.ZeroOptimizer(
            [model.a], torch.optim.AdamW, lr=0.1, stage=stage, loss_scale="dynamic"
        )
        for step in range(3):
            if step == 1:
                opt.add_param_group({"params": [model.b]})
                opt.load_state_dict(opt.full_state_dict())
            opt.backward((1.0 + step) * model.a.sum() + 2.0 * model.b.sum())
            opt.grad_norm(1.0)
            opt.clip_grad_norm_(100.0)
            opt.full_grad(model.a)
            opt.step()
            opt.zero_grad()
            model.b.grad = None
        opt.state_dict()
    return model.a.detach().cpu(), model.b.detach().cpu()


@worlds(1, 2)
@stages
def test_trains_under_another_default_device(world: int, backend: str, stage: int) -> None:
    model = Parameters(a=torch.ones(5), b=torch.ones(3))
    plain = torch.optim.AdamW([model.a], lr=0.1)
    for step in range(3):
        if step == 1:
            plain.add_param_group({"params": [model.b]})
        weighted(model, {"a": 1.0 + step, "b": 2.0}).backward()
        plain.step()
        plain.zero_grad()
        model.b.grad = None
    for a, b in run_world(world, under_a_default_device, stage, backend=backend):
        torch.testing.assert_close(a, model.a.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(b, model.b.detach(), rtol=1e-6, atol=1e-6)
