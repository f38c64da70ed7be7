"""Hooks around step() and its range in a profile are those of any torch optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

import dynzero


def build(cls: type = dynzero.ZeroOptimizer, optimizer: Any = torch.optim.SGD, **zero: Any) -> Any:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return cls([p], optimizer, lr=0.5, **zero)


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


class Own(torch.optim.SGD):
    """Calls the step of its base class, and has a hook of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.register_step_post_hook(lambda *args: self.calls.append("own"))

    calls: list[str] = []

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Own])
def test_hooks_for_all_optimizers_see_the_users_only(optimizer: Any) -> None:
    """Not those that a class is tried out with, nor the one that works on the pieces."""
    seen: list[Any] = []
    torch.optim.SGD([Parameter(torch.ones(3))], lr=0.5)  # its step is hooked from now on
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda who, *args: seen.append(who)),
        torch_optimizer.register_optimizer_step_post_hook(lambda who, *args: seen.append(who)),
    ]
    opt = build(optimizer=optimizer, fused=False)
    assert seen == []
    Own.calls.clear()
    opt.step()
    assert seen == [opt, opt]
    assert bool(Own.calls) == (optimizer is Own)
    handles[0].remove()
    opt.step()
    assert seen == [opt] * 3
    handles[1].remove()
    assert opt.param_groups[0]["params"][0].tolist() == [0.0] * 3


def test_a_hook_for_all_optimizers_may_build_and_step_one() -> None:
    steps: list[Any] = []

    def start_another(who: Any, *args: Any) -> None:
        if not steps:
            steps.append(who)
            steps.append(build(fused=False))
            steps[1].step()

    handle = torch_optimizer.register_optimizer_step_pre_hook(start_another)
    opt = build(fused=False)
    for _ in range(2):
        opt.step()
    handle.remove()
    assert steps[0] is opt and not torch_optimizer._global_optimizer_pre_hooks
    assert opt.param_groups[0]["params"][0].tolist() == [0.0] * 3


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
