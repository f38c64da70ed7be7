"""What never changes about the parameters: sizes, dtypes, pieces, groups.

Every parameter is seen as a flat row of reals in the order in which its memory lies (complex
numbers as pairs), and cut into `world` pieces of `piece` elements. A parameter whose memory has
gaps is staged: a dense copy in logical order stands in for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import ops
from .table import CHUNK, CHUNK_BITS

REAL_DTYPE = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# What the fields of a packed chunk can count (csrc/segments.h).
MAX_PARAMS = 1 << CHUNK_BITS
MAX_NUMEL = CHUNK << CHUNK_BITS
WIRE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def shard_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a parameter of real dtype `dtype` is reduced and updated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def memory_order(p: Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory, size-1 dimensions left out."""
    dims = [d for d in range(p.dim()) if p.shape[d] > 1]
    return tuple(sorted(dims, key=lambda d: p.stride()[d], reverse=True))


def is_dense(p: Tensor) -> bool:
    """True if the elements of `p` fill one gap-free stretch of memory, each once."""
    return p.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense(p)


def overlaps(p: Tensor) -> bool:
    """True if elements of `p` share memory, as an expanded tensor's do."""
    return not is_dense(p) and any(p.stride(d) == 0 and p.shape[d] > 1 for d in range(p.dim()))


def flat_view(p: Tensor) -> Tensor:
    """1-D view of a dense tensor's reals in memory order; writes go to the tensor."""
    real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
    return real.as_strided((real.numel(),), (1,), real.storage_offset())


def flat_copy(t: Tensor, like: Tensor) -> Tensor:
    """The reals of `t` (shape of `like`) as a new 1-D tensor in the memory order of `like`."""
    out = torch.empty_strided(like.shape, dense_strides(like), dtype=t.dtype, device=t.device)
    return flat_view(out.copy_(t))


def unflatten(flat: Tensor, like: Tensor) -> Tensor:
    """A new dense tensor of the shape of `like` from 1-D reals in its memory order."""
    dtype = flat.dtype
    if like.is_complex():
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    out = torch.empty_strided(like.shape, dense_strides(like), dtype=dtype, device=flat.device)
    flat_view(out).copy_(flat)
    return out


def dense_strides(p: Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor in the memory order of `p`; logical order if `p` has gaps."""
    return p.stride() if is_dense(p) else torch.empty(p.shape, device="meta").stride()


@dataclass(frozen=True)
class Layout:
    """Static tables over all parameters, int64 [params] on the CPU unless said otherwise.

    numel, piece and start count elements (reals); `class_index` numbers `classes`, the distinct
    (wire dtype, parameter dtype) pairs, since a bucket holds one pair only.
    """

    names: tuple[str, ...]
    numel: Tensor
    piece: Tensor
    start: Tensor  # first element of this rank's piece
    own: Tensor  # elements of this rank's piece, 0 for an empty one
    itemsize: Tensor  # bytes of one element
    group: Tensor
    class_index: Tensor
    classes: tuple[tuple[torch.dtype, torch.dtype], ...]
    dtypes: tuple[torch.dtype, ...]
    world: int
    rank: int

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def bit_bytes(self) -> int:
        return (self.size + 7) // 8


def build_layout(
    params: list[Tensor],
    names: list[str],
    groups: list[int],
    *,
    world: int,
    rank: int,
    wire_dtype: torch.dtype | None,
) -> Layout:
    """Layout of `params`; raises ValueError for what cannot be sharded: a dtype, memory, a size."""
    if len(params) > MAX_PARAMS:
        raise ValueError(
            f"params: expected at most {MAX_PARAMS} parameters in one optimizer, got "
            f"{len(params)}; divide them among several optimizers"
        )
    classes: list[tuple[torch.dtype, torch.dtype]] = []
    columns: list[tuple[int, int, int, int]] = []
    for p, name in zip(params, names, strict=True):
        check_param(p, name)
        dtype = REAL_DTYPE[p.dtype]
        wire = dtype if wire_dtype is None or dtype == torch.float64 else wire_dtype
        if (wire, dtype) not in classes:
            classes.append((wire, dtype))
        numel = p.numel() * (2 if p.is_complex() else 1)
        unit = 16 // min(wire.itemsize, dtype.itemsize)
        piece = -(-numel // (world * unit)) * unit
        if piece * world > MAX_NUMEL:
            raise ValueError(
                f"parameter '{name}': expected at most {MAX_NUMEL} elements, got {numel}; split it"
            )
        columns.append((numel, piece, dtype.itemsize, classes.index((wire, dtype))))
    table = torch.tensor(columns, dtype=torch.int64, device="cpu").reshape(-1, 4)
    numel_t, piece_t, itemsize_t, class_t = (c.contiguous() for c in table.unbind(1))
    start = torch.minimum(piece_t * rank, numel_t)
    return Layout(
        names=tuple(names),
        numel=numel_t,
        piece=piece_t,
        start=start,
        own=torch.minimum(piece_t, numel_t - start),
        itemsize=itemsize_t,
        group=torch.tensor(groups, dtype=torch.int64, device="cpu"),
        class_index=class_t,
        classes=tuple(classes),
        dtypes=tuple(REAL_DTYPE[p.dtype] for p in params),
        world=world,
        rank=rank,
    )


def check_param(p: Tensor, name: str) -> None:
    if p.dtype not in REAL_DTYPE:
        raise ValueError(
            f"parameter '{name}': expected a floating point or complex dtype, got {p.dtype}; "
            "leave it out of the optimizer"
        )
    if p.layout != torch.strided:
        raise ValueError(
            f"parameter '{name}': expected a strided tensor, got {p.layout}; make it dense"
        )
    if not ops.has_plain_data(p):
        raise ValueError(
            f"parameter '{name}': expected a tensor whose elements lie in its memory, got "
            f"{kind_of(p)}; pass what it stands for (.resolve_conj(), .resolve_neg(), .to_local())"
        )
    if overlaps(p):
        raise ValueError(
            f"parameter '{name}': its elements overlap in memory (strides {tuple(p.stride())} for "
            f"shape {tuple(p.shape)}), expected one place for each; pass a .contiguous() copy"
        )


def kind_of(p: Tensor) -> str:
    """What keeps the elements of `p` from lying in its memory, in words."""
    if p.is_conj() or p.is_neg():
        return "a view that is still to be conjugated or negated"
    if p._is_zerotensor():
        return "a symbolic zero"
    return f"a {type(p.data).__name__}, which wraps other tensors"
