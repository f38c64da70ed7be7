"""Rows `exchange` of `python -m bench scale`: host time of one exchange between two real ranks."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from dynzero.transports.control import Action, Control, Message

from .machine import BenchError
from .timer import Samples

WORLD = 2
PARAMS = (1_000, 100_000)
REPEATS, QUICK_REPEATS = 2000, 50
LIMIT = datetime.timedelta(seconds=60)
Times = dict[tuple[str, int], Samples]


def measure(*, quick: bool) -> Times:
    """By way and number of parameters, on the first rank; without shared memory only over Gloo."""
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(WORLD):
        here, there = context.Pipe()
        arguments = (rank, store.port, QUICK_REPEATS if quick else REPEATS, there)
        processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        there.close()  # so that a dead rank reads as the end of its pipe
        pipes.append(here)
    try:
        return [receive(pipe) for pipe in pipes][0]
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(pipe: Connection) -> Times:
    if not pipe.poll(2 * LIMIT.total_seconds()):
        raise BenchError(f"exchange: a rank does not answer within {2 * LIMIT}")
    try:
        times: Times = pipe.recv()
    except EOFError:
        raise BenchError("exchange: a rank died") from None
    return times


def rank_main(rank: int, port: int, repeats: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=LIMIT)
    control = Control(None)
    ways = {"shared memory": control.board, "Gloo": None}
    times: Times = {}
    for way, board in ways.items():
        control.board = board
        for params in PARAMS if board is not None or way == "Gloo" else ():
            times[way, params] = time_exchanges(control, params, repeats)
    pipe.send(times)
    with contextlib.suppress(EOFError):
        pipe.recv()  # for the rest of its life: the other may still need this rank


def time_exchanges(control: Control, params: int, repeats: int) -> Samples:
    message = Message(0, 0, 0, Action.STEP, 0, 0, 0, 0, 0, (0.0, 0.0))
    bits = torch.zeros((params + 7) // 8, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats + repeats // 10):
        start = time.perf_counter()
        control.exchange(message, bits)
        seconds.append(time.perf_counter() - start)
    seconds = seconds[-repeats:]  # the first warm up
    return Samples(device=seconds, whole=seconds, host=seconds)
