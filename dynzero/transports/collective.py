"""The `collective` transport: any torch.distributed backend.

A bucket goes out in one all-to-all; each rank receives every rank's slots for the pieces that it
owns, and sums them itself, in rank order (Note [Sum on the owner]). New values come back in one
all-gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import all_gather_single
from .control import Control

# Note [Sum on the owner]
# An all-to-all moves exactly the bytes of a reduce-scatter, but leaves the sum to us: in float32
# whatever the wire dtype, and in rank order whatever the backend, the bucket or the world size. So
# a 16-bit wire loses nothing to the sum (neither 40000 on every rank nor 6e-8 on every rank, which
# no scaling before the sum can both save), results have the same bits for every bucket size, and
# slots of ranks without a gradient are never read.


class Work:
    """A collective under way. Once waited for it lets go of the buffers, which it keeps alive."""

    def __init__(self, work: Any, control: Control, on_cuda: bool) -> None:
        self._work, self._control, self._on_cuda = work, control, on_cuda

    def ready(self) -> bool:
        return self._on_cuda or self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """On the CPU waits for the data; on CUDA makes the current stream wait for it."""
        work, self._work = self._work, None
        if work is not None:
            with self._control.naming_ranks():
                work.wait()


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

    def __init__(self, group: Any, control: Control) -> None:
        backend = dist.get_backend(dist.group.WORLD if group is None else group)
        self.control = control
        self.group = dist.new_group(
            control.ranks, backend=backend, timeout=control.timeout, use_local_synchronization=True
        )

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Both [world, stride]: row r of `sent` goes to rank r, row r of `received` is from it."""
        with self.control.naming_ranks():
            work = dist.all_to_all_single(
                on_wire(received), on_wire(sent), group=self.group, async_op=True
            )
        return Work(work, self.control, sent.is_cuda)

    def all_gather(self, everybody: Tensor, mine: Tensor) -> Work:
        """everybody [world, ...] receives `mine` of each rank; `mine` may be its own row of it."""
        with self.control.naming_ranks():
            work = all_gather_single(
                on_wire(everybody), on_wire(mine), group=self.group, async_op=True
            )
        return Work(work, self.control, mine.is_cuda)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        with self.control.naming_ranks():
            dist.broadcast(as_bytes(tensor), src=self.control.ranks[0], group=self.group)


def on_wire(tensor: Tensor) -> Tensor:
    """NCCL knows the dtypes of buckets; CPU backends differ in theirs."""
    return tensor if tensor.is_cuda else as_bytes(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """Every backend moves bytes."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(-1).view(torch.uint8)
