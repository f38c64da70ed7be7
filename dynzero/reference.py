"""Every op of csrc/ops.h in plain torch: executable specification for tests and bench.

Where an op takes a table of addresses, the reference takes a list of flat tensors by parameter
index, None where the address would be 0. All other arguments are those of the op. The order of
sums and of element arithmetic is that of the op, except within the sum of squares of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .ops import (
    HYPER_COLUMNS,
    HYPER_FLAGS,
    MAX_SCALE,
    NONFINITE_BITS,
    OPTIMIZER_KINDS,
    RECORD_COLUMNS,
    SCALE_FIELDS,
    STATUS_FIELDS,
)
from .table import CHUNK, CHUNK_BITS, COLUMNS

Tensors = Sequence[Tensor | None]
# A reduced sum's bits stand above those of local gradients.
SUM_SHIFT = len(NONFINITE_BITS)


class Row(NamedTuple):
    """One row of the table, and the chunks of this call that are its own: (number, start)."""

    numel: int
    piece: int
    offset: int
    own_numel: int
    param: int
    group: int
    divisor: int
    full_first: int
    own_first: int
    chunks: tuple[tuple[int, int], ...] = ()


def rows_of(rows: Tensor, chunks: Tensor | None = None) -> Iterator[Row]:
    """The rows, with `chunks` only those that have a chunk in it."""
    table = [Row(**{name: row[at] for name, at in COLUMNS.items()}) for row in rows.tolist()]
    if chunks is None:
        yield from table
        return
    by_row: dict[int, list[tuple[int, int]]] = {}
    for number, packed in enumerate(chunks.tolist()):
        row, start = packed >> 2 * CHUNK_BITS, packed % (1 << CHUNK_BITS) * CHUNK
        by_row.setdefault(row, []).append((number, start))
    for index, starts in by_row.items():
        yield table[index]._replace(chunks=tuple(starts))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def note(
    row: Row, values: Tensor, partials: Tensor | None, nonfinite: Tensor, shift: int = 0
) -> None:
    """Squares of the row's chunks, and its non-finite bits. values: what the chunks cover."""
    if partials is not None:
        for number, start in row.chunks:
            partials[number] = values[start : start + CHUNK].double().square().sum()
    bits = NONFINITE_BITS["inf"] * bool(values.isinf().any())
    bits |= NONFINITE_BITS["nan"] * bool(values.isnan().any())
    nonfinite[row.param] |= bits << shift


def pack_grads(
    rows: Tensor,
    full_chunks: Tensor,
    grads: Tensors,
    bucket: Tensor,
    partials: Tensor | None,
    nonfinite: Tensor,
) -> None:
    """Whole rows at a time: full_chunks must hold all chunks of a row, or none."""
    world = bucket.shape[0]
    for row in rows_of(rows, full_chunks):
        values = bucket.new_zeros(world * row.piece)
        grad = grads[row.param]
        if grad is not None:
            values[: row.numel] = grad
        bucket[:, row.offset : row.offset + row.piece] = values.view(world, row.piece)
        note(row, values, partials, nonfinite)


def reduce_shard(
    rows: Tensor,
    own_chunks: Tensor,
    received: Tensor,
    present: Tensor,
    shards: Tensors,
    accumulate: Tensor,
    partials: Tensor,
    nonfinite: Tensor,
) -> None:
    for row in rows_of(rows, own_chunks):
        shard = shards[row.param]
        assert shard is not None
        total = torch.zeros_like(shard)
        for rank in range(received.shape[0]):
            if int(present[rank, row.param // 8]) >> row.param % 8 & 1:
                total += received[rank, row.offset : row.offset + row.own_numel]
        shard.copy_(shard + total if accumulate[row.param] else total)
        note(row, shard, partials, nonfinite, SUM_SHIFT)


def check_shard(
    rows: Tensor, own_chunks: Tensor, grads: Tensors, partials: Tensor, nonfinite: Tensor
) -> None:
    for row in rows_of(rows, own_chunks):
        grad = grads[row.param]
        values = torch.zeros(row.own_numel) if grad is None else grad[: row.own_numel]
        note(row, values, partials, nonfinite)


def fold_sums(rows: Tensor, partials: Tensor, full: bool, world: int, sumsq: Tensor) -> None:
    for row in rows_of(rows):
        numel = world * row.piece if full else row.own_numel
        first = row.full_first if full else row.own_first
        sumsq[row.param] = sum(partials[first : first + -(-numel // CHUNK)].tolist())


def summarize_shard(
    rows: Tensor, sumsq: Tensor, nonfinite: Tensor, scale_state: Tensor, record: Tensor
) -> None:
    scale = float(scale_state[SCALE_FIELDS["value"]])
    total = 0.0
    local: list[tuple[int, int]] = []
    sums: list[tuple[int, int]] = []
    for row in rows_of(rows):
        total += float(sumsq[row.param]) / (row.divisor * scale) ** 2
        flags = int(nonfinite[row.param])
        if flags & (1 << SUM_SHIFT) - 1:
            local.append((row.param, flags & (1 << SUM_SHIFT) - 1))
        elif flags:
            sums.append((row.param, flags >> SUM_SHIFT))
    param, kind = min(local or sums, default=(-1, 0))
    record[RECORD_COLUMNS["sumsq"]] = total
    record[RECORD_COLUMNS["param"]] = param
    record[RECORD_COLUMNS["kind"]] = kind
    record[RECORD_COLUMNS["from_sum"]] = bool(sums and not local)


def begin_step(
    rows: Tensor,
    records: Tensor,
    max_norm: float,
    check_finite: bool,
    scale_options: list[float],
    steps: Tensor,
    scale_state: Tensor,
    status: Tensor,
) -> None:
    column = RECORD_COLUMNS
    norm = math.sqrt(sum(records[:, column["sumsq"]].tolist()))
    offenders = [
        (record[column["from_sum"]], record[column["param"]], rank, record[column["kind"]])
        for rank, record in enumerate(records.tolist())
        if record[column["param"]] >= 0
    ]
    _, param, rank, kind = min(offenders, default=(0.0, -1.0, -1, 0.0))
    found = check_finite and bool(offenders)
    clip = max_norm / (norm + 1e-6) if max_norm > 0 else 1.0
    values = {
        "found": float(found),
        "norm": norm,
        "clip": 1.0 if clip > 1 else clip,
        "scale": float(scale_state[SCALE_FIELDS["value"]]),
        "param": param,
        "rank": float(rank),
        "kind": kind,
    }
    if not found:
        steps[rows[:, COLUMNS["param"]]] += 1
    state = dict(zip(SCALE_FIELDS, scale_state.tolist(), strict=True))
    advance_scale(state, found, scale_options)
    scale_state.copy_(torch.tensor([state[name] for name in SCALE_FIELDS], dtype=torch.float64))
    fields = [values[name] for name in STATUS_FIELDS]
    told = [*fields, *scale_state.tolist(), *records.flatten().tolist()]
    status.copy_(torch.tensor(told, dtype=torch.float64))


def advance_scale(state: dict[str, float], found: bool, options: list[float]) -> None:
    state["skipped" if found else "taken"] += 1
    if not options:
        return
    growth, backoff, window, hysteresis, minimum = options
    state["growth"] = 0 if found else state["growth"] + 1
    if not found:
        if state["growth"] >= window:
            state["growth"], state["hysteresis"] = 0, hysteresis
            if state["value"] * growth <= MAX_SCALE:
                state["value"] *= growth
        return
    state["exhausted"] += state["value"] <= minimum
    state["hysteresis"] = max(state["hysteresis"] - 1, 0)
    if state["hysteresis"] == 0:
        state["value"] = max(state["value"] * backoff, minimum)


class States(NamedTuple):
    """Own pieces by parameter index; counterpart of the state pointer table."""

    params: Tensors
    masters: Tensors  # None where the parameter is its own master
    state1: Tensors
    state2: Tensors


def update_shard(
    kind: int,
    rows: Tensor,
    own_chunks: Tensor,
    grads: Tensors,
    states: States,
    out: Tensor | None,
    hyper: Tensor,
    steps: Tensor,
    status: Tensor,
) -> None:
    values = dict(zip(STATUS_FIELDS, status.tolist(), strict=False))
    if values["found"]:
        return
    for row in rows_of(rows, own_chunks):
        param = states.params[row.param]
        assert param is not None
        master = states.masters[row.param]
        if master is None:
            master = param
        else:
            master.copy_(
                torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))
            )
        options = dict(zip(HYPER_COLUMNS, hyper[row.group].tolist(), strict=True))
        raw = grads[row.param]
        acc = accumulator(param.dtype)
        grad = torch.zeros_like(master) if raw is None else raw[: row.own_numel].to(acc)
        # A tensor on the device: some devices divide by a Python number by multiplying.
        grad = grad / torch.tensor(row.divisor * values["scale"], dtype=acc, device=grad.device)
        grad = grad * values["clip"]
        update = UPDATES[kind]
        update(
            -grad if int(options["flags"]) & HYPER_FLAGS["maximize"] else grad,
            master,
            states.state1[row.param],
            states.state2[row.param],
            options,
            float(steps[row.param]),
        )
        if out is not None:
            out[row.offset : row.offset + row.own_numel] = master
        if master is not param and out is None:
            param.copy_(master)


Options = dict[str, float]


def adam(
    grad: Tensor, p: Tensor, m: Tensor | None, v: Tensor | None, options: Options, step: float
) -> None:
    assert m is not None and v is not None
    lr, decay, beta1, beta2 = (options[k] for k in ("lr", "weight_decay", "beta1", "beta2"))
    if int(options["flags"]) & HYPER_FLAGS["decoupled_decay"]:
        p.mul_(1 - lr * decay)
    elif decay != 0:
        grad = grad + decay * p
    m.add_((1 - beta1) * (grad - m))
    v.copy_(beta2 * v + (1 - beta2) * grad * grad)
    bias2_sqrt = torch.tensor(math.sqrt(1 - beta2**step), dtype=p.dtype, device=p.device)
    # torch's float32 square root is not correctly rounded on every CPU; by way of float64 it is.
    denominator = v.double().sqrt().to(v.dtype) / bias2_sqrt + options["eps"]
    p.sub_(lr / (1 - beta1**step) * (m / denominator))


def sgd(
    grad: Tensor, p: Tensor, buffer: Tensor | None, _: Tensor | None, options: Options, step: float
) -> None:
    momentum = options["beta1"]
    if options["weight_decay"] != 0:
        grad = grad + options["weight_decay"] * p
    if momentum != 0:
        assert buffer is not None
        buffer.copy_(grad if step == 1 else momentum * buffer + (1 - options["beta2"]) * grad)
        nesterov = int(options["flags"]) & HYPER_FLAGS["nesterov"]
        grad = grad + momentum * buffer if nesterov else buffer
    p.sub_(options["lr"] * grad)


def lion(
    grad: Tensor, p: Tensor, m: Tensor | None, _: Tensor | None, options: Options, step: float
) -> None:
    assert m is not None
    lr, beta1, beta2 = (options[k] for k in ("lr", "beta1", "beta2"))
    sign = (beta1 * m + (1 - beta1) * grad).sign()
    m.copy_(beta2 * m + (1 - beta2) * grad)
    p.copy_(p * (1 - lr * options["weight_decay"]) - lr * sign)


UPDATES = {
    OPTIMIZER_KINDS["adam"]: adam,
    OPTIMIZER_KINDS["sgd"]: sgd,
    OPTIMIZER_KINDS["lion"]: lion,
}


def unpack_params(
    rows: Tensor, full_chunks: Tensor, bucket: Tensor, params: Tensors, status: Tensor | None
) -> None:
    if status is not None and status[STATUS_FIELDS["found"]]:
        return
    for row in rows_of(rows, full_chunks):
        param = params[row.param]
        assert param is not None
        slots = bucket[:, row.offset : row.offset + row.piece]
        param.copy_(slots.reshape(-1)[: row.numel])
