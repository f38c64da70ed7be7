"""Which torch.optim classes have a fused kernel, with which options, and their state's names.

Also the test that a class is elementwise: only then may it run on pieces of a parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .hooks import no_global_hooks
from .lion import Lion
from .ops import HYPER_COLUMNS, HYPER_FLAGS, OPTIMIZER_KINDS

# Keys of a parameter group that are no options.
MEMBERS = ("params", "param_names")


@dataclass(frozen=True)
class FusedSpec:
    """One fused optimizer: kernel kind, state names as in torch, hyperparameters as a table row."""

    kind: int
    keys: tuple[str, ...]
    has_step: bool
    row: Callable[[dict[str, Any]], list[float]]


# A value of one of these types is another object when it is another value.
SETTLED = (int, float, bool, str, type(None), complex)


class Seen:
    """Tells whether options are what they were when last looked at; without reading tensors."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def again(self, groups: list[dict[str, Any]]) -> bool:
        """True if nothing in them can have changed since the last call."""
        values = [part for group in groups for item in group.items() for part in item]
        known, self._values = self._values, values
        if len(known) == len(values) and all(map(operator.is_, known, values)):
            return True
        if not all(settled(v) for group in groups for k, v in group.items() if k not in MEMBERS):
            self.forget()
        return False

    def forget(self) -> None:
        self._values = []


def settled(value: Any) -> bool:
    if type(value) is tuple:
        return all(settled(part) for part in value)
    return type(value) in SETTLED


def fused_spec(cls: type[Optimizer], groups: list[dict[str, Any]]) -> tuple[FusedSpec | None, str]:
    """The spec that covers `cls` with the options of `groups`, or None and the reason."""
    if cls in (Adam, AdamW):
        spec = FusedSpec(OPTIMIZER_KINDS["adam"], ("exp_avg", "exp_avg_sq"), True, adam_row)
    elif cls is SGD:
        momentum = any(group["momentum"] != 0 for group in groups)
        keys = ("momentum_buffer",) if momentum else ()
        spec = FusedSpec(OPTIMIZER_KINDS["sgd"], keys, False, sgd_row)
    elif cls is Lion:
        spec = FusedSpec(OPTIMIZER_KINDS["lion"], ("exp_avg",), False, lion_row)
    else:
        return None, f"{cls.__name__} has no fused kernel"
    for group in groups:
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                return None, f"{cls.__name__}({option}=True) has no fused kernel"
    return spec, ""


def hyper_row(
    lr: Any, decay: float, beta1: float, beta2: float, eps: float, flags: float
) -> list[float]:
    values = {
        "lr": 0.0 if isinstance(lr, Tensor) and lr.is_cuda else lr,
        "weight_decay": decay,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "flags": flags,
    }
    return [float(values[name]) for name in HYPER_COLUMNS]


def flags_of(group: dict[str, Any], decoupled: bool) -> float:
    return float(
        HYPER_FLAGS["nesterov"] * bool(group.get("nesterov"))
        + HYPER_FLAGS["maximize"] * bool(group.get("maximize"))
        + HYPER_FLAGS["decoupled_decay"] * decoupled
    )


def adam_row(group: dict[str, Any]) -> list[float]:
    beta1, beta2 = group["betas"]
    # torch.optim.AdamW is Adam with this key set; releases before it was one had no such key.
    decoupled = bool(group.get("decoupled_weight_decay", group.get("_adamw", False)))
    flags = flags_of(group, decoupled)
    return hyper_row(group["lr"], group["weight_decay"], beta1, beta2, group["eps"], flags)


def sgd_row(group: dict[str, Any]) -> list[float]:
    flags = flags_of(group, False)
    momentum, dampening = group["momentum"], group["dampening"]
    return hyper_row(group["lr"], group["weight_decay"], momentum, dampening, 0.0, flags)


def lion_row(group: dict[str, Any]) -> list[float]:
    beta1, beta2 = group["betas"]
    return hyper_row(group["lr"], group["weight_decay"], beta1, beta2, 0.0, flags_of(group, True))


def check_elementwise(cls: type[Optimizer], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError unless `cls` updates each element by itself.

    Returns its state of one piece: tensors with a value for each element, and single numbers.

    Runs two steps on one matrix, and on the same numbers cut into two flat pieces, each piece with
    an optimizer of its own as on two ranks; with small and with large gradients, so that limits are
    met. The results must agree. So trust ratios (LAMB), matrix methods (Muon, Shampoo), factored
    moments (Adafactor), norms over all parameters and optimizers that call a closure again (LBFGS)
    are refused whoever wrote them.
    """
    # Float64 and a large rate: the updates, not the start values, decide.
    options = {**kwargs, "lr": 0.1} if "lr" in kwargs else kwargs
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.empty(3, 4, 6, dtype=torch.float64, device="cpu").normal_(generator=generator)
    start, *grads = numbers.unbind()
    flat_start, flat_grads = start.flatten(), [grad.flatten() for grad in grads]
    for size in (1.0, 1e-3, 1e3):
        try:
            whole, _ = after_steps(cls, options, start, [g * size for g in grads])
            parts = [
                after_steps(cls, options, flat_start[cut], [g[cut] * size for g in flat_grads])
                for cut in (slice(7), slice(7, 24))
            ]
        except Exception as cause:
            raise ValueError(
                f"optimizer_class: {cls.__name__} cannot run on 1-D pieces of parameters without a "
                f"closure ({type(cause).__name__}: {cause}); use an elementwise torch.optim class"
            ) from cause
        together = torch.cat([p for p, _ in parts]).view(4, 6)
        if not torch.allclose(whole, together, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise ValueError(
                f"optimizer_class: {cls.__name__} is not elementwise: an element's update depends "
                "on other elements or on the parameter's shape, so it cannot run on pieces; use an "
                "elementwise torch.optim class"
            )
        for p, state in parts:
            check_state(cls, state, p)
    return {k: v for k, v in parts[0][1].items() if v is not None}


def after_steps(
    cls: type[Optimizer], options: dict[str, Any], start: Tensor, grads: list[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """What one parameter is after a step with each gradient, and its state."""
    p = torch.nn.Parameter(start.clone())
    # On the CPU whatever the default is, where the class makes tensors itself.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), no_global_hooks():
        optimizer = cls([p], **options)
        for grad in grads:
            p.grad = grad.clone()
            optimizer.step()
    return p.detach(), optimizer.state[p]


def check_state(cls: type[Optimizer], state: dict[str, Any], p: Tensor) -> None:
    """What is gathered from all ranks must have a value for each element of a piece."""
    for key, value in state.items():
        for tensor in tensors_in(value):
            if tensor.dim() > 0 and not (tensor is value and tensor.shape == p.shape):
                raise ValueError(
                    f"optimizer_class: {cls.__name__} keeps '{key}', a {type(value).__name__} with "
                    f"a tensor of shape {tuple(tensor.shape)} for {p.numel()} elements; expected "
                    "a tensor with a value for each element, or one number (torch.zeros(()))"
                )


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
