"""The ops of dynzero, prepared for one case each: the call, its check and its baselines.

Every op knows the bytes that it cannot avoid to move, compares one run on poisoned outputs with
plain torch, and only then is timed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynzero.ops import NONFINITE_BITS, ops
from dynzero.reduced import upload

from . import cupy_kernels, peers
from .cases import Case
from .inputs import Planned, Sums, choose, random_tensors
from .machine import BenchError
from .timer import Call


def require(fine: bool, case: Case, what: str) -> None:
    if not fine:
        raise BenchError(f"{case}: {what} differs from the reference; nothing was timed")


def check_sums(case: Case, sums: Sums, which: Tensor, parts: list[list[Tensor]]) -> None:
    """Squares of the parameters `which` (bool), against float64 sums of `parts`."""
    norms = [
        torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in some])
        for some in parts
    ]
    expected = torch.stack([n.square().sum() for n in norms])
    got = sums.sumsq[which.to(sums.sumsq.device)]
    # Chunks are summed in float32 (csrc/ops.h), hence not exactly.
    close = torch.allclose(got, expected, rtol=1e-5, atol=1e-12)
    require(close, case, "sum of squares")
    require(not bool(sums.nonfinite.any()), case, "non-finite flags")


class PackGrads:
    """Gradients -> bucket. Absent ones are active elsewhere: their slots get zeros."""

    ceiling = "copy"

    @staticmethod
    def bytes_per_element(case: Case) -> int:
        """Gradients; bucket, the expected one, one for the peers and one for torch.cat."""
        return case.source.itemsize + 4 * case.wire.itemsize

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.flat, tensors = random_tensors(case.sizes(), case.source, device, aligned=case.aligned)
        everything = torch.ones(case.tensors, dtype=torch.bool)
        self.present = choose(case.tensors, case.active)
        self.planned = Planned(
            case, device, tensors, wire=case.wire, active=everything, present=self.present
        )
        shape = (case.world, self.planned.bucket.stride)
        self.bucket = torch.empty(shape, dtype=case.wire, device=device)
        self.sums = Sums(self.planned, full=True)
        self.ptrs, _ = self.planned.grad_ptrs()
        self.elements = self.planned.numel(everything)
        read = self.planned.numel(self.present) * case.source.itemsize
        self.bytes = read + self.elements * case.wire.itemsize
        self.ours = Call(self.run, self.kernel)

    def kernel(self) -> None:
        table = self.planned.table
        ops.pack_grads(
            table.rows, table.full_chunks, self.ptrs, self.case.source, self.bucket,
            self.sums.partials, self.sums.nonfinite,
        )  # fmt: skip
        self.sums.fold()

    def run(self) -> None:
        self.ptrs, self.sums.nonfinite = self.planned.grad_ptrs()
        self.kernel()

    def check(self) -> None:
        case, params = self.case, self.planned.params
        self.bucket.fill_(float("nan"))
        self.run()
        expected = torch.zeros_like(self.bucket)
        grads, slots, _ = self._pairs(expected)
        torch._foreach_copy_(slots, grads)
        require(torch.equal(self.bucket, expected), case, "bucket")
        all_slots = self._rows(expected)
        check_sums(case, self.sums, torch.ones_like(self.present), all_slots)
        last = int(self.present.nonzero()[-1])
        kept = params[last][-1].clone()
        params[last][-1] = float("nan")
        self.run()
        params[last][-1] = kept
        flagged = self.sums.nonfinite.nonzero().flatten().tolist()
        bits = int(self.sums.nonfinite[last])
        require(flagged == [last] and bits == NONFINITE_BITS["nan"], case, "flag of a NaN")

    def _rows(self, bucket: Tensor) -> list[list[Tensor]]:
        """Slots by parameter index (the plan has a row for each)."""
        by_index: list[list[Tensor]] = [[] for _ in self.planned.params]
        slots = self.planned.slots(bucket)
        for index, parts in zip(self.planned.plan.indices, slots, strict=True):
            by_index[index] = parts
        return by_index

    def _pairs(self, bucket: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Pieces of present gradients, their slots, and the slots of absent ones."""
        grads: list[Tensor] = []
        views: list[Tensor] = []
        absent: list[Tensor] = []
        for index, parts in enumerate(self._rows(bucket)):
            if self.present[index]:
                grads += self.planned.pieces(index)
                views += parts
            else:
                absent += parts
        return grads, views, absent

    def baselines(self) -> dict[str, Call]:
        case = self.case
        other = torch.empty_like(self.bucket)
        grads, views, absent = self._pairs(other)
        calls = peers.pack_peers(grads, views, absent)
        if case.active == 1:
            n = min(self.flat.numel(), other.numel())
            a, b = self.flat[:n], other.view(-1)[:n]
            size = n * (case.source.itemsize + case.wire.itemsize)
            calls["copy"] = Call(lambda: b.copy_(a), bytes=size)
            calls |= peers.gather_peers(self.planned.params, other, case.world)
        if self.bucket.is_cuda and case.world == 1 and cupy_kernels.available():
            calls["cupy"] = peers.attempt(lambda: self._cupy(other))
        return calls

    def _cupy(self, other: Tensor) -> Call:
        rows = [parts[0] for parts in self._rows(other)]
        params = self.planned.params
        pack = cupy_kernels.Pack([p if p.grad is not None else None for p in params], rows, other)
        other.zero_()  # padding between the slots is not its business
        pack.run()
        self.run()
        # The second oracle.
        require(torch.equal(other, self.bucket), self.case, "bucket of the CuPy kernel")
        close = torch.allclose(pack.sums, self.sums.sumsq, rtol=1e-5)
        require(close, self.case, "sums of the CuPy kernel")
        return Call(pack.run, pack.kernel)


class CheckShard:
    ceiling = "read"

    @staticmethod
    def bytes_per_element(case: Case) -> int:
        return 2 * case.source.itemsize

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        _, tensors = random_tensors(case.sizes(), case.source, device, aligned=case.aligned)
        active = choose(case.tensors, case.active)
        self.planned = Planned(
            case, device, tensors, wire=case.source, active=active, present=active
        )
        self.sums = Sums(self.planned, full=False)
        self.ptrs, _ = self.planned.grad_ptrs()
        self.elements = self.planned.numel(active)
        self.bytes = self.elements * case.source.itemsize
        self.ours = Call(self.run, self.kernel)

    def kernel(self) -> None:
        table = self.planned.table
        ops.check_shard(
            table.rows, table.own_chunks, self.ptrs, self.case.source,
            self.sums.partials, self.sums.nonfinite,
        )  # fmt: skip
        self.sums.fold()

    def run(self) -> None:
        self.ptrs, self.sums.nonfinite = self.planned.grad_ptrs()
        self.kernel()

    def check(self) -> None:
        self.sums.sumsq.fill_(float("nan"))
        self.run()
        check_sums(self.case, self.sums, self.planned.active, [[g] for g in self._grads()])

    def _grads(self) -> list[Tensor]:
        return [p for p in self.planned.params if p.grad is not None]

    def baselines(self) -> dict[str, Call]:
        return peers.check_peers([p.detach() for p in self._grads()])


class ReduceShard:
    """Slots of `world` ranks -> own pieces in float32. `active`: slots that hold a gradient."""

    ceiling = "copy"

    @staticmethod
    def bytes_per_element(case: Case) -> int:
        """Slots of all ranks; the shard and the peers' one, of one rank."""
        return case.wire.itemsize + 8

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        tensors = [torch.empty(n, dtype=case.wire, device="meta") for n in case.sizes()]
        everything = torch.ones(case.tensors, dtype=torch.bool)
        self.planned = Planned(
            case, device, tensors, wire=case.wire, active=everything, present=~everything
        )
        stride = self.planned.bucket.stride
        self.received = torch.empty(case.world, stride, dtype=case.wire, device=device).normal_()
        self.shard = torch.empty(stride, dtype=torch.float32, device=device)
        self.host_present = choose(case.tensors * case.world, case.active).view(case.world, -1)
        self.present_bits = pack_bits(self.host_present)
        offset = torch.zeros(self.planned.size, dtype=torch.int64)
        offset[list(self.planned.plan.indices)] = torch.tensor(self.planned.plan.offsets)
        self.host_ptrs = torch.stack([self.shard.data_ptr() + 4 * offset, torch.zeros_like(offset)])
        self.sums = Sums(self.planned, full=False)
        self._upload()
        own = self.planned.layout.own
        read = int((self.host_present * own).sum()) * case.wire.itemsize
        self.elements = self.planned.numel(everything)
        self.bytes = read + int(own.sum()) * self.shard.element_size()
        self.ours = Call(self.run, self.kernel)

    def _upload(self) -> None:
        self.tables = upload(self.host_ptrs, self.planned.device)
        self.bits = upload(self.present_bits, self.planned.device)

    def kernel(self) -> None:
        table = self.planned.table
        ops.reduce_shard(
            table.rows, table.own_chunks, self.received, self.bits, self.tables[0], self.tables[1],
            self.sums.partials, self.sums.nonfinite,
        )  # fmt: skip
        self.sums.fold()

    def run(self) -> None:
        self._upload()
        self.sums.nonfinite.zero_()
        self.kernel()

    def check(self) -> None:
        self.shard.fill_(float("nan"))
        self.run()
        own = self.planned.layout.own.tolist()
        results = []
        rows = zip(self.planned.plan.indices, self.planned.plan.offsets, strict=True)
        for index, offset in rows:
            got = self.shard[offset : offset + own[index]]
            expected = torch.zeros_like(got)
            for rank in range(self.case.world):
                if self.host_present[rank, index]:
                    expected += self.received[rank, offset : offset + own[index]]
            require(torch.equal(got, expected), self.case, f"sum of parameter {index}")
            results.append((index, got))
        ordered = [[got] for _, got in sorted(results, key=lambda pair: pair[0])]
        check_sums(self.case, self.sums, self.planned.active, ordered)

    def baselines(self) -> dict[str, Call]:
        return peers.reduce_peers(self.received, torch.empty_like(self.shard))


class UnpackParams:
    ceiling = "copy"

    @staticmethod
    def bytes_per_element(case: Case) -> int:
        return 3 * case.wire.itemsize

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        _, tensors = random_tensors(case.sizes(), case.wire, device, aligned=case.aligned)
        active = choose(case.tensors, case.active)
        self.planned = Planned(case, device, tensors, wire=case.wire, active=active, present=active)
        shape = (case.world, self.planned.bucket.stride)
        self.bucket = torch.empty(shape, dtype=case.wire, device=device).normal_()
        self.ptrs, _ = self.planned.grad_ptrs()
        self.elements = self.planned.numel(active)
        self.bytes = 2 * self.elements * case.wire.itemsize
        self.ours = Call(self.run, self.kernel)

    def kernel(self) -> None:
        table = self.planned.table
        ops.unpack_params(table.rows, table.full_chunks, self.bucket, self.ptrs, None)

    def run(self) -> None:
        self.ptrs, _ = self.planned.grad_ptrs()
        self.kernel()

    def check(self) -> None:
        self.run()
        for param, slot in zip(*self._pairs(), strict=True):
            require(torch.equal(param, slot), self.case, "parameters")

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        params: list[Tensor] = []
        slots: list[Tensor] = []
        for index, parts in zip(
            self.planned.plan.indices, self.planned.slots(self.bucket), strict=True
        ):
            params += self.planned.pieces(index)
            slots += parts
        return params, slots

    def baselines(self) -> dict[str, Call]:
        params, slots = self._pairs()
        return peers.unpack_peers(slots, params)


def pack_bits(rows: Tensor) -> Tensor:
    """bool [ranks, n] -> uint8 [ranks, ceil(n / 8)], little-endian."""
    padded = torch.nn.functional.pad(rows.to(torch.int64), (0, -rows.shape[1] % 8))
    weights = 1 << torch.arange(8)
    return (padded.view(rows.shape[0], -1, 8) * weights).sum(-1).to(torch.uint8)


def op_classes() -> dict[str, Any]:
    from .buckets import ReduceBuckets
    from .update import UpdateShard

    return {
        "pack_grads": PackGrads,
        "check_shard": CheckShard,
        "reduce_shard": ReduceShard,
        "update_shard": UpdateShard,
        "unpack_params": UnpackParams,
        "reduce_buckets": ReduceBuckets,
    }
