"""Windows, and how their gradients reach the owners and new values come back: reduce and gather.

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
from .plan import Plan, Room, rooms_of
from .reduced import Gradients, Local, upload
from .shard import Shard
from .transports.collective import Collective


class Window:
    """Reduced pieces so far. Tables by parameter index; `present` uint8 [world, bytes]."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        tables: list[Tensor] = ops.empty_window(layout.size, layout.world, device)
        # announced, had: by this rank, and what of it there really was: see Note [Withdrawn].
        self.ptrs, self.present, self.announced, self.had, self.sumsq, self.nonfinite = tables
        self._tables = tables
        self.ptrs_there: Tensor | None = None  # on the device, as of the last reduction
        self.buffers: list[Tensor] = []
        self.rounds = 0

    @property
    def used(self) -> bool:
        """True once ranks have met in this window: the same answer on every rank."""
        return self.rounds > 0 or bool(self.buffers)

    def withdrawn(self) -> Tensor:
        """uint8 [bytes]: announced by this rank in this window, but not there in any pass."""
        return self.announced & ~self.had

    def grown(self, layout: Layout) -> Window:
        """The same with room for the parameters that this layout has more."""
        window = Window(layout, self.device)
        for new, old in zip(window._tables, self._tables, strict=True):
            new[..., : old.shape[-1]] = old
        window.buffers, window.rounds = self.buffers, self.rounds
        return window

    def rooms(self, plan: Plan) -> list[Room]:
        """Of the plan's parameters that have no pieces here yet, in row order."""
        if not self.buffers:
            return plan.rooms
        fresh = self.ptrs[plan.active] == 0
        return plan.rooms if fresh.all() else rooms_of(self.layout, plan.active[fresh])


class Mover:
    """Moves buckets between ranks over the collective transport."""

    def __init__(self, world: int, device: torch.device, collective: Collective) -> None:
        self.world, self.device, self.collective = world, device, collective
        self._uploads = ops.Uploads()

    def reduce(
        self, plan: Plan, local: Local, present: Tensor, window: Window, *, in_step: bool
    ) -> Iterator[Any]:
        """Sum the local gradients of all ranks into the window; yields before each wait.

        present: uint8 [world, bytes], the ranks that contribute to each parameter. Buckets go in
        the order in which backward completes them, the last parameters first. in_step: see Note
        [In step].
        """
        reduction, buffers, window.ptrs_there = ops.begin_reduction(
            plan.compiled, self.collective.transport, window.rooms(plan), local.ptrs[0],
            window.ptrs, present, window.nonfinite, in_step and self.device.type == "cuda",
            self._uploads if local.located else None,
        )  # fmt: skip
        window.buffers += buffers
        yield from local.feed(reduction, plan, self.collective)
        local.own.clear()
        reduction.fold(window.sumsq)
        window.present |= present

    def gather_grads(self, plan: Plan, window: Window) -> tuple[Tensor, list[Tensor]]:
        """Stage 0: every rank gets the whole reduced gradients. Returns addresses and buffers.

        The window must hold this one reduction, so that its buffers follow the plan's rows.
        """
        layout, world = plan.layout, self.world
        ptrs = torch.zeros(layout.size, dtype=torch.int64, device="cpu")
        buffers = []
        shards = {buffer.dtype: buffer for buffer in window.buffers}
        for bucket in plan.buckets:
            dtype = shard_dtype(bucket.dtype)
            active = plan.active[bucket.rows]
            room = layout.piece[active] * world
            flat = torch.empty(int(room.sum()) + 1, dtype=dtype, device=self.device)
            ptrs[active] = flat.data_ptr() + (torch.cumsum(room, 0) - room) * dtype.itemsize
            buffers.append(flat)
        whole = upload(ptrs, self.device)
        for bucket in plan.buckets:
            shard = shards[shard_dtype(bucket.dtype)]
            mine = shard[bucket.shard_offset : bucket.shard_offset + bucket.stride]
            everybody = torch.empty(world, bucket.stride, dtype=mine.dtype, device=self.device)
            self.collective.all_gather(everybody, mine)
            chunks = plan.full_chunks[bucket.number]
            ops.unpack_params(plan.table.rows, chunks, everybody, whole, None)
        return ptrs, buffers

    def update_and_gather(
        self, plan: Plan, shard: Shard, grads: Gradients, ptrs: Tensor, *, receive: bool = True
    ) -> Any:
        """Update own pieces bucket by bucket and send the new values to everybody's parameters.

        Returns what receives them, in order, if that is not done here.
        """
        rank, transport = plan.layout.rank, self.collective.transport
        gathering = ops.Gathering(plan.compiled, transport, rank, ptrs, grads.status)
        with self.collective.naming_ranks():
            shard.update_and_gather(plan, grads, gathering, receive=receive)
        return gathering

    def gather_records(self, grads: Gradients, scale_state: Tensor) -> Tensor:
        """Every rank's record of reduced gradients, float64 [world, columns]."""
        with self.collective.naming_ranks():
            records: Tensor = ops.summarize_and_gather(
                grads.plan.compiled, self.collective.transport, grads.sumsq, grads.nonfinite,
                scale_state,
            )  # fmt: skip
        return records

    def gather_rows(self, mine: Tensor) -> Tensor:
        """A small tensor of every rank, [world, ...]."""
        everybody = torch.empty(self.world, *mine.shape, dtype=mine.dtype, device=self.device)
        self.collective.all_gather(everybody, mine.contiguous())
        return everybody


def run(works: Iterator[Any]) -> None:
    """Drive a generator of works to its end, waiting where it waits."""
    for _ in works:
        pass
