"""update_shard against the reference and against torch.optim."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from op_inputs import (
    PATTERNS,
    SIZES,
    addresses,
    make_sizes,
    make_status,
    poisoned,
    randn,
)
from torch import Tensor

from dynzero import reference
from dynzero.lion import Lion
from dynzero.ops import HYPER_COLUMNS, HYPER_FLAGS, OPTIMIZER_KINDS, ops
from dynzero.table import CHUNK


class Optimizer(NamedTuple):
    """One set of options, for torch and as kind and hyperparameter row."""

    torch: type[torch.optim.Optimizer]
    options: dict
    kind: str
    hyper: dict[str, float]
    flags: tuple[str, ...] = ()

    def row(self) -> list[float]:
        values = {name: 0.0 for name in HYPER_COLUMNS} | self.hyper
        values["flags"] = float(sum(HYPER_FLAGS[name] for name in self.flags))
        return [values[name] for name in HYPER_COLUMNS]


ADAM = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
ADAM_TORCH = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
SGD = {"lr": 0.1, "weight_decay": 0.01, "beta1": 0.9}
SGD_TORCH = {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9}
LION = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99}
LION_TORCH = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)}
OPTIMIZERS = {
    "adamw": Optimizer(torch.optim.AdamW, ADAM_TORCH, "adam", ADAM, ("decoupled_decay",)),
    "adam": Optimizer(torch.optim.Adam, ADAM_TORCH, "adam", ADAM),
    "adam maximize": Optimizer(
        torch.optim.Adam,
        ADAM_TORCH | {"weight_decay": 0.0, "maximize": True},
        "adam",
        ADAM | {"weight_decay": 0.0},
        ("maximize",),
    ),
    "sgd": Optimizer(torch.optim.SGD, {"lr": 0.1}, "sgd", {"lr": 0.1}),
    "sgd momentum": Optimizer(torch.optim.SGD, SGD_TORCH, "sgd", SGD),
    "sgd dampening": Optimizer(
        torch.optim.SGD, SGD_TORCH | {"dampening": 0.3}, "sgd", SGD | {"beta2": 0.3}
    ),
    "sgd nesterov": Optimizer(
        torch.optim.SGD, SGD_TORCH | {"nesterov": True}, "sgd", SGD, ("nesterov",)
    ),
    "sgd maximize": Optimizer(
        torch.optim.SGD, SGD_TORCH | {"maximize": True}, "sgd", SGD, ("maximize",)
    ),
    "lion": Optimizer(Lion, LION_TORCH, "lion", LION, ("decoupled_decay",)),
}
DTYPES = [  # (parameter, gradient)
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_states(params: list[Tensor], optimizer: Optimizer) -> reference.States:
    acc = accumulator(params[0].dtype)
    half = params[0].dtype != acc
    momentum = optimizer.kind != "sgd" or "momentum" in optimizer.options
    nothing: list[Tensor | None] = [None] * len(params)
    return reference.States(
        params,
        [p.to(acc) for p in params] if half else nothing,
        [torch.zeros_like(p, dtype=acc) for p in params] if momentum else nothing,
        [torch.zeros_like(p, dtype=acc) for p in params] if optimizer.kind == "adam" else nothing,
    )


def clone(states: reference.States) -> reference.States:
    return reference.States(*([None if t is None else t.clone() for t in s] for s in states))


def update(optimizer, sizes, grads, grad_dtype, states, steps, status, out=None):
    device = str(steps.device)
    ops.update_shard(
        OPTIMIZER_KINDS[optimizer.kind],
        sizes.table.rows,
        sizes.table.own_chunks,
        addresses(grads, device),
        grad_dtype,
        torch.stack([addresses(list(s), device) for s in states]),
        states.params[0].dtype,
        out,
        torch.tensor([optimizer.row()], dtype=torch.float64, device=device),
        steps,
        status,
    )


def update_reference(optimizer, sizes, grads, states, steps, status, out=None):
    reference.update_shard(
        OPTIMIZER_KINDS[optimizer.kind],
        sizes.table.rows,
        sizes.table.own_chunks,
        grads,
        states,
        out,
        torch.tensor([optimizer.row()], dtype=torch.float64),
        steps,
        status,
    )


def assert_states_equal(ours: reference.States, expected: reference.States) -> None:
    """Bit for bit on the CPU, but for float64, where torch's square root may be a unit off.

    CUDA fuses multiplications with additions: one more rounding or less in each of about ten
    operations, and then one unit of a 16-bit parameter.
    """
    for name, mine, theirs in zip(reference.States._fields, ours, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if a is None:
                assert b is None, name
            elif a.device.type == "cpu" and a.dtype != torch.float64:
                assert torch.equal(a, b), name
            else:
                eps = torch.finfo(a.dtype).eps
                torch.testing.assert_close(a, b, rtol=10 * eps, atol=10 * eps)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES, ids=str)
def test_update_shard_follows_the_reference(device, name, dtype, grad_dtype):
    optimizer = OPTIMIZERS[name]
    sizes = make_sizes(SIZES, dtype, device, divisor=3)
    states = make_states([randn(n, dtype, device, odd=n % 2 == 1) for n in SIZES], optimizer)
    expected = clone(states)
    for step in (1, 2, 3):
        grads = [randn(n, grad_dtype, device) for n in SIZES]
        steps = torch.full((len(SIZES),), float(step), device=device)
        status = make_status(device, scale=1000.0 if step == 2 else 1024.0, clip=0.7)
        update(optimizer, sizes, grads, grad_dtype, states, steps, status)
        update_reference(optimizer, sizes, grads, expected, steps, status)
        assert_states_equal(states, expected)


def torch_run(optimizer, start, grads, dtype):
    params = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in start]
    made = optimizer.torch(params, **optimizer.options)
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.to(dtype)
        made.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_update_shard_is_as_exact_as_torch(device, name, dtype):
    """Error against a float64 run at most twice that of torch.optim in the same dtype."""
    optimizer = OPTIMIZERS[name]
    numels = [1000, CHUNK + 3]  # enough that the largest error is not luck
    sizes = make_sizes(numels, dtype, device)
    start = [randn(n, dtype, device) for n in numels]
    grads = [[randn(n, dtype, device) for n in numels] for _ in range(6)]
    states = make_states([p.clone() for p in start], optimizer)
    for step, step_grads in enumerate(grads, 1):
        steps = torch.full((len(numels),), float(step), device=device)
        update(optimizer, sizes, step_grads, dtype, states, steps, make_status(device))
    truth = torch_run(optimizer, start, grads, torch.float64)
    torch_values = torch_run(optimizer, start, grads, dtype)
    ours, theirs, true = (torch.cat(p).double() for p in (states.params, torch_values, truth))
    if dtype == torch.float64:  # torch is the truth: a few roundings per step apart
        torch.testing.assert_close(ours, true, rtol=1e-14, atol=1e-15)
    else:
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_update_shard_an_absent_gradient_is_zero(device, pattern):
    optimizer = OPTIMIZERS["adamw"]
    sizes = make_sizes(SIZES, torch.float32, device)
    n = len(SIZES)
    grads = [
        randn(m, torch.float32, device) if PATTERNS[pattern](i, n) else None
        for i, m in enumerate(SIZES)
    ]
    states = make_states([randn(m, torch.float32, device) for m in SIZES], optimizer)
    expected = clone(states)
    steps = torch.ones(n, device=device)
    update(optimizer, sizes, grads, torch.float32, states, steps, make_status(device))
    update_reference(optimizer, sizes, grads, expected, steps, make_status(device))
    assert_states_equal(states, expected)


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_update_shard_writes_its_pieces_to_out(device, dtype, grad_dtype, world):
    optimizer = OPTIMIZERS["adamw"]
    for rank in range(world):
        sizes = make_sizes(SIZES, dtype, device, world=world, rank=rank)
        own = [s.stop - s.start for s in sizes.own]
        states = make_states([randn(n, dtype, device) for n in own], optimizer)
        expected = clone(states)
        grads = [randn(n, grad_dtype, device) for n in own]
        steps = torch.ones(len(SIZES), device=device)
        out = poisoned(sizes.stride, dtype=dtype, device=device)
        out_expected = out.clone()
        status = make_status(device)
        update(optimizer, sizes, grads, grad_dtype, states, steps, status, out)
        update_reference(optimizer, sizes, grads, expected, steps, status, out_expected)
        assert_states_equal(states, expected)
        exact = {"rtol": 0, "atol": 0} if device == "cpu" and dtype != torch.float64 else {}
        torch.testing.assert_close(out, out_expected, equal_nan=True, **exact)


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_update_shard_found_changes_nothing(device, name, dtype):
    optimizer = OPTIMIZERS[name]
    sizes = make_sizes(SIZES, dtype, device)
    states = make_states([randn(n, dtype, device) for n in SIZES], optimizer)
    before = clone(states)
    grads = [poisoned(n, dtype=dtype, device=device) for n in SIZES]
    out = torch.zeros(sizes.stride, dtype=dtype, device=device)
    steps = torch.ones(len(SIZES), device=device)
    update(optimizer, sizes, grads, dtype, states, steps, make_status(device, found=1.0), out)
    for after, then in zip(states, before, strict=True):
        for a, b in zip(after, then, strict=True):
            assert a is None or torch.equal(a, b)
    assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_update_shard_follows_values_written_behind_its_back(device, dtype):
    optimizer = OPTIMIZERS["sgd"]
    sizes = make_sizes([1000], dtype, device)
    states = make_states([randn(1000, dtype, device)], optimizer)
    fine = states.masters[0]
    fine.add_(torch.rand(1000, device=device) * 1e-4)
    fine.copy_(torch.where(fine.to(dtype) == states.params[0], fine, states.params[0].float()))
    kept = fine.clone()
    states.params[0][500:] = 3.0  # the first half keeps its finer masters
    expected = torch.cat([kept[:500], torch.full((500,), 3.0, device=device)])
    grads = [torch.zeros(1000, dtype=dtype, device=device)]
    steps = torch.ones(1, device=device)
    update(optimizer, sizes, grads, dtype, states, steps, make_status(device))
    assert torch.equal(states.masters[0], expected)
    assert torch.equal(states.params[0], expected.to(dtype))


def test_update_shard_infinite_weights_stay_without_decay(device):
    """0 * inf would be NaN; torch skips the decay when it is 0."""
    optimizer = OPTIMIZERS["sgd"]
    sizes = make_sizes([9], torch.float32, device)
    states = make_states([torch.full((9,), float("inf"), device=device)], optimizer)
    grads = [torch.ones(9, device=device)]
    steps = torch.ones(1, device=device)
    update(optimizer, sizes, grads, torch.float32, states, steps, make_status(device))
    assert states.params[0].isinf().all()


def test_update_shard_groups_and_steps_are_per_parameter(device):
    """Two groups and two step counts in one call equal two calls."""
    sizes = make_sizes([100, 100], torch.float32, device)
    params = [torch.ones(100, device=device) for _ in range(2)]
    grads = [randn(100, torch.float32, device) for _ in range(2)]
    rows = sizes.table.rows.clone()
    rows[:, 5] = rows[:, 4]  # group = parameter index
    first = OPTIMIZERS["adamw"]
    second = first._replace(hyper=ADAM | {"lr": 0.5, "beta1": 0.5})
    states = make_states(params, first)
    alone = [clone(states), clone(states)]
    steps = torch.tensor([1.0, 40.0], device=device)
    hyper = torch.tensor([first.row(), second.row()], dtype=torch.float64, device=device)
    pointers = torch.stack([addresses(list(s), device) for s in states])
    ops.update_shard(
        OPTIMIZER_KINDS["adam"], rows, sizes.table.own_chunks, addresses(grads, device),
        torch.float32, pointers, torch.float32, None, hyper, steps, make_status(device),
    )  # fmt: skip
    for i, optimizer in enumerate((first, second)):
        update(optimizer, sizes, grads, torch.float32, alone[i], steps, make_status(device))
        for mine, theirs in zip(states, alone[i], strict=True):
            if mine[i] is not None:
                assert torch.equal(mine[i], theirs[i])
