"""What holds for every op: argument checks, opcheck, nothing to do, and any number of threads."""

import pytest
import torch
from op_inputs import SIZES, addresses, make_sizes, make_status, pack_bits, randn

from dynzero.ops import (
    HYPER_COLUMNS,
    RECORD_COLUMNS,
    SCALE_FIELDS,
    SCHEMAS,
    STATE_POINTERS,
    ops,
)
from dynzero.table import CHUNK

KEEP = []  # tensors whose addresses stand in tables


def arguments(op, device, numels=(5, CHUNK + 1), world=2):
    """Valid arguments by name."""
    torch.manual_seed(0)
    numels = list(numels)
    sizes = make_sizes(numels, torch.float32, device, world=world)
    tensors = [randn(n, torch.float32, device) for n in numels]
    states = [[randn(n, torch.float32, device).abs() for n in numels] for _ in STATE_POINTERS]
    KEEP.append((tensors, states))
    rows, full, own = sizes.table

    def zeros(*shape, dtype=torch.float64):
        return torch.zeros(*shape, dtype=dtype, device=device)

    n = len(numels)
    everything = {
        "kind": 0,
        "rows": rows,
        "full_chunks": full,
        "own_chunks": own,
        "grad_ptrs": addresses(tensors, device),
        "param_ptrs": addresses(tensors, device),
        "shard_ptrs": addresses(tensors, device),
        "state_ptrs": torch.stack([addresses(s, device) for s in states]),
        "grad_dtype": torch.float32,
        "param_dtype": torch.float32,
        "bucket": randn(world * sizes.stride, torch.float32, device).view(world, -1),
        "received": randn(world * sizes.stride, torch.float32, device).view(world, -1),
        "present": pack_bits([[True] * n] * world, device),
        "accumulate": zeros(n, dtype=torch.int64),
        "partials": zeros(full.numel() if op in ("pack_grads", "fold_sums") else own.numel()),
        "nonfinite": zeros(n, dtype=torch.int32),
        "sumsq": zeros(n),
        "full": True,
        "world": world,
        "scale_state": zeros(len(SCALE_FIELDS)) + 1,
        "record": zeros(len(RECORD_COLUMNS)),
        "records": zeros(world, len(RECORD_COLUMNS)),
        "max_norm": 1.0,
        "check_finite": True,
        "scale_options": [2.0, 0.5, 10.0, 1.0, 1.0],
        "out": None,
        "hyper": zeros(1, len(HYPER_COLUMNS)) + 0.5,
        "steps": zeros(n, dtype=torch.float32) + 1,
        "status": make_status(device, world if op == "begin_step" else 0),
    }
    names = [word.split()[-1] for word in SCHEMAS[op].split(", ")]
    return {name: everything[name] for name in names}


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_op_passes_opcheck(op):
    registered = getattr(torch.ops.dynzero, op).default
    torch.library.opcheck(registered, tuple(arguments(op, "cpu").values()))


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_op_is_registered_as_it_is(device, op):
    """torch.ops.dynzero runs what `ops` runs: the same bits in every argument."""
    outputs = []
    for call in (getattr(ops, op), getattr(torch.ops.dynzero, op)):
        KEEP.clear()
        values = arguments(op, device)
        call(*values.values())
        tensors, states = KEEP[0]
        written = [v for k, v in values.items() if isinstance(v, torch.Tensor) and "_ptrs" not in k]
        outputs.append([t.clone() for t in [*written, *tensors, *(t for s in states for t in s)]])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_op_accepts_no_rows(device, op):
    getattr(ops, op)(*arguments(op, device, numels=()).values())


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_op_checks_its_rows(device, op):
    call = getattr(ops, op)
    good = arguments(op, device)
    with pytest.raises(RuntimeError, match=f"{op}: expected rows of dtype int64, got int32"):
        call(*(good | {"rows": good["rows"].int()}).values())
    with pytest.raises(RuntimeError, match=f"{op}: expected rows with 9 entries in dimension 1"):
        call(*(good | {"rows": good["rows"][:, :8].contiguous()}).values())
    with pytest.raises(RuntimeError, match=f"{op}: expected rows contiguous, got strides"):
        call(*(good | {"rows": good["rows"].repeat(1, 2)[:, :9]}).values())


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_op_checks_every_tensor(device, op):
    """A wrong dtype, and too many dimensions, are refused by argument name."""
    good = arguments(op, device)
    for name, value in good.items():
        if not isinstance(value, torch.Tensor):
            continue
        for wrong in (value.to(torch.int16), value[None, None]):
            with pytest.raises(RuntimeError, match=f"^{op}: expected {name} .*, got"):
                getattr(ops, op)(*(good | {name: wrong}).values())


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("pack_grads", {"partials": torch.zeros(1).double()}, "expected partials with 3 entries"),
        ("pack_grads", {"grad_dtype": torch.int32}, "expected grad_dtype of dtype float16 or"),
        ("pack_grads", {"grad_dtype": torch.float64}, "expected bucket of dtype float64, got"),
        ("reduce_shard", {"present": torch.zeros(1, 1).byte()}, "expected present with 2 entries"),
        ("fold_sums", {"world": 0}, "expected world > 0, got 0"),
        ("begin_step", {"scale_options": [1.0]}, "expected scale_options with 0 or 5 entries"),
        ("update_shard", {"kind": 3}, "expected kind 0 .*, got 3"),
        ("update_shard", {"grad_dtype": torch.float16}, "expected grad_dtype of dtype float32"),
        ("unpack_params", {"status": torch.zeros(2).double()}, "expected status with at least 7"),
        ("begin_step", {"status": torch.zeros(7).double()}, "expected status with 21 entries"),
    ],
)
def test_wrong_arguments_are_named(op, change, message):
    good = arguments(op, "cpu")
    with pytest.raises(RuntimeError, match=f"^{op}: {message}"):
        getattr(ops, op)(*(good | change).values())


def test_tensors_on_two_devices_are_refused(device):
    if device == "cpu":
        pytest.skip("needs a second device")
    good = arguments("pack_grads", device)
    with pytest.raises(RuntimeError, match="expected grad_ptrs on cuda:0, got cpu"):
        ops.pack_grads(*(good | {"grad_ptrs": good["grad_ptrs"].cpu()}).values())


@pytest.mark.parametrize("op", ["pack_grads", "reduce_shard", "check_shard", "update_shard"])
def test_threads_do_not_change_a_bit(op):
    """Same input, another number of threads: the same bits in every output."""
    before = torch.get_num_threads()
    seen = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            KEEP.clear()
            good = arguments(op, "cpu", numels=[*SIZES, 20 * CHUNK + 3])
            getattr(ops, op)(*good.values())
            tables = ("rows", "_ptrs", "chunks")
            outputs = [
                value
                for name, value in good.items()
                if isinstance(value, torch.Tensor) and not name.endswith(tables)
            ]
            tensors, states = KEEP[0]
            written = [*tensors, *(t for state in states for t in state)]
            seen.append([t.clone() for t in [*outputs, *written]])
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
