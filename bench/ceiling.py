"""What the memory of this machine gives: the fastest plain copy, read and fill of this run.

Every percentage of the results is relative to these, measured minutes before or after the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import cupy_kernels
from .timer import Call, Timer

BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}


@dataclass(frozen=True)
class Ceiling:
    """GB/s; a copy counts the bytes read and the bytes written."""

    copy: float
    read: float
    fill: float
    names: dict[str, str]  # which candidate was the fastest

    def of(self, kind: str) -> float:
        return self.read if kind == "read" else self.copy


def candidates(a: Tensor, b: Tensor) -> dict[str, dict[str, Call]]:
    copies = {
        "copy_": Call(lambda: b.copy_(a)),
        "neg(out=)": Call(lambda: torch.neg(a, out=b)),
    }
    reads = {
        "sum": Call(a.sum),
        "amax": Call(a.amax),
        "vector_norm": Call(lambda: torch.linalg.vector_norm(a)),
    }
    fills = {"fill_": Call(lambda: b.fill_(1.5))}
    if a.is_cuda and cupy_kernels.available():
        sink = torch.zeros(1, dtype=torch.int32, device=a.device)
        copies["cupy"] = Call(lambda: cupy_kernels.copy(a, b))
        reads["cupy"] = Call(lambda: cupy_kernels.read(a, sink))
    return {"copy": copies, "read": reads, "fill": fills}


def measure_ceiling(timer: Timer, *, quick: bool = False) -> Ceiling:
    num_bytes = BYTES[timer.device.type] // (4 if quick else 1)
    a = torch.randn(num_bytes // 4, device=timer.device)
    b = torch.empty_like(a)
    best, names = {}, {}
    for kind, calls in candidates(a, b).items():
        moved = num_bytes * (2 if kind == "copy" else 1)
        samples = timer.measure(calls)
        speed = {n: moved / s.ms / 1e6 for n, s in samples.items() if s.error is None}
        names[kind] = max(speed, key=lambda name: speed[name])
        best[kind] = speed[names[kind]]
    return Ceiling(best["copy"], best["read"], best["fill"], names)
