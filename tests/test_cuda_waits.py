"""step() never makes the host wait for the GPU: looked up in a profiler trace, call by call."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import nccl_worlds
from play import stages
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from world import rank_device, run_world

import dynzero

STEP, CONTROL = "the step under test", "calls that do wait"
# Calls that return only when the GPU has caught up. A copy from or to pageable memory waits, too.
WAITING = {
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cudaFree", "cudaFreeHost", "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
}  # fmt: skip
ADAMW = (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1})
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": ADAMW,
    "rate on the GPU": ADAMW,
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "lion": (dynzero.Lion, {"lr": 1e-3}),
    # A dynamic scale needs the check, after which torch's class has to wait for its outcome.
    "torch class": (
        ADAMW[0],
        ADAMW[1] | {"fused": False, "check_finite": False, "loss_scale": 8.0},
    ),
}


def waits(trace: dict[str, Any], mark: str) -> list[str]:
    """Names of the waiting calls, and of the pageable copies, inside the ranges named `mark`."""
    events = [e for e in trace["traceEvents"] if "ts" in e]
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == mark]
    assert marks, f"the trace has no range {mark!r}"

    def inside(event: dict[str, Any]) -> bool:
        return any(
            m["tid"] == event["tid"] and m["ts"] <= event["ts"] <= m["ts"] + m["dur"] for m in marks
        )

    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and inside(e)]
    assert calls, "the trace has no CUDA calls: the profiler cannot see them"
    issued = {e["args"].get("correlation") for e in calls}
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    pageable = [
        e["name"]
        for e in copies
        if e["args"].get("correlation") in issued and "pageable" in e["name"].lower()
    ]
    return [e["name"] for e in calls if e["name"] in WAITING] + pageable


def build(stage: int, kind: str) -> tuple[nn.Module, dynzero.ZeroOptimizer]:
    cls, options = KINDS[kind]
    model = nn.ModuleDict({name: nn.Linear(256, 256) for name in "abcd"})
    model.to(device=rank_device(), dtype=torch.float16)
    groups: list[dict[str, Any]] = [{"params": model[name].parameters()} for name in "abcd"]
    if kind == "momentum":
        groups[1]["momentum"] = 0.0  # so that each step is a first one for this group
    if kind == "rate on the GPU":  # looked at in each step, as it may be another
        options = options | {"lr": torch.tensor(1e-3, device=rank_device())}
    options = {"loss_scale": dynzero.LossScale(init=8.0), **options}
    opt = dynzero.ZeroOptimizer(
        groups, cls, stage=stage, max_grad_norm=1.0, bucket_bytes=100_000, **options
    )
    return model, opt


def backward(opt: dynzero.ZeroOptimizer, model: nn.Module, names: str, factor: float) -> None:
    x = torch.ones(8, 256, device=rank_device(), dtype=torch.float16)
    opt.backward(sum(model[name](x).float().square().mean() for name in names) * factor)
    torch.cuda._sleep(1_000_000)  # the GPU is behind: what waits for it, waits


def train(opt: dynzero.ZeroOptimizer, model: nn.Module, names: str, factor: float = 1.0) -> None:
    backward(opt, model, names, factor)
    with record_function(STEP):
        opt.step()
    opt.zero_grad()


def run_steps(opt: dynzero.ZeroOptimizer, model: nn.Module, finite_only: bool) -> None:
    """Steady state, an overflow whose report comes two steps later, a parameter's first step."""
    for _ in range(2):
        train(opt, model, "abc")
    if not finite_only:
        train(opt, model, "abc", float("inf"))
        torch.cuda.synchronize()  # so that the next step finds, and logs, what happened
    for _ in range(2):
        train(opt, model, "ab")
    train(opt, model, "abcd")


def traced(rank: int, world: int, stage: int, kind: str) -> tuple[list[str], list[str], int]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("dynzero").addHandler(handler)
    finite_only = kind == "torch class"
    try:
        model, opt = build(stage, kind)
        run_steps(opt, model, finite_only)
        model, opt = build(stage, kind)
        for names in ("abc", "ab", "abc"):  # not yet "d"
            train(opt, model, names)
        records.clear()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            run_steps(opt, model, finite_only)
            with record_function(CONTROL):
                torch.zeros(1000).to(rank_device())
                torch.ones(1, device=rank_device()).item()
        local = torch.ones(1, device=rank_device())
        backward(opt, model, "abcd", 1.0)
        torch.cuda.set_sync_debug_mode("error")  # torch's own guard, on calls that torch makes
        try:
            with pytest.raises(RuntimeError):
                local.item()
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        logging.getLogger("dynzero").removeHandler(handler)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return waits(trace, STEP), waits(trace, CONTROL), len(records)


@stages
@nccl_worlds
@pytest.mark.parametrize("kind", KINDS)
def test_step_does_not_wait_for_the_gpu(world: int, stage: int, kind: str) -> None:
    for found, control, logged in run_world(world, traced, stage, kind, backend="nccl"):
        assert any("Synchronize" in name for name in control), control
        assert any("pageable" in name.lower() for name in control), control
        assert found == []
        assert logged == (0 if kind == "torch class" else 1), "the overflow is reported, too"
