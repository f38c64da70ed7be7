"""Which rows a run has: sizes, tensor counts, dtypes, active fractions, alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
M = 1_000_000
# Elements of a small tensor: "4096 tensors of 256 to 65536".
SMALL = (256, 65536)
# The largest of many tensors is about this much larger than the smallest.
SPREAD = 100.0


@dataclass(frozen=True)
class Case:
    """One row. numel: elements of all tensors together, over all ranks' pieces.

    source: dtype of the gradients (update_shard: also float32 for a reduced shard). wire: dtype of
    the bucket (update_shard: of the parameters). active: fraction of the tensors that take part.
    small: tensors of 256 to 65536 elements each, whatever `numel` says. buckets: how many there are
    (reduce_buckets; the others have one), all with equally many tensors of one size.
    """

    op: str
    numel: int
    tensors: int
    source: torch.dtype = F16
    wire: torch.dtype = F16
    active: float = 1.0
    aligned: bool = True
    world: int = 1
    small: bool = False
    buckets: int = 1

    def sizes(self) -> list[int]:
        if self.buckets > 1:
            return [self.numel // self.tensors] * self.tensors
        return tensor_sizes(self.numel, self.tensors, small=self.small)

    def as_json(self, elements: int) -> dict[str, Any]:
        return {
            "elements": elements,
            "tensors": self.tensors,
            "source": short(self.source),
            "wire": short(self.wire),
            "active": self.active,
            "aligned": self.aligned,
            "world": self.world,
            "small": self.small,
            "buckets": self.buckets,
        }

    def __str__(self) -> str:
        parts = [
            f"{self.numel / M:g} M" if not self.small else "small",
            f"in {self.tensors}",
            f"{short(self.source)}->{short(self.wire)}",
        ]
        parts += [f"{self.active:.0%} active"] if self.active < 1 else []
        parts += [] if self.aligned else ["odd offsets"]
        parts += [f"world {self.world}"] if self.world > 1 else []
        parts += [f"{self.buckets} buckets"] if self.buckets > 1 else []
        return f"{self.op} " + " ".join(parts)


def short(dtype: torch.dtype) -> str:
    return {F16: "fp16", BF16: "bf16", F32: "fp32"}[dtype]


def tensor_sizes(numel: int, tensors: int, *, small: bool = False) -> list[int]:
    """Elements of each tensor: the same on every machine, log-uniform so that they differ."""
    generator = torch.Generator().manual_seed(tensors)
    draw = torch.rand(tensors, generator=generator, dtype=torch.float64)
    if small:
        low, high = SMALL
        return (low + draw * (high - low)).to(torch.int64).tolist()
    weight = torch.exp(draw * math.log(SPREAD))
    sizes = (weight / weight.sum() * numel).to(torch.int64).clamp(min=1)
    sizes[-1] += max(numel - int(sizes.sum()), 1 - int(sizes[-1]))
    return sizes.tolist()


def pack_cases_cuda() -> list[Case]:
    def pack(
        numel: float, tensors: int, source: torch.dtype = F16, wire: torch.dtype = F16, **more: Any
    ) -> Case:
        return Case("pack_grads", int(numel * M), tensors, source, wire, **more)

    return [
        pack(25, 1), pack(25, 20), pack(25, 580), pack(25, 20, aligned=False),
        pack(100, 580), pack(200, 580), pack(400, 580), pack(1500, 580), pack(1500, 1),
        pack(1500, 580, BF16, BF16), pack(800, 580, F32, F16), pack(800, 580, F16, F32),
        pack(800, 580, F32, F32), pack(134, 4096, small=True), pack(400, 4096),
        pack(400, 20000), pack(1500, 580, active=0.5), pack(1500, 580, active=0.1),
        pack(134, 4096, small=True, active=0.5), pack(400, 580, aligned=False),
        pack(1500, 580, world=8), pack(25, 20, world=8),
    ]  # fmt: skip


def other_cases_cuda() -> list[Case]:
    big, small = 1500 * M, 134 * M
    return [
        Case("check_shard", big, 580), Case("check_shard", 25 * M, 20),
        Case("check_shard", small, 4096, small=True), Case("check_shard", 800 * M, 580, F32, F32),
        Case("check_shard", 400 * M, 20000),
        Case("reduce_shard", 800 * M, 580, world=2), Case("reduce_shard", 800 * M, 580, world=8),
        Case("reduce_shard", 800 * M, 580, world=8, active=0.5),
        Case("reduce_shard", 25 * M, 20, world=8),
        Case("reduce_shard", small, 4096, small=True, world=2),
        Case("update_shard", 800 * M, 580), Case("update_shard", 800 * M, 580, BF16, BF16),
        Case("update_shard", 800 * M, 580, F32, F32), Case("update_shard", 800 * M, 580, F32, F16),
        Case("update_shard", 25 * M, 20), Case("update_shard", small, 4096, small=True),
        Case("update_shard", 800 * M, 580, active=0.5),
        Case("unpack_params", big, 580, world=8), Case("unpack_params", 25 * M, 20, world=8),
        Case("unpack_params", small, 4096, small=True, world=8),
        *bucket_cases(128 * M, 1, 20, 580, 4096),
    ]  # fmt: skip


def bucket_cases(numel: int, *tensors: int) -> list[Case]:
    """tensors: of each bucket."""
    return [Case("reduce_buckets", numel, 16 * n, F16, F16, world=2, buckets=16) for n in tensors]


def cases_cpu() -> list[Case]:
    return [
        Case("pack_grads", 200 * M, 580, F32, F32), Case("pack_grads", 200 * M, 580, F16, F16),
        Case("pack_grads", 25 * M, 20, F32, F32), Case("pack_grads", 25 * M, 1, F32, F32),
        Case("pack_grads", 25 * M, 20, BF16, BF16), Case("pack_grads", 25 * M, 20, F32, F16),
        Case("pack_grads", 25 * M, 20, F16, F32), Case("pack_grads", 25 * M, 4096, F32, F32),
        Case("pack_grads", 25 * M, 20000, F32, F32),
        Case("pack_grads", 25 * M, 580, F32, F32, active=0.5),
        Case("pack_grads", 25 * M, 580, F32, F32, active=0.1),
        Case("pack_grads", 25 * M, 20, F32, F32, aligned=False),
        Case("pack_grads", 25 * M, 20, F32, F32, world=4),
        Case("check_shard", 100 * M, 580, F32, F32), Case("check_shard", 25 * M, 20, BF16, BF16),
        Case("reduce_shard", 50 * M, 580, F32, F32, world=4),
        Case("reduce_shard", 50 * M, 580, BF16, BF16, world=4),
        Case("update_shard", 20 * M, 580, F32, F32), Case("update_shard", 20 * M, 580, BF16, BF16),
        Case("update_shard", 20 * M, 580, F32, BF16),
        Case("unpack_params", 50 * M, 580, F32, F32, world=4),
        *bucket_cases(16 * M, 20),
    ]  # fmt: skip


def cases_quick(device_type: str) -> list[Case]:
    """A few rows of every op: seconds, and no results to publish."""
    numel, half = (25 * M, F16) if device_type == "cuda" else (1 * M, BF16)
    return [
        Case("pack_grads", numel, 20, F32, F32), Case("pack_grads", numel, 580, half, half),
        Case("pack_grads", numel, 580, F32, half, active=0.5),
        Case("pack_grads", numel, 20, half, half, aligned=False, world=4),
        Case("check_shard", numel, 580, half, half),
        Case("reduce_shard", numel, 20, half, half, world=4),
        Case("update_shard", numel, 580, F32, F32), Case("update_shard", numel, 580, half, half),
        Case("unpack_params", numel, 580, half, half, world=4), *bucket_cases(numel, 20),
    ]  # fmt: skip


def kernel_cases(device_type: str, *, quick: bool, wanted: Sequence[str]) -> list[Case]:
    """The rows of `python -m bench kernels`; `wanted`: only these ops, none means all."""
    if quick:
        cases = cases_quick(device_type)
    else:
        cases = pack_cases_cuda() + other_cases_cuda() if device_type == "cuda" else cases_cpu()
    return [case for case in cases if not wanted or case.op in wanted]
