"""The picture that multitask_digits.py leaves: loss curves, and who had a gradient for what."""

from __future__ import annotations

from itertools import product

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")  # before pyplot: writes files, needs no display

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402


def plot_run(path: str, losses: Tensor, parts: list[str], tasks: list[list[str]]) -> None:
    """Writes a PNG. `losses` is [ranks, steps], `tasks[rank][step]` what the rank trained on there.

    `parts[0]` is used by every task, each of the others by the task of its name.
    """
    world_size, num_steps = losses.shape
    num_shown = min(num_steps, 60)
    fig, (top, bottom) = plt.subplots(
        2, 1, figsize=(10, 6 + 0.5 * world_size), layout="constrained"
    )
    for task in parts[1:]:
        points = [
            (step, losses[rank, step].item())
            for step in range(num_steps)
            for rank in range(world_size)
            if tasks[rank][step] == task
        ]
        if not points:
            continue
        x, y = torch.tensor(points).T
        window = max(1, len(points) // 30)
        dots = top.scatter(x, y, s=3, alpha=0.25)
        smooth = y.unfold(0, window, 1).mean(1)
        middle = x[window // 2 : window // 2 + len(smooth)]
        top.plot(middle, smooth, color=dots.get_facecolor()[0, :3], label=task)
    top.set(title="Every batch, and the running mean", xlabel="step", ylabel="loss", yscale="log")
    top.legend()

    # 0: no rank has a gradient, 1: another rank has one (this one adds zero), 2: this rank has.
    cells = torch.zeros(len(parts) * world_size, num_shown)
    for row, (part, rank) in enumerate(product(parts, range(world_size))):
        for step in range(num_shown):
            users = [r for r in range(world_size) if part in (parts[0], tasks[r][step])]
            cells[row, step] = 2 if rank in users else 1 if users else 0
    colors = {"on no rank: untouched": "#f0f0f0", "on another rank": "#fdbf6f", "here": "#1f78b4"}
    bottom.imshow(cells, aspect="auto", cmap=ListedColormap(list(colors.values())), vmin=0, vmax=2)
    bottom.set_yticks(
        range(len(cells)),
        [f"{part}, rank {rank}" for part, rank in product(parts, range(world_size))],
    )
    bottom.set_yticks([world_size * i - 0.5 for i in range(1, len(parts))], minor=True)
    bottom.grid(axis="y", which="minor", color="black")
    bottom.set(title=f"Who has a gradient for what, first {num_shown} steps", xlabel="step")
    bottom.legend(
        handles=[Patch(facecolor=c, edgecolor="black", label=text) for text, c in colors.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
        ncols=3,
        title="gradient is present",
    )
    fig.savefig(path, dpi=110)
