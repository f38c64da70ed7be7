"""Who sits where: the buckets of one active set.

A plan is a pure function of the layout, the active set, the divisors and `bucket_bytes`, so every
rank computes the same one without a message. Plans are cached by the optimizer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Layout, shard_dtype
from .ops import ops
from .streams import outlive_current_stream
from .table import COLUMNS, Table, make_table


class Bucket(NamedTuple):
    """One flat buffer [world, stride]. Slices count rows and chunks of the plan's table."""

    number: int  # its place among the plan's buckets
    wire: torch.dtype
    dtype: torch.dtype  # of the parameters, and of their gradients
    rows: slice
    full: slice
    own: slice
    stride: int  # elements of one rank's share
    shard_offset: int  # elements before this bucket in the shard buffer of its dtype


class Room(NamedTuple):
    """A flat buffer of pieces: int64 [n] parameter indices, and where in it each starts, bytes."""

    dtype: torch.dtype
    indices: Tensor
    offsets: Tensor
    numel: int


@dataclass(frozen=True)
class Plan:
    """The buckets of one active set. `active` int64 [n]: parameter indices in row order."""

    active: Tensor
    table: Table
    buckets: tuple[Bucket, ...]
    indices: tuple[int, ...]  # `active` as Python numbers
    offsets: tuple[int, ...]  # of each row's slot in its bucket, elements
    divisors: dict[int, int]  # ranks to average over, by parameter index
    layout: Layout

    # Worked out once for all steps: each slice costs microseconds.
    @cached_property
    def full_chunks(self) -> tuple[Tensor, ...]:
        """`table.full_chunks` of each bucket."""
        counts = [b.full.stop - b.full.start for b in self.buckets]
        return tuple(self.table.full_chunks.split(counts))

    @cached_property
    def own_chunks(self) -> tuple[Tensor, ...]:
        """`table.own_chunks` of each bucket."""
        counts = [b.own.stop - b.own.start for b in self.buckets]
        return tuple(self.table.own_chunks.split(counts))

    @cached_property
    def compiled(self) -> Any:
        """The plan as the bucket loops in C++ read it."""
        buckets = ops.Buckets(self.table.rows, self.layout.world)
        for b, full, own in zip(self.buckets, self.full_chunks, self.own_chunks, strict=True):
            params = self.indices[b.rows]
            buckets.add(full, own, b.wire, b.dtype, b.stride, b.own.start, params)
        return buckets

    @cached_property
    def places(self) -> Tensor:
        """int32 [params]: place of each parameter's bucket in the order of sending, -1 if none."""
        places = torch.full((self.layout.size,), -1, dtype=torch.int32, device="cpu")
        for place, bucket in enumerate(reversed(self.buckets)):
            places[self.active[bucket.rows]] = place
        return places

    @cached_property
    def rooms(self) -> list[Room]:
        """Room for the pieces of all its parameters."""
        return rooms_of(self.layout, self.active)

    @cached_property
    def _streams(self) -> set[int]:
        return set()

    def outlive_stream(self) -> Plan:
        """It may be dropped while kernels on a stream that has not allocated it still read it."""
        outlive_current_stream(self.table.rows, self._streams)
        return self

    def to(self, device: torch.device) -> Plan:
        return replace(self, table=self.table.to(device))


class PlanCache:
    """The latest plans by active set, limited in number and in bytes of their tables.

    With thousands of different active sets (LayerDrop on a big model) all their tables together
    would take more memory than a bucket.
    """

    def __init__(self, most: int = 256, most_bytes: int = 16 << 20) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._plans: dict[Hashable, Plan] = {}
        self._bytes = 0
        self._latest: tuple[Tensor, Plan] | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> Plan | None:
        plan = self._plans.pop(key, None)
        if plan is not None:
            self._plans[key] = plan.outlive_stream()  # the last one to go
        return plan

    def latest(self, bits: Tensor) -> Plan | None:
        """The plan of the last `keep`, if that was for this tensor, and not just an equal one."""
        if self._latest is None or self._latest[0] is not bits:
            return None
        return self._latest[1].outlive_stream()

    def keep(self, bits: Tensor, plan: Plan) -> None:
        self._latest = bits, plan

    def put(self, key: Hashable, plan: Plan) -> None:
        """The newest plan always stays."""
        self._plans[key] = plan
        self._bytes += plan.table.nbytes
        while len(self) > 1 and (len(self) > self.most or self._bytes > self.most_bytes):
            oldest = next(iter(self._plans))
            self._bytes -= self._plans.pop(oldest).table.nbytes

    def clear(self) -> None:
        self._plans.clear()
        self._bytes = 0
        self._latest = None


def make_plan(
    layout: Layout,
    active: Tensor,
    divisor: Tensor,
    *,
    bucket_bytes: float,
    whole: bool = False,
) -> Plan:
    """Plan for the parameters `active` (int64 [n], ascending), averaged over `divisor` (int64 [n]).

    `whole`: this rank updates every element of each parameter (nothing is sharded).
    """
    order = torch.argsort(layout.class_index[active], stable=True)
    active, divisor = active[order], divisor[order]
    classes = layout.class_index[active].tolist()
    piece = layout.piece[active]
    bounds = bucket_bounds(layout, classes, piece.tolist(), bucket_bytes)
    offset, strides = bucket_offsets(piece, bounds)

    rows = torch.zeros(len(classes), len(COLUMNS), dtype=torch.int64, device="cpu")
    rows[:, COLUMNS["numel"]] = layout.numel[active]
    rows[:, COLUMNS["piece"]] = piece
    rows[:, COLUMNS["offset"]] = offset
    rows[:, COLUMNS["own_numel"]] = (layout.numel if whole else layout.own)[active]
    rows[:, COLUMNS["param"]] = active
    rows[:, COLUMNS["group"]] = layout.group[active]
    rows[:, COLUMNS["divisor"]] = divisor
    table = make_table(rows, layout.world)

    full = [*table.rows[:, COLUMNS["full_first"]].tolist(), table.full_chunks.numel()]
    own = [*table.rows[:, COLUMNS["own_first"]].tolist(), table.own_chunks.numel()]
    buckets = []
    shard_numel: dict[torch.dtype, int] = {}
    for number, ((a, b), stride) in enumerate(zip(bounds, strides, strict=True)):
        wire, dtype = layout.classes[classes[a]]
        at = shard_numel.get(shard_dtype(dtype), 0)
        buckets.append(
            Bucket(
                number,
                wire,
                dtype,
                slice(a, b),
                slice(full[a], full[b]),
                slice(own[a], own[b]),
                stride,
                at,
            )
        )
        shard_numel[shard_dtype(dtype)] = at + stride
    indices = tuple(active.tolist())
    divisors = dict(zip(indices, divisor.tolist(), strict=True))
    return Plan(active, table, tuple(buckets), indices, tuple(offset.tolist()), divisors, layout)


def rooms_of(layout: Layout, indices: Tensor) -> list[Room]:
    """Where the pieces of these parameters lie in shard buffers of their own, one per dtype."""
    dtypes = [shard_dtype(layout.dtypes[i]) for i in indices.tolist()]
    rooms = []
    for dtype in dict.fromkeys(dtypes):
        some = indices[torch.tensor([d == dtype for d in dtypes], device="cpu")]
        piece = layout.piece[some]
        offsets = (torch.cumsum(piece, 0) - piece) * dtype.itemsize
        rooms.append(Room(dtype, some, offsets, int(piece.sum())))
    return rooms


def bucket_bounds(
    layout: Layout, classes: list[int], pieces: list[int], bucket_bytes: float
) -> list[tuple[int, int]]:
    """Row ranges of the buckets: in order, one dtype pair each, filled up to `bucket_bytes`."""
    bounds: list[tuple[int, int]] = []
    first, used = 0, 0
    for i, (c, piece) in enumerate(zip(classes, pieces, strict=True)):
        need = piece * layout.world * layout.classes[c][0].itemsize
        if i > first and (c != classes[first] or used + need > bucket_bytes):
            bounds.append((first, i))
            first, used = i, 0
        used += need
    if classes:
        bounds.append((first, len(classes)))
    return bounds


def bucket_offsets(piece: Tensor, bounds: list[tuple[int, int]]) -> tuple[Tensor, list[int]]:
    """Slot offsets within each bucket, and each bucket's stride, in elements."""
    ends = torch.cumsum(piece, 0)
    before = ends - piece
    bases = [int(before[a]) for a, _ in bounds]
    strides = [int(ends[b - 1]) - base for (_, b), base in zip(bounds, bases, strict=True)]
    counts = torch.tensor([b - a for a, b in bounds], dtype=torch.int64, device="cpu")
    base_of_row = torch.repeat_interleave(
        torch.tensor(bases, dtype=torch.int64, device="cpu"), counts
    )
    return before - base_of_row, strides


def indices_of(bits: Tensor, size: int) -> Tensor:
    """Ascending indices (int64) of the set bits of uint8 [bytes], little-endian."""
    return flags_of(bits)[:size].nonzero().flatten()


def flags_of(bits: Tensor) -> Tensor:
    """uint8 [bytes], little-endian, as bool [8 * bytes]."""
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu")
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten().bool()


def raw(bits: Tensor) -> bytes:
    """The bytes of a uint8 tensor on the CPU."""
    content: bytes = ops.raw(bits.contiguous())
    return content


def union(rows: Tensor) -> Tensor:
    """Bitwise OR over the first dimension of uint8 [ranks, bytes]: uint8 [bytes]."""
    anywhere: Tensor = ops.union_rows(rows)
    return anywhere


def counts_of(rows: Tensor, indices: Tensor) -> Tensor:
    """In how many rows of uint8 [ranks, bytes] each of `indices` is set, int64 [n]."""
    columns = rows[:, indices // 8]
    return ((columns >> (indices % 8).to(torch.uint8)) & 1).sum(0, dtype=torch.int64)


def bit_mask(indices: list[int], size: int) -> Tensor:
    """uint8 [bytes] with the bits of `indices` set, little-endian."""
    flags = torch.zeros((size + 7) // 8 * 8, dtype=torch.uint8, device="cpu")
    flags[indices] = 1
    weights = 1 << torch.arange(8, dtype=torch.uint8, device="cpu")
    return (flags.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
