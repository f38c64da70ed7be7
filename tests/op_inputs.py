"""Inputs for the op tests: tables, address tables, sizes, and who is absent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynzero.ops import NONFINITE_BITS, RECORD_COLUMNS, SCALE_FIELDS, STATUS_FIELDS
from dynzero.table import CHUNK, COLUMNS, Table, make_table

VECTOR = 8  # elements of 16 bits in a 16-byte access
SIZES = [0, 1, VECTOR - 1, VECTOR, VECTOR + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
INF, NAN = NONFINITE_BITS["inf"], NONFINITE_BITS["nan"]

PATTERNS = {
    "none absent": lambda i, n: True,
    "all absent": lambda i, n: False,
    "alternating": lambda i, n: i % 2 == 0,
    "last only": lambda i, n: i == n - 1,
}


class Sizes(NamedTuple):
    """One table for parameters of these sizes, of which this rank owns its pieces."""

    table: Table
    stride: int
    own: list[slice]  # of each flat parameter


def make_sizes(
    numels: list[int],
    dtype: torch.dtype,
    device: str,
    *,
    world: int = 1,
    rank: int = 0,
    divisor: int | None = None,
) -> Sizes:
    """dtype: of the wire. The last row is the first parameter, so row and parameter differ."""
    unit = 16 // dtype.itemsize
    rows = torch.zeros(len(numels), len(COLUMNS), dtype=torch.int64)
    own = [slice(0)] * len(numels)
    offset = 0
    for at, param in enumerate([*range(1, len(numels)), *range(min(1, len(numels)))]):
        numel = numels[param]
        piece = -(-numel // (world * unit)) * unit
        start = min(numel, rank * piece)
        own[param] = slice(start, min(numel, start + piece))
        values = {
            "numel": numel,
            "piece": piece,
            "offset": offset,
            "own_numel": own[param].stop - start,
            "param": param,
            "divisor": world if divisor is None else divisor,
        }
        for name, value in values.items():
            rows[at, COLUMNS[name]] = value
        offset += piece
    return Sizes(make_table(rows, world).to(device), offset, own)


def addresses(tensors: list[Tensor | None], device: str) -> Tensor:
    return torch.tensor(
        [0 if t is None else t.data_ptr() for t in tensors], dtype=torch.int64, device=device
    )


def randn(numel: int, dtype: torch.dtype, device: str, *, odd: bool = False) -> Tensor:
    """Normal values; `odd`: at an address that is a multiple of the element size only."""
    if not odd:
        return torch.randn(numel, device=device).to(dtype)
    return torch.randn(numel + 1, device=device).to(dtype)[1:]


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def pack_bits(present: list[list[bool]], device: str) -> Tensor:
    """present[rank][param] -> uint8 [world, ceil(params / 8)], little-endian bits."""
    num_bytes = -(-len(present[0]) // 8)
    out = torch.zeros(len(present), num_bytes, dtype=torch.uint8)
    for rank, flags in enumerate(present):
        for param, flag in enumerate(flags):
            out[rank, param // 8] |= int(flag) << param % 8
    return out.to(device)


def make_status(device: str, world: int = 0, **fields: float) -> Tensor:
    """world: ranks for whose records, and for the scale, there is room behind the fields."""
    values = {name: 0.0 for name in STATUS_FIELDS} | {"clip": 1.0, "scale": 1.0, "param": -1.0}
    values |= fields
    room = [0.0] * (len(SCALE_FIELDS) + world * len(RECORD_COLUMNS)) if world else []
    numbers = [*(values[n] for n in STATUS_FIELDS), *room]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def assert_sums_close(ours: Tensor, expected: Tensor) -> None:
    """Sums of squares: a few are added up in float32 before they go to float64."""
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0, equal_nan=True)
