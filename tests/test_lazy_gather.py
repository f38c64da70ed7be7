"""gather="lazy": values arrive with the forward that needs them, and with the bits of "eager"."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpus import nccl_worlds
from models import TwoHeads, by_iteration, by_rank, mixed, two_heads
from oracle import play_oracle
from play import assert_close, backwards, make, oracle_options, worlds
from scenario import Scenario, Turn, data, snapshot
from torch import Tensor, nn
from torch.nn import functional
from world import message_of, outcome_of, rank_device, run_world

import dynzero

# Every parameter in a bucket of its own, unless said otherwise.
LAZY = {"gather": "lazy", "bucket_bytes": 1}
sharded = pytest.mark.parametrize("stage", [1, 2])


def two_micros(step: int, rank: int) -> int:
    return 1 + (step + rank) % 2


SCENARIOS: list[tuple[Scenario, dict[str, Any]]] = [
    (two_heads(by_iteration), {}),
    (two_heads(by_rank, dtype=torch.bfloat16), {"bucket_bytes": 40}),
    (two_heads(mixed, steps=6, micros=two_micros), {"fused": False, "max_grad_norm": 0.5}),
    (two_heads(mixed, steps=6, micros=two_micros), {"absent": "zero", "average": "present"}),
    (two_heads(by_rank), {"bucket_bytes": 1e6, "presence": "static", "loss_scale": 4.0}),
]


def train(rank: int, world: int, scenario: Scenario, zero: dict[str, Any]) -> tuple[Any, ...]:
    """Losses of all passes, which show the weights they read; and the weights in the end."""
    losses = []

    def loss(model: nn.Module, turn: Turn) -> Tensor | None:
        value = scenario.loss(model, turn)
        losses.append(None if value is None else value.detach().cpu())
        return value

    model = scenario.model(rank_device())
    opt = make(scenario, model, **zero)
    recorded = Scenario(model, loss, opt.__class__, {}, scenario.steps, scenario.micros)
    for step in range(scenario.steps):
        backwards(opt, model, recorded, step, rank, world)
        opt.step()
        opt.zero_grad()
    opt.wait_for_parameters()
    return losses, snapshot(model), opt.full_state_dict()["state"]


def train_both(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    finals = []
    for scenario, zero in SCENARIOS:
        zero = {"stage": stage, "bucket_bytes": 1, **zero}
        eager = train(rank, world, scenario, zero)
        lazy = train(rank, world, scenario, zero | {"gather": "lazy"})
        torch.testing.assert_close(lazy, eager, rtol=0, atol=0)
        finals.append(lazy[1])
    return finals


@worlds(2, 3)
@sharded
def test_lazy_has_the_bits_of_eager(world: int, backend: str, stage: int) -> None:
    ranks = run_world(world, train_both, stage, backend=backend)
    for number, (scenario, zero) in enumerate(SCENARIOS):
        options = oracle_options(zero | {"stage": stage}, world)
        device = "cpu" if backend == "gloo" else "cuda:0"
        expected = play_oracle(scenario, world, device=device, **options).params[-1]
        for finals in ranks:
            for name, value in finals[number].items():
                assert_close(value, expected[name], f"{zero}: {name}")


class Wide(TwoHeads):
    """Every rank holds a piece of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 4), nn.Linear(16, 4)


class Run:
    """A lazy and an eager run of the same model, one optimizer each."""

    def __init__(self, model: Callable[[], nn.Module] = Wide, **zero: Any) -> None:
        self.models, self.opts = [], []
        for gather in ("lazy", "eager"):
            torch.manual_seed(0)
            self.models.append(model().to(rank_device()))
            options = {**LAZY, "lr": 0.1, **zero, "gather": gather}
            named = self.models[-1].named_parameters()
            self.opts.append(dynzero.ZeroOptimizer(named, torch.optim.AdamW, **options))

    @property
    def lazy(self) -> tuple[Any, dynzero.ZeroOptimizer]:
        return self.models[0], self.opts[0]

    def step(self, *args: Any, factor: float = 1.0) -> None:
        for model, opt in zip(self.models, self.opts, strict=True):
            opt.backward(model(inputs(model), *args).square().mean() * factor)
            opt.step()
            opt.zero_grad()

    def same(self, *names: str) -> bool:
        ours, theirs = (dict(model.named_parameters()) for model in self.models)
        return all(torch.equal(ours[name], theirs[name]) for name in names or ours)


def inputs(model: nn.Module) -> Tensor:
    like = next(model.parameters())
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(like)


def one_at_a_time(rank: int, world: int, stage: int) -> None:
    run = Run(stage=stage)
    run.step("a")
    model, opt = run.lazy
    assert not run.same("trunk.weight") and not run.same("a.weight"), "nothing has been taken out"
    hidden = model.trunk(inputs(model))
    assert run.same("trunk.weight") and not run.same("a.weight"), "only what has run"
    model.a(torch.tanh(hidden))
    assert run.same()
    assert not nn.modules.module._global_forward_pre_hooks
    run.step("b")
    run.step("a")  # b is still on its way, and taken out by this step
    assert run.same("b.weight", "b.bias") and not run.same("a.weight")
    run.step("b", factor=float("inf"))
    model(inputs(model), "a")
    assert run.same() and opt.last_step.overflow is not None


@worlds(2, 3)
@sharded
def test_a_parameter_arrives_with_its_module(world: int, backend: str, stage: int) -> None:
    run_world(world, one_at_a_time, stage, backend=backend)


def elsewhere(rank: int, world: int, stage: int, bucket_bytes: float) -> list[str]:
    """Rank 0 alone uses the weight of b itself; in one bucket it has arrived with the trunk."""
    run = Run(stage=stage, bucket_bytes=bucket_bytes)
    run.step("b")
    model, opt = run.lazy
    hidden = model.trunk(inputs(model))
    out = functional.linear(hidden, model.b.weight) if rank == 0 else model.b(hidden)
    messages = [outcome_of(opt.backward, out.sum())]
    messages += [outcome_of(opt.step), outcome_of(opt.grad_norm)]
    opt.zero_grad()
    assert run.same(), "nothing has been updated"
    run.step("b")  # and on it goes
    opt.wait_for_parameters()
    assert run.same()
    opt.backward(functional.linear(model.trunk(inputs(model)), model.b.weight).sum())
    opt.step()
    return messages


@worlds(2, 3)
@sharded
@pytest.mark.parametrize("bucket_bytes", [1, 1e6])
def test_use_outside_of_its_module_is_refused(
    world: int, backend: str, stage: int, bucket_bytes: float
) -> None:
    for backward, *later in run_world(world, elsewhere, stage, bucket_bytes, backend=backend):
        assert backward == "nothing was raised"
        for message in later:
            for word in ("RuntimeError", "rank 0", "'b.weight'", "wait_for_parameters", "'eager'"):
                assert word in message, message


class Late(Wide):
    """Uses a weight first itself, then through its module."""

    def forward(self, x: Tensor, head: str) -> Tensor:
        early = functional.linear(torch.tanh(self.trunk(x)), getattr(self, head).weight)
        return early + super().forward(x, head)


def too_early(rank: int, world: int) -> str:
    run = Run(Late)
    run.step("a")
    model, opt = run.lazy
    return message_of(RuntimeError, opt.backward, model(inputs(model), "a").sum())


def test_use_before_its_module_is_seen_by_autograd() -> None:
    for message in run_world(2, too_early):
        assert "modified by an inplace operation" in message


def overwrite(model: nn.Module) -> None:
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})


def replace(model: nn.Module) -> None:
    model.a.weight.data = torch.ones_like(model.a.weight)


def meddle(rank: int, world: int, how: Callable[[nn.Module], None]) -> str:
    run = Run()
    run.step("a")
    model, opt = run.lazy
    if rank == 1:
        how(model)
    opt.backward(model(inputs(model), "a").sum())
    message = message_of(RuntimeError, opt.step)
    opt.step()
    opt.wait_for_parameters()
    how(model)
    opt.backward(model(inputs(model), "a").sum())
    opt.step()
    return message


@pytest.mark.parametrize("how", [overwrite, replace])
def test_writing_to_what_is_on_its_way_is_refused(how: Callable[[nn.Module], None]) -> None:
    for message in run_world(2, meddle, how):
        assert "rank 1" in message and "written to or moved" in message
        assert "wait_for_parameters" in message


def away_and_back(rank: int, world: int) -> list[Tensor]:
    run = Run()
    run.step("a")
    model, opt = run.lazy
    kept = model.a.weight.data
    if rank == 1:
        replace(model)
    opt.backward(model(inputs(model), "a").sum())
    model.a.weight.data = kept
    message_of(RuntimeError, opt.step)
    opt.zero_grad()
    overwrite(model)
    opt.backward(model(inputs(model), "a").sum())
    opt.step()
    opt.wait_for_parameters()
    return [p.detach().cpu() for p in (model.a.weight, model.b.weight)]


def test_a_parameter_that_was_away_is_found_again() -> None:
    ranks = run_world(2, away_and_back)
    used, unused = ranks[0]
    assert not (used == 1).any() and (unused == 1).all()
    for other in ranks[1:]:
        assert torch.equal(other[0], used) and torch.equal(other[1], unused)


def calls(rank: int, world: int, stage: int) -> None:
    """Whatever else reads weights, or meets the other ranks, has them all."""
    named: dict[str, Callable[[dynzero.ZeroOptimizer], Any]] = {
        "wait": lambda opt: opt.wait_for_parameters(),
        "state_dict": lambda opt: opt.state_dict(),
        "full_state_dict": lambda opt: opt.full_state_dict(),
        "load": lambda opt: opt.load_state_dict(opt.full_state_dict()),
        "norm": lambda opt: opt.grad_norm(),
        "group": lambda opt: opt.add_param_group(
            {"params": [("more", nn.Parameter(torch.ones(3, device=rank_device())))]}
        ),
    }
    for name, call in named.items():
        run = Run(stage=stage)
        run.step("a")
        assert not run.same()
        for opt in run.opts:
            call(opt)
        assert run.same(), name
        run.step("b")
        run.opts[0].wait_for_parameters()
        assert run.same(), name
    run = Run(stage=stage)
    for model, opt in zip(run.models, run.opts, strict=True):
        with opt.join():
            for _ in range(1 + rank):
                opt.backward(model(inputs(model), "a").sum())
                opt.step()
                opt.zero_grad()
    assert run.same(), "join"


def deleted(rank: int, world: int) -> None:
    run = Run()
    run.step("a")
    run.opts.clear()
    gc.collect()
    assert run.same() and not nn.modules.module._global_forward_pre_hooks
    run = Run()
    run.step("a")
    model, _ = run.lazy
    dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    assert run.same(), "a new optimizer starts from the new values"


@worlds(2)
@sharded
def test_other_calls_wait_for_values(world: int, backend: str, stage: int) -> None:
    run_world(world, calls, stage, backend=backend)


@worlds(2)
def test_values_arrive_when_the_optimizer_goes(world: int, backend: str) -> None:
    run_world(world, deleted, backend=backend)


class Tied(nn.Module):
    """Attention, whose out_proj torch never calls, between layers that share their weight; one
    weight lies in memory with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.attention = nn.MultiheadAttention(4, 2)
        self.gaps = nn.Linear(4, 4)
        self.gaps.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.gaps(x))


def shared(rank: int, world: int) -> None:
    run = Run(Tied)
    for _ in range(3):
        run.step()
    run.lazy[0](inputs(run.lazy[0]))
    assert run.same()


@worlds(2)
def test_tied_weights_and_attention(world: int, backend: str) -> None:
    run_world(world, shared, backend=backend)


class Listed(nn.Module):
    """Parameters in lists and dicts, which no call of their module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.few = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        shifts = {"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))}
        self.blocks = nn.ModuleList([nn.ParameterDict(shifts)])

    def forward(self, x: Tensor) -> Tensor:
        x = sum(self.few) * self.first(x)
        return x + self.blocks[0]["a"] * self.blocks[0]["b"]


def listed(rank: int, world: int, stage: int) -> None:
    run = Run(Listed, stage=stage)
    for _ in range(3):
        run.step()
    assert not run.same(), "on their way"
    run.lazy[0](inputs(run.lazy[0]))
    assert run.same()


@worlds(2)
@sharded
def test_lists_of_parameters_arrive_with_their_module(world: int, backend: str, stage: int) -> None:
    run_world(world, listed, stage, backend=backend)


def build_compiled(how: str) -> nn.Module:
    model = Wide()
    if how == "module":
        return torch.compile(model, backend="aot_eager")
    if how == "inner":
        model.trunk = torch.compile(model.trunk, backend="aot_eager")
    if how == "in place, inner":
        model.trunk.compile(backend="aot_eager")
    if how == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
    if how == "function":
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    return model


def compiled(rank: int, world: int) -> list[str]:
    """Returns what happens where no hook runs outside of the compiled code."""
    for how in ("module", "inner", "in place, inner"):
        torch._dynamo.reset()
        run = Run(partial(build_compiled, how))
        for head in "abbaab":
            run.step(head)
        run.opts[0].wait_for_parameters()
        assert run.same(), how
    messages = []
    for how in ("in place", "function"):
        torch._dynamo.reset()
        run = Run(partial(build_compiled, how))
        run.step("a")
        model, opt = run.lazy
        opt.backward(model(inputs(model), "a").sum())
        messages.append(message_of(RuntimeError, opt.step))
        opt.zero_grad()
        for head in "abba":
            opt.wait_for_parameters()
            run.step(head)
        opt.wait_for_parameters()
        assert run.same(), how
    return messages


def test_compiled_modules() -> None:
    for messages in run_world(2, compiled):
        assert all("has not run since step()" in message for message in messages), messages


def beside(rank: int, world: int) -> None:
    """Forward on another stream than step(), which is still at work."""
    run = Run(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]))
    stream = torch.cuda.Stream()
    for _ in range(5):
        torch.cuda._sleep(50_000_000)
        run.step()
        with torch.cuda.stream(stream):
            run.lazy[0](inputs(run.lazy[0]))
            values = [p.detach().clone() for p in run.lazy[0].parameters()]
        stream.synchronize()
        expected = [p.detach() for p in run.models[1].parameters()]
        assert all(torch.equal(p, q) for p, q in zip(values, expected, strict=True))
        torch.cuda.current_stream().wait_stream(stream)


@nccl_worlds
def test_forward_on_another_stream(world: int) -> None:
    run_world(world, beside, backend="nccl")


@pytest.mark.parametrize("gather", ["late", None])
def test_other_words_for_gather_are_refused(gather: Any) -> None:
    with pytest.raises(ValueError, match="gather: expected 'eager' or 'lazy', got"):
        dynzero.ZeroOptimizer(TwoHeads().parameters(), torch.optim.SGD, lr=1.0, gather=gather)


def test_one_process_waits_for_nothing() -> None:
    model = TwoHeads()
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, **LAZY)
    opt.backward(functional.linear(data(Turn(0, 0, 0, 1), 2, 4, like=model.a.weight),
                                   model.a.weight).sum())  # fmt: skip
    opt.step()
    opt.backward(model.a.weight.sum())
    opt.step()
