"""A transformer in fp16 and bf16 on several ranks, against one process of torch.optim in fp32.

Data: the manual that Python's own `help()` shows, as characters; the next one is predicted. Each
block is left out at random (LayerDrop; the deeper, the more often), independently on every rank and
in each of the three backward passes of a step, so that a block may be used on some ranks only or on
none. The fp16 run starts with a loss scale that is far too high; a step that overflows changes
nothing and is made again with the same data, so that all runs make the same updates.

    torchrun --nproc-per-node=2 examples/layerdrop_transformer.py    # or plain python: one process
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loss_report import Run, plot_losses, print_table, table
from ranks import gather, get_rank, get_world_size, start_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import dynzero

LENGTH, BATCH, NUM_MICRO = 32, 4, 3  # characters, sequences, backward passes; per rank and step
WIDTH, DROP_ODDS = 48, (0.2, 0.4, 0.6, 0.8)  # of the blocks
MAX_NORM = 1.0
# What 16 bits may cost: this many times what rounding the weights alone costs in the fp32 run, as
# measured in the same run. Activations and two kinds of gradients are rounded as well, and one kind
# alone costs up to twice as much with one seed as with another.
RATIO = 8
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Transformer(nn.Module):
    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.token = nn.Embedding(num_characters, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in DROP_ODDS
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_characters)

    def loss(self, text: Tensor, used: list[bool]) -> Tensor:
        """text [sequences, LENGTH + 1]; used: which blocks."""
        x = self.token(text[:, :-1]) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, x.device, x.dtype)
        for block, use in zip(self.blocks, used, strict=True):
            x = block(x, mask, is_causal=True) if use else x
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Data:
    """The text, and what each rank trains on: the same whenever asked."""

    def __init__(self, device: torch.device) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        characters = sorted(set(text))
        number = {character: i for i, character in enumerate(characters)}
        self.num_characters = len(characters)
        self.text = torch.tensor([number[character] for character in text])
        self.device = device

    def batch(self, step: int, rank: int, micro: int) -> tuple[Tensor, list[bool]]:
        generator = torch.Generator().manual_seed((step * 1009 + rank) * NUM_MICRO + micro)
        starts = torch.randint(len(self.text) - LENGTH - 1, (BATCH, 1), generator=generator)
        odds = torch.tensor(DROP_ODDS)
        used = torch.rand(len(odds), generator=generator) >= odds
        return self.text[starts + torch.arange(LENGTH + 1)].to(self.device), used.tolist()


def build_model(data: Data, seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(data.num_characters).to(data.device)


def train(args: argparse.Namespace, data: Data, dtype: torch.dtype) -> Run:
    rank, world = get_rank(), get_world_size()
    model = build_model(data, seed=0).to(dtype)
    loss_scale = dynzero.LossScale(init=args.loss_scale, window=100) if dtype == F16 else None
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=args.lr, stage=args.stage,
        max_grad_norm=MAX_NORM, loss_scale=loss_scale,
    )  # fmt: skip
    scheduler = CosineAnnealingLR(opt, args.steps)
    losses: list[Tensor] = []
    run = Run([])
    while len(losses) < args.steps:
        parts = []
        for micro in range(NUM_MICRO):
            loss = model.loss(*data.batch(len(losses), rank, micro)) / NUM_MICRO
            opt.backward(loss)
            parts.append(loss.detach())
        opt.step()
        opt.zero_grad()
        run.scales.append(opt.last_step.loss_scale)
        if opt.last_step.stepped:
            scheduler.step()
            losses.append(torch.stack(parts).sum())
        elif dtype != F16:  # no loss scale that could shrink: the same data would fail again
            raise RuntimeError(f"{dtype}: {opt.last_step.overflow}")
    run.losses = gather(torch.stack(losses), world).mean(0).tolist()
    run.skipped = opt.counters["skipped"]
    params = gather(nn.utils.parameters_to_vector(model.parameters()).detach(), world)
    run.same_bits = all(torch.equal(params[0], row) for row in params)
    return run


def train_reference(
    args: argparse.Namespace, data: Data, world: int, seed: int = 0, rounded: torch.dtype = F32
) -> Run:
    """One process, fp32, torch.optim on the mean of all ranks' gradients; an absent one stays None.

    rounded: what the weights that the model sees are rounded to; the optimizer keeps them in fp32.
    """
    model = build_model(data, seed)
    params = list(model.parameters())
    masters = [param.detach().clone() for param in params]
    opt = torch.optim.AdamW(masters, lr=args.lr)
    scheduler = CosineAnnealingLR(opt, args.steps)
    losses = []
    for step in range(args.steps):
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master.to(rounded))
        parts = []
        for rank in range(world):
            for micro in range(NUM_MICRO):
                loss = model.loss(*data.batch(step, rank, micro)) / (NUM_MICRO * world)
                loss.backward()
                parts.append(loss.detach())
        for param, master in zip(params, masters, strict=True):
            master.grad, param.grad = param.grad, None
        nn.utils.clip_grad_norm_(masters, MAX_NORM)
        opt.step()
        scheduler.step()
        losses.append(torch.stack(parts).sum())
    return Run(torch.stack(losses).tolist())


def all_references(args: argparse.Namespace, data: Data) -> dict[str, Run]:
    """Shared out among the ranks."""
    rank, world = get_rank(), get_world_size()
    jobs = {"fp32": (0, F32), "other seed": (1, F32), "fp16": (0, F16), "bf16": (0, BF16)}
    mine = [(name, *job) for i, (name, job) in enumerate(jobs.items()) if i % world == rank]
    found = {name: train_reference(args, data, world, seed, dtype) for name, seed, dtype in mine}
    if world == 1:
        return found
    boxes: list[dict[str, Run]] = [{} for _ in range(world)]
    dist.all_gather_object(boxes, found)
    return {name: run for box in boxes for name, run in box.items()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--loss-scale", type=float, default=2.0**32, help="fp16 starts with it")
    parser.add_argument("--output", default="layerdrop_transformer.png", help="the plot")
    parser.add_argument("--json", type=Path, help="where table and losses go as JSON")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    data = Data(start_ranks())
    world = get_world_size()
    runs = {"fp16": train(args, data, F16), "bf16": train(args, data, BF16)}
    references = all_references(args, data)
    is_first = get_rank() == 0
    if world > 1:
        dist.destroy_process_group()
    if not is_first:
        return 0

    plain, other = references.pop("fp32"), references.pop("other seed")
    bounds = {name: RATIO * run.difference(plain) for name, run in references.items()}
    rows = table(plain, other, runs, bounds)
    print_table(rows)
    failures = [f"{name}: ranks differ" for name, run in runs.items() if not run.same_bits]
    for name, row in rows.items():
        if "bound" in row and not row["difference"] <= row["bound"]:
            failures.append(f"{name}: the difference exceeds the bound")
    for failure in failures:
        print(f"FAILED: {failure}")
    losses = {"fp32, one process": plain.losses, "other seed": other.losses}
    losses |= {f"{name}, dynzero": run.losses for name, run in runs.items()}
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "losses": losses}))
    plot_losses(args.output, losses, runs["fp16"].scales)
    print(f"loss curves and loss scale: {Path(args.output).resolve()}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
