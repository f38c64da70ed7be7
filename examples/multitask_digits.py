"""A multi-task model on real handwritten digits: another head on every rank and iteration.

Data: the 1,797 8x8 scans that ship inside scikit-learn. One shared trunk and three heads: which
digit, odd or even, and the share of ink in the upper half. Each rank draws one task per iteration,
so a head may be used on some ranks only, or on none. Afterwards rank 0 repeats the run with plain
torch.optim in one process and compares the parameters.

    torchrun --nproc-per-node=2 examples/multitask_digits.py    # or plain python: one process
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass

import sklearn.datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import gather, get_rank, get_world_size, start_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm, trange

import dynzero

TASKS = ("digit", "parity", "ink")
PARTS = ["trunk", *TASKS]
TASK_ODDS = torch.tensor([0.5, 0.25, 0.25])
NUM_HELD_OUT = 360
MIN_DIGIT_ACCURACY = 0.95


class MultiTaskNet(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        # GELU: at ReLU's kinks, rounding alone can drive two equal runs 0.1 apart in 600 steps.
        self.trunk = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.digit = nn.Linear(width, 10)
        self.parity = nn.Linear(width, 2)
        self.ink = nn.Linear(width, 1)

    def forward(self, images: Tensor, task: str) -> Tensor:
        return self.get_submodule(task)(self.trunk(images))

    def loss(self, images: Tensor, targets: Tensor, task: str) -> Tensor:
        output = self(images, task)
        if task == "ink":
            return F.mse_loss(output.squeeze(1), targets)
        return F.cross_entropy(output, targets)


class Digits:
    """Images [n, 64] in 0..1 and one target per task [n], split at random but always alike."""

    def __init__(self, device: torch.device) -> None:
        pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(pixels, dtype=torch.float32)[order] / 16
        digit = torch.tensor(labels)[order]
        share = images[:, :32].sum(1) / images.sum(1)
        ink = (share - share.mean()) / share.std()
        self.images = images.to(device)
        self.targets = {
            "digit": digit.to(device),
            "parity": (digit % 2).to(device),
            "ink": ink.to(device),
        }

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor, str]:
        """What `rank` trains on at `step`: images, targets, task. The same whenever asked."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        task = TASKS[int(torch.multinomial(TASK_ODDS, 1, generator=generator))]
        rows = torch.randint(len(self.images) - NUM_HELD_OUT, (size,), generator=generator)
        rows = rows.to(self.images.device)
        return self.images[rows], self.targets[task][rows], task

    @torch.no_grad()
    def score(self, model: MultiTaskNet, task: str) -> float:
        """On the held-out images: R^2 for the regression, accuracy for the others."""
        images, targets = self.images[-NUM_HELD_OUT:], self.targets[task][-NUM_HELD_OUT:]
        output = model(images, task)
        if task == "ink":
            residual = (output.squeeze(1) - targets).square().sum()
            return 1 - float(residual / (targets - targets.mean()).square().sum())
        return float((output.argmax(1) == targets).float().mean())


@dataclass
class Run:
    """What a training run leaves behind."""

    model: MultiTaskNet
    seconds: float
    losses: Tensor  # [world size, steps]
    params: Tensor  # [world size, parameter elements]: every rank's copy
    active: list[set[str]]  # per step, the parts that the optimizer updated
    num_updates: dict[str, int]  # per part, AdamW's own step count


def build_model(args: argparse.Namespace, device: torch.device) -> MultiTaskNet:
    torch.manual_seed(args.seed)
    return MultiTaskNet().to(device)


def train(args: argparse.Namespace, data: Digits, device: torch.device) -> Run:
    rank, world_size = get_rank(), get_world_size()
    model = build_model(args, device)
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(),
        torch.optim.AdamW,
        lr=args.lr,
        weight_decay=0.01,
        stage=args.stage,
        fused=args.fused,
    )
    scheduler = CosineAnnealingLR(opt, args.steps)
    losses, active = [], []
    start = time.perf_counter()
    for step in progress(args.steps, "dynzero", disable=rank != 0):
        images, targets, task = data.batch(step, rank, args.batch_size)
        loss = model.loss(images, targets, task)
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        scheduler.step()

        losses.append(loss.detach())
        active.append({part_of(name) for name in opt.last_step.active})
    seconds = time.perf_counter() - start

    state = opt.full_state_dict()  # torch's own layout, on every rank
    names = state["param_groups"][0]["param_names"]
    num_updates = {part_of(names[i]): int(entry["step"]) for i, entry in state["state"].items()}
    params = gather(flatten(model), world_size)
    return Run(model, seconds, gather(torch.stack(losses), world_size), params, active, num_updates)


def train_reference(
    args: argparse.Namespace, data: Digits, device: torch.device, world_size: int
) -> MultiTaskNet:
    """The same run in one process: torch.optim on all ranks' gradients, averaged in rank order."""
    model = build_model(args, device)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = CosineAnnealingLR(opt, args.steps)
    for step in progress(args.steps, "torch.optim"):
        sums: dict[nn.Parameter, Tensor] = {}
        for rank in range(world_size):
            model.zero_grad()
            model.loss(*data.batch(step, rank, args.batch_size)).backward()
            for param in model.parameters():
                if param.grad is not None:
                    sums[param] = sums[param] + param.grad if param in sums else param.grad
        for param in model.parameters():
            param.grad = sums[param] / world_size if param in sums else None
        opt.step()
        scheduler.step()
    return model


def progress(num_steps: int, title: str, disable: bool = False) -> tqdm:
    interval = 0.1 if sys.stderr.isatty() else 5.0  # seconds; few lines in a log file
    return trange(num_steps, desc=title, unit="step", mininterval=interval, disable=disable)


def part_of(name: str) -> str:
    """The part that a parameter belongs to: digit.weight is of digit."""
    return name.partition(".")[0]


def flatten(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def report(data: Digits, run: Run, tasks: list[list[str]], difference: float, bound: float) -> int:
    """Prints the tables and returns the number of failed checks. `tasks` is [world size][steps]."""
    failures = []
    ranks = range(len(tasks))
    print(f"{'part':8}{'held out':>16}", *(f"{f'on rank {r}':>10}" for r in ranks), end="")
    print(f"{'active':>9}{'idle':>7}{'AdamW steps':>13}")
    for part in PARTS:
        present = [[part in ("trunk", task) for task in tasks[r]] for r in ranks]
        used = [any(on_ranks) for on_ranks in zip(*present, strict=True)]
        num_used, num_updates = sum(used), run.num_updates.get(part, 0)
        if used != [part in active for active in run.active]:
            failures.append(f"{part}: active in other steps than those in which a rank used it")
        if num_updates != num_used:
            failures.append(f"{part}: used in {num_used} steps, updated in {num_updates}")
        score = ""
        if part != "trunk":
            value = data.score(run.model, part)
            score = f"{value:.3f} R^2" if part == "ink" else f"{value:.1%} right"
            if part == "digit" and value < MIN_DIGIT_ACCURACY:
                failures.append(f"digit accuracy {value:.1%} is below {MIN_DIGIT_ACCURACY:.0%}")
        print(f"{part:8}{score:>16}", *(f"{sum(p):>10}" for p in present), end="")
        print(f"{num_used:>9}{len(used) - num_used:>7}{num_updates:>13}")

    same_bits = all(torch.equal(params, run.params[0]) for params in run.params)
    if not same_bits:
        failures.append("the ranks' parameters differ")
    if not difference <= bound:
        failures.append(f"difference to torch.optim {difference:.2g} exceeds {bound:.2g}")
    print(
        f"\nlargest difference to torch.optim in one process: {difference:.2g} (bound {bound:.2g})"
    )
    print(f"parameters bit-identical on all ranks: {'yes' if same_bits else 'NO'}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return len(failures)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="dynzero's own AdamW kernel, or torch's class on the pieces",
    )
    parser.add_argument(
        "--bound",
        type=float,
        default=1e-4,
        help="largest parameter difference to torch.optim that passes; rounding gives about 1e-6",
    )
    parser.add_argument("--output", default="multitask_digits.png", help="where the plot goes")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    device = start_ranks()
    rank, world_size = get_rank(), get_world_size()
    data = Digits(device)
    run = train(args, data, device)
    if world_size > 1:
        dist.destroy_process_group()
    if rank != 0:
        return 0

    reference = flatten(train_reference(args, data, device, world_size)).cpu()
    difference = (run.params - reference).abs().max().item()
    steps = range(args.steps)
    tasks = [[data.batch(step, r, 1)[2] for step in steps] for r in range(world_size)]
    print(
        f"\nstage {args.stage}, {world_size} rank(s) on {device.type}: {args.steps} steps "
        f"of {args.batch_size} images per rank in {run.seconds:.1f} s\n"
    )
    num_failures = report(data, run, tasks, difference, args.bound)
    from presence_plot import plot_run  # here: only this rank needs matplotlib

    plot_run(args.output, run.losses, PARTS, tasks)
    print(f"loss curves and presence pattern: {os.path.abspath(args.output)}")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
