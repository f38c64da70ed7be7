"""pack_grads: gradients -> bucket, against the reference, bit for bit."""

import itertools

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
    poisoned,
    randn,
)

from dynzero import reference
from dynzero.ops import ops
from dynzero.table import CHUNK


def run(sizes, grads, grad_dtype, wire, device, *, world=1, squares=True, op=True):
    chunks = sizes.table.full_chunks
    bucket = poisoned(world, sizes.stride, dtype=wire, device=device)
    partials = poisoned(chunks.numel(), dtype=torch.float64, device=device) if squares else None
    nonfinite = torch.zeros(len(grads), dtype=torch.int32, device=device)
    if op:
        table = addresses(grads, device)
        ops.pack_grads(sizes.table.rows, chunks, table, grad_dtype, bucket, partials, nonfinite)
    else:
        reference.pack_grads(sizes.table.rows, chunks, grads, bucket, partials, nonfinite)
    return bucket, partials, nonfinite


def check(sizes, grads, grad_dtype, wire, device, **options):
    ours = run(sizes, grads, grad_dtype, wire, device, **options)
    expected = run(sizes, grads, grad_dtype, wire, device, op=False, **options)
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=0, equal_nan=True)
    if ours[1] is not None:
        assert_sums_close(ours[1], expected[1])
    assert ours[2].tolist() == expected[2].tolist()
    return ours


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
def test_pack_grads_sizes_and_absence(device, world, pattern, odd):
    present = PATTERNS[pattern]
    sizes = make_sizes(SIZES, torch.float32, device, world=world)
    grads = [
        randn(n, torch.float32, device, odd=odd) if present(i, len(SIZES)) else None
        for i, n in enumerate(SIZES)
    ]
    bucket, _, nonfinite = check(sizes, grads, torch.float32, torch.float32, device, world=world)
    assert not bucket.isnan().any()  # padding and absent slots were written too
    assert not nonfinite.any()


@pytest.mark.parametrize(
    ("grad_dtype", "wire"),
    [*itertools.product(FLOATS, FLOATS), (torch.float64, torch.float64)],
    ids=str,
)
def test_pack_grads_dtypes(device, grad_dtype, wire):
    sizes = make_sizes(SIZES, wire, device, world=2)
    scales = torch.logspace(-12, 12, len(SIZES)).tolist()  # reaches subnormal and infinite halves
    grads = [
        (randn(n, torch.float32, device) * scale).to(grad_dtype)
        for n, scale in zip(SIZES, scales, strict=True)
    ]
    check(sizes, grads, grad_dtype, wire, device, world=2)


@pytest.mark.parametrize("wire", FLOATS, ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pack_grads_every_16_bit_value(device, grad_dtype, wire):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(grad_dtype)
    sizes = make_sizes([every.numel()], wire, device)
    _, _, nonfinite = check(sizes, [every], grad_dtype, wire, device)
    assert nonfinite.tolist() == [INF | NAN]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16], ids=str)
def test_pack_grads_rounds_as_torch(device, wire):
    """Floats around every 16-bit value: halfway to the neighbours, and just beside halfway."""
    every = torch.arange(0, 2**15, dtype=torch.int16, device=device).view(wire).float()
    every = every[every.isfinite()]
    middle = (every[1:].double() + every[:-1].double()).div(2).float()
    bits = middle.view(torch.int32)
    values = torch.cat(
        [every, middle, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)]
    )
    values = torch.cat([values, -values])
    sizes = make_sizes([values.numel()], wire, device)
    bucket, _, _ = check(sizes, [values], torch.float32, wire, device)
    assert torch.equal(bucket[0, : values.numel()], values.to(wire))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("grad_dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_pack_grads_flags_name_the_parameter(device, grad_dtype, world, place):
    numels = [CHUNK + 1, 9, 2 * CHUNK, 1, 100]
    wire = grad_dtype
    sizes = make_sizes(numels, wire, device, world=world)
    for bad, bits in [("inf", INF), ("-inf", INF), ("nan", NAN)]:
        for param, numel in enumerate(numels):
            grads = [randn(n, grad_dtype, device) for n in numels]
            at = {"first": 0, "middle": numel // 2, "last": numel - 1}[place]
            grads[param][at] = float(bad)
            result = run(sizes, grads, grad_dtype, wire, device, world=world)
            assert result[2].tolist() == [bits * (i == param) for i in range(len(numels))]


def test_pack_grads_flags_are_of_the_wire_and_are_added(device):
    sizes = make_sizes([100, 100, 100], torch.float16, device)
    grads = [torch.ones(100, device=device) for _ in range(3)]
    grads[1][50] = 65520.0  # rounds to an infinite half
    grads[2][0], grads[2][99] = float("nan"), float("inf")
    bucket = poisoned(1, sizes.stride, dtype=torch.float16, device=device)
    nonfinite = torch.tensor([NAN, 0, 0], dtype=torch.int32, device=device)
    chunks = sizes.table.full_chunks
    ops.pack_grads(
        sizes.table.rows,
        chunks,
        addresses(grads, device),
        torch.float32,
        bucket,
        None,
        nonfinite,
    )
    assert nonfinite.tolist() == [NAN, INF, INF | NAN]


def test_pack_grads_absent_memory_is_not_read(device):
    sizes = make_sizes([100, 100], torch.float32, device)
    grads = [None, torch.ones(100, device=device)]
    bucket, partials, nonfinite = run(sizes, grads, torch.float32, torch.float32, device)
    assert nonfinite.tolist() == [0, 0]
    assert sorted(partials.tolist()) == [0.0, 100.0]
    assert bucket.sum() == 100


def test_pack_grads_a_slice_of_the_chunks_leaves_the_rest(device):
    sizes = make_sizes([CHUNK + 1, CHUNK + 1], torch.float32, device)
    grads = [torch.ones(CHUNK + 1, device=device) for _ in range(2)]
    bucket = poisoned(1, sizes.stride, dtype=torch.float32, device=device)
    nonfinite = torch.zeros(2, dtype=torch.int32, device=device)
    chunks = sizes.table.full_chunks[2:]
    table = addresses(grads, device)
    ops.pack_grads(sizes.table.rows, chunks, table, torch.float32, bucket, None, nonfinite)
    assert bucket[0, : sizes.stride // 2].isnan().all()
    assert (bucket[0, sizes.stride // 2 :][: CHUNK + 1] == 1).all()


def test_pack_grads_many_tensors(device):
    numels = [i % 37 for i in range(3000)]
    sizes = make_sizes(numels, torch.bfloat16, device, world=2)
    grads = [randn(n, torch.float32, device) if i % 3 else None for i, n in enumerate(numels)]
    check(sizes, grads, torch.float32, torch.bfloat16, device, world=2)


def test_pack_grads_large_bucket_is_streamed(device):
    """Large enough for stores that bypass the caches."""
    numels = [3_000_001, 77, 1_500_000]
    for wire in [torch.float32, torch.float16]:
        sizes = make_sizes(numels, wire, device, world=2)
        grads = [randn(n, torch.float32, device, odd=True) for n in numels]
        check(sizes, grads, torch.float32, wire, device, world=2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_case_04_flattening_a_list_that_holds_a_none(device, dtype):
    numels = [1, 3, 1025, 4097, 7]
    sizes = make_sizes(numels, dtype, device)
    values = [randn(n, dtype, device) for n in numels]
    for mask in itertools.product([True, False], repeat=len(numels)):
        params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in numels]
        for p, value, present in zip(params, values, mask, strict=True):
            p.grad = value if present else None
        grads = [p.grad for p in params]
        bucket, _, _ = run(sizes, grads, dtype, dtype, device)
        covered = torch.zeros(sizes.stride, dtype=torch.bool, device=device)
        for numel, _, offset, _, param, *_ in sizes.table.rows.tolist():
            slot = bucket[0, offset : offset + numel]
            assert torch.equal(slot, values[param] if mask[param] else torch.zeros_like(slot))
            covered[offset : offset + numel] = True
        assert (bucket[0, ~covered] == 0).all()
        assert [p.grad is not None for p in params] == list(mask)
