"""The report's tables and plots of `python -m bench train`."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

NOTE = """
`iteration`: median, of the slowest rank, from one iteration's start to the next; forward and
backward, and the step, are its parts. `bare`: forward and backward of the same model with nothing
attached; `beyond`: what the iteration takes more than that. `exposed`: what it takes more than with
the collectives of gradients and parameters replaced by writes on the own GPU. `peak`: GPU memory at
the fullest moment of an iteration, model included. Before timing, every implementation's losses of
the first five steps had to be those of the first one, up to 3 % of their fall.
"""


def train_table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = NOTE.splitlines()[1:] + [
        "",
        "| mode | active | dtype | ranks | implementation | iteration ms | forward, backward "
        "| step | peak GiB | bare | beyond | exposed |",
        "| --- " * 12 + "|",
    ]
    order = {"all": 0, "turn": 1, "share": 2}
    for row in sorted(rows, key=lambda r: (order[r["case"]["mode"]], -r["case"]["active"])):
        case = row["case"]
        names = "forward_backward_ms", "step_ms", "peak_gib"
        extra = "bare_ms", "beyond_bare_ms", "exposed_comm_ms"
        cells = [number(row.get(name)) for name in ("iteration_ms", *names, *extra)]
        if "error" in row:
            cells[0] = row["error"].replace("|", "/").replace("\n", " ")
        lines.append(
            f"| {case['mode']} | {case['active']:.0%} | {case['dtype']} | {case['world']} "
            f"| {row['impl']} | {' | '.join(cells)} |"
        )
    return [*lines, ""]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def iteration_bars(axes: Any, rows: list[Row], machine: Row) -> bool:
    """Iterations of all implementations, as forward + backward and step."""
    some = [r for r in rows if "error" not in r and r["case"]["mode"] != "share"]
    if not some:
        return False
    words = {"all": "all heads", "turn": "one in turn"}
    names = [f"{r['impl']}, {words[r['case']['mode']]}" for r in some]
    first = [r["forward_backward_ms"] for r in some]
    axes.barh(names, first, color="tab:blue", label="forward and backward")
    # The medians of the parts need not add up to the median of the whole, which is what counts.
    rest = [max(0.0, r["iteration_ms"] - f) for r, f in zip(some, first, strict=True)]
    axes.barh(names, rest, left=first, color="tab:orange", label="step")
    for name, row in zip(names, some, strict=True):
        axes.annotate(f" {row['iteration_ms']:.1f}", (row["iteration_ms"], name), va="center",
                      fontsize=7)  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ms per iteration")
    axes.legend(fontsize=7)
    return True


def share_lines(axes: Any, rows: list[Row], machine: Row) -> bool:
    """Time of an iteration against the active share, and what dynzero adds to a bare one."""
    some = [r for r in rows if "error" not in r and r["case"]["mode"] == "share"]
    for name in dict.fromkeys(r["impl"] for r in some):
        chosen = sorted((r for r in some if r["impl"] == name), key=lambda r: r["case"]["active"])
        xs = [r["case"]["active"] for r in chosen]
        (line,) = axes.plot(xs, [r["iteration_ms"] for r in chosen], marker="o", label=name)
        if "beyond_bare_ms" in chosen[0]:
            axes.plot(xs, [r["beyond_bare_ms"] for r in chosen], ":", marker=".",
                      color=line.get_color(), label=f"{name}, beyond bare")  # fmt: skip
    axes.set_xlabel("share of the parameters that an iteration trains")
    axes.set_ylabel("ms per iteration")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    return bool(some)
