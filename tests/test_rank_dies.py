"""A rank whose process is killed: the others get an error that names it and the step, in time."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import mixed, two_heads
from play import make
from scenario import Turn
from world import LATE_SECONDS, RankFailure, check_words, message_of, run_world

from dynzero._C import Transport

SCENARIO = two_heads(mixed)
SHORT = datetime.timedelta(seconds=9)  # and yet long enough for a busy machine


def die(*_: Any, **__: Any) -> Any:
    """As if out of memory. A child, such as data loaders have, lives on with what it inherited."""
    if os.fork() == 0:
        for fd in os.listdir("/proc/self/fd"):
            # Of sockets the other end would not notice anything before the child ends, too.
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:dynzero"):
                    os.close(int(fd))
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Transport):
    all_to_all = die


def train_until_one_dies(
    rank: int, world: int, stage: int, where: str, dies: int
) -> tuple[str, float] | None:
    """In step 1 the rank `dies` dies before its backward, before step(), or while data moves.

    The others' error, and the seconds from the begin of step 1 until it came.
    """
    model = SCENARIO.model()
    gather = "lazy" if where == "values" else "eager"
    group = dist.new_group(timeout=SHORT)
    opt = make(SCENARIO, model, stage=stage, process_group=group, gather=gather)

    def iterate(step: int) -> None:
        mortal = step == 1 and rank == dies
        if mortal and where == "before backward":
            die()
        if mortal and where == "reduce":
            opt._mover.collective.transport = Deadly()
        if mortal and where == "gather":
            opt._mover.gather_records = die
        if mortal and where == "values":  # which the others miss in their next forward
            opt._mover.update_and_gather = die
        opt.backward(SCENARIO.loss(model, Turn(step, 0, rank, world)))
        if mortal and where == "before step":
            die()
        opt.step()
        opt.zero_grad()

    iterate(0)
    start = time.monotonic()
    try:
        iterate(1)
        iterate(2)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None


# A death costs the pool of processes, so not every combination.
DEATHS = [
    (2, 0, "before step", 0),
    (2, 1, "gather", 0),
    (3, 2, "before backward", 2),
    (3, 2, "reduce", 2),
    (2, 2, "values", 1),
]


@pytest.mark.parametrize(("world", "stage", "where", "dies"), DEATHS)
def test_a_dead_rank_is_named(world: int, stage: int, where: str, dies: int) -> None:
    with pytest.raises(RankFailure) as failure:
        run_world(world, train_until_one_dies, stage, where, dies)
    assert not failure.value.errors, failure.value
    told = [result for result in failure.value.results if result is not None]
    assert len(told) == world - 1, failure.value
    for message, seconds in told:
        check_words(message, [f"rank(s) [{dies}]", "iteration 1", "died"])
        if "before" in where:  # noticed in an exchange, without waiting for the timeout
            assert "imed out" not in message and "no answer" not in message
        assert seconds < SHORT.total_seconds() + LATE_SECONDS


BRIEF = datetime.timedelta(seconds=4.5)


def seconds_until_named(rank: int, world: int) -> tuple[float, float]:
    """How long the first rank waits for the second, which makes no step; what else it would."""
    opt = make(SCENARIO, SCENARIO.model(), process_group=dist.new_group(timeout=BRIEF))
    waits = opt._control.timeout + opt._control.naming
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] did not arrive within 3 s"):
            opt.step()
    waited = time.monotonic() - start
    dist.barrier()  # the second rank lives on
    return waited, (BRIEF - waits).total_seconds()


def test_a_missing_rank_is_named_within_the_timeout() -> None:
    """3 s of waiting, and 1.5 s, a third of the limit, for finding out who is missing."""
    (waited, left), _ = run_world(2, seconds_until_named)
    assert left == 0.0
    assert 3.0 < waited < BRIEF.total_seconds() + LATE_SECONDS


def build_without_one(rank: int, world: int) -> tuple[str, str]:
    """The last rank builds no optimizer; nor may it with something that is no group."""
    group = dist.new_group(timeout=BRIEF)
    text = message_of(TypeError, make, SCENARIO, SCENARIO.model(), process_group="nope")
    if rank < world - 1:
        missed = message_of(RuntimeError, make, SCENARIO, SCENARIO.model(), process_group=group)
    else:
        missed = ""
    dist.barrier()
    return text, missed


def test_a_rank_that_builds_no_optimizer_is_named() -> None:
    for rank, (text, missed) in enumerate(run_world(3, build_without_one)):
        check_words(text, ["process_group", "new_group", "'nope'"])
        if rank < 2:
            check_words(missed, [f"rank {rank} waited at construction", "rank(s) [2]"])


def out_of_memory(rank: int, world: int) -> str:
    """What has nothing to do with other ranks does not accuse them."""
    opt = make(SCENARIO, SCENARIO.model(), process_group=dist.new_group(timeout=BRIEF))
    with pytest.raises(torch.OutOfMemoryError) as raised, opt._control.naming_ranks():
        raise torch.OutOfMemoryError("no room")
    return str(raised.value)


def test_an_error_of_this_rank_names_no_other() -> None:
    assert run_world(2, out_of_memory) == ["no room"] * 2
