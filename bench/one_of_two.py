"""The first of two ranks, simulated in this process: what a rank does but for wire and waiting.

The other rank always says and has the same, and is always there. What would arrive over the wire is
whatever was in memory, so results are meaningless.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dynzero import construction, optimizer
from dynzero._C import TransportError, loopback_transport
from dynzero.transports.collective import Collective
from dynzero.transports.control import Agreed, Control, Message

WORLD = 2


class Answer:
    """Stands in for dynzero.transports.control.Exchange."""

    def __init__(self, agreed: Agreed) -> None:
        self.agreed = agreed

    def ready(self) -> bool:
        return True

    def wait(self) -> Agreed:
        return self.agreed


class Echo(Control):
    def __init__(self, group: Any) -> None:
        self.ranks, self.world, self.rank = list(range(WORLD)), WORLD, 0
        self.group, self.board, self.last = None, None, None
        self.timeout = self.naming = datetime.timedelta(seconds=1)

    def start(self, message: Message, bits: Tensor) -> Any:
        return Answer(self.exchange(message, bits))

    def exchange(self, message: Message, bits: Tensor) -> Agreed:
        return Agreed([message] * WORLD, bits.expand(WORLD, -1))

    def gather_objects(self, thing: Any) -> list[Any]:
        return [thing] * WORLD


class NoWire(Collective):
    @staticmethod
    def check(group: Any, device: torch.device) -> None:
        pass

    def __init__(self, group: Any, control: Control, device: torch.device) -> None:
        self.control = control
        self.transport = loopback_transport(writes=False)
        self._not_reached = TransportError

    def broadcast_from_first(self, tensor: Tensor) -> None:
        pass


@contextmanager
def one_of_two() -> Iterator[None]:
    """Optimizers that are built inside believe that they are the first of two ranks."""
    with (
        mock.patch.object(optimizer, "Control", Echo),
        mock.patch.object(construction, "Collective", NoWire),
    ):
        yield
