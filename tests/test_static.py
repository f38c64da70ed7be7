"""presence="static": no exchange after the first window, and steps in a CUDA graph."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gpus import needs_gpus
from play import stages, worlds
from scenario import Parameters
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import rank_device, run_world

import dynzero

OPTIONS = dict(lr=0.1, weight_decay=0.1)


def build(device: Any = "cpu", **options: Any) -> tuple[nn.ModuleDict, dynzero.ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("trunk", "a", "b", "unused")})
    model.to(device)
    options = {"presence": "static", "max_grad_norm": 1.0, **OPTIONS, **options}
    opt = dynzero.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, **options)
    return model, opt


def loss_of(model: nn.ModuleDict, head: str, seed: int) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(3, 4).to(model["trunk"].weight)
    return model[head](model["trunk"](x)).square().mean()


def train(rank: int, world: int, stage: int, presence: str, micros: int) -> tuple[Any, ...]:
    """Ranks use different heads, each the same one in every window."""
    model, opt = build(rank_device(), stage=stage, presence=presence, bucket_bytes=64)
    started: list[int] = []
    start = opt._control.start
    opt._control.start = lambda *args: started.append(1) or start(*args)
    counts, norms = [], []
    for step in range(4):
        for micro in range(micros):
            head = "ab"[(rank + micro) % 2]
            opt.backward(loss_of(model, head, 100 * step + 10 * micro + rank))
        norms.append(float(opt.grad_norm()))
        opt.step()
        opt.zero_grad()
        counts.append(len(started))
    return [p.detach().cpu() for p in model.parameters()], norms, counts, opt.last_step.active


@worlds(1, 2, 3)
@stages
@pytest.mark.parametrize("micros", [1, 2])
def test_static_presence_has_the_bits_of_exact(
    world: int, backend: str, stage: int, micros: int
) -> None:
    exact = run_world(world, train, stage, "exact", micros, backend=backend)
    static = run_world(world, train, stage, "static", micros, backend=backend)
    for (params, norms, counts, active), (expected, same_norms, before, also) in zip(
        static, exact, strict=True
    ):
        assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))
        assert norms == same_norms and active == also
        if world > 1:
            assert counts[0] == counts[3] == before[0] > 0, "one window of exchanges"
            assert before[3] > before[0]


def uneven(rank: int, world: int, stage: int, presence: str) -> list[Tensor]:
    """Ranks differ in their numbers of backward calls, as in every window; one is slow."""
    model, opt = build(rank_device(), stage=stage, presence=presence)
    for step in range(3):
        if rank == 1 and step == 1:
            time.sleep(0.5)
        for micro in range(1 + (rank == 0)):
            opt.backward(loss_of(model, "ab"[micro], 10 * step + micro))
        opt.step()
        opt.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


@worlds(2, 3)
@stages
def test_static_ranks_may_differ_in_rounds(world: int, backend: str, stage: int) -> None:
    exact = run_world(world, uneven, stage, "exact", backend=backend)
    for got in run_world(world, uneven, stage, "static", backend=backend):
        assert all(torch.equal(p, q) for p, q in zip(got, exact[0], strict=True))


def deviate(rank: int, world: int, stage: int) -> list[str]:
    model, opt = build(stage=stage)
    messages = []
    for head in ("a", "b"):
        try:
            opt.backward(loss_of(model, head, 0))
            opt.step()
        except ValueError as error:
            messages.append(str(error))
        opt.zero_grad()
    try:
        opt.backward(loss_of(model, "a", 0))
        opt.grad_norm()
    except ValueError as error:
        messages.append(str(error))
    opt.zero_grad()
    opt.backward(loss_of(model, "a", 0))
    opt.step()
    return [*messages, str(opt.last_step.stepped)]


@pytest.mark.parametrize("world", [1, 2])
@stages
def test_a_window_unlike_the_first_is_refused_by_name(world: int, stage: int) -> None:
    for first, second, stepped in run_world(world, deviate, stage):
        assert "parameter 'a.weight' has no gradient in iteration 1" in first
        assert "grad_norm() after" in second and "presence='exact'" in second
        assert stepped == "True"


def loaded_inside(rank: int, world: int, stage: int, calls: str) -> list[Any]:
    """Load between backward and step of the third window; `calls` are made before its step."""
    model, opt = build(stage=stage)
    start = model.a.weight.detach().clone()
    for window in range(6):
        opt.backward(model.a.weight.sum())
        if calls == "clip":
            opt.clip_grad_norm_(1e6)
        if window == 2:
            opt.load_state_dict(opt.full_state_dict())
        opt.step()
        opt.zero_grad()
    assert opt._repeated is not None
    return [opt._repeated.closed, start, model.a.weight.detach()]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("calls", ["", "clip"])
@stages
def test_a_state_may_be_loaded_inside_a_window(world: int, stage: int, calls: str) -> None:
    """Only a whole window becomes the one that is repeated."""
    for closed, start, weight in run_world(world, loaded_inside, stage, calls):
        assert closed, "later windows ask nothing"
        p = torch.nn.Parameter(start)
        plain = torch.optim.AdamW([p], **OPTIONS)
        for _ in range(6):
            p.grad = torch.ones_like(p)
            plain.step()
        torch.testing.assert_close(weight, p.detach())


def test_join_is_refused() -> None:
    _, opt = build()
    with pytest.raises(ValueError, match="join: .*presence='exact'"), opt.join():
        pass


def test_other_words_for_presence_are_refused() -> None:
    with pytest.raises(ValueError, match="presence: expected 'exact' or 'static', got 'maybe'"):
        build(presence="maybe")


@needs_gpus(1)
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0}, {"fused": True, "stage": 2}])
def test_a_captured_step_replays_as_eager(dtype: torch.dtype, options: dict[str, Any]) -> None:
    def run(graphed: bool) -> list[Tensor]:
        model, opt = build("cpu", presence="static")
        del opt
        model.to("cuda", dtype)
        opt = dynzero.ZeroOptimizer(
            model.named_parameters(), torch.optim.AdamW, presence="static", max_grad_norm=1.0,
            **OPTIONS, **options,
        )  # fmt: skip
        x = torch.zeros(3, 4, device="cuda", dtype=dtype)

        def iteration() -> None:
            opt.zero_grad(set_to_none=False)
            opt.backward(model["a"](model["trunk"](x)).square().mean())
            opt.step()

        inputs = torch.randn(13, 3, 4, generator=torch.Generator().manual_seed(1)).to(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for value in inputs[:3]:
                x.copy_(value)
                iteration()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                iteration()
        for value in inputs[3:]:
            x.copy_(value)
            graph.replay() if graphed else iteration()
        torch.cuda.synchronize()
        assert opt.counters["taken"] == 13
        return [p.detach().cpu() for p in model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(run(True), run(False), strict=True))


@needs_gpus(1)
@pytest.mark.cuda
def test_a_step_that_asks_is_not_captured() -> None:
    model, opt = build("cuda", presence="exact")
    opt.backward(loss_of(model, "a", 0))
    opt.step()
    opt.backward(loss_of(model, "a", 1))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="presence='static'"), torch.cuda.graph(graph):
        opt.step()


@needs_gpus(1)
@pytest.mark.cuda
def test_gradients_that_move_are_not_captured() -> None:
    model, opt = build("cuda")
    opt.backward(loss_of(model, "a", 0))
    opt.step()
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="set_to_none=False"), torch.cuda.graph(graph):
        opt.step()


def in_eager_and_replayed_steps(graphed: bool, change: Any) -> list[Tensor]:
    """Steps on constant gradients: two, one captured, `change`, one eager, and one replayed."""
    model = nn.Linear(300, 200, device="cuda")
    for k, p in enumerate(model.parameters()):
        p.data.fill_(1.0)
        p.grad = torch.full_like(p, 0.5 + k)
    opt = dynzero.ZeroOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.5, presence="static"
    )
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        opt.step()
        opt.step()
        if graphed:
            with torch.cuda.graph(graph, stream=stream):
                opt.step()
        change(opt)
        opt.step()
        # Memory that had been given back would be handed out again here.
        junk = [torch.full((size,), -1, device="cuda") for size in range(1, 3000, 7)]
        graph.replay() if graphed else opt.step()
    torch.cuda.synchronize()
    del junk
    return [p.detach().cpu() for p in model.parameters()]


def other_rate(opt: dynzero.ZeroOptimizer) -> None:
    opt.param_groups[0]["lr"] = 0.25


def no_decay(opt: dynzero.ZeroOptimizer) -> None:
    opt.param_groups[0]["weight_decay"] = 0.0


@needs_gpus(1)
@pytest.mark.cuda
@pytest.mark.parametrize("change", [other_rate, lambda opt: None], ids=["lr", "nothing"])
def test_a_replay_follows_what_an_eager_step_has_changed(change: Any) -> None:
    replayed, eager = (in_eager_and_replayed_steps(graphed, change) for graphed in (True, False))
    assert all(torch.equal(p, q) for p, q in zip(replayed, eager, strict=True))


@needs_gpus(1)
@pytest.mark.cuda
@pytest.mark.parametrize("change", [other_rate, no_decay])
def test_changed_options_are_not_captured(change: Any) -> None:
    model, opt = build("cuda")
    opt.backward(loss_of(model, "a", 0))
    opt.step()
    change(opt)
    with (
        pytest.raises(RuntimeError, match="take another step"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        opt.step()


def used_in_and_around_a_nested_pass(rank: int, world: int, late: int) -> list[float]:
    """w is used in a re-entrant checkpoint, which backward meets last, and outside of it."""
    params = {name: torch.ones(4, device=rank_device()) for name in "tuwv"}
    model = Parameters(**params)
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, stage=2, presence="static",
        bucket_bytes=1,
    )  # fmt: skip
    for step in range(4):
        if step == late and rank == 1:
            time.sleep(0.1)
        start = torch.zeros((), requires_grad=True, device=rank_device())
        inner = checkpoint(lambda x: x + (model.w * 2).sum(), start, use_reentrant=True)
        terms = [(p * 3).sum() for p in model.parameters()]
        opt.backward(torch.stack([inner, *terms]).sum())
        opt.step()
        opt.zero_grad()
    return [p[0].item() for p in model.parameters()]


@worlds(2)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_nested_pass_is_the_same_in_every_window(world: int, backend: str, late: int) -> None:
    for got in run_world(world, used_in_and_around_a_nested_pass, late, backend=backend):
        assert got == pytest.approx([1 - 4 * 0.3, 1 - 4 * 0.3, 1 - 4 * 0.5, 1 - 4 * 0.3])
