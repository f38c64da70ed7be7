"""summarize_shard and begin_step: from sums and flags to the status, step counts and loss scale."""

import math

import pytest
import torch
from op_inputs import INF, NAN, make_sizes

from dynzero import reference
from dynzero.ops import RECORD_COLUMNS, SCALE_FIELDS, STATUS_FIELDS, ops

SUM = reference.SUM_SHIFT
DYNAMIC = [2.0, 0.5, 3.0, 2.0, 1.0]  # growth, backoff, window, hysteresis, minimum


def scale_state(device, **fields):
    values = {name: 0.0 for name in SCALE_FIELDS} | {"value": 1.0} | fields
    return torch.tensor([values[n] for n in SCALE_FIELDS], dtype=torch.float64, device=device)


def named(names, tensor):
    return dict(zip(names, tensor.tolist(), strict=True))


def summarize(sumsq, flags, device, *, divisor=1, scale=1.0):
    sizes = make_sizes([8] * len(sumsq), torch.float32, device, divisor=divisor)
    results = []
    for function in (ops.summarize_shard, reference.summarize_shard):
        record = torch.full((len(RECORD_COLUMNS),), math.nan, dtype=torch.float64, device=device)
        function(
            sizes.table.rows,
            torch.tensor(sumsq, dtype=torch.float64, device=device),
            torch.tensor(flags, dtype=torch.int32, device=device),
            scale_state(device, value=scale),
            record,
        )
        results.append(record)
    torch.testing.assert_close(*results, rtol=1e-14, atol=0, equal_nan=True)
    return named(RECORD_COLUMNS, results[0])


@pytest.mark.parametrize("num_params", [0, 1, 2, 255, 256, 1000])
def test_summarize_shard_sums_the_unscaled_squares(device, num_params):
    sumsq = torch.rand(num_params, dtype=torch.float64).tolist()
    record = summarize(sumsq, [0] * num_params, device, divisor=3, scale=1024.0)
    assert record["sumsq"] == pytest.approx(sum(sumsq) / (3 * 1024.0) ** 2, rel=1e-13)
    assert (record["param"], record["kind"], record["from_sum"]) == (-1, 0, 0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([0, 0, NAN, INF], (2, NAN, 0)),
        ([INF | NAN, 0, 0, 0], (0, INF | NAN, 0)),
        ([INF << SUM, 0, 0, NAN], (3, NAN, 0)),  # a local gradient comes before any sum
        ([0, INF << SUM, NAN << SUM, 0], (1, INF, 1)),
        ([0, INF << SUM | NAN, 0, 0], (1, NAN, 0)),
    ],
)
def test_summarize_shard_names_the_first_offender(device, flags, expected):
    record = summarize([1.0] * 4, flags, device)
    assert (record["param"], record["kind"], record["from_sum"]) == expected


def begin(records, device, *, max_norm=0.0, check_finite=True, options=(), state=None):
    """Op and reference on the same input; returns (status, steps, scale state) by name."""
    sizes = make_sizes([8, 8, 8], torch.float32, device)
    rows = sizes.table.rows[:2]  # parameters 1 and 2 are active, 0 is not
    records = torch.tensor(records, dtype=torch.float64, device=device)
    results = []
    for function in (ops.begin_step, reference.begin_step):
        steps = torch.tensor([5.0, 6.0, 7.0], device=device)
        scale = scale_state(device) if state is None else state.clone()
        size = len(STATUS_FIELDS) + len(SCALE_FIELDS) + records.numel()
        status = torch.full((size,), math.nan, dtype=torch.float64, device=device)
        function(rows, records, max_norm, check_finite, list(options), steps, scale, status)
        results.append((status, steps, scale))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-15, atol=0, equal_nan=True)
    status, steps, scale = results[0]
    fields, told = status.split([len(STATUS_FIELDS), status.numel() - len(STATUS_FIELDS)])
    assert told.tolist() == pytest.approx(
        [*scale.tolist(), *records.flatten().tolist()], nan_ok=True
    )
    return named(STATUS_FIELDS, fields), steps.tolist(), named(SCALE_FIELDS, scale)


def test_begin_step_counts_only_the_active(device):
    status, steps, scale = begin([[4.0, -1, 0, 0], [5.0, -1, 0, 0]], device)
    assert status["norm"] == 3.0
    assert (status["found"], status["clip"], status["param"], status["rank"]) == (0, 1, -1, -1)
    assert steps == [5, 7, 8]
    assert (scale["taken"], scale["skipped"], scale["value"]) == (1, 0, 1)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, 0.5, 3.0, 100.0])
def test_begin_step_clips_as_torch(device, max_norm):
    status, _, _ = begin([[9.0, -1, 0, 0]], device, max_norm=max_norm)
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.full((1,), 3.0, dtype=torch.float64)
    if max_norm > 0:
        torch.nn.utils.clip_grad_norm_([p], max_norm)
    assert status["clip"] * 3.0 == pytest.approx(p.grad.item(), rel=1e-15)


def test_begin_step_a_nan_norm_gives_a_nan_clip(device):
    status, steps, _ = begin([[math.nan, 1, NAN, 0]], device, max_norm=1.0, check_finite=False)
    assert math.isnan(status["clip"])
    assert (status["found"], status["param"]) == (0, 1)
    assert steps == [5, 7, 8]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([[1, -1, 0, 0], [1, 2, NAN, 0]], (2, 1, NAN)),
        ([[1, 2, INF, 0], [1, 1, NAN, 0]], (1, 1, NAN)),
        ([[1, 1, INF, 0], [1, 1, NAN, 0]], (1, 0, INF)),  # ties go to the lowest rank
        ([[1, 1, INF, 1], [1, 2, NAN, 0]], (2, 1, NAN)),  # a sum comes after any gradient
        ([[1, 2, INF, 1], [1, 1, NAN, 1]], (1, 1, NAN)),
        ([[1, -1, 0, 0]] * 300 + [[1, 0, INF, 0]], (0, 300, INF)),
    ],
)
def test_begin_step_names_the_first_offender_and_changes_nothing(device, records, expected):
    status, steps, scale = begin(records, device)
    assert status["found"] == 1
    assert (status["param"], status["rank"], status["kind"]) == expected
    assert steps == [5, 6, 7]
    assert (scale["taken"], scale["skipped"]) == (0, 1)


def test_begin_step_moves_a_dynamic_scale(device):
    good, bad = [[1.0, -1, 0, 0]], [[1.0, 0, INF, 0]]
    state = scale_state(device, value=4.0, hysteresis=2.0)
    story = [
        (good, 4.0),
        (good, 4.0),
        (good, 8.0),  # the third good step in a row
        (bad, 8.0),  # hysteresis 2: the first overflow only takes one of it
        (bad, 4.0),
        (bad, 2.0),
        (bad, 1.0),
        (bad, 1.0),  # at the minimum
        (good, 1.0),
    ]
    for records, value in story:
        status, _, named_state = begin(records, device, options=DYNAMIC, state=state)
        assert status["scale"] == state[SCALE_FIELDS["value"]]  # that of this step's gradients
        assert named_state["value"] == value
        state = scale_state(device, **named_state)
    assert named_state["exhausted"] == 1
    assert (named_state["taken"], named_state["skipped"]) == (4, 5)


def test_begin_step_takes_any_growth_and_backoff(device):
    good, bad = [[1.0, -1, 0, 0]], [[1.0, 0, INF, 0]]
    state = scale_state(device, value=8.0, hysteresis=1.0)
    story = [(good, 24.0), (bad, 6.0), (bad, 1.5), (good, 4.5), (bad, 1.125), (bad, 0.5)]
    for records, value in story:
        _, _, named_state = begin(records, device, options=[3.0, 0.25, 1.0, 1.0, 0.5], state=state)
        assert named_state["value"] == value
        state = scale_state(device, **named_state)
    assert named_state["exhausted"] == 0


def test_begin_step_leaves_a_constant_scale(device):
    for records in ([[1.0, -1, 0, 0]], [[1.0, 0, INF, 0]]):
        _, _, state = begin(records, device, state=scale_state(device, value=1024.0))
        assert state["value"] == 1024.0
