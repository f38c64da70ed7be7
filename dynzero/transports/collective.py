"""The `collective` transport: any torch.distributed backend.

A bucket goes out in one all-to-all; each rank receives every rank's slots for the pieces that it
owns, and sums them itself, in rank order (Note [Sum on the owner]). New values come back in one
all-gather.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import ops
from .control import Control

# Note [Sum on the owner]
# An all-to-all moves exactly the bytes of a reduce-scatter, but leaves the sum to us: in float32
# whatever the wire dtype, and in rank order whatever the backend, the bucket or the world size. So
# a 16-bit wire loses nothing to the sum (neither 40000 on every rank nor 6e-8 on every rank, which
# no scaling before the sum can both save), results have the same bits for every bucket size, and
# slots of ranks without a gradient are never read.


class Collective:
    """Data collectives of one optimizer, over a group of its own with the user's backend."""

    @staticmethod
    def check(group: Any, device: torch.device) -> None:
        """ValueError if the group's backend cannot move tensors of this device."""
        backend = dist.get_backend(dist.group.WORLD if group is None else group)
        if device.type == "cuda" and backend == "gloo":
            raise ValueError(
                "process_group: backend gloo has no all-to-all for CUDA tensors; initialise with "
                "'nccl' or 'cpu:gloo,cuda:nccl'"
            )
        if device.type == "cpu" and backend == "nccl":
            raise ValueError(
                "process_group: backend nccl cannot move CPU tensors; use 'gloo' or "
                "'cpu:gloo,cuda:nccl'"
            )

    def __init__(self, group: Any, control: Control, device: torch.device) -> None:
        backend = dist.get_backend(dist.group.WORLD if group is None else group)
        self.control = control
        self.group = control.new_group(backend)
        self.transport: Any = ops.collective_transport(self.group)
        self._not_reached = ops.TransportError
        self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Collective. NCCL connects two ranks when both first send something to each other.

        Until then the first of them waits on the host. That must not happen inside a backward pass,
        where the other one may be on its way to a collective of the user.
        """
        sent = torch.zeros(len(self.control.ranks), dtype=torch.uint8, device=device)
        with self.naming_ranks():
            self.transport.all_to_all(torch.empty_like(sent), sent).wait()

    def all_gather(self, everybody: Tensor, mine: Tensor) -> None:
        """everybody [world, ...] receives `mine` of each rank.

        Returns when it is there (CPU), or when the current stream will wait for it (CUDA).
        """
        with self.naming_ranks():
            self.transport.all_gather(everybody, mine).wait()

    def naming_ranks(self) -> AbstractContextManager[None]:
        """Around calls of the transport: what keeps them from the other ranks, with their names."""
        return self.control.naming_ranks(self._not_reached)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        with self.control.naming_ranks():
            dist.broadcast(as_bytes(tensor), src=self.control.ranks[0], group=self.group)


def as_bytes(tensor: Tensor) -> Tensor:
    """Every backend moves bytes."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(-1).view(torch.uint8)
