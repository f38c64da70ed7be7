"""The plots of the report: bandwidth against size, time against active fraction, ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from .scale import step_lines  # noqa: E402
from .targets import Row, pack  # noqa: E402
from .train_report import iteration_bars, share_lines  # noqa: E402

WIDTH, HEIGHT, DPI = 7.0, 4.0, 120


def draw_plots(folder: Path, stem: str, content: dict[str, Any]) -> list[str]:
    """Names of the files written; plots without data are left out."""
    rows = content["rows"]
    kernels = [row for row in rows if row["bench"] == "kernels"]
    steps = [row for row in rows if row.get("impl") == "dynzero"]
    train = [row for row in rows if row["bench"] == "train"]
    made = []
    for name, draw, some in (
        ("bandwidth", bandwidth, [r for r in kernels if r["case"]["active"] == 1]),
        ("active", active_fraction, [r for r in kernels if r["op"] == "pack_grads"]),
        ("ratios", kernel_ratios, [r for r in kernels if pack(r)]),
        ("step-ratios", step_ratios, steps),
        ("iterations", iteration_bars, train),
        ("host", step_lines, [r for r in rows if r["bench"] == "scale"]),
        ("shares", share_lines, [r for r in train if r["case"]["mode"] == "share"]),
    ):
        figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT))
        if some and draw(axes, some, content["machine"]):
            figure.tight_layout()
            path = folder / f"{stem}-{name}.png"
            figure.savefig(path, dpi=DPI)
            made.append(path.name)
        plt.close(figure)
    return made


def label_of(row: Row) -> str:
    case = row["case"]
    kind = f"{case['source']}->{case['wire']}"
    return (
        f"{row['op']} {kind}" if case["source"] != case["wire"] else f"{row['op']} {case['wire']}"
    )


def bandwidth(axes: Any, rows: list[Row], machine: Row) -> bool:
    """GB/s of each op against the bytes that it moves, with the ceilings as lines."""
    by_label: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["case"]["aligned"] and not row["case"]["small"] and row["case"]["tensors"] <= 580:
            by_label.setdefault(label_of(row), []).append((row["bytes"] / 1e6, row["gb_per_s"]))
    for label, points in sorted(by_label.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=1, label=label)
    for name, speed in machine["gb_per_s"].items():
        style = "-" if name == "copy" else ":"
        axes.axhline(speed, color="black", linestyle=style, linewidth=1)
        axes.annotate(name, (1.0, speed), xycoords=("axes fraction", "data"), fontsize=7)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MB read and written")
    axes.set_ylabel("GB/s")
    axes.legend(fontsize=6)
    return bool(by_label)


def active_fraction(axes: Any, rows: list[Row], machine: Row) -> bool:
    """Time against the fraction of tensors with a gradient, beside what the bytes cost."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        case = row["case"]
        if case["aligned"] and case["world"] == 1:
            key = (case["elements"], case["tensors"], case["source"], case["wire"])
            groups.setdefault(key, []).append(row)
    swept = [g for g in groups.values() if len({r["case"]["active"] for r in g}) > 1]
    if not swept:
        return False
    chosen = max(swept, key=lambda group: (len(group), group[0]["bytes"]))
    chosen = sorted(chosen, key=lambda row: row["case"]["active"])
    xs = [row["case"]["active"] for row in chosen]
    axes.plot(xs, [row["ms"] for row in chosen], marker="o", label="pack_grads")
    ideal = [row["bytes"] / row["ceiling_gb_per_s"] / 1e6 for row in chosen]
    axes.plot(xs, ideal, color="black", linestyle=":", label="its bytes at copy speed")
    foreach = [row["baselines"].get("foreach", {}).get("ms") for row in chosen]
    if None not in foreach:
        axes.plot(xs, foreach, marker="s", label="torch foreach")
    case = chosen[0]["case"]
    axes.set_title(f"{case['elements'] / 1e6:.0f} M elements in {case['tensors']} tensors")
    axes.set_xlabel("fraction of tensors with a gradient")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    return True


def bars(axes: Any, names: list[str], values: list[float]) -> None:
    axes.barh(names, values, color="tab:blue")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    for name, value in zip(names, values, strict=True):
        axes.annotate(f" {value:.2f}x", (value, name), va="center", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)


def speedups(row: Row) -> dict[str, float]:
    entries = row["baselines"].items()
    return {name: e["whole_speedup"] for name, e in entries if "whole_speedup" in e}


def kernel_ratios(axes: Any, rows: list[Row], machine: Row) -> bool:
    """The largest pack row against every baseline, host work included."""
    row = max(rows, key=lambda r: (r["case"]["elements"], len(r["baselines"])))
    found = sorted(speedups(row).items(), key=lambda pair: pair[1])
    if not found:
        return False
    bars(axes, [name for name, _ in found], [value for _, value in found])
    case = row["case"]
    axes.set_title(
        f"{label_of(row)}, {case['elements'] / 1e6:.0f} M elements in {case['tensors']} tensors",
        fontsize=9,
    )
    axes.set_xlabel("times as long as pack_grads, host work included")
    return True


def step_ratios(axes: Any, rows: list[Row], machine: Row) -> bool:
    found = [
        (f"{name} ({row['case']['dtype']})", value)
        for row in rows
        for name, value in sorted(speedups(row).items(), key=lambda pair: pair[1])
    ]
    if not found:
        return False
    bars(axes, [name for name, _ in found], [value for _, value in found])
    case = rows[0]["case"]
    axes.set_title(f"{case['elements'] / 1e6:.0f} M parameters in {case['tensors']} tensors")
    axes.set_xlabel("times as long as dynzero's step, host work included")
    return True
