"""What the last step did, read back from the device only when looked at, or when it is there.

Steps that were skipped are logged (logger "dynzero") once their outcome has reached the host.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from .ops import RECORD_COLUMNS, SCALE_FIELDS, STATUS_FIELDS, ops
from .plan import indices_of

logger = logging.getLogger("dynzero")
KINDS = {1: "inf", 2: "nan", 3: "nan"}


class Outcome:
    """What one step decided: status, loss scale after it, and the record of each rank.

    status: as begin_step leaves it. It starts on its way to the host; only `numbers` waits, for the
    copy alone. captured: in a CUDA graph it stays on the device, where each replay writes it anew.
    """

    def __init__(self, status: Tensor, captured: bool) -> None:
        self.captured = captured
        self._status, self._copy = status, ops.Readback(status, captured)
        self._read: list[float] | None = None

    def ready(self) -> bool:
        return bool(self._copy.ready())

    @property
    def found(self) -> Tensor:
        """Above 0 if the step was skipped for a non-finite gradient; on the device, 0-dim."""
        return self._status[STATUS_FIELDS["found"]]

    @property
    def numbers(self) -> list[float]:
        if self._read is None or self.captured:
            self._read = self._copy.numbers()
        return self._read

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
    scale the gradients carried, or would have. overflow: None, or (parameter, rank, "inf" or "nan")
    of the first offender on each rank that had one, in parameter order; ranks count as in the world
    group.
    """

    def __init__(
        self,
        iteration: int,
        names: tuple[str, ...],
        ranks: Sequence[int],
        outcome: Outcome | None,
        scale: Tensor | None = None,
    ) -> None:
        """scale: of a step without an outcome; 0-dim, on the device."""
        self.iteration = iteration
        self._names, self._ranks, self.outcome = names, ranks, outcome
        self._scale = scale
        self.present: Tensor | None = None  # uint8 bits over the parameters

    @cached_property
    def active(self) -> tuple[str, ...]:
        if self.present is None:
            return ()
        return tuple(self._names[i] for i in indices_of(self.present, len(self._names)).tolist())

    @property
    def _values(self) -> dict[str, float]:
        if self.outcome is None:
            assert self._scale is not None
            return {"found": 0.0, "norm": 0.0, "scale": float(self._scale)}
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
        rows = zip(self._ranks, self.outcome.records, strict=True)
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

    def __init__(self, scaling: bool) -> None:
        self.scaling = scaling
        self._queue: deque[LastStep] = deque()
        self.exhausted = 0  # overflows at the minimum of the loss scale, as far as known

    def follow(self, step: LastStep) -> None:
        self._queue.append(step)

    def poll(self, *, wait: bool = False) -> None:
        """Log the skipped steps among those that are known by now; with `wait` among all."""
        while self._queue:
            step = self._queue[0]
            assert step.outcome is not None
            if not wait and not step.outcome.ready():
                return
            self._queue.popleft()
            numbers = step.outcome.numbers
            self.exhausted = int(numbers[len(STATUS_FIELDS) + SCALE_FIELDS["exhausted"]])
            if numbers[STATUS_FIELDS["found"]]:
                scale = f"; loss scale is now {step.outcome.scale['value']:g}"
                logger.warning("%s%s", step.blame(), scale if self.scaling else "")
