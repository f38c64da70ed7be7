"""`python -m bench report`: one page and the plots, from the JSON files of a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .machine import BenchError
from .results import where
from .scale import scale_table
from .targets import Row, verdicts
from .train_report import train_table


def write_report(folder: Path) -> str:
    """Writes README.md and PNGs into `folder`; returns what it did, in a sentence."""
    files = read(folder)
    plots: list[str] = []
    try:
        from .plots import draw_plots
    except ImportError as error:
        note = f" without plots ({error}; pip install matplotlib)"
    else:
        note = ""
        for stem, content in files.items():
            plots += draw_plots(folder, stem, content)
    page = folder / "README.md"
    page.write_text("\n".join(lines_of(files, plots)) + "\n")
    return f"{page} from {len(files)} files, {len(plots)} plots{note}"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Contents by file stem; of several dates of the same machine and bench the last one."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json")):
        newest[re.sub(r"-\d{4}-\d\d-\d\d$", "", path.stem)] = path
    if not newest:
        raise BenchError(f"no JSON file in {folder}; run `python -m bench kernels` first")
    return {path.stem: json.loads(path.read_text()) for path in newest.values()}


def lines_of(files: dict[str, dict[str, Any]], plots: list[str]) -> list[str]:
    lines = [
        "# Results",
        "",
        "Written by `python -m bench report` from the JSON files beside it, which",
        "`python -m bench kernels`, `... step` and `... train` write. `ms`: median GPU time (CPU:",
        "wall time) of the op; `host`: microseconds until the call returns, tables built and",
        "uploaded; ratios: GPU time of the other over ours, above 1 means ours is faster.",
        "Why bars are missed, and what was tried: [LIMITS.md](../LIMITS.md).",
    ]
    lines += [f"\n![{name}]({name})" for name in plots]
    for stem, content in files.items():
        lines += ["", f"## {stem}", "", machine_line(content["machine"]), ""]
        lines += target_table(content)
        lines += kernel_table([r for r in content["rows"] if r["bench"] == "kernels"])
        lines += step_table([r for r in content["rows"] if r["bench"] == "step"])
        lines += train_table([r for r in content["rows"] if r["bench"] == "train"])
        lines += scale_table([r for r in content["rows"] if r["bench"] == "scale"])
    return lines


def machine_line(machine: Row) -> str:
    device = machine["gpu"] or machine.get("cpu", "CPU")
    if machine["gpu"]:
        device = f"{machine['gpus']} x {device}, driver {machine['driver']}"
    limits = machine.get("gb_per_s", {})
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in limits.items())
    commit = (machine["commit"] or "unknown")[:12]
    dirty = "+dirty" if "+dirty" in (machine["commit"] or "") else ""
    memory = f" Memory, GB/s: {speeds}." if speeds else ""
    return (
        f"{device}; torch {machine['torch']}, CUDA {machine['cuda']}; commit {commit}{dirty}; "
        f"{machine['date']}.{memory}"
    )


def target_table(content: dict[str, Any]) -> list[str]:
    found = verdicts(content["machine"], content["rows"])
    if not found:
        return []
    lines = ["| bar | wanted | worst row | |", "| --- | --- | --- | --- |"]
    for verdict in found:
        target = verdict.target
        sign = "at most" if target.at_most else "at least"
        lines.append(
            f"| {target.text} | {sign} {target.bar:.3g} | {verdict.worst:.3g} "
            f"| {'met' if verdict.met else '**missed**'} |"
        )
    return [*lines, ""]


def kernel_table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "| op | elements | tensors | dtypes | case | ms (min-max) | GB/s | of ceiling | host us "
        "| launches | others |",
        "| --- " * 11 + "|",
    ]
    for row in rows:
        case = row["case"]
        lines.append(
            f"| {row['op']} | {case['elements'] / 1e6:.0f} M | {case['tensors']} "
            f"| {case['source']}->{case['wire']} | {special(case)} "
            f"| {row['ms']:.3f} ({row['ms_min']:.3f}-{row['ms_max']:.3f}) | {row['gb_per_s']:.0f} "
            f"| {row['of_ceiling']:.1%} | {row['host_us']:.0f} | {row['launches'] or ''} "
            f"| {others(row)} |"
        )
    return [*lines, "", *time_lines(rows), *remarks(rows)]


def time_lines(rows: list[Row]) -> list[str]:
    """Where the time of each op goes, from its largest profiled row."""
    largest: dict[str, Row] = {}
    for row in rows:
        if row.get("device_us") and row["bytes"] >= largest.get(row["op"], {"bytes": 0})["bytes"]:
            largest[row["op"]] = row
    lines = [
        f"- {name}, {row['case']['elements'] / 1e6:.0f} M elements in {row['case']['tensors']} "
        f"tensors, microseconds by launch: {where(row)}"
        for name, row in largest.items()
    ]
    return [*lines, ""] if lines else []


def special(case: Row) -> str:
    words = [f"{case['active']:.0%} active"] if case["active"] < 1 else []
    words += [] if case["aligned"] else ["odd offsets"]
    words += [f"world {case['world']}"] if case["world"] > 1 else []
    words += ["small"] if case["small"] else []
    words += [f"{case['buckets']} buckets"] if case.get("buckets", 1) > 1 else []
    return ", ".join(words)


def others(row: Row) -> str:
    parts = []
    for name, entry in sorted(row["baselines"].items()):
        parts.append(f"{name} {entry['speedup']:.2f}x" if "speedup" in entry else f"{name} failed")
    return ", ".join(parts)


def step_table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "| dtype | world | timed | implementation | ms (min-max) | whole ms | host us | launches "
        "| dynzero faster |",
        "| --- " * 9 + "|",
    ]
    ours: Row = {}
    for row in rows:
        case = row["case"]
        if row["impl"] == "dynzero":
            ours = row
        ratio = row["whole_ms"] / ours["whole_ms"]
        lines.append(
            f"| {case['dtype']} | {case['world']} | {case['timed']} | {row['impl']} "
            f"| {row['ms']:.3f} ({row['ms_min']:.3f}-{row['ms_max']:.3f}) | {row['whole_ms']:.3f} "
            f"| {row['host_us']:.0f} | {row['launches'] or ''} | {ratio:.2f}x |"
        )
    return [*lines, "", *remarks(rows)]


def remarks(rows: list[Row]) -> list[str]:
    """Why candidates did not run, and what is special about those that did."""
    texts = {
        f"- {name}: {entry.get('error') or entry['note']}"
        for row in rows
        for name, entry in row["baselines"].items()
        if "error" in entry or "note" in entry
    }
    return [*sorted(texts), ""] if texts else []
