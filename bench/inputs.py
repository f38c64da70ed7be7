"""Inputs of a case: random tensors, and the plan and tables that the optimizer would build."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from dynzero.layout import build_layout
from dynzero.ops import ops
from dynzero.plan import make_plan
from dynzero.reduced import Reader, upload

from .cases import Case

# Where torch's allocator lets a tensor start, bytes.
ALIGNMENT = 512


def random_tensors(
    sizes: list[int], dtype: torch.dtype, device: torch.device, *, aligned: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """One random allocation and 1-D tensors cut from it.

    aligned: each starts where an allocation would; else at an odd element, as slices may.
    """
    unit = ALIGNMENT // dtype.itemsize
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end if aligned else end + 1)
        end += math.ceil((size + (not aligned)) / unit) * unit
    flat = torch.empty(end, dtype=dtype, device=device).normal_()
    return flat, [flat[at : at + size] for at, size in zip(offsets, sizes, strict=True)]


def choose(tensors: int, fraction: float) -> Tensor:
    """Which tensors take part, bool [tensors]: random, the same on every machine, at least one."""
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(tensors, generator=generator)
    chosen = torch.zeros(tensors, dtype=torch.bool)
    chosen[order[: max(1, round(fraction * tensors))]] = True
    return chosen


class Planned:
    """Tensors of a case as parameters of rank 0, their plan with one bucket, and the tables.

    `active`: rows of the plan, bool [tensors]. `present`: parameters with a gradient here; their
    `grad` is the parameter itself, which saves memory and is read all the same.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        tensors: list[Tensor],
        *,
        wire: torch.dtype,
        active: Tensor,
        present: Tensor,
    ) -> None:
        self.case, self.device = case, device
        self.params = [t.detach() for t in tensors]
        for param, is_present in zip(self.params, present.tolist(), strict=True):
            if is_present:
                param.grad = param.detach()
        self.active, self.present = active, present
        names = [f"p{i}" for i in range(len(tensors))]
        self.layout = build_layout(
            self.params, names, [0] * len(tensors), world=case.world, rank=0, wire_dtype=wire
        )
        indices = active.nonzero().flatten()
        divisor = torch.full_like(indices, case.world)
        plan = make_plan(self.layout, indices, divisor, bucket_bytes=math.inf)
        self.plan = plan.to(device)
        (self.bucket,) = plan.buckets
        self.table = self.plan.table

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.params, self.layout, self.device)

    @property
    def size(self) -> int:
        return self.layout.size

    def grad_ptrs(self) -> tuple[Tensor, Tensor]:
        """As the optimizer does in a step whose gradients have moved: read all, upload the table.

        Returns addresses and flags of zero.
        """
        local, complaint = self.reader.read()
        assert complaint is None and not local.own, complaint
        flags = torch.zeros(self.size, dtype=torch.int32, device=self.device)
        return upload(local.ptrs[0], self.device), flags

    def numel(self, which: Tensor) -> int:
        return int(self.layout.numel[which].sum())

    def slots(self, flat_bucket: Tensor) -> list[list[Tensor]]:
        """Per row of the plan: the pieces, by rank, of its slot in a bucket [world, stride]."""
        world, stride = self.case.world, self.bucket.stride
        matrix = flat_bucket.view(world, stride)
        slots = []
        for index, offset in zip(self.plan.indices, self.plan.offsets, strict=True):
            piece, numel = self._piece[index], self._numel[index]
            sizes = [min(piece, numel - r * piece) for r in range(world)]
            slots.append([matrix[r, offset : offset + n] for r, n in enumerate(sizes) if n > 0])
        return slots

    @cached_property
    def _piece(self) -> list[int]:
        return self.layout.piece.tolist()

    @cached_property
    def _numel(self) -> list[int]:
        return self.layout.numel.tolist()

    def pieces(self, index: int) -> list[Tensor]:
        """Parameter `index` cut by rank, without empty pieces."""
        piece = max(self._piece[index], 1)
        return list(self.params[index].split(piece)) if self._numel[index] else []


class Sums:
    """Outputs that a check leaves: squares per chunk and per parameter, and non-finite bits."""

    def __init__(self, planned: Planned, *, full: bool) -> None:
        device, self.full, self.planned = planned.device, full, planned
        chunks = planned.table.full_chunks if full else planned.table.own_chunks
        self.partials = torch.empty(chunks.numel(), dtype=torch.float64, device=device)
        self.sumsq = torch.zeros(planned.size, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(planned.size, dtype=torch.int32, device=device)

    def fold(self) -> None:
        world = self.planned.case.world
        ops.fold_sums(self.planned.table.rows, self.partials, self.full, world, self.sumsq)
