"""`python -m bench step`: whole optimizer steps, alone and under torchrun."""

from __future__ import annotations

import dataclasses
import gc
import os
from typing import Any

import torch
import torch.distributed as dist

from . import results
from .cases import BF16, F16, F32, short
from .ceiling import Ceiling, measure_ceiling
from .machine import BenchError, lack_of_memory
from .peers import NOT_INSTALLED, installed
from .step_impls import MAX_NORM, OPTIONS, Spec, build_dynzero, draw, peers_of
from .timer import Call, Samples, Timer, profile_launches

DTYPES = {"fp32": F32, "fp16": F16, "bf16": BF16}
# Elements and tensors.
SIZES = {"cuda": (800_000_000, 580), "cpu": (20_000_000, 580)}
QUICK_SIZES = {"cuda": (25_000_000, 580), "cpu": (1_000_000, 100)}
SECONDS = {"cuda": 0.6, "cpu": 2.0}
QUICK_SECONDS = {"cuda": 0.2, "cpu": 0.1}
CHECK_NUMEL = 5_000_000
# Ranks must run equally often.
REPEATS = 12
# Per element, of the hungriest candidate and the shared part.
BYTES_PER_ELEMENT = 56


def run(
    device: torch.device, *, quick: bool, fit: bool, wanted: list[str]
) -> tuple[list[dict[str, Any]], Ceiling]:
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend)
    seconds = (QUICK_SECONDS if quick else SECONDS)[device.type]
    timer = Timer(device, seconds, repeats=REPEATS if world > 1 else None)
    ceiling = measure_ceiling(timer, quick=quick)
    numel, tensors = (QUICK_SIZES if quick else SIZES)[device.type]
    rows: list[dict[str, Any]] = []
    for name in wanted or DTYPES:
        spec = Spec(numel, tensors, DTYPES[name], device, world, rank)
        lack = lack_of_memory(f"step with {name}", memory(spec), device)
        if lack is not None and not fit:
            raise BenchError(f"{lack}; --fit leaves out what does not fit")
        if lack is not None:
            results.say(f"left out: {lack}")
            continue
        check(dataclasses.replace(spec, numel=min(numel, CHECK_NUMEL)))
        rows += rows_of(spec, timer, ceiling)
    if device.type == "cuda" and world == 1:
        count_launches(rows, device)
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows, ceiling


def memory(spec: Spec) -> int:
    together = len(peers_of(spec)) if spec.device.type == "cpu" else 1
    return spec.numel * BYTES_PER_ELEMENT * together


def check(spec: Spec) -> None:
    """dynzero's first step against torch.optim.AdamW on the mean of all ranks' gradients."""
    call, model, _ = build_dynzero(spec)
    call.run()
    slopes = [draw(spec, 1 + rank, 1.0, F32) for rank in range(spec.world)]
    expected = draw(spec, 0, 0.02, F32)
    for k, p in enumerate(expected):
        p.grad = torch.stack([some[k] for some in slopes]).sum(0) / spec.world
    torch.nn.utils.clip_grad_norm_(expected, MAX_NORM)
    torch.optim.AdamW(expected, **OPTIONS).step()
    for number, (got, want) in enumerate(zip(model.parameters(), expected, strict=True)):
        # One step of size lr: rounding of the gradient's mean and of the clip factor.
        tolerance = {"rtol": 2 * torch.finfo(spec.dtype).eps, "atol": 1e-3 * OPTIONS["lr"]}
        if not torch.allclose(got.detach().float(), want, **tolerance):
            raise BenchError(f"step: parameter {number} differs from torch.optim; nothing timed")


def rows_of(spec: Spec, timer: Timer, ceiling: Ceiling) -> list[dict[str, Any]]:
    case = spec.as_json()
    samples, errors = measure_all(spec, timer)
    ours = samples["dynzero"]
    if ours.error is not None:
        raise BenchError(f"step: dynzero: {ours.error}")
    name = {"bench": "step", "impl": "dynzero", "case": case}
    row = results.make_row(name, spec.bytes if spec.world == 1 else None, ours, ceiling)
    row["baselines"] = {
        peer: results.baseline_entry(ours, some, Call(lambda: None))
        for peer, some in samples.items()
        if peer != "dynzero"
    } | {peer: {"error": text} for peer, text in errors.items()}
    rows = [row]
    for peer, some in samples.items():
        if peer != "dynzero" and some.error is None:
            name = {"bench": "step", "impl": peer, "case": case}
            rows.append(results.make_row(name, None, some, ceiling))
    results.say(
        f"step {case['dtype']} {spec.numel / 1e6:g} M in {spec.tensors}, world {spec.world}: "
        f"{ours.ms:.3f} ms, whole {ours.whole_ms:.3f} ms, host {ours.host_us:.0f} us; "
        f"{results.ratios(row)}"
    )
    return rows


def measure_all(spec: Spec, timer: Timer) -> tuple[dict[str, Samples], dict[str, str]]:
    """Samples of all candidates. On a CPU they take turns; on a GPU their memory forbids it."""
    samples: dict[str, Samples] = {}
    errors: dict[str, str] = {}
    calls: dict[str, Call] = {"dynzero": build_dynzero(spec)[0]}
    if spec.device.type == "cuda":
        samples |= timer.measure(calls)
        calls = {}
    ensure_group(spec)
    for name, (module, build) in results.progress(
        list(peers_of(spec).items()), f"{short(spec.dtype)} peer"
    ):
        if module is not None and not installed(module):
            errors[name] = NOT_INSTALLED
            continue
        release(spec.device)
        try:
            calls[name] = build()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            continue
        if spec.device.type == "cuda":
            samples |= timer.measure(calls)
            calls = {}
    if calls:
        samples |= timer.measure(calls)
    calls = {}
    release(spec.device)
    return samples, errors


def ensure_group(spec: Spec) -> None:
    """A process group of one, for the peers that cannot do without; dynzero can."""
    if not dist.is_initialized():
        backend = "nccl" if spec.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def count_launches(rows: list[dict[str, Any]], device: torch.device) -> None:
    """After all timing: see timer.profile_launches."""
    for row in rows:
        case = row["case"]
        if row["impl"] == "dynzero":
            release(device)
            dtype = DTYPES[case["dtype"]]
            spec = Spec(case["elements"], case["tensors"], dtype, device, 1, 0)
            call = build_dynzero(spec)[0]
            call.run()
            results.add_launches(row, profile_launches(call, device))
            results.say(f"step {case['dtype']}: us: {results.where(row)}")
            del call


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
