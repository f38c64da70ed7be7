"""reduce_shard, check_shard and fold_sums against the reference."""

import pytest
import torch
from op_inputs import (
    FLOATS,
    INF,
    NAN,
    PATTERNS,
    SIZES,
    addresses,
    assert_sums_close,
    make_sizes,
    pack_bits,
    poisoned,
    randn,
)

from dynzero import reference
from dynzero.ops import ops
from dynzero.table import CHUNK

DTYPES = [*FLOATS, torch.float64]


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def reduce_both(sizes, received, present, shards, accumulate, device):
    """Runs op and reference from the same shards; returns both (shards, partials, nonfinite)."""
    chunks = sizes.table.own_chunks
    results = []
    for op in (True, False):
        mine = [s.clone() for s in shards]
        partials = poisoned(chunks.numel(), dtype=torch.float64, device=device)
        nonfinite = torch.zeros(len(shards), dtype=torch.int32, device=device)
        common = (accumulate, partials, nonfinite)
        if op:
            table = addresses(mine, device)
            ops.reduce_shard(sizes.table.rows, chunks, received, present, table, *common)
        else:
            reference.reduce_shard(sizes.table.rows, chunks, received, present, mine, *common)
        results.append((mine, partials, nonfinite))
    return results


def check_both(sizes, grads, dtype, device):
    chunks = sizes.table.own_chunks
    results = []
    for op in (True, False):
        partials = poisoned(chunks.numel(), dtype=torch.float64, device=device)
        nonfinite = torch.zeros(len(grads), dtype=torch.int32, device=device)
        if op:
            table = addresses(grads, device)
            ops.check_shard(sizes.table.rows, chunks, table, dtype, partials, nonfinite)
        else:
            reference.check_shard(sizes.table.rows, chunks, grads, partials, nonfinite)
        results.append((partials, nonfinite))
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_reduce_shard_sums_the_present_ranks_in_order(device, dtype, world, pattern):
    for rank in {0, world - 1}:
        sizes = make_sizes(SIZES, dtype, device, world=world, rank=rank)
        n = len(SIZES)
        # Each rank has its own pattern: rotated by the rank.
        flags = [[PATTERNS[pattern]((i + r) % n, n) for i in range(n)] for r in range(world)]
        received = randn(world * sizes.stride, dtype, device).view(world, sizes.stride)
        for row in sizes.table.rows.tolist():
            for r in range(world):
                if not flags[r][row[4]]:  # an absent rank's slot may hold anything
                    received[r, row[2] : row[2] + row[1]] = float("nan")
        acc = accumulator(dtype)
        shards = [randn(s.stop - s.start, acc, device) for s in sizes.own]
        accumulate = torch.tensor([i % 2 for i in range(n)], device=device)
        present = pack_bits(flags, device)
        ours, expected = reduce_both(sizes, received, present, shards, accumulate, device)
        for mine, theirs in zip(ours[0], expected[0], strict=True):
            assert torch.equal(mine, theirs)
        assert_sums_close(ours[1], expected[1])
        assert not ours[2].any()


def test_reduce_shard_overwrites_poison(device):
    """Without accumulate what the shard held is not read, also where no rank is present."""
    sizes = make_sizes([100, 100], torch.float32, device, world=2)
    received = torch.ones(2, sizes.stride, device=device)
    shards = [poisoned(s.stop - s.start, dtype=torch.float32, device=device) for s in sizes.own]
    present = pack_bits([[True, False], [True, False]], device)
    accumulate = torch.zeros(2, dtype=torch.int64, device=device)
    ours, _ = reduce_both(sizes, received, present, shards, accumulate, device)
    assert (ours[0][0] == 2).all()
    assert (ours[0][1] == 0).all()
    assert not ours[2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_shard_flags_stand_above_local_ones(device, dtype):
    numels = [CHUNK + 1, 9, 2 * CHUNK]
    sizes = make_sizes(numels, dtype, device)
    present = pack_bits([[True] * 3], device)
    accumulate = torch.zeros(3, dtype=torch.int64, device=device)
    shards = [torch.zeros(n, dtype=accumulator(dtype), device=device) for n in numels]
    for row in sizes.table.rows.tolist():
        for at in (0, row[0] // 2, row[0] - 1):
            for bad, bits in (("inf", INF), ("nan", NAN)):
                received = torch.ones(1, sizes.stride, dtype=dtype, device=device)
                received[0, row[2] + at] = float(bad)
                ours, expected = reduce_both(sizes, received, present, shards, accumulate, device)
                assert ours[2].tolist() == expected[2].tolist()
                assert ours[2].tolist() == [
                    (bits << reference.SUM_SHIFT) * (i == row[4]) for i in range(3)
                ]


def test_reduce_shard_many_ranks(device):
    """More ranks than a byte or a warp has bits."""
    world = 71
    sizes = make_sizes([3, 50000], torch.bfloat16, device, world=world)
    flags = [[r % 3 == 0, r > 60] for r in range(world)]
    received = randn(world * sizes.stride, torch.bfloat16, device).view(world, sizes.stride)
    shards = [randn(s.stop - s.start, torch.float32, device) for s in sizes.own]
    accumulate = torch.ones(2, dtype=torch.int64, device=device)
    present = pack_bits(flags, device)
    ours, expected = reduce_both(sizes, received, present, shards, accumulate, device)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], expected[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
def test_check_shard_squares(device, dtype, pattern, odd):
    sizes = make_sizes(SIZES, dtype, device)
    n = len(SIZES)
    grads = [
        randn(m, dtype, device, odd=odd) if PATTERNS[pattern](i, n) else None
        for i, m in enumerate(SIZES)
    ]
    ours, expected = check_both(sizes, grads, dtype, device)
    assert_sums_close(ours[0], expected[0])
    assert not ours[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_check_shard_flags_name_the_parameter(device, dtype, place):
    numels = [CHUNK + 1, 9, 2 * CHUNK, 1]
    sizes = make_sizes(numels, dtype, device)
    for param, numel in enumerate(numels):
        for bad, bits in (("inf", INF), ("-inf", INF), ("nan", NAN)):
            grads = [randn(n, dtype, device) for n in numels]
            grads[param][{"first": 0, "middle": numel // 2, "last": numel - 1}[place]] = float(bad)
            ours, _ = check_both(sizes, grads, dtype, device)
            assert ours[1].tolist() == [bits * (i == param) for i in range(len(numels))]


def test_check_shard_large_values_do_not_overflow(device):
    grad = torch.full((1000,), 3e38, device=device)
    sizes = make_sizes([1000], torch.float32, device)
    ours, expected = check_both(sizes, [grad], torch.float32, device)
    assert ours[1].tolist() == [0]
    assert_sums_close(ours[0], expected[0])


def test_check_shard_large_float64_values_are_not_flagged(device):
    """Their squares overflow; the values are finite."""
    grad = torch.full((1000,), 1e300, dtype=torch.float64, device=device)
    sizes = make_sizes([1000], torch.float64, device)
    ours, _ = check_both(sizes, [grad], torch.float64, device)
    assert ours[1].tolist() == [0]


@pytest.mark.parametrize("full", [True, False], ids=["full", "own"])
@pytest.mark.parametrize("world", [1, 3])
def test_fold_sums_adds_the_chunks_of_each_row(device, full, world):
    sizes = make_sizes(SIZES, torch.float32, device, world=world, rank=world - 1)
    chunks = sizes.table.full_chunks if full else sizes.table.own_chunks
    partials = torch.rand(chunks.numel(), dtype=torch.float64, device=device)
    ours = poisoned(len(SIZES) + 1, dtype=torch.float64, device=device)
    expected = ours.clone()
    ops.fold_sums(sizes.table.rows, partials, full, world, ours)
    reference.fold_sums(sizes.table.rows, partials, full, world, expected)
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0, equal_nan=True)
    assert ours[-1].isnan()  # no row has this parameter


def test_fold_sums_of_long_and_short_rows_side_by_side(device):
    """A row of many chunks is added by more threads than a short one, wherever it stands."""
    counts = [8193, 1, 4097, 0, 31, 4096, 32, 33, 4097, *[2] * 20, 5000]
    sizes = make_sizes([CHUNK * count for count in counts], torch.float32, device)
    partials = torch.rand(sum(counts), dtype=torch.float64, device=device)
    ours = poisoned(len(counts), dtype=torch.float64, device=device)
    ops.fold_sums(sizes.table.rows, partials, False, 1, ours)
    *others, first = partials.split([*counts[1:], counts[0]])  # parameter 0 is the last row
    of_rows = [first, *others]
    expected = torch.stack([row.sum() for row in of_rows])
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)
    for count, row, in_company in zip(counts, of_rows, ours, strict=True):
        alone = poisoned(1, dtype=torch.float64, device=device)
        table = make_sizes([CHUNK * count], torch.float32, device).table
        ops.fold_sums(table.rows, row.clone(), False, 1, alone)
        assert torch.equal(alone[0], in_company)
