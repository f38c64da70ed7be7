"""Loss scaling as device state: begin_step reads and updates it without the host's help."""

from __future__ import annotations

import logging
import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .ops import MAX_SCALE, SCALE_FIELDS

logger = logging.getLogger("dynzero")


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale (Micikevicius et al., "Mixed Precision Training", 2018).

    The scale starts at `init`, is multiplied by `growth` after `window` good steps in a row, and by
    `backoff` when an overflow finds no `hysteresis` left (never below `minimum`). An overflow that
    comes while the scale is at its minimum raises RuntimeError on every rank at a later step
    (`on_minimum="raise"`) or is counted only (`"continue"`). All scales lie between 2^-100 and
    2^100, where growth ends: beyond, float32 could not hold them times the number of ranks.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0
    on_minimum: str = "raise"

    def __post_init__(self) -> None:
        for field in ("init", "growth", "backoff", "window", "hysteresis", "minimum"):
            whole = field in ("window", "hysteresis")
            got = getattr(self, field)
            kind = numbers.Integral if whole else numbers.Real
            if isinstance(got, bool) or not isinstance(got, kind):
                raise TypeError(
                    f"LossScale: {field}: expected {'an int' if whole else 'a number'}, got {got!r}"
                )
        rules = {
            "init": (self.minimum <= self.init <= MAX_SCALE, "at least minimum, at most 2^100"),
            "growth": (1 <= self.growth < math.inf, "at least 1, and finite"),
            "backoff": (0 < self.backoff <= 1, "in (0, 1]"),
            "window": (self.window >= 1, "at least 1"),
            "hysteresis": (self.hysteresis >= 1, "at least 1"),
            "minimum": (self.minimum >= 1 / MAX_SCALE, "at least 2^-100"),
            "on_minimum": (self.on_minimum in ("raise", "continue"), "'raise' or 'continue'"),
        }
        for field, (fine, expected) in rules.items():
            if not fine:
                got = getattr(self, field)
                raise ValueError(f"LossScale: {field}: expected {expected}, got {got!r}")

    @property
    def options(self) -> list[float]:
        return [self.growth, self.backoff, float(self.window), float(self.hysteresis), self.minimum]


class ScaleState:
    """The scale and its counters, float64 [fields] on the device (csrc/segments.h, ScaleField)."""

    def __init__(self, loss_scale: Any, device: torch.device) -> None:
        self.config = parse_loss_scale(loss_scale)
        self.used = False  # a loss has been scaled, or that none has been was said
        self.told = 0  # overflows at the minimum that all ranks have raised
        self.options: list[float] = []
        init, hysteresis = 1.0, 1
        if isinstance(self.config, LossScale):
            self.options = self.config.options
            init, hysteresis = self.config.init, self.config.hysteresis
        elif self.config is not None:
            init = self.config
        values = [0.0] * len(SCALE_FIELDS)
        values[SCALE_FIELDS["value"]] = init
        values[SCALE_FIELDS["hysteresis"]] = float(hysteresis)
        self.tensor = torch.tensor(values, dtype=torch.float64, device=device)

    @property
    def scaling(self) -> bool:
        return self.config is not None

    def multiply(self, loss: Any) -> Any:
        """`loss` (a tensor, or a list or tuple of them) times the scale, in float32 or wider."""
        self.used = True
        if not self.scaling:
            return loss
        if type(loss) in (list, tuple):
            return type(loss)(self.multiply(part) for part in loss)
        if not isinstance(loss, (Tensor, int, float)):
            raise TypeError(
                "loss: expected a tensor, or a list or tuple of tensors, to scale, got "
                f"{type(loss).__name__}; scale each of its losses"
            )
        if isinstance(loss, Tensor):
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return loss * self.value.to(torch.float32)

    def warn_unused(self) -> None:
        """Once, at a step with gradients of losses that nobody has scaled."""
        self.used = True
        logger.warning(
            "loss_scale is set, so that gradients are divided by it, but no loss has been "
            "multiplied: call opt.backward(loss), or opt.scale(loss).backward()"
        )

    @property
    def value(self) -> Tensor:
        return self.tensor[SCALE_FIELDS["value"]]

    def exhausted(self, overflows: int) -> bool:
        """If there were more overflows at the minimum than all ranks have raised."""
        raises = isinstance(self.config, LossScale) and self.config.on_minimum == "raise"
        return raises and overflows > self.told

    def exhaustion(self, overflows: int) -> RuntimeError:
        """The error for it, the same on all ranks."""
        assert isinstance(self.config, LossScale)
        self.told = overflows
        return RuntimeError(
            f"the loss scale is at its minimum of {self.config.minimum:g} and gradients overflowed "
            "again: training has diverged, or the minimum is too high; look at last_step.overflow, "
            "or pass LossScale(on_minimum='continue')"
        )

    def counters(self) -> tuple[int, int]:
        values = self.tensor.tolist()
        return int(values[SCALE_FIELDS["taken"]]), int(values[SCALE_FIELDS["skipped"]])

    def state_dict(self) -> dict[str, Any]:
        fields = dict(zip(SCALE_FIELDS, self.tensor.tolist(), strict=True))
        return {**fields, "dynamic": bool(self.options)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Counters always; the scale itself only from a dynamic one into a dynamic one."""
        for name, value in self.checked(state).items():
            self.tensor[SCALE_FIELDS[name]] = value
        self.told = int(self.tensor[SCALE_FIELDS["exhausted"]])

    def checked(self, state: dict[str, Any]) -> dict[str, float]:
        """What is taken of a saved state; an exception if that is not there, or not a number."""
        whole = bool(self.options) and state["dynamic"]
        taken = {n: float(state[n]) for n in SCALE_FIELDS if whole or n in ("taken", "skipped")}
        scale = taken.get("value", 1.0)
        if not 1 / MAX_SCALE <= scale <= MAX_SCALE:
            raise ValueError(f"loss_scale: expected a scale from 2^-100 to 2^100, got {scale!r}")
        for name, value in taken.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"loss_scale: '{name}': expected a number from 0, got {value!r}")
        return taken


def parse_loss_scale(loss_scale: Any) -> LossScale | float | None:
    if loss_scale is None or isinstance(loss_scale, LossScale):
        return loss_scale
    if loss_scale == "dynamic":
        return LossScale()
    number = isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool)
    if number and 1 / MAX_SCALE <= loss_scale <= MAX_SCALE:
        return float(loss_scale)
    raise ValueError(
        "loss_scale: expected None, a number from 2^-100 to 2^100, 'dynamic' or "
        f"dynzero.LossScale(...), got {loss_scale!r}"
    )
