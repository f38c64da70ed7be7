"""Rows and files of results, in the one shape that every sub-command writes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .ceiling import Ceiling
from .timer import Call, Samples

RESULTS = Path("bench/results")
T = TypeVar("T")


def baseline_entry(ours: Samples, theirs: Samples, call: Call) -> dict[str, Any]:
    """`speedup` compares GPU times (`ms`), `whole_speedup` whole calls, host work included."""
    if theirs.error is not None:
        return {"error": theirs.error}
    entry: dict[str, Any] = {
        "ms": theirs.ms,
        "speedup": theirs.ms / ours.ms,
        "whole_ms": theirs.whole_ms,
        "whole_speedup": theirs.whole_ms / ours.whole_ms,
        "host_us": theirs.host_us,
    }
    if theirs.note is not None:
        entry["note"] = theirs.note
    if call.bytes is not None:
        entry["gb_per_s"] = call.bytes / theirs.ms / 1e6
    return entry


def make_row(
    name: dict[str, Any],
    num_bytes: int | None,
    ours: Samples,
    ceiling: Ceiling,
    kind: str = "copy",
) -> dict[str, Any]:
    """name: bench, op or impl, case. Times in milliseconds, bytes as counted by the case."""
    speed = None if num_bytes is None else num_bytes / ours.ms / 1e6
    limit = ceiling.of(kind)
    return {
        **name,
        "ms": ours.ms,
        "ms_min": ours.ms_min,
        "ms_max": ours.ms_max,
        "bytes": num_bytes,
        "gb_per_s": speed,
        "ceiling": kind,
        "ceiling_gb_per_s": limit,
        "of_ceiling": None if speed is None else speed / limit,
        "whole_ms": ours.whole_ms,
        "host_us": ours.host_us,
        "launches": None,
        "repeats": len(ours.device),
        "baselines": {},
    }


def add_baselines(row: dict[str, Any], samples: dict[str, Samples], calls: dict[str, Call]) -> None:
    ours = samples["ours"]
    row["baselines"] = {
        name: baseline_entry(ours, samples[name], call)
        for name, call in calls.items()
        if name != "ours"
    }


def add_launches(row: dict[str, Any], launches: dict[str, list[float]]) -> None:
    """Number of launches, and where their time goes: microseconds by name."""
    if launches:
        row["launches"] = sum(len(times) for times in launches.values())
        row["device_us"] = {name: round(sum(times), 1) for name, times in launches.items()}


def where(row: dict[str, Any]) -> str:
    """Where the GPU time of a call goes, in words: microseconds by launch, longest first."""
    parts = sorted(row.get("device_us", {}).items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {us:g}" for name, us in parts)


def default_output(machine: dict[str, Any], bench: str) -> Path:
    """bench/results/<gpu or cpu>-<bench>-<date>.json"""
    device = re.sub(r"[^a-z0-9]+", "-", (machine["gpu"] or "cpu").lower()).strip("-")
    if machine["gpus"] > 1:
        device += f"-x{machine['gpus']}"
    return RESULTS / f"{device}-{bench}-{machine['date'][:10]}.json"


def write(
    path: Path, machine: dict[str, Any], rows: list[dict[str, Any]], ceiling: Ceiling | None
) -> None:
    """ceiling: None where nothing is compared with the memory's speed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ceiling is not None:
        limits = {"copy": ceiling.copy, "read": ceiling.read, "fill": ceiling.fill}
        machine = {**machine, "gb_per_s": limits, "fastest": ceiling.names}
    content = {"machine": machine, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """A bar on a terminal with tqdm installed, else a line per item."""
    if os.environ.get("RANK", "0") != "0":
        return iter(items)
    tqdm = bar_class()
    return counted(items, what) if tqdm is None else iter(tqdm(items, desc=what, leave=False))


def bar_class() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm if sys.stderr.isatty() else None


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    for number, item in enumerate(items, 1):
        print(f"{what} {number}/{len(items)}", flush=True)
        yield item


def say(text: str) -> None:
    """A line of output, of the first rank, that does not tear the progress bar."""
    if os.environ.get("RANK", "0") != "0":
        return
    tqdm = bar_class()
    if tqdm is None:
        print(text, flush=True)
    else:
        tqdm.write(text)


def ratios(row: dict[str, Any], names: Iterable[str] | None = None) -> str:
    """GPU-time speedups in words, fastest baseline first."""
    entries = row["baselines"].items()
    chosen = [(n, e) for n, e in entries if names is None or n in names]
    good = sorted((e["speedup"], n) for n, e in chosen if "speedup" in e)
    bad = [f"{n}: {e['error'][:60]}" for n, e in chosen if "error" in e]
    return ", ".join([f"{n} {speedup:.2f}x" for speedup, n in good] + bad)
