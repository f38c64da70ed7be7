"""Plays a scenario under `dynzero.ZeroOptimizer` and compares it with the oracle."""

from __future__ import annotations

import logging
from typing import Any

import oracle
import pytest
import torch
from gpus import needs_gpus
from oracle import play_oracle
from scenario import Record, Scenario, Turn, snapshot, state_by_name
from torch import Tensor, nn
from world import rank_device, run_world

import dynzero
from dynzero._C import Transfer, Transport

stages = pytest.mark.parametrize("stage", [0, 1, 2])
# The tolerance against the oracle, float32.
ABSOLUTE, RELATIVE = 1e-6, 1e-5
# Options of ZeroOptimizer that change what the right result is.
_ORACLE_OPTIONS = ("average", "absent", "max_grad_norm", "loss_scale")


def worlds(*sizes: int) -> pytest.MarkDecorator:
    """Runs a test with `world` gloo ranks; with two NCCL ranks as well, if there may be two."""
    cases: list[Any] = [(size, "gloo") for size in sizes]
    if 2 in sizes:
        cases.append(pytest.param(2, "nccl", marks=[pytest.mark.cuda, needs_gpus(1)]))
    return pytest.mark.parametrize(("world", "backend"), cases)


class Weighing(Transport):
    """Notes the bytes of each bucket that this rank sends."""

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self.inner = inner
        self.reduced: list[int] = []
        self.gathered: list[int] = []

    def all_to_all(self, received: Tensor, sent: Tensor) -> Transfer:
        self.reduced.append(sent.nbytes)
        return self.inner.all_to_all(received, sent)

    def all_gather(self, everybody: Tensor, mine: Tensor) -> Transfer:
        self.gathered.append(mine.nbytes)
        return self.inner.all_gather(everybody, mine)


def weigh(opt: dynzero.ZeroOptimizer) -> Weighing:
    """From now on; several ranks only."""
    opt._mover.collective.transport = Weighing(opt._mover.collective.transport)
    return opt._mover.collective.transport


def zero_class(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """torch has no Lion: the oracle brings its own, dynzero its own."""
    return dynzero.Lion if optimizer is oracle.Lion else optimizer


def make(scenario: Scenario, model: nn.Module, **zero: Any) -> dynzero.ZeroOptimizer:
    cls = zero_class(scenario.optimizer)
    return dynzero.ZeroOptimizer(scenario.groups(model), cls, **scenario.options, **zero)


def play(
    rank: int,
    world: int,
    scenario: Scenario,
    zero: dict[str, Any],
    every_state: bool = False,
    device: torch.device | str | None = None,
) -> Record:
    """One rank's run; `zero` are the options of ZeroOptimizer."""
    model = scenario.model(device or rank_device())
    opt = make(scenario, model, **zero)
    scheduler = scenario.scheduler(opt) if scenario.scheduler else None
    record = Record([snapshot(model)], [], [], [{}], [])
    for step in range(scenario.steps):
        record.lrs.append([group["lr"] for group in opt.param_groups])
        backwards(opt, model, scenario, step, rank, world)
        opt.step()
        record.active.append(set(opt.last_step.active))
        record.norms.append(float(opt.last_step.grad_norm))
        record.params.append(snapshot(model))
        if every_state or step == scenario.steps - 1:
            record.states.append(state_by_name(opt.full_state_dict()))
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return record


def backwards(
    opt: dynzero.ZeroOptimizer,
    model: nn.Module,
    scenario: Scenario,
    step: int,
    rank: int,
    world: int,
) -> None:
    for micro in range(scenario.micros(step, rank)):
        loss = scenario.loss(model, Turn(step, micro, rank, world))
        if loss is not None:
            opt.backward(loss)


def check(
    scenario: Scenario,
    world: int,
    *,
    backend: str = "gloo",
    exact: bool = False,
    every_state: bool = False,
    **zero: Any,
) -> Record:
    """Plays on `world` ranks; all ranks must agree bit for bit and with the oracle."""
    records = run_world(world, play, scenario, zero, every_state, backend=backend)
    device = "cpu" if backend == "gloo" else "cuda:0"  # 16-bit products differ between devices
    expected = play_oracle(scenario, world, device=device, **oracle_options(zero, world))
    assert_ranks_agree(records)
    assert_equals_oracle(records[0], expected, exact)
    if every_state:
        assert_inactive_untouched(records[0])
    return records[0]


def oracle_options(zero: dict[str, Any], world: int) -> dict[str, Any]:
    """Stage 2 adds the ranks of each round up, then the rounds; at W = 1 torch's own rules hold."""
    options = {key: zero[key] for key in _ORACLE_OPTIONS if zero.get(key) is not None}
    return options | {"by_round": zero["stage"] == 2 and world > 1}


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    assert same_bits(got, expected), f"{what}: got {got}\nexpected, bit for bit, {expected}"


def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    """Within the tolerance; 16-bit weights within one unit in the last place."""
    absolute, relative = ABSOLUTE, RELATIVE
    if got.dtype in oracle.HALVES:
        relative = torch.finfo(got.dtype).eps
    wide = torch.complex128 if got.is_complex() else torch.float64
    torch.testing.assert_close(
        got.to(wide),
        expected.to(wide),
        atol=absolute,
        rtol=relative,
        msg=lambda text: f"{what}: {text}",
    )


def assert_ranks_agree(records: list[Record]) -> None:
    for rank, record in enumerate(records[1:], start=1):
        for step, (ours, theirs) in enumerate(zip(records[0].params, record.params, strict=True)):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert_same_bits(theirs[name], ours[name], f"rank {rank}, step {step - 1}, {name}")
        assert record.active == records[0].active, f"rank {rank} reports other active parameters"
        assert record.norms == records[0].norms, f"rank {rank} reports other norms"


def assert_equals_oracle(got: Record, expected: Record, exact: bool) -> None:
    compare = assert_same_bits if exact else assert_close
    for step, (ours, theirs) in enumerate(zip(got.params, expected.params, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            compare(ours[name], theirs[name], f"step {step - 1}, {name}")
    assert got.active == expected.active
    assert got.lrs == expected.lrs
    torch.testing.assert_close(got.norms, expected.norms, rtol=RELATIVE, atol=ABSOLUTE)
    assert_states_equal(got.states[-1], expected.states[-1], compare)


def assert_states_equal(got: dict[str, Any], expected: dict[str, Any], compare: Any) -> None:
    """Exactly what torch keeps, in torch's shape; `master` where the oracle has one."""
    assert got.keys() == expected.keys(), "parameters with a state"
    for name, entries in expected.items():
        assert set(got[name]) == set(entries), f"state of {name}"
        for key, value in entries.items():
            if isinstance(value, Tensor):
                compare(got[name][key], value, f"state {key} of {name}")
            else:
                assert got[name][key] == value, f"state {key} of {name}"


def assert_inactive_untouched(record: Record) -> None:
    """A parameter that is not active in a step keeps value and state, bit for bit."""
    for step, active in enumerate(record.active):
        before, after = record.params[step], record.params[step + 1]
        for name in before.keys() - active:
            assert_same_bits(after[name], before[name], f"step {step}, inactive {name}")
            old, new = record.states[step].get(name, {}), record.states[step + 1].get(name, {})
            assert old.keys() == new.keys(), f"step {step}, state of inactive {name}"
            for key, value in old.items():
                if isinstance(value, Tensor):
                    assert_same_bits(new[key], value, f"step {step}, {key} of inactive {name}")
                else:
                    assert new[key] == value


class Lines(logging.Handler):
    """The lines of the logger `dynzero` while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger("dynzero").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("dynzero").removeHandler(self)
