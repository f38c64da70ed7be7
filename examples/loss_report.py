"""What layerdrop_transformer.py tells: its runs as a table, and as a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

NUM_LAST = 20
Table = dict[str, dict[str, float]]


@dataclass
class Run:
    losses: list[float]  # per update, the mean over ranks and backward passes
    scales: list[float] = field(default_factory=list)  # per step, overflows included
    skipped: int = 0
    same_bits: bool = True  # on all ranks

    @property
    def final(self) -> float:
        return fmean(self.losses[-NUM_LAST:])

    def difference(self, other: Run) -> float:
        """Mean distance of the last losses: at least as large as that of their means."""
        pairs = list(zip(self.losses, other.losses, strict=True))[-NUM_LAST:]
        return fmean([abs(a - b) for a, b in pairs])


def table(plain: Run, other: Run, runs: dict[str, Run], bounds: dict[str, float]) -> Table:
    """plain: the reference; other: the same with another seed, to compare the differences with."""
    rows = {"fp32, one process": {"final loss": plain.final}}
    for name, run in runs.items():
        rows[f"{name}, dynzero"] = {
            "final loss": run.final,
            "difference": run.difference(plain),
            "bound": bounds[name],
            "skipped": run.skipped,
            "scale at end": run.scales[-1],
        }
    return rows | {"other seed": {"final loss": other.final, "difference": other.difference(plain)}}


def print_table(rows: Table) -> None:
    columns = list(rows["fp16, dynzero"])
    print(f"\n{'run':18}" + "".join(f"{column:>14}" for column in columns))
    for name, row in rows.items():
        cells = [f"{row[c]:>14.6g}" if c in row else " " * 14 for c in columns]
        print(f"{name:18}" + "".join(cells))


def plot_losses(path: str, losses: dict[str, list[float]], scales: list[float]) -> None:
    """Writes a PNG. `losses`: by run, the reference first; `scales`: of every step that was made.

    A scale that is lower than the one before it tells of an overflow in between.
    """
    import matplotlib  # here: only one rank needs it

    matplotlib.use("Agg")  # before pyplot: writes files, needs no display
    from matplotlib import pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    reference, *others = losses
    styles = dict(zip(losses, ("-", ":", "--", "-."), strict=True))
    for name, values in losses.items():
        left.plot(values, styles[name], linewidth=1, label=name)
    left.set(title="Loss", xlabel="update")
    left.legend()
    middle.plot([])  # the reference's colour
    for name in others:
        apart = [abs(a - b) for a, b in zip(losses[name], losses[reference], strict=True)]
        middle.plot(apart, linewidth=1, label=name)
    middle.set(title=f"Distance to {reference}", xlabel="update", yscale="log")
    middle.legend()
    overflows = [i for i in range(len(scales) - 1) if scales[i + 1] < scales[i]]
    right.step(range(len(scales)), scales, where="post", color="black", linewidth=1)
    right.plot(overflows, [scales[i] for i in overflows], "rx", label="overflow: step skipped")
    right.set(title="Loss scale of the fp16 run", xlabel="step")
    right.set_yscale("log", base=2)
    right.legend()
    fig.savefig(path, dpi=90)
