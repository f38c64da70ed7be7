"""Ops in a row on one stream, with no wait between them: each must see what the one before wrote.

On newer GPUs the small ops start while the kernel before them still runs (csrc/launch_kernel.cuh).
So the kernels before them are made long, and what they are to write is NaN until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from gpus import needs_gpus
from op_inputs import INF, addresses, make_sizes, pack_bits
from torch import Tensor

from dynzero.ops import RECORD_COLUMNS, SCALE_FIELDS, STATUS_FIELDS, ops
from dynzero.table import CHUNK

NAN = math.nan


def numels(device: str) -> list[int]:
    """On a GPU large enough that a pass over them takes longer than starting a kernel."""
    return [7, (3000 if device.startswith("cuda") else 3) * CHUNK + 5, 2 * CHUNK]


def empty(*shape: int, dtype: torch.dtype = torch.float64, device: str) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class Chain(NamedTuple):
    """check_shard, fold_sums, summarize_shard and begin_step of one process on the same memory."""

    grads: list[Tensor]
    tables: tuple[Tensor, ...]  # rows, chunks, addresses
    partials: Tensor
    sumsq: Tensor
    nonfinite: Tensor
    record: Tensor
    scale_state: Tensor
    steps: Tensor
    status: Tensor

    @staticmethod
    def make(device: str) -> Chain:
        sizes = make_sizes(numels(device), torch.float16, device)
        grads = [torch.zeros(n, dtype=torch.float16, device=device) for n in numels(device)]
        rows, _, own = sizes.table
        scale_state = empty(len(SCALE_FIELDS), device=device)
        scale_state[SCALE_FIELDS["value"]] = 1
        return Chain(
            grads,
            (rows, own, addresses(list(grads), device)),
            empty(own.numel(), device=device),
            empty(len(grads), device=device),
            empty(len(grads), dtype=torch.int32, device=device),
            empty(1, len(RECORD_COLUMNS), device=device),
            scale_state,
            empty(len(grads), dtype=torch.float32, device=device),
            empty(len(STATUS_FIELDS) + len(SCALE_FIELDS) + len(RECORD_COLUMNS), device=device),
        )

    def fill(self, value: float) -> None:
        for grad in self.grads:
            grad.fill_(value)

    def run(self) -> None:
        rows, chunks, ptrs = self.tables
        for tensor in (self.partials, self.sumsq, self.record, self.status):
            tensor.fill_(NAN)
        self.nonfinite.zero_()
        ops.check_shard(rows, chunks, ptrs, torch.float16, self.partials, self.nonfinite)
        ops.fold_sums(rows, self.partials, False, 1, self.sumsq)
        ops.summarize_shard(rows, self.sumsq, self.nonfinite, self.scale_state, self.record[0])
        ops.begin_step(rows, self.record, 0.0, True, [], self.steps, self.scale_state, self.status)

    def seen(self) -> Tensor:
        """[sumsq of each parameter, norm, found, param]"""
        fields = [STATUS_FIELDS[name] for name in ("norm", "found", "param")]
        return torch.cat([self.sumsq, self.status[fields]])

    def expected(self, value: float) -> list[float]:
        squares = [grad.numel() * value * value for grad in self.grads]
        finite = math.isfinite(value)
        return [*squares, math.sqrt(sum(squares)), float(not finite), -1.0 if finite else 0.0]


VALUES = [1.0, 3.0, math.inf, 2.0, 0.0, 4.0]  # squares and their sums are exact


def test_a_step_sees_what_its_check_wrote(device: str) -> None:
    chain = Chain.make(device)
    seen = []
    for value in VALUES:
        chain.fill(value)
        chain.run()
        seen.append(chain.seen())
    for got, value in zip(seen, VALUES, strict=True):
        assert got.tolist() == chain.expected(value)
    assert chain.steps.tolist() == [len(VALUES) - 1] * 3


@needs_gpus(1)
@pytest.mark.cuda
def test_a_captured_step_sees_what_its_check_wrote() -> None:
    chain = Chain.make("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    seen = []
    for value in VALUES:
        chain.fill(value)
        graph.replay()
        seen.append(chain.seen())
    for got, value in zip(seen, VALUES, strict=True):
        assert got.tolist() == chain.expected(value)


@needs_gpus(2)
@pytest.mark.cuda
def test_steps_on_two_devices_in_turn() -> None:
    chains = [Chain.make("cuda:0"), Chain.make("cuda:1")]
    seen = []
    for value in VALUES:
        for chain in chains:
            chain.fill(value)
            chain.run()
            seen.append((chain, value, chain.seen()))
    for chain, value, got in seen:
        assert got.tolist() == chain.expected(value)


Writer = Callable[[Tensor, Tensor], None]  # (tensor to write, values)


def by_kernel(tensor: Tensor, values: Tensor) -> None:
    torch.add(values, 0, out=tensor)


def by_copy(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(values, non_blocking=True)


@pytest.mark.parametrize("write", [by_kernel, by_copy])
def test_fold_sums_sees_what_torch_wrote(device: str, write: Writer) -> None:
    """Sums and rows that are written on the device just before."""
    sizes = make_sizes(numels(device), torch.float32, device)
    count = sizes.table.own_chunks.numel()
    rows = torch.zeros_like(sizes.table.rows)
    partials = empty(count, device=device)
    sumsq = empty(3, device=device)
    seen = []
    for value in (1.0, 2.0, 5.0):
        values = torch.full((count,), value, dtype=torch.float64, device=device)
        rows.zero_()
        partials.fill_(NAN)
        if device == "cuda":
            torch.cuda._sleep(200_000)  # some 0.1 ms: everything below is queued before it ends
        write(partials, values)
        write(rows, sizes.table.rows)
        ops.fold_sums(rows, partials, False, 1, sumsq)
        seen.append(sumsq.clone())
    chunks = [-(-n // CHUNK) for n in numels(device)]
    assert [s.tolist() for s in seen] == [[v * c for c in chunks] for v in (1.0, 2.0, 5.0)]


def test_fold_sums_sees_what_fold_sums_wrote(device: str) -> None:
    """The sums of many rows are the chunks of one row."""
    each, many = 3, 5000
    first = make_sizes([each * CHUNK] * many, torch.float32, device)
    second = make_sizes([many * CHUNK], torch.float32, device)
    partials = empty(each * many, device=device)
    sums, total = empty(many, device=device), empty(1, device=device)
    seen = []
    for value in (1.0, 2.0, 5.0):
        sums.fill_(NAN)
        partials.fill_(value)
        ops.fold_sums(first.table.rows, partials, False, 1, sums)
        ops.fold_sums(second.table.rows, sums, True, 1, total)
        seen.append(total.clone())
    assert [t.item() for t in seen] == [v * each * many for v in (1.0, 2.0, 5.0)]


def test_fold_sums_twice_gives_the_same(device: str) -> None:
    sizes = make_sizes(numels(device), torch.float32, device)
    partials = torch.rand(sizes.table.own_chunks.numel(), dtype=torch.float64, device=device)
    sums = [empty(3, device=device).fill_(NAN) for _ in range(2)]
    for out in sums:
        ops.fold_sums(sizes.table.rows, partials, False, 1, out)
    assert torch.equal(*sums)
    per_row = partials.split([-(-n // CHUNK) for n in [*numels(device)[1:], numels(device)[0]]])
    expected = torch.stack([part.sum() for part in per_row]).roll(1)  # the last row is parameter 0
    torch.testing.assert_close(sums[0], expected, rtol=1e-14, atol=0)


def test_fold_sums_sees_what_pack_grads_wrote(device: str) -> None:
    sizes = make_sizes(numels(device), torch.float16, device)
    rows, full, _ = sizes.table
    grads = [torch.empty(n, dtype=torch.float16, device=device) for n in numels(device)]
    ptrs = addresses(list(grads), device)
    bucket = empty(1, sizes.stride, dtype=torch.float16, device=device)
    partials, sumsq = empty(full.numel(), device=device), empty(3, device=device)
    nonfinite = empty(3, dtype=torch.int32, device=device)
    seen = []
    for value in (1.0, 2.0, 3.0):
        for grad in grads:
            grad.fill_(value)
        partials.fill_(NAN)
        ops.pack_grads(rows, full, ptrs, torch.float16, bucket, partials, nonfinite)
        ops.fold_sums(rows, partials, True, 1, sumsq)
        seen.append(sumsq.clone())
    expected = [[n * v * v for n in numels(device)] for v in (1.0, 2.0, 3.0)]
    assert [s.tolist() for s in seen] == expected


def test_a_record_sees_what_reduce_shard_wrote(device: str) -> None:
    """reduce_shard, fold_sums, summarize_shard: as in a process among several."""
    sizes = make_sizes(numels(device), torch.float16, device)
    rows, _, own = sizes.table
    shards = [torch.empty(n, device=device) for n in numels(device)]
    received = empty(1, sizes.stride, dtype=torch.float16, device=device)
    fixed = (pack_bits([[True] * 3], device), addresses(list(shards), device))
    accumulate = empty(3, dtype=torch.int64, device=device)
    partials, sumsq = empty(own.numel(), device=device), empty(3, device=device)
    scale_state = torch.ones(len(SCALE_FIELDS), dtype=torch.float64, device=device)
    record = empty(len(RECORD_COLUMNS), device=device)
    seen = []
    for value in (1.0, math.inf, 2.0):
        nonfinite = empty(3, dtype=torch.int32, device=device)
        received.fill_(value)
        for tensor in (partials, sumsq, record):
            tensor.fill_(NAN)
        ops.reduce_shard(rows, own, received, *fixed, accumulate, partials, nonfinite)
        ops.fold_sums(rows, partials, False, 1, sumsq)
        ops.summarize_shard(rows, sumsq, nonfinite, scale_state, record)
        seen.append(record.clone())
    total = float(sum(numels(device)))
    assert [r.tolist() for r in seen] == [
        [total, -1, 0, 0],
        [math.inf, 0, INF, 1],
        [4 * total, -1, 0, 0],
    ]
