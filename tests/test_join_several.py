"""join() of several optimizers, one inside the other: they end together with the outermost."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from play import worlds
from scenario import Parameters
from world import LATE_SECONDS, RankFailure, check_words, message_of, rank_device, run_world

import dynzero
from dynzero import joining

STAGES = [(0, 1), (1, 2), (2, 2)]
several_stages = pytest.mark.parametrize("stages", STAGES, ids=str)


def players(stages: tuple[int, int], **options: Any) -> list[Any]:
    """A generator with `a`, a discriminator with `b` and their optimizers."""
    device = rank_device()
    models = [
        Parameters(a=torch.ones(40, device=device)),
        Parameters(b=torch.ones(7, device=device)),
    ]
    opts = [
        dynzero.ZeroOptimizer(
            model.named_parameters(), torch.optim.SGD, lr=1.0, momentum=0.5, stage=stage, **options
        )
        for model, stage in zip(models, stages, strict=True)
    ]
    return [*models, *opts]


def played(order: str, rank: int, stages: tuple[int, int], leftover: bool) -> list[float]:
    """Rank 0 plays one turn, rank 1 two and so on; one backward feeds both players.

    order: of the steps. leftover: a rank leaves with gradients that it has not stepped with.
    """
    gen, disc, opt_g, opt_d = players(stages, bucket_bytes=64)
    # Looks so seldom that it finds both steps announced, if they may be.
    slow = mock.patch.object(joining, "LOOK_EVERY_S", 0.02)
    with slow, opt_g.join(), opt_d.join():
        for _ in range(1 + rank):
            (gen.a.sum() + 3 * disc.b.sum()).backward()
            for opt in (opt_g, opt_d) if order == "gd" else (opt_d, opt_g):
                opt.step()
                opt.zero_grad()
        if leftover:
            disc.b.sum().backward()
    return [gen.a[0].item(), disc.b[0].item()]


def play_uneven(rank: int, world: int, *args: Any) -> list[float]:
    order, stages, leftover = args
    return played(order, rank, stages, leftover)


def oracle(gradients: list[float]) -> float:
    p = torch.nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([p], lr=1.0, momentum=0.5)
    for gradient in gradients:
        p.grad = torch.full((1,), gradient)
        opt.step()
    return p.item()


@worlds(2, 3)
@several_stages
@pytest.mark.parametrize("order", ["gd", "dg"])
@pytest.mark.parametrize("leftover", [False, True], ids=["stepped", "leftover"])
def test_ranks_follow_both_optimizers(
    world: int, backend: str, stages: tuple[int, int], order: str, leftover: bool
) -> None:
    # What has been reduced counts: in stage 2 a leftover goes into the next turn of the others.
    counts = int(leftover and stages[1] == 2)
    of_a = [(world - turn) / world for turn in range(world)]
    of_b = [(3 * (world - turn) + (counts if turn else 0)) / world for turn in range(world)]
    expected = pytest.approx([oracle(of_a), oracle(of_b)], rel=1e-6)
    for got in run_world(world, play_uneven, order, stages, leftover, backend=backend):
        assert got == expected


def leaves_by_exception(rank: int, world: int, stages: tuple[int, int]) -> list[Any]:
    """The inner join is left by an exception on every rank, so only the outer one is followed."""
    gen, disc, opt_g, opt_d = players(stages)
    with opt_g.join():
        with contextlib.suppress(ArithmeticError), opt_d.join():
            (disc.b.sum()).backward()
            opt_d.step()
            opt_d.zero_grad()
            raise ArithmeticError
        for _ in range(1 + rank):
            gen.a.sum().backward()
            opt_g.step()
            opt_g.zero_grad()
    disc.b.sum().backward()  # it goes on as if there had been no join
    opt_d.step()
    return [gen.a[0].item(), disc.b[0].item()]


@worlds(2)
@several_stages
def test_a_join_left_by_an_exception_is_not_followed(
    world: int, backend: str, stages: tuple[int, int]
) -> None:
    for got in run_world(world, leaves_by_exception, stages, backend=backend):
        assert got == [oracle([1.0, 0.5]), oracle([1.0, 1.0])]


def one_dies(rank: int, world: int, stages: tuple[int, int]) -> str:
    _, disc, opt_g, opt_d = players(stages)

    def loop() -> None:
        with opt_g.join(), opt_d.join():
            if rank == 1:
                disc.b.sum().backward()
                os._exit(7)

    return message_of(RuntimeError, loop)


@several_stages
def test_a_rank_that_dies_is_named(stages: tuple[int, int]) -> None:
    with pytest.raises(RankFailure) as failure:
        run_world(2, one_dies, stages)
    message, _ = failure.value.results
    check_words(message, ["rank(s) [1]", "join()", "iteration 0"])


def one_stays_away(rank: int, world: int, seconds: float) -> tuple[str, float]:
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    *_, opt_g, opt_d = players((1, 1), process_group=group)
    start = time.monotonic()

    def loop() -> None:
        with opt_g.join(), opt_d.join():
            pass

    message = message_of(RuntimeError, loop) if rank == 0 else ""
    took = time.monotonic() - start
    dist.barrier()
    return message, took


def test_a_rank_that_never_joins_is_named_in_time() -> None:
    (message, seconds), _ = run_world(2, one_stays_away, 3.0)
    check_words(message, ["rank(s) [1]", "join()"])
    assert seconds < 3.0 + LATE_SECONDS
