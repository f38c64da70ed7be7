"""Hooks around step() and its range in a profile are those of any torch optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

import dynzero


def build(cls: type = dynzero.ZeroOptimizer) -> Any:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return cls([p], torch.optim.SGD, lr=0.5)


class Derived(dynzero.ZeroOptimizer):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def with_hooks(opt: Any) -> list[str]:
    """What hooks of all kinds see around one step."""
    seen: list[str] = []
    value = opt.param_groups[0]["params"][0]

    def hook(name: str) -> Any:
        def note(who: Any, args: Any, kwargs: Any) -> None:
            assert who is opt
            seen.append(f"{name} {value[0].item()}")

        return note

    handles = [
        opt.register_step_pre_hook(hook("pre")),
        opt.register_step_post_hook(hook("post")),
        torch_optimizer.register_optimizer_step_pre_hook(hook("global pre")),
        torch_optimizer.register_optimizer_step_post_hook(hook("global post")),
    ]
    opt.step()
    for handle in handles:
        handle.remove()
    opt.step()
    return seen


def test_hooks_run_once_and_in_the_order_of_torch() -> None:
    plain = torch.optim.SGD([Parameter(torch.ones(3))], lr=0.5)
    plain.param_groups[0]["params"][0].grad = torch.ones(3)
    expected = with_hooks(plain)
    assert len(expected) == 4
    assert with_hooks(build()) == with_hooks(build(Derived)) == expected


@pytest.mark.parametrize("place", ["optimizer", "all"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_each_kind_of_hook_is_enough(place: str, when: str) -> None:
    opt, seen = build(), []
    owner, name = (
        (opt, "register") if place == "optimizer" else (torch_optimizer, "register_optimizer")
    )
    handle = getattr(owner, f"{name}_step_{when}_hook")(lambda *args: seen.append(args))
    opt.step()
    handle.remove()
    assert seen == [(opt, (opt,), {})]


def test_a_hook_may_replace_the_arguments() -> None:
    opt = build()
    opt.register_step_pre_hook(lambda who, args, kwargs: ((who, lambda: 7.0), {}))
    assert opt.step() == 7.0


def test_the_profiler_sees_the_step() -> None:
    opt = build()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        opt.step()
    names = [event.name for event in prof.events()]
    assert names.count("Optimizer.step#ZeroOptimizer.step") == 1


def test_a_scheduler_knows_the_step() -> None:
    opt = build()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    opt.step()
    scheduler.step()
    opt.step()
    assert opt.param_groups[0]["params"][0].tolist() == [0.25] * 3
