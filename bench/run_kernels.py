"""`python -m bench kernels`: every op over its cases."""

from __future__ import annotations

from typing import Any

import torch

from . import results
from .cases import Case
from .ceiling import Ceiling, measure_ceiling
from .kernels import op_classes
from .machine import BenchError, lack_of_memory
from .timer import Timer, profile_launches

# Wall seconds per candidate of a row.
SECONDS = {"cuda": 0.12, "cpu": 0.5}
QUICK_SECONDS = {"cuda": 0.05, "cpu": 0.06}


def fitting(cases: list[Case], device: torch.device, *, fit: bool) -> list[Case]:
    """The cases that fit in memory; without `fit`, an error if one does not."""
    kept = []
    for case in cases:
        per_element = op_classes()[case.op].bytes_per_element(case)
        # Host tables, the cache filler, the ceiling's buffers.
        needed = sum(case.sizes()) * per_element + (1 << 29)
        lack = lack_of_memory(str(case), needed, device)
        if lack is None:
            kept.append(case)
        elif fit:
            results.say(f"left out: {lack}")
        else:
            raise BenchError(f"{lack}; --fit leaves out what does not fit")
    return kept


def run_case(case: Case, timer: Timer, ceiling: Ceiling) -> dict[str, Any]:
    op = op_classes()[case.op](case, timer.device)
    op.check()
    calls = {"ours": op.ours, **op.baselines()}
    samples = timer.measure(calls)
    if samples["ours"].error is not None:
        raise BenchError(f"{case}: {samples['ours'].error}")
    name = {"bench": "kernels", "op": case.op, "case": case.as_json(op.elements)}
    row = results.make_row(name, op.bytes, samples["ours"], ceiling, op.ceiling)
    results.add_baselines(row, samples, calls)
    return row


def line(case: Case, row: dict[str, Any]) -> str:
    return (
        f"{case}: {row['ms']:.3f} ms ({row['ms_min']:.3f}-{row['ms_max']:.3f}), "
        f"{row['gb_per_s']:.0f} GB/s = {row['of_ceiling']:.1%} of {row['ceiling']}, "
        f"whole {row['whole_ms']:.3f} ms, host {row['host_us']:.0f} us; {results.ratios(row)}"
    )


def run(
    cases: list[Case], device: torch.device, *, quick: bool, fit: bool
) -> tuple[list[dict[str, Any]], Ceiling]:
    cases = fitting(cases, device, fit=fit)
    seconds = (QUICK_SECONDS if quick else SECONDS)[device.type]
    timer = Timer(device, seconds)
    ceiling = measure_ceiling(timer, quick=quick)
    results.say(
        f"copy {ceiling.copy:.0f}, read {ceiling.read:.0f}, fill {ceiling.fill:.0f} GB/s "
        f"({', '.join(ceiling.names.values())})"
    )
    rows = []
    for case in results.progress(cases, "kernels"):
        rows.append(run_case(case, timer, ceiling))
        results.say(line(case, rows[-1]))
        release(device)
    if device.type == "cuda":
        # The profiler takes seconds to start: a quick run looks at one row of each op.
        first = {case.op: i for i, case in reversed(list(enumerate(cases)))}
        chosen = sorted(first.values()) if quick else range(len(cases))
        count_launches([cases[i] for i in chosen], [rows[i] for i in chosen], device)
    return rows, ceiling


def count_launches(cases: list[Case], rows: list[dict[str, Any]], device: torch.device) -> None:
    """In a second pass, because a profiler that was on once slows down later launches."""
    pairs = list(zip(cases, rows, strict=True))
    for case, row in results.progress(pairs, "launches"):
        op = op_classes()[case.op](case, device)
        op.ours.run()
        results.add_launches(row, profile_launches(op.ours, device))
        results.say(f"{case}: {row['launches']} launches, us: {results.where(row)}")
        del op
        release(device)


def release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
