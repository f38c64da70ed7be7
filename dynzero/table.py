"""The tables of one plan: its rows and the chunks that they are cut into (csrc/segments.h)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .ops import ops

COLUMNS: dict[str, int] = ops.ROW_COLUMNS
CHUNK: int = ops.CHUNK
CHUNK_BITS: int = ops.CHUNK_BITS


class Table(NamedTuple):
    """All int64 and on one device.

    rows         [n, len(COLUMNS)]  one active parameter each
    full_chunks  [f]                row, param, chunk: CHUNK_BITS each, over the padded parameters
    own_chunks   [o]                the same, over the elements that this rank owns
    """

    rows: Tensor
    full_chunks: Tensor
    own_chunks: Tensor

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self)

    def to(self, device: torch.device | str) -> Table:
        """On `device`, by one copy."""
        return Table(*ops.upload(list(self), torch.device(device)))


def make_table(rows: Tensor, world: int) -> Table:
    """Cuts rows into chunks.

    rows: int64 [n, len(COLUMNS)] on the CPU; a copy gets full_first and own_first filled in.
    """
    rows = rows.clone()
    full_chunks, full_first = _cut(rows, rows[:, COLUMNS["piece"]] * world)
    own_chunks, own_first = _cut(rows, rows[:, COLUMNS["own_numel"]])
    rows[:, COLUMNS["full_first"]] = full_first
    rows[:, COLUMNS["own_first"]] = own_first
    return Table(rows, full_chunks, own_chunks)


def _cut(rows: Tensor, numel: Tensor) -> tuple[Tensor, Tensor]:
    """Packed chunks of rows with `numel` elements, and the number of each row's first chunk."""
    count = (numel + (CHUNK - 1)) // CHUNK
    first = count.cumsum(0) - count
    row = torch.repeat_interleave(count)
    chunk = torch.arange(row.numel(), device="cpu") - first[row]
    param = rows[:, COLUMNS["param"]][row]
    return (row << CHUNK_BITS | param) << CHUNK_BITS | chunk, first
