"""The most telling cases of ranks that differ once more, with messages that go over Gloo.

Elsewhere they go through shared memory, since the ranks of tests are on one host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import test_cases_h_rounds as h_rounds
import test_given_up as given_up
import test_join_and_options as join
import test_rank_dies as rank_dies
import world

from dynzero.transports import local


def no_board(control: Any) -> None:
    return None


def over_gloo(rank: int, world: int, fn: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.object(local, "open_board", no_board):
        return fn(rank, world, *args)


CASES = {
    "joined": partial(h_rounds.test_case_11_join_with_uneven_data, 3, "gloo", 2),
    "discarded while joined": partial(join.test_joined_rank_follows_a_discarded_window, 2),
    "out of step": partial(h_rounds.test_case_12_one_rank_raises_in_backward, 2, "gloo", 2, 2),
    "uneven rounds": partial(h_rounds.test_unequal_numbers_of_backward_calls, 2, "grad_norm"),
    "two optimizers": partial(h_rounds.test_two_optimizers_and_a_collective_between, 3, 2, "rl"),
    "given up": partial(given_up.test_all_clear_after_one_raised, 3, "gloo", 2, 2, True),
    "given up by one": partial(given_up.test_ranks_without_gradients_need_not_clear, 3, "gloo", 2),
    # Last, since it costs the pool of processes.
    "dead": partial(rank_dies.test_a_dead_rank_is_named, 2, 0, "before step", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_over_gloo(case: str) -> None:
    play = world._Pool.play

    def play_over_gloo(pool: Any, fn: Any, args: Any, timeout: float) -> Any:
        return play(pool, over_gloo, (fn, *args), timeout)

    with mock.patch.object(world._Pool, "play", play_over_gloo):
        CASES[case]()
