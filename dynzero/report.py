"""What the last step did, read back from the device only when looked at, or when it is there.

Steps that were skipped are logged (logger "dynzero") once their outcome has reached the host.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import cached_property

import torch
from torch import Tensor

from .ops import RECORD_COLUMNS, SCALE_FIELDS, STATUS_FIELDS
from .plan import indices_of
from .reduced import capturing

logger = logging.getLogger("dynzero")
KINDS = {1: "inf", 2: "nan", 3: "nan"}


class Readback:
    """Device numbers on their way to the host: only `numbers` waits, for their copy alone."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        self._read: list[float] | None = None
        # In a CUDA graph they stay on the device: each replay writes them anew.
        self.captured = capturing(numbers.device)
        if numbers.is_cuda and not self.captured:
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    @property
    def numbers(self) -> list[float]:
        if self._read is None or self.captured:
            if self._event is not None and not self._event.query():
                self._event.synchronize()
            self._read = self._numbers.tolist()
        return self._read


class Outcome(Readback):
    """What one step decided: status, loss scale after it, and the record of each rank."""

    def __init__(self, status: Tensor, scale_state: Tensor, records: Tensor) -> None:
        super().__init__(torch.cat([status, scale_state, records.flatten()]))
        self.found = status[STATUS_FIELDS["found"]]

    @property
    def status(self) -> dict[str, float]:
        return dict(zip(STATUS_FIELDS, self.numbers, strict=False))

    @property
    def scale(self) -> dict[str, float]:
        return dict(zip(SCALE_FIELDS, self.numbers[len(STATUS_FIELDS) :], strict=False))

    @property
    def records(self) -> list[dict[str, float]]:
        """By rank."""
        width = len(RECORD_COLUMNS)
        rows = self.numbers[len(STATUS_FIELDS) + len(SCALE_FIELDS) :]
        cut = [rows[first : first + width] for first in range(0, len(rows), width)]
        return [dict(zip(RECORD_COLUMNS, row, strict=True)) for row in cut]


class LastStep:
    """Outcome of one `step()`; each attribute waits for the step to be done when first read.

    iteration: number of the step() call, from 0. active: names of the parameters that had a
    gradient on any rank. stepped: False when the update was skipped (overflow, nothing active).
    grad_norm: global 2-norm of the averaged, unscaled gradients before clipping. loss_scale: the
    scale the gradients carried. overflow: None, or (parameter, rank, "inf" or "nan") of the first
    offender on each rank that had one, in parameter order.
    """

    def __init__(self, iteration: int, names: tuple[str, ...], outcome: Outcome | None) -> None:
        self.iteration = iteration
        self._names, self.outcome = names, outcome
        self.present: Tensor | None = None  # uint8 bits over the parameters

    @cached_property
    def active(self) -> tuple[str, ...]:
        if self.present is None:
            return ()
        return tuple(self._names[i] for i in indices_of(self.present, len(self._names)).tolist())

    @property
    def _values(self) -> dict[str, float]:
        if self.outcome is None:
            return {"found": 0.0, "norm": 0.0, "scale": 1.0}
        return self.outcome.status

    @property
    def found(self) -> Tensor | None:
        """Above 0 if the step was skipped for a non-finite gradient; on the device, 0-dim."""
        return None if self.outcome is None else self.outcome.found

    @property
    def stepped(self) -> bool:
        return self.outcome is not None and not self._values["found"]

    @property
    def grad_norm(self) -> float:
        return self._values["norm"]

    @property
    def loss_scale(self) -> float:
        return self._values["scale"]

    @property
    def overflow(self) -> list[tuple[str, int, str]] | None:
        if self.outcome is None or not self._values["found"]:
            return None
        rows = enumerate(self.outcome.records)
        offenders = [(row, rank) for rank, row in rows if row["param"] >= 0]
        # A sum that is not finite is its owner's business only if every gradient was finite.
        local = [(row, rank) for row, rank in offenders if not row["from_sum"]]
        ordered = sorted((int(row["param"]), rank, row["kind"]) for row, rank in local or offenders)
        return [(self._names[param], rank, KINDS[int(kind)]) for param, rank, kind in ordered]

    def blame(self) -> str:
        """One line on a skipped step."""
        offenders = self.overflow or []
        where = ", ".join(f"{kind} in '{name}' on rank {rank}" for name, rank, kind in offenders)
        return f"iteration {self.iteration} skipped: {where}"

    def __repr__(self) -> str:
        return (
            f"LastStep(iteration={self.iteration}, stepped={self.stepped}, "
            f"active={len(self.active)}, grad_norm={self.grad_norm:.6g}, "
            f"loss_scale={self.loss_scale:g}, overflow={self.overflow})"
        )


class Outcomes:
    """Outcomes on their way to the host: looked at when they have arrived, never waited for."""

    def __init__(self) -> None:
        self._queue: deque[LastStep] = deque()
        self.exhausted = 0  # overflows at the minimum of the loss scale, as far as known

    def follow(self, step: LastStep) -> None:
        self._queue.append(step)

    def poll(self) -> None:
        """Log the skipped steps among those that are known by now."""
        while self._queue:
            step = self._queue[0]
            assert step.outcome is not None
            if not step.outcome.ready():
                return
            self._queue.popleft()
            scale = step.outcome.scale
            self.exhausted = int(scale["exhausted"])
            if not step.stepped:
                logger.warning("%s; loss scale is now %g", step.blame(), scale["value"])
