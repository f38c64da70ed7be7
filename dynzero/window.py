"""Pack, reduce and gather: how the gradients of a window reach their owners and values come back.

A window is the time between two steps. Its reduced pieces accumulate here, in the shard dtype; in
stage 1 a window holds one reduction, in stage 2 one for each backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, shard_dtype
from .ops import ops
from .plan import Bucket, Plan
from .reduced import Gradients, Local, upload
from .shard import Shard
from .transports.collective import Collective, Work

# Buckets in flight: one is being packed while the one before it travels.
IN_FLIGHT = 2


class Window:
    """Reduced pieces so far. Tables by parameter index; `present` uint8 [world, bytes]."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.ptrs = torch.zeros(layout.size, dtype=torch.int64)
        self.buffers: list[Tensor] = []
        self.present = torch.zeros(layout.world, layout.bit_bytes, dtype=torch.uint8)
        # What this rank has announced, and what of it there really was: see Note [Withdrawn].
        self.announced = torch.zeros(layout.bit_bytes, dtype=torch.uint8)
        self.had = torch.zeros(layout.bit_bytes, dtype=torch.uint8)
        self.sumsq = torch.zeros(layout.size, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(layout.size, dtype=torch.int32, device=device)
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
        self.ptrs = torch.nn.functional.pad(self.ptrs, (0, extra))
        self.sumsq = torch.nn.functional.pad(self.sumsq, (0, extra))
        self.nonfinite = torch.nn.functional.pad(self.nonfinite, (0, extra))
        missing = layout.bit_bytes - self.present.shape[1]
        self.present = torch.nn.functional.pad(self.present, (0, missing))
        self.announced = torch.nn.functional.pad(self.announced, (0, missing))
        self.had = torch.nn.functional.pad(self.had, (0, missing))

    def claim(self, plan: Plan) -> None:
        """Room for the pieces of the plan's parameters that have none yet, in row order."""
        new = plan.active[self.ptrs[plan.active] == 0]
        dtypes = [shard_dtype(self.layout.dtypes[i]) for i in new.tolist()]
        for dtype in dict.fromkeys(dtypes):
            some = new[torch.tensor([d == dtype for d in dtypes])]
            piece = self.layout.piece[some]
            # At least one element, so that an empty piece has an address that is not 0.
            buffer = torch.empty(int(piece.sum()) + 1, dtype=dtype, device=self.device)
            self.buffers.append(buffer)
            offset = torch.cumsum(piece, 0) - piece
            self.ptrs[some] = buffer.data_ptr() + offset * dtype.itemsize


class Mover:
    """Moves buckets between ranks over the collective transport."""

    def __init__(self, layout: Layout, device: torch.device, collective: Collective) -> None:
        self.layout, self.device, self.collective = layout, device, collective

    def reduce(self, plan: Plan, local: Local, present: Tensor, window: Window) -> Iterator[Any]:
        """Sum the local gradients of all ranks into the window; yields before each wait.

        present: uint8 [world, bytes], the ranks that contribute to each parameter. Buckets go in
        the order in which backward completes them, the last parameters first.
        """
        accumulate = (window.ptrs != 0).to(torch.int64)
        window.claim(plan)
        complete = local.complete
        tables = upload(torch.stack([local.ptrs[0], window.ptrs, accumulate]), self.device).unbind()
        bits = upload(present.contiguous(), self.device)
        chunks = plan.table.own_chunks.numel()
        partials = torch.empty(chunks, dtype=torch.float64, device=self.device)
        sums = plan.by_bucket(partials)
        waiting: deque[tuple[Bucket, Tensor, Work]] = deque()
        for place, bucket in enumerate(reversed(plan.buckets)):
            if not complete:
                yield from local.arrive(plan, bucket, place)
                span = plan.span(bucket)
                tables[0][span].copy_(local.ptrs[0][span], non_blocking=True)
            if len(waiting) == IN_FLIGHT:
                yield waiting[0][-1]
                self._receive(plan, waiting.popleft(), bits, tables, sums, window)
            waiting.append(self._send(plan, bucket, local, tables[0], window))
        while waiting:
            yield waiting[0][-1]
            self._receive(plan, waiting.popleft(), bits, tables, sums, window)
        ops.fold_sums(plan.table.rows, partials, False, self.layout.world, window.sumsq)
        window.present |= present

    def _send(
        self, plan: Plan, bucket: Bucket, local: Local, grad_ptrs: Tensor, window: Window
    ) -> tuple[Bucket, Tensor, Work]:
        shape = (self.layout.world, bucket.stride)
        sent = torch.empty(shape, dtype=bucket.wire, device=self.device)
        ops.pack_grads(
            plan.table.rows,
            plan.full_chunks[bucket.number],
            grad_ptrs,
            bucket.dtype,
            sent,
            None,
            window.nonfinite,
        )
        # What was packed is free; on a big model that is most of the gradients.
        for i in plan.indices[bucket.rows]:
            local.own.pop(i, None)
        received = torch.empty_like(sent)
        return bucket, received, self.collective.all_to_all(received, sent)

    def _receive(
        self,
        plan: Plan,
        parcel: tuple[Bucket, Tensor, Work],
        bits: Tensor,
        tables: tuple[Tensor, ...],
        sums: tuple[Tensor, ...],
        window: Window,
    ) -> None:
        bucket, received, work = parcel
        work.wait()
        ops.reduce_shard(
            plan.table.rows,
            plan.own_chunks[bucket.number],
            received,
            bits,
            tables[1],
            tables[2],
            sums[bucket.number],
            window.nonfinite,
        )

    def gather_grads(self, plan: Plan, window: Window) -> tuple[Tensor, list[Tensor]]:
        """Stage 0: every rank gets the whole reduced gradients. Returns addresses and buffers.

        The window must hold this one reduction, so that its buffers follow the plan's rows.
        """
        ptrs = torch.zeros(self.layout.size, dtype=torch.int64)
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
            self.collective.all_gather(everybody, mine).wait()
            self._unpack(plan, bucket, everybody, whole, None)
        return ptrs, buffers

    def update_and_gather(self, plan: Plan, shard: Shard, grads: Gradients, ptrs: Tensor) -> None:
        """Update own pieces bucket by bucket and send the new values to everybody's parameters."""
        waiting: deque[tuple[Bucket, Tensor, Work]] = deque()
        for bucket in plan.buckets:
            shape = (self.layout.world, bucket.stride)
            everybody = torch.empty(shape, dtype=bucket.dtype, device=self.device)
            mine = everybody[self.layout.rank]
            shard.update(plan, bucket, grads, mine)
            waiting.append((bucket, everybody, self.collective.all_gather(everybody, mine)))
            if len(waiting) == IN_FLIGHT:
                self._arrive(plan, waiting.popleft(), ptrs, grads)
        while waiting:
            self._arrive(plan, waiting.popleft(), ptrs, grads)

    def _arrive(
        self, plan: Plan, parcel: tuple[Bucket, Tensor, Work], ptrs: Tensor, grads: Gradients
    ) -> None:
        bucket, everybody, work = parcel
        work.wait()
        self._unpack(plan, bucket, everybody, ptrs, grads.status)

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
        self.collective.all_gather(everybody, mine.contiguous()).wait()
        return everybody


def run(works: Iterator[Any]) -> None:
    """Drive a generator of works to its end, waiting where it waits."""
    for _ in works:
        pass
