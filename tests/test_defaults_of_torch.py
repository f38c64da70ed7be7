"""torch's default dtype and device are the user's business."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from scenario import Parameters, weighted

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
