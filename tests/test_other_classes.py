"""Elementwise classes that are not torch's own, with state and groups as they like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import assert_same_bits, stages
from scenario import Parameters, weighted
from world import check_words, message_of, run_world

import dynzero


class Numbers(torch.optim.Optimizer):
    """Keeps numbers of all kinds, each of which shows in the next update."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, rate=1.0, count=torch.zeros((), dtype=torch.int64))
                    state.update(scale=torch.ones(()), slow=torch.zeros_like(p))
                state["step"] += 1
                state["rate"] *= 0.9
                state["count"] += 2
                state["scale"] *= 1.25
                state["slow"].mul_(0.5).add_(p.grad)
                number = sum(range(state["step"])) + state["rate"] + state["count"].item()
                p.sub_(state["slow"] * (group["lr"] * number) * state["scale"])


def model_ab() -> Parameters:
    return Parameters(a=torch.linspace(0, 1, 5), b=torch.tensor(2.0))


def resumed(rank: int, world: int, stage: int, form: str) -> tuple[Parameters, dict[str, Any]]:
    """Two steps, saved and loaded into a new optimizer, two more."""
    model = model_ab()
    saved: dict[str, Any] = {}
    for part in range(2):
        opt = dynzero.ZeroOptimizer(model.named_parameters(), Numbers, stage=stage)
        if saved:
            opt.load_state_dict(saved)
        for step in range(2):
            opt.backward(weighted(model, {"a": 1.0 + rank + step, "b": 2.0 + part}))
            opt.step()
            opt.zero_grad()
        saved = getattr(opt, form)()
    return model, opt.full_state_dict()


@stages
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", ["state_dict", "full_state_dict"])
def test_numbers_of_any_name_are_saved_and_loaded(world: int, stage: int, form: str) -> None:
    model = model_ab()
    plain = Numbers(model.named_parameters())
    for part in range(2):
        for step in range(2):
            model.a.grad = torch.full((5,), 1.0 + (world - 1) / 2 + step)
            model.b.grad = torch.tensor(2.0 + part)
            plain.step()
    for trained, saved in run_world(world, resumed, stage, form):
        for name, p in model.named_parameters():
            assert_same_bits(trained.get_parameter(name).detach(), p.detach(), name)
        for i, p in enumerate(model.parameters()):
            for key, value in plain.state[p].items():
                ours = saved["state"][i][key]
                assert type(ours) is type(value)
                assert_same_bits(torch.as_tensor(ours), torch.as_tensor(value), key)


class Counting(torch.optim.Optimizer):
    """Looks at the first parameter of each group, and counts the group's steps in its options."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        for group in self.param_groups:
            assert group["params"][0].dim() > 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            number = torch.tensor(group["count"], dtype=group["params"][0].dtype)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / number)


# Nobody has c before the last step.
USED = [{"a": 1.0}, {"b": 2.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 3.0}]


def model_abc() -> Parameters:
    return Parameters(a=torch.ones(5), b=torch.ones(2, 2), c=torch.ones(3))


def by_groups(rank: int, world: int, stage: int) -> tuple[Parameters, list[int]]:
    model = model_abc()
    groups = [{"params": [item], "lr": 0.1 + k} for k, item in enumerate(model.named_parameters())]
    opt = dynzero.ZeroOptimizer(groups, Counting, stage=stage)
    for step, factors in enumerate(USED):
        opt.backward(weighted(model, factors))
        opt.step()
        opt.zero_grad()
        if step == 1:
            opt.load_state_dict(opt.full_state_dict())
    return model, [group["count"] for group in opt.param_groups]


@stages
@pytest.mark.parametrize("world", [1, 2])
def test_groups_without_gradients_are_not_empty(world: int, stage: int) -> None:
    model = model_abc()
    plain = Counting([{"params": [p], "lr": 0.1 + k} for k, p in enumerate(model.parameters())])
    for factors in USED:
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, factors[name]) if name in factors else None
        plain.step()
    for trained, counts in run_world(world, by_groups, stage):
        assert counts == [4, 4, 4]
        for name, p in model.named_parameters():
            assert_same_bits(trained.get_parameter(name).detach(), p.detach(), name)


class Odd(torch.optim.SGD):
    """SGD with one more state, of a kind that its option names."""

    def __init__(self, params: Any, lr: float = 0.1, extra: str = "") -> None:
        super().__init__(params, lr=lr)
        self.extra = extra

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            makers = {
                "count": lambda p: torch.zeros(1),
                "pairs": lambda p: torch.zeros(p.numel(), 2),
                "past": lambda p: [torch.zeros_like(p)],
                "nested": lambda p: {"mean": {"slow": torch.zeros_like(p)}},
                "few": lambda p: [torch.zeros(()), 3],
            }
            self.state[p][self.extra] = makers[self.extra](p)


@pytest.mark.parametrize("kind", ["count", "pairs", "past", "nested"])
def test_state_that_is_not_by_element_is_refused(kind: str) -> None:
    params = model_ab().named_parameters()
    text = message_of(ValueError, dynzero.ZeroOptimizer, params, Odd, extra=kind)
    check_words(text, ["optimizer_class", "Odd", f"'{kind}'", "shape", "each element", "number"])


def test_numbers_in_a_list_are_no_reason_to_refuse() -> None:
    dynzero.ZeroOptimizer(model_ab().named_parameters(), Odd, extra="few")


def test_numbers_take_no_memory() -> None:
    """Of Numbers' five entries one has a value for each element."""
    params = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in (1000, 24)]
    estimate = dynzero.estimate_memory(params, 1, 1, Numbers, lr=0.1)
    assert estimate.moments == 4 * (1000 + 24)


def nesterov(model: Parameters, build: Any, **options: Any) -> Any:
    """torch's foreach code adds the momentum to the gradient that it is given, in place."""
    kwargs: dict[str, Any] = {"lr": 0.125, "momentum": 0.5, "nesterov": True, "foreach": True}
    return build(model.named_parameters(), torch.optim.SGD, **kwargs, **options)


def with_zeros(rank: int, world: int, stage: int, average: str) -> Parameters:
    model = model_abc()
    options = {"stage": stage, "average": average, "fused": False}
    opt = nesterov(model, dynzero.ZeroOptimizer, absent="zero", **options)
    for factors in [*USED, {"a": 1.0}, {}, {}]:
        if factors:
            opt.backward(weighted(model, factors))
        opt.step()
        opt.zero_grad()
    return model


@stages
@pytest.mark.parametrize("average", ["world", "present"])
@pytest.mark.parametrize("world", [1, 2])
def test_zeros_are_zeros_after_torch_has_written_to_them(
    world: int, stage: int, average: str
) -> None:
    model = model_abc()
    plain = nesterov(model, lambda params, cls, **options: cls(params, **options))
    for factors in [*USED, {"a": 1.0}, {}, {}]:
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, factors.get(name, 0.0))
        plain.step()
    for trained in run_world(world, with_zeros, stage, average):
        for name, p in model.named_parameters():
            assert_same_bits(trained.get_parameter(name).detach(), p.detach(), name)


class Hyperbolic(torch.optim.SGD):
    """The update is tanh of the gradient, computed in a way that overflows for large ones."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    up, down = p.grad.exp(), (-p.grad).exp()
                    p.sub_(group["lr"] * (up - down) / (up + down))


def test_a_class_may_overflow_where_gradients_are_large() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    opt = dynzero.ZeroOptimizer([p], Hyperbolic, lr=1.0)
    opt.backward(p.sum())
    opt.step()
    torch.testing.assert_close(p.detach(), -torch.ones(3).tanh())
