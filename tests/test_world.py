"""The rank runner itself: what it reports when a rank raises, hangs, dies, or answers."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from world import RankFailure, expect_error, message_of, run_world


def _sum_of_ranks(rank: int, world: int, factor: float) -> torch.Tensor:
    value = torch.full((3,), factor * rank)
    dist.all_reduce(value)
    return value


def _raise_on_one(rank: int, world: int) -> int:
    if rank == 1:
        raise KeyError("no such head")
    return rank


def _raise_everywhere(rank: int, world: int) -> None:
    raise ValueError(f"parameter w differs, seen by rank {rank}")


def _wait_for_nobody(rank: int, world: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))  # rank 1 never comes


def _sleep_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(600)


def _die_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_answers(world: int) -> None:
    total = 2.0 * sum(range(world))
    for result in run_world(world, _sum_of_ranks, 2.0):
        assert torch.equal(result, torch.full((3,), total))


def test_an_exception_names_rank_and_traceback() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 raised KeyError: 'no such head'") as caught:
        run_world(2, _raise_on_one)
    assert "_raise_on_one" in caught.value.errors[1].traceback
    assert 0 not in caught.value.errors
    assert torch.equal(run_world(2, _sum_of_ranks, 1.0)[1], torch.ones(3))


@pytest.mark.parametrize(
    ("fn", "rank", "place"),
    [(_wait_for_nobody, 0, "all_reduce"), (_sleep_on_rank_1, 1, "_sleep_on_rank_1")],
)
def test_a_hang_names_rank_and_place(fn: object, rank: int, place: str) -> None:
    with pytest.raises(RankFailure, match=rf"ranks that hang: \[{rank}\]") as caught:
        run_world(2, fn, timeout=2.0)
    assert place in str(caught.value)
    assert torch.equal(run_world(2, _sum_of_ranks, 1.0)[0], torch.ones(3))


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 did not come back.*\n.*exit code 3"):
        run_world(2, _die_on_rank_1)
    assert torch.equal(run_world(2, _sum_of_ranks, 1.0)[0], torch.ones(3))


def test_expect_error_wants_every_rank_and_every_word() -> None:
    assert len(expect_error(2, _raise_everywhere, words=["parameter w", "rank"])) == 2
    with pytest.raises(AssertionError, match="remedy"):
        expect_error(2, _raise_everywhere, words=["remedy"])
    with pytest.raises(AssertionError, match=r"ranks \[0\] raised nothing"):
        expect_error(2, _raise_on_one, kind="KeyError")
    with pytest.raises(AssertionError, match="no rank raised"):
        expect_error(2, _sum_of_ranks, 1.0)
    with pytest.raises(AssertionError, match="nothing was raised"):
        message_of(ValueError, int, "3")
