"""Random scenarios for the differential tests, each a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from oracle import Lion
from scenario import Parameters, Scenario, Turn, data
from torch import Tensor, nn
from torch.optim import lr_scheduler

# Nothing, one element, a vector register and its neighbours, a chunk and its neighbours.
SHAPES = ((0,), (), (1,), (7,), (8,), (9,), (3, 5), (1023,), (4097,))

OPTIM = torch.optim
# With a fused kernel.
KERNELS: list[tuple[type[OPTIM.Optimizer], dict[str, Any]]] = [
    (OPTIM.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    (OPTIM.AdamW, {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3, "maximize": True}),
    (OPTIM.Adam, {"lr": 0.02, "weight_decay": 0.05}),
    (OPTIM.SGD, {"lr": 0.05}),
    (OPTIM.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (OPTIM.SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True}),
    (OPTIM.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "maximize": True}),
    (Lion, {"lr": 0.01, "weight_decay": 0.1}),
]
# Without one, but continuous in the gradients: a rounding error stays a rounding error.
SMOOTH: list[tuple[type[OPTIM.Optimizer], dict[str, Any]]] = [
    (OPTIM.AdamW, {"lr": 0.02, "amsgrad": True}),
    (OPTIM.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (OPTIM.Adagrad, {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    (OPTIM.NAdam, {"lr": 0.02, "weight_decay": 0.01}),
    (OPTIM.Adamax, {"lr": 0.02}),
    (OPTIM.Adadelta, {"lr": 0.5}),
]
# Rprop and RAdam branch on signs and step counts, ASGD keeps tensors of its own.
BRANCHING: list[tuple[type[OPTIM.Optimizer], dict[str, Any]]] = [
    (OPTIM.RAdam, {"lr": 0.02}),
    (OPTIM.Rprop, {"lr": 0.02}),
    (OPTIM.ASGD, {"lr": 0.05, "t0": 2}),
]
# Lion is the one whose arithmetic order torch does not fix.
TORCH = [entry for entry in KERNELS + SMOOTH + BRANCHING if entry[0] is not Lion]

SCHEDULERS: list[Callable[[OPTIM.Optimizer], Any] | None] = [
    None,
    partial(lr_scheduler.StepLR, step_size=1, gamma=0.5),
    partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    partial(lr_scheduler.LinearLR, start_factor=0.25, total_iters=3),
]
STEPS = 4


class Draw(NamedTuple):
    scenario: Scenario
    world: int
    zero: dict[str, Any]


def bag(shapes: tuple[tuple[int, ...], ...]) -> nn.Module:
    return Parameters(**{f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)})


def is_present(seed: int, turn: Turn, number: int) -> bool:
    """A parameter is used never, seldom, often or always: by step, rank and micro-step."""
    odds = random.Random(f"{seed} {number}").choice([0.0, 0.2, 0.5, 0.5, 1.0])
    lot = random.Random(f"{seed} {turn.step} {turn.rank} {turn.micro} {number}")
    return lot.random() < odds


def bag_loss(seed: int, model: nn.Module, turn: Turn) -> Tensor | None:
    """Elementwise in the parameters, so that its gradients have the same bits everywhere."""
    terms = []
    for number, p in enumerate(model.parameters()):
        if is_present(seed, turn, number):
            slope = data(turn._replace(micro=turn.micro + 7 * number), *p.shape, like=p)
            terms.append((p * slope + 0.25 * p * p).sum())
    return torch.stack(terms).sum() if terms else None


def rounds(seed: int, step: int, rank: int) -> int:
    """The same on every rank; uneven numbers have tests of their own."""
    return random.Random(f"{seed} rounds {step}").choice([1, 1, 2, 3])


def bag_groups(seed: int, model: nn.Module) -> list[dict[str, Any]]:
    lot = random.Random(f"{seed} groups")
    number = lot.choice([1, 2, 3])
    members: list[list[Any]] = [[] for _ in range(number)]
    for name, p in model.named_parameters():
        members[lot.randrange(number)].append((name, p))
    groups = [{"params": some} for some in members if some]
    for group in groups[1:]:
        group |= {"lr": lot.choice([0.01, 0.1]), "absent": lot.choice(["skip", "zero"])}
    return groups


def draw(
    seed: int,
    optimizer: tuple[type[OPTIM.Optimizer], dict[str, Any]],
    dtypes: tuple[torch.dtype, ...],
) -> Draw:
    lot = random.Random(f"{seed}")
    shapes = tuple(lot.sample(SHAPES, lot.randint(2, len(SHAPES))))
    scenario = Scenario(
        build=partial(bag, shapes),
        loss=partial(bag_loss, seed),
        optimizer=optimizer[0],
        options=optimizer[1],
        steps=STEPS,
        micros=partial(rounds, seed),
        groups=partial(bag_groups, seed),
        scheduler=lot.choice(SCHEDULERS),
        dtype=lot.choice(dtypes),
    )
    zero = {
        "average": lot.choice(["world", "world", "present"]),
        "absent": lot.choice(["skip", "skip", "zero"]),
        "bucket_bytes": lot.choice([1, 100, 4096, 1 << 25]),
    }
    return Draw(scenario, lot.choice([1, 2, 2, 3, 4]), zero)
