"""Pack, reduce and gather: how the gradients of a window reach their owners and values come back.

A window is the time between two steps. Its reduced pieces accumulate here, in the shard dtype; in
stage 1 a window holds one reduction, in stage 2 one for each backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, shard_dtype
from .ops import ops
from .plan import Bucket, Plan, rooms_of
from .reduced import Gradients, Local, upload
from .shard import Shard
from .transports.collective import IN_FLIGHT, Collective


class Window:
    """Reduced pieces so far. Tables by parameter index; `present` uint8 [world, bytes]."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.ptrs = torch.zeros(layout.size, dtype=torch.int64, device="cpu")
        self.ptrs_there: Tensor | None = None  # on the device, as of the last reduction
        self.buffers: list[Tensor] = []
        self.present = torch.zeros(layout.world, layout.bit_bytes, dtype=torch.uint8, device="cpu")
        # What this rank has announced, and what of it there really was: see Note [Withdrawn].
        self.announced = torch.zeros(layout.bit_bytes, dtype=torch.uint8, device="cpu")
        self.had = torch.zeros(layout.bit_bytes, dtype=torch.uint8, device="cpu")
        # By one fill: float64 sums, int32 flags.
        zeros = torch.zeros(2, layout.size, dtype=torch.float64, device=device)
        self.sumsq, self.nonfinite = zeros[0], zeros[1].view(torch.int32)[: layout.size]
        self.rounds = 0

    @property
    def used(self) -> bool:
        """True once ranks have met in this window: the same answer on every rank."""
        return self.rounds > 0 or bool(self.buffers)

    def withdrawn(self) -> Tensor:
        """uint8 [bytes]: announced by this rank in this window, but not there in any pass."""
        return self.announced & ~self.had

    def grow(self, layout: Layout) -> None:
        """Take over a layout with more parameters than before."""
        extra = layout.size - self.layout.size
        self.layout = layout
        self.ptrs, self.ptrs_there = torch.nn.functional.pad(self.ptrs, (0, extra)), None
        self.sumsq = torch.nn.functional.pad(self.sumsq, (0, extra))
        self.nonfinite = torch.nn.functional.pad(self.nonfinite, (0, extra))
        missing = layout.bit_bytes - self.present.shape[1]
        self.present = torch.nn.functional.pad(self.present, (0, missing))
        self.announced = torch.nn.functional.pad(self.announced, (0, missing))
        self.had = torch.nn.functional.pad(self.had, (0, missing))

    def claim(self, plan: Plan) -> None:
        """Room for the pieces of the plan's parameters that have none yet, in row order."""
        rooms = plan.rooms
        if self.buffers:
            fresh = self.ptrs[plan.active] == 0
            rooms = plan.rooms if fresh.all() else rooms_of(self.layout, plan.active[fresh])
        for room in rooms:
            # At least one element, so that an empty piece has an address that is not 0.
            buffer = torch.empty(room.numel + 1, dtype=room.dtype, device=self.device)
            self.buffers.append(buffer)
            self.ptrs[room.indices] = buffer.data_ptr() + room.offsets


class Mover:
    """Moves buckets between ranks over the collective transport."""

    def __init__(self, layout: Layout, device: torch.device, collective: Collective) -> None:
        self.layout, self.device, self.collective = layout, device, collective

    def reduce(
        self, plan: Plan, local: Local, present: Tensor, window: Window, *, in_step: bool
    ) -> Iterator[Any]:
        """Sum the local gradients of all ranks into the window; yields before each wait.

        present: uint8 [world, bytes], the ranks that contribute to each parameter. Buckets go in
        the order in which backward completes them, the last parameters first. in_step: see Note
        [In step].
        """
        accumulate = (window.ptrs != 0).to(torch.int64)
        window.claim(plan)
        tables = [local.ptrs[0], window.ptrs, accumulate, present.contiguous()]
        *addresses, present_there = ops.upload(tables, self.device)
        window.ptrs_there = addresses[1]
        partials = torch.empty(
            plan.table.own_chunks.numel(), dtype=torch.float64, device=self.device
        )
        reduction = ops.Reduction(
            plan.compiled, self.collective.transport, addresses, present_there, partials,
            window.nonfinite, in_step and self.device.type == "cuda",
        )  # fmt: skip
        yield from local.feed(reduction, plan, self.collective)
        local.own.clear()
        ops.fold_sums(plan.table.rows, partials, False, self.layout.world, window.sumsq)
        window.present |= present

    def gather_grads(self, plan: Plan, window: Window) -> tuple[Tensor, list[Tensor]]:
        """Stage 0: every rank gets the whole reduced gradients. Returns addresses and buffers.

        The window must hold this one reduction, so that its buffers follow the plan's rows.
        """
        ptrs = torch.zeros(self.layout.size, dtype=torch.int64, device="cpu")
        buffers = []
        shards = {buffer.dtype: buffer for buffer in window.buffers}
        for bucket in plan.buckets:
            dtype = shard_dtype(bucket.dtype)
            active = plan.active[bucket.rows]
            room = self.layout.piece[active] * self.layout.world
            flat = torch.empty(int(room.sum()) + 1, dtype=dtype, device=self.device)
            ptrs[active] = flat.data_ptr() + (torch.cumsum(room, 0) - room) * dtype.itemsize
            buffers.append(flat)
        whole = upload(ptrs, self.device)
        for bucket in plan.buckets:
            shard = shards[shard_dtype(bucket.dtype)]
            mine = shard[bucket.shard_offset : bucket.shard_offset + bucket.stride]
            everybody = torch.empty(
                self.layout.world, bucket.stride, dtype=mine.dtype, device=self.device
            )
            self.collective.all_gather(everybody, mine)
            self._unpack(plan, bucket, everybody, whole, None)
        return ptrs, buffers

    def update_and_gather(self, plan: Plan, shard: Shard, grads: Gradients, ptrs: Tensor) -> None:
        """Update own pieces bucket by bucket and send the new values to everybody's parameters."""
        gathering = self._gathering(plan, grads, ptrs)
        with self.collective.naming_ranks():
            shard.update_and_gather(plan, grads, gathering, IN_FLIGHT)

    def update_and_send(self, plan: Plan, shard: Shard, grads: Gradients, ptrs: Tensor) -> Any:
        """The same, but all buckets stay on their way; returns what receives them, in order."""
        gathering = self._gathering(plan, grads, ptrs)
        with self.collective.naming_ranks():
            shard.update_and_send(plan, grads, gathering)
        return gathering

    def _gathering(self, plan: Plan, grads: Gradients, ptrs: Tensor) -> Any:
        rank, transport = self.layout.rank, self.collective.transport
        return ops.Gathering(plan.compiled, transport, rank, ptrs, grads.status)

    def _unpack(
        self, plan: Plan, bucket: Bucket, everybody: Tensor, ptrs: Tensor, status: Tensor | None
    ) -> None:
        chunks = plan.full_chunks[bucket.number]
        ops.unpack_params(plan.table.rows, chunks, everybody, ptrs, status)

    def gather_rows(self, mine: Tensor) -> Tensor:
        """A small tensor of every rank, [world, ...]."""
        everybody = torch.empty(
            self.layout.world, *mine.shape, dtype=mine.dtype, device=self.device
        )
        self.collective.all_gather(everybody, mine.contiguous())
        return everybody


def run(works: Iterator[Any]) -> None:
    """Drive a generator of works to its end, waiting where it waits."""
    for _ in works:
        pass
