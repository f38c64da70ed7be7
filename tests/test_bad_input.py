"""Arguments that cannot work are refused at construction: on every rank, by name, nothing changed.

In each case rank 1 alone has the bad argument. Rank 0 must raise all the same, and say who.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from play import assert_same_bits
from scenario import Parameters, snapshot
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from world import check_words, message_of, outcome_of, run_world

import dynzero

OPTIM = torch.optim


class Lamb(OPTIM.Optimizer):
    """A toy with LAMB's trust ratio: an element's update depends on the whole tensor's norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Clipped(OPTIM.Optimizer):
    """SGD that clips the norm of each gradient, or of all of them, to `limit`."""

    def __init__(
        self, params: Any, lr: float = 0.1, limit: float = 1.0, whole: bool = True
    ) -> None:
        super().__init__(params, {"lr": lr, "limit": limit, "whole": whole})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            for p in group["params"]:
                if p.grad is not None:
                    some = grads if group["whole"] else [p.grad]
                    norm = torch.stack([grad.norm() for grad in some]).norm()
                    p.sub_(p.grad * group["lr"] * (group["limit"] / norm).clamp(max=1.0))


class Wrapper(Tensor):
    """As quantised or distributed weights are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].inner) if func is torch.ops.aten.detach.default else NotImplemented


class Call(NamedTuple):
    """One construction; `params(model)` and `options` replace the good ones."""

    params: Callable[[nn.Module], Any] = lambda model: model.named_parameters()
    optimizer: Any = OPTIM.AdamW
    options: dict[str, Any] = {}


class Bad(NamedTuple):
    call: Call
    kind: type[Exception]
    words: tuple[str, ...]


def model_of_rank() -> nn.Module:
    torch.manual_seed(0)
    return Parameters(u=torch.randn(3, 4), v=torch.randn(5), w=torch.randn(()))


def construct(model: nn.Module, call: Call) -> dynzero.ZeroOptimizer:
    options = {"lr": 0.1, "stage": 2} | call.options
    return dynzero.ZeroOptimizer(call.params(model), call.optimizer, **options)


def leaf(tensor: Tensor) -> list[tuple[str, nn.Parameter]]:
    return [("odd", nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))]


def with_option(**options: Any) -> Call:
    return Call(options=options)


# By name, so that a rank can look its own up: lambdas do not travel.
PARAMS: dict[str, Bad] = {
    "no parameters": Bad(Call(lambda m: []), ValueError, ("params", "empty")),
    "only empty groups": Bad(
        Call(lambda m: [{"params": []}, {"params": []}]), ValueError, ("params", "empty")
    ),
    "one tensor": Bad(Call(lambda m: m.u), TypeError, ("params", "iterable")),
    "a set": Bad(Call(lambda m: set(m.parameters())), TypeError, ("params", "set", "list")),
    "a number": Bad(Call(lambda m: 5), TypeError, ("params", "iterable", "5")),
    "a group of nothing": Bad(
        Call(lambda m: [{"params": None}]), TypeError, ("params", "iterable", "None")
    ),
    "triples": Bad(Call(lambda m: [("u", m.u, 1)]), TypeError, ("params", "pairs", "tuple of 3")),
    "numbers": Bad(Call(lambda m: [1.0, 2.0]), TypeError, ("Tensors", "float")),
    "not a leaf": Bad(Call(lambda m: [("odd", m.u * 2)]), ValueError, ("non-leaf",)),
    "twice in a list": Bad(
        Call(lambda m: [("u", m.u), ("v", m.v), ("again", m.u)]), ValueError, ("again", "u", "once")
    ),
    "twice in groups": Bad(
        Call(lambda m: [{"params": [m.u, m.v]}, {"params": [m.v]}]), ValueError, ("1.0", "0.1")
    ),
    "integers": Bad(
        Call(lambda m: leaf(torch.zeros(3, dtype=torch.int32))), ValueError, ("odd", "int32")
    ),
    "overlapping": Bad(
        Call(lambda m: leaf(torch.zeros(1, 4).expand(3, 4))), ValueError, ("odd", "overlap")
    ),
    "sparse": Bad(
        Call(lambda m: leaf(torch.zeros(3, 4).to_sparse())), ValueError, ("odd", "sparse", "dense")
    ),
    "conjugate": Bad(
        Call(lambda m: [("odd", nn.Parameter(torch.ones(3, dtype=torch.complex64).conj()))]),
        ValueError,
        ("odd", "conjugated", "resolve_conj"),
    ),
    "symbolic zero": Bad(
        Call(lambda m: leaf(torch._efficientzerotensor(3))), ValueError, ("odd", "symbolic zero")
    ),
    "wrapper": Bad(Call(lambda m: leaf(Wrapper(torch.ones(3)))), ValueError, ("odd", "Wrapper")),
    "lazy": Bad(
        Call(lambda m: nn.LazyLinear(3).named_parameters()), ValueError, ("weight", "lazy", "run")
    ),
    "a dict": Bad(Call(lambda m: dict(m.named_parameters())), TypeError, ("params", "items()")),
    "on two devices": Bad(
        Call(lambda m: [("u", m.u), *leaf(torch.zeros(3, device="meta"))]),
        ValueError,
        ("odd", "meta", "cpu"),
    ),
    "on no device": Bad(
        Call(lambda m: leaf(torch.zeros(3, device="meta"))), ValueError, ("odd", "meta", "cuda")
    ),
    "bad group option": Bad(
        Call(lambda m: [{"params": [m.u], "absent": "none"}]),
        ValueError,
        ("absent", "none", "skip"),
    ),
}


def on_cuda() -> list[tuple[str, Tensor]]:
    with FakeTensorMode():
        return [("odd", nn.Parameter(torch.empty(3, device="cuda")))]


if not dynzero.build_info()["cuda"]:
    PARAMS["on CUDA, built without"] = Bad(
        Call(lambda m: on_cuda()), RuntimeError, ("odd", "cuda:0", "without CUDA", "pip install")
    )

OPTIMIZERS: dict[str, Bad] = {
    "a string": Bad(Call(optimizer="AdamW"), TypeError, ("optimizer_class", "AdamW")),
    "an instance": Bad(
        Call(optimizer=OPTIM.SGD([torch.zeros(1)], lr=1.0)), TypeError, ("optimizer_class",)
    ),
    "no optimizer": Bad(Call(optimizer=nn.Linear), TypeError, ("optimizer_class", "Linear")),
    "a sharded one": Bad(Call(optimizer=dynzero.ZeroOptimizer), TypeError, ("optimizer_class",)),
    "LBFGS": Bad(Call(optimizer=OPTIM.LBFGS), ValueError, ("LBFGS", "closure", "elementwise")),
    "Adafactor": Bad(Call(optimizer=OPTIM.Adafactor), ValueError, ("Adafactor", "elementwise")),
    "LAMB": Bad(Call(optimizer=Lamb), ValueError, ("Lamb", "elementwise")),
    "norm of all": Bad(Call(optimizer=Clipped), ValueError, ("Clipped", "elementwise")),
    "norm of each, seldom": Bad(
        Call(optimizer=Clipped, options={"limit": 100.0, "whole": False}),
        ValueError,
        ("Clipped", "elementwise"),
    ),
    "unknown option": Bad(with_option(momentums=1), TypeError, ("AdamW", "momentums")),
    "negative rate": Bad(with_option(lr=-1.0), ValueError, ("learning rate", "-1.0")),
    "fused RMSprop": Bad(
        Call(optimizer=OPTIM.RMSprop, options={"fused": True}), ValueError, ("fused", "RMSprop")
    ),
    "fused amsgrad": Bad(
        with_option(fused=True, amsgrad=True), ValueError, ("fused", "amsgrad", "fused=False")
    ),
}
if hasattr(OPTIM, "Muon"):
    OPTIMIZERS["Muon"] = Bad(Call(optimizer=OPTIM.Muon), ValueError, ("Muon", "elementwise"))

OPTIONS: dict[str, Bad] = {
    f"{name}={value!r}": Bad(with_option(**{name: value}), ValueError, (name, repr(value)))
    for name, value in [
        ("stage", 3),
        ("stage", "2"),
        ("stage", True),
        ("stage", 1.0),
        ("absent", "none"),
        ("average", "sum"),
        ("max_grad_norm", -1.0),
        ("max_grad_norm", 0),
        ("loss_scale", -2.0),
        ("loss_scale", "auto"),
        ("check_finite", "yes"),
        ("wire_dtype", torch.int8),
        ("bucket_bytes", 0),
        ("bucket_bytes", "25MB"),
        ("transport", "carrier pigeon"),
        ("fused", "maybe"),
        ("fused", 1),
        ("sync_params", None),
    ]
}
ALL = PARAMS | OPTIMIZERS | OPTIONS


def bad_on_rank_1(rank: int, world: int) -> dict[str, tuple[str, dict[str, Tensor]]]:
    results = {}
    for name, bad in ALL.items():
        model = model_of_rank()
        call = bad.call if rank == 1 else Call()
        results[name] = outcome_of(construct, model, call), snapshot(model)
    # All those refusals have left nothing behind: a good one still works.
    model = model_of_rank()
    opt = construct(model, Call())
    opt.backward(model.u.sum())
    opt.step()
    assert set(opt.last_step.active) == {"u"}
    return results


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, dict[str, Tensor]]]]:
    return run_world(2, bad_on_rank_1, timeout=120.0)


@pytest.mark.parametrize("name", ALL)
def test_one_bad_rank_is_refused_on_all(name: str, refusals: list[Any]) -> None:
    (first, untouched), (second, also_untouched) = (results[name] for results in refusals)
    words = [ALL[name].kind.__name__, *ALL[name].words]
    check_words(first, [*words, "rank 1"], "rank 0, which did nothing wrong")
    check_words(second, words, "rank 1")
    for parameter, value in snapshot(model_of_rank()).items():
        assert_same_bits(untouched[parameter], value, f"rank 0, {parameter}")
        assert_same_bits(also_untouched[parameter], value, f"rank 1, {parameter}")


@pytest.mark.parametrize("name", ALL)
def test_one_process_refuses_it_too(name: str) -> None:
    bad = ALL[name]
    check_words(message_of(bad.kind, construct, model_of_rank(), bad.call), bad.words)


# What user code raises, of any type.


class Picky(OPTIM.SGD):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        assert lr < 1.0, "too fast"
        super().__init__(params, lr=lr)


def failing(model: nn.Module) -> Iterator[Tensor]:
    yield model.u
    raise KeyError("no such head")


STRANGE: dict[str, tuple[Call, type[Exception], str]] = {
    "class": (Call(optimizer=Picky, options={"lr": 2.0}), AssertionError, "too fast"),
    "generator": (Call(failing), KeyError, "'no such head'"),
}


def strange_on_rank_1(rank: int, world: int) -> list[str]:
    good = Call(optimizer=Picky)
    calls = [call if rank == 1 else good for call, _, _ in STRANGE.values()]
    return [message_of(RuntimeError, construct, model_of_rank(), call) for call in calls]


def test_an_error_of_any_type_reaches_all_ranks() -> None:
    for messages in run_world(2, strange_on_rank_1):
        for message, (_, kind, text) in zip(messages, STRANGE.values(), strict=True):
            assert message.startswith(f"rank 1: {kind.__name__}: {text}")


@pytest.mark.parametrize("name", STRANGE)
def test_one_process_raises_it_as_it_is(name: str) -> None:
    call, kind, text = STRANGE[name]
    assert message_of(kind, construct, model_of_rank(), call).startswith(text)
