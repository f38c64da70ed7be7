"""unpack_params: bucket -> parameters, bit for bit; and pack followed by unpack."""

import pytest
import torch
from op_inputs import FLOATS, SIZES, addresses, make_sizes, make_status, poisoned, randn

from dynzero import reference
from dynzero.ops import ops


def unpack_both(sizes, bucket, params, status, device):
    expected = [p.clone() for p in params]
    table = addresses(params, device)
    ops.unpack_params(sizes.table.rows, sizes.table.full_chunks, bucket, table, status)
    reference.unpack_params(sizes.table.rows, sizes.table.full_chunks, bucket, expected, status)
    return expected


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
def test_unpack_params_writes_every_element_and_no_more(device, dtype, world, odd):
    sizes = make_sizes(SIZES, dtype, device, world=world)
    bucket = randn(world * sizes.stride, dtype, device).view(world, sizes.stride)
    # Room on both sides that must stay as it is.
    room = [poisoned(n + 16, dtype=dtype, device=device) for n in SIZES]
    first = 7 if odd else 8
    params = [r[first : first + n] for r, n in zip(room, SIZES, strict=True)]
    expected = unpack_both(sizes, bucket, params, None, device)
    for around, param, theirs, n in zip(room, params, expected, SIZES, strict=True):
        assert torch.equal(param, theirs)
        assert around[:first].isnan().all()
        assert around[first + n :].isnan().all()


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_unpack_params_obeys_the_status(device, found):
    sizes = make_sizes([100], torch.float32, device)
    bucket = torch.ones(1, sizes.stride, device=device)
    params = [torch.zeros(100, device=device)]
    expected = unpack_both(sizes, bucket, params, make_status(device, found=found), device)
    assert torch.equal(params[0], expected[0])
    assert params[0].sum() == (0 if found else 100)


def test_unpack_params_large_bucket_is_streamed(device):
    numels = [3_000_001, 5]
    sizes = make_sizes(numels, torch.float16, device, world=2)
    bucket = randn(2 * sizes.stride, torch.float16, device).view(2, sizes.stride)
    params = [poisoned(n + 1, dtype=torch.float16, device=device)[1:] for n in numels]
    expected = unpack_both(sizes, bucket, params, None, device)
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_unpack_params_undoes_pack_grads(device, dtype):
    numels = [i % 37 for i in range(500)] + SIZES
    sizes = make_sizes(numels, dtype, device, world=3)
    values = [randn(n, dtype, device) for n in numels]
    bucket = poisoned(3, sizes.stride, dtype=dtype, device=device)
    nonfinite = torch.zeros(len(numels), dtype=torch.int32, device=device)
    rows, chunks = sizes.table.rows, sizes.table.full_chunks
    ops.pack_grads(rows, chunks, addresses(values, device), dtype, bucket, None, nonfinite)
    params = [poisoned(n, dtype=dtype, device=device) for n in numels]
    ops.unpack_params(rows, chunks, bucket, addresses(params, device), None)
    assert all(torch.equal(a, b) for a, b in zip(params, values, strict=True))
