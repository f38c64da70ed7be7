"""Messages through the memory of one host: order, ends that come early, and when Gloo is used."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from play import Lines
from world import check_words, message_of, run_world

import dynzero
from dynzero.transports import local
from dynzero.transports.control import MESSAGE_BYTES, Action, Control, Exchange, Message

NO_BITS = torch.zeros(0, dtype=torch.uint8)


def control_over(way: str) -> Control:
    with mock.patch.object(local, "open_board", local.open_board if way == "memory" else no_board):
        control = Control(None)
    assert (control.board is not None) == (way == "memory")
    return control


def no_board(control: Control) -> None:
    return None


def message(rank: int, number: int) -> Message:
    return Message(number, rank, 0, Action.STEP, -number - rank, 0, 0, 0, 0, (0.1 * number, 1e300))


def bits(rank: int, number: int, length: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(256, (length,), generator=draw, dtype=torch.uint8)


def check(exchange: Exchange, world: int, number: int, length: int) -> None:
    agreed = exchange.wait()
    assert agreed.messages == [message(rank, number) for rank in range(world)]
    assert torch.equal(agreed.bits, torch.stack([bits(r, number, length) for r in range(world)]))


# Order.


def many(rank: int, world: int, way: str, lengths: list[int]) -> int:
    """Each rank has its own times at which it starts, looks and waits; the oldest is waited for."""
    control, draw = control_over(way), random.Random(rank)
    started: list[Exchange] = []
    done = most = 0
    while done < len(lengths):
        following = done + len(started)
        if following < len(lengths) and (not started or draw.random() < 0.6):
            mine = bits(rank, following, lengths[following])
            started.append(control.start(message(rank, following), mine))
            most = max(most, len(started))
            continue
        if draw.random() < 0.1:
            time.sleep(draw.random() * 1e-3)
        while draw.random() < 0.5 and not started[0].ready():
            pass
        check(started.pop(0), world, done, lengths[done])
        done += 1
    return most


@pytest.mark.parametrize("way", ["memory", "gloo"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_message_comes_once_and_in_order(way: str, world: int) -> None:
    """Also one that is too long for the shared memory, amid the others."""
    draw = random.Random(0)
    lengths = [draw.choice([0, 1, 125, 12_500]) for _ in range(300)]
    lengths[100] = lengths[101] = dynzero._C.LocalBoard.MESSAGE_BYTES
    lengths[200] = dynzero._C.LocalBoard.MESSAGE_BYTES - MESSAGE_BYTES
    assert max(run_world(world, many, way, lengths)) > 8, "more than there are slots"


def started_ahead(rank: int, world: int) -> list[bool]:
    """Rank 0 starts more than can be posted, drops the first, and waits for the last only."""
    control = control_over("memory")
    if rank == 0:
        started = [control.start(message(0, n), bits(0, n, 5)) for n in range(20)]
        early = [exchange.ready() for exchange in started]
        dist.barrier()
        del started[0]
        check(started[-1], world, 19, 5)
        assert all(exchange.ready() for exchange in started)
        check(started[7], world, 8, 5)
        return early
    dist.barrier()
    for number in range(20):
        check(control.start(message(1, number), bits(1, number, 5)), world, number, 5)
    return [False]


def test_exchanges_that_nobody_waits_for_complete() -> None:
    assert not any(sum(run_world(2, started_ahead), []))


def wait_beside_a_thread(rank: int, world: int) -> None:
    """Rank 1 answers when it hears from a thread of rank 0, whose main thread waits meanwhile."""
    control = control_over("memory")
    if rank == 0:
        exchange = control.start(message(0, 0), NO_BITS)
        thread = threading.Thread(target=dist.send, args=(torch.ones(1), 1))
        thread.start()
        check(exchange, world, 0, 0)
        thread.join()
    else:
        dist.recv(torch.zeros(1), 0)
        check(control.start(message(1, 0), NO_BITS), world, 0, 0)


def test_waiting_lets_other_threads_run() -> None:
    run_world(2, wait_beside_a_thread)


# Ends. Through the board itself: Control would first ask, for seconds, who is missing.


def leaves_early(rank: int, world: int) -> str:
    """Rank 1 takes part once, and is gone before rank 0 reads what it said."""
    control = control_over("memory")
    first = control.board.start(b"%d" % rank, NO_BITS)
    if rank == 1:
        control.board = None
        first.wait(60.0)
        return ""
    second = control.board.start(b"more", NO_BITS)
    words = message_of(RuntimeError, second.wait, 60.0)
    assert bytes(first.wait(60.0).flatten().tolist()) == b"01"
    assert second.ready()
    return words


def test_a_rank_that_drops_its_optimizer_is_noticed() -> None:
    """Long before the timeout, here 60 s, at which run_world gives up."""
    assert "rank 1 of the group has ended or dropped" in run_world(2, leaves_early)[0]


def times_out(rank: int, world: int) -> list[str]:
    """Rank 0 has no patience in the second exchange; rank 1 comes late to both."""
    control = control_over("memory")
    first = control.board.start(b"%d" % rank, NO_BITS)
    errors = []
    if rank == 0:
        first.wait(60.0)
        errors.append(message_of(RuntimeError, control.board.start(b"x", NO_BITS).wait, 0.01))
    dist.barrier()
    if rank == 1:
        assert bytes(first.wait(60.0).flatten().tolist()) == b"01"
    for _ in range(2):
        late = control.board.start(b"x", NO_BITS)
        assert late.ready()
        errors.append(message_of(RuntimeError, late.wait, 60.0))
    return errors


def test_after_a_timeout_nothing_succeeds_on_some_ranks_only() -> None:
    impatient, late = run_world(2, times_out)
    assert impatient[0] == "no answer within 0.01 s"
    assert impatient[1:] == late == ["another rank has given up waiting"] * 2


def differing_lengths(rank: int, world: int) -> str:
    control = control_over("memory")
    return message_of(RuntimeError, control.board.start(b"x" * (3 + rank), NO_BITS).wait, 60.0)


def test_messages_of_different_lengths_are_refused() -> None:
    for rank, message in enumerate(run_world(2, differing_lengths)):
        check_words(
            message,
            ["length", "4 bytes from rank 1", "3 from this one"]
            if rank == 0
            else ["3 bytes from rank 0", "4 from"],
        )


class Alarm(Exception):
    pass


def interrupted(rank: int, world: int) -> None:
    """A signal reaches Python while rank 0 waits; the exchange can be waited for again."""

    def ring(*_: Any) -> None:
        raise Alarm

    control = control_over("memory")
    if rank == 0:
        exchange = control.board.start(b"0", NO_BITS)
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        message_of(Alarm, exchange.wait, 60.0)
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
    else:
        dist.barrier()
        exchange = control.board.start(b"1", NO_BITS)
    assert bytes(exchange.wait(60.0).flatten().tolist()) == b"01"


def test_a_signal_ends_the_wait() -> None:
    run_world(2, interrupted)


def bad_bits(rank: int, world: int) -> list[str]:
    board = control_over("memory").board
    too_long = torch.zeros(board.MESSAGE_BYTES, dtype=torch.uint8)
    return [
        message_of(RuntimeError, board.start, b"x", wrong)
        for wrong in (torch.zeros(3), torch.zeros(6, dtype=torch.uint8)[::2], too_long)
    ]


def test_bad_bits_are_refused() -> None:
    for message in run_world(2, bad_bits)[0]:
        check_words(message, ["LocalBoard.start", "expected bits contiguous uint8", "got"])


# Opening.


def left_over() -> int:
    """Shared memory of optimizers that this process has open or mapped."""
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(name) for name in names if os.path.lexists(name)]
    with open("/proc/self/maps") as maps:
        return sum("memfd:dynzero" in place for place in [*links, *maps])


def opened_and_dropped(rank: int, world: int) -> tuple[int, int]:
    opt = dynzero.ZeroOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=1.0)
    opt.step()
    during = left_over()
    dist.barrier()
    del opt
    gc.collect()
    return during, left_over()


def test_nothing_is_left() -> None:
    assert run_world(2, opened_and_dropped) == [(2, 0)] * 2


def refuse(*_: Any) -> Any:
    raise PermissionError("not in this container")


TROUBLES: dict[str, tuple[Any, str, Any, list[int]]] = {
    "cannot create": (local, "create", refuse, [0]),
    "cannot open": (local, "open_offered", refuse, [1]),
    "another host": (os, "readlink", lambda _: "/dev/zero", [1]),
    "threads": (os, "getpid", lambda: 1, [0, 1]),
}


def in_trouble(rank: int, world: int, trouble: str) -> tuple[list[str], int]:
    """One rank has no access to the memory of the first: all use Gloo, and it works."""
    where, what, instead, ranks = TROUBLES[trouble]
    level = local.logger.level
    local.logger.setLevel(logging.DEBUG)
    replaced = mock.patch.object(where, what, instead if rank in ranks else getattr(where, what))
    with Lines() as log, replaced:
        control = Control(None)
    local.logger.setLevel(level)
    assert control.board is None
    check(control.start(message(rank, 0), bits(rank, 0, 3)), world, 0, 3)
    return log.lines, left_over()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("cannot create", ["rank 0", "not in this container"]),
        ("cannot open", ["rank 1", "not in this container"]),
        ("another host", ["rank 1", "not the first rank's memory"]),
        ("threads", ["rank 0", "same process id"]),
    ],
)
def test_all_use_gloo_if_one_rank_must(trouble: str, words: list[str]) -> None:
    for said, left in run_world(2, in_trouble, trouble):
        assert len(said) == 1 and left == 0
        check_words(said[0], ["Gloo", *words])
