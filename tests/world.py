"""Rank processes for tests: `run_world(4, fn, *args)` calls `fn(rank, 4, *args)` in four of them.

Starting ranks costs seconds, a case in running ones milliseconds: the processes of one world size
are started once (from a fork server that has torch loaded) and play every case of the session. Each
case gets a fresh default process group, so nothing of one case can reach the next. A rank that
raises, dies or does not come back fails the case with its name, its traceback or the place where it
stood, and the pool is started anew.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# After one rank has failed the others get this long to come back before they count as stuck.
GRACE_SECONDS = 15.0
# Beyond every case's limit: a stuck collective is to be found by us, with a stack.
GROUP_TIMEOUT = datetime.timedelta(seconds=180)
# How far beyond a group's timeout an error may come on a busy machine.
LATE_SECONDS = 1.5

_device = torch.device("cpu")  # in a rank process: where this rank's tensors live


class RankError(NamedTuple):
    kind: str  # name of the exception's class
    message: str
    traceback: str


class RankFailure(AssertionError):
    """Some rank raised, died or hung. `errors` holds what each such rank reported, `results` what
    the others returned (None of a rank that died).
    """

    def __init__(self, text: str, errors: dict[int, RankError], results: list[Any]) -> None:
        super().__init__(text)
        self.errors, self.results = errors, results


def run_world(
    world: int, fn: Callable[..., Any], *args: Any, backend: str = "gloo", timeout: float = 60.0
) -> list[Any]:
    """Returns what `fn(rank, world, *args)` returned on each rank; `fn` must be importable."""
    pool = _pool(world, backend)
    results, errors, stuck = pool.play(fn, args, timeout)
    if stuck:
        pool.close()
    if errors or stuck:
        raise RankFailure(_report(fn, errors, stuck), errors, results)
    return results


def expect_error(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    words: Sequence[str] = (),
    kind: str = "ValueError",
    backend: str = "gloo",
    timeout: float = 60.0,
) -> list[str]:
    """Every rank must raise `kind` with all of `words` in its message; returns the messages."""
    try:
        run_world(world, fn, *args, backend=backend, timeout=timeout)
    except RankFailure as failure:
        missing = [rank for rank in range(world) if rank not in failure.errors]
        assert not missing, f"ranks {missing} raised nothing\n{failure}"
        for rank, error in failure.errors.items():
            assert error.kind == kind, f"rank {rank}: expected {kind}, got\n{error.traceback}"
            check_words(error.message, words, f"rank {rank}")
        return [failure.errors[rank].message for rank in range(world)]
    raise AssertionError(f"expected {kind} on all {world} ranks, but no rank raised")


def message_of(kind: type[BaseException], call: Callable[..., Any], *args: Any, **kw: Any) -> str:
    """For use inside a rank: the message of the `kind` that `call` must raise."""
    try:
        call(*args, **kw)
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")


def outcome_of(call: Callable[..., Any], *args: Any, **kw: Any) -> str:
    """For use inside a rank, many calls in one case: "Kind: message", or what happened instead."""
    try:
        call(*args, **kw)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def check_words(message: str, words: Sequence[str], where: str = "message") -> None:
    lacking = [word for word in words if word.lower() not in message.lower()]
    assert not lacking, f"{where}: {lacking} not in: {message}"


def rank_device() -> torch.device:
    """In a rank process: cuda:rank under NCCL, else the CPU."""
    return _device


def close_worlds() -> None:
    for pool in list(_pools.values()):
        pool.close()


def _pool(world: int, backend: str) -> _Pool:
    if (world, backend) not in _pools:
        _pools[world, backend] = _Pool(world, backend)
    return _pools[world, backend]


def _report(fn: Callable[..., Any], errors: dict[int, RankError], stuck: dict[int, str]) -> str:
    name = getattr(fn, "__qualname__", repr(fn))
    lines = [f"{name}: ranks that failed: {sorted(errors)}, ranks that hang: {sorted(stuck)}"]
    for rank, error in sorted(errors.items()):
        lines.append(f"--- rank {rank} raised {error.kind}: {error.message}\n{error.traceback}")
    for rank, where in sorted(stuck.items()):
        lines.append(f"--- rank {rank} did not come back; it stood at\n{where}")
    return "\n".join(lines)


class _Pool:
    """The processes of one world size, and the store at which their process groups meet."""

    def __init__(self, world: int, backend: str) -> None:
        context = multiprocessing.get_context("forkserver")
        # torch._dynamo: the first optimizer of a process imports it, for two seconds.
        context.set_forkserver_preload(
            ["torch._dynamo", "torch.distributed", "hypothesis", "pytest"]
        )
        self.key = (world, backend)
        self.folder = tempfile.TemporaryDirectory(prefix="dynzero-ranks-")
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.cases = 0
        self.pipes: list[Connection] = []
        self.ranks: list[Any] = []
        for rank in range(world):
            here, there = context.Pipe()
            setup = (rank, world, backend, self.store.port, self._log(rank), there)
            process = context.Process(target=_rank_main, args=setup, daemon=True)
            process.start()
            there.close()  # so that a dead rank reads as the end of its pipe
            self.pipes.append(here)
            self.ranks.append(process)

    def _log(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"rank{rank}.log")

    def play(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> tuple[list[Any], dict[int, RankError], dict[int, str]]:
        """Results by rank, errors of ranks that raised, places of ranks that hang or died."""
        self.cases += 1
        order = pickle.dumps((self.cases, fn, args))
        for pipe in self.pipes:
            pipe.send_bytes(order)
        results: list[Any] = [None] * len(self.pipes)
        errors: dict[int, RankError] = {}
        stuck: dict[int, str] = {}
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        end = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                stuck.update((rank, self._where(rank)) for rank in waiting.values())
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcome = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    stuck[rank] = self._obituary(rank)
                    outcome = None
                if isinstance(outcome, RankError):
                    errors[rank] = outcome
                else:
                    results[rank] = outcome
                if errors or stuck:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        if not stuck:
            for pipe in self.pipes:  # all are back: now nobody needs the process group any more
                pipe.send_bytes(b"done")
        return results, errors, stuck

    def _where(self, rank: int) -> str:
        log = Path(self._log(rank))
        before = log.stat().st_size
        os.kill(self.ranks[rank].pid, signal.SIGUSR1)  # faulthandler writes every thread's stack
        deadline = time.monotonic() + 2.0
        while log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        return log.read_text()[before:] or "(no Python stack)"

    def _obituary(self, rank: int) -> str:
        self.ranks[rank].join(5.0)
        log = Path(self._log(rank)).read_text()
        return f"died with exit code {self.ranks[rank].exitcode}\n{log}"

    def close(self) -> None:
        _pools.pop(self.key, None)
        for pipe in self.pipes:
            pipe.close()
        for process in self.ranks:
            process.kill()
            process.join()
        self.folder.cleanup()


_pools: dict[tuple[int, str], _Pool] = {}
atexit.register(close_worlds)


def _rank_main(
    rank: int, world: int, backend: str, port: int, log_path: str, pipe: Connection
) -> None:
    global _device
    log = open(log_path, "w")  # faulthandler needs it open for the life of the process
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    torch.set_num_threads(1)
    if backend == "nccl":
        _device = _own_or_shared_gpu(rank, world)
        torch.cuda.set_device(_device)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            case, fn, args, error = _unpack(pipe.recv_bytes())
            if error is None:
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore(f"case{case}", store),
                    rank=rank,
                    world_size=world,
                    timeout=GROUP_TIMEOUT,
                )
                outcome = _outcome(fn, rank, world, args)
            pipe.send_bytes(error or outcome)
            pipe.recv_bytes()  # the others may still be talking to this rank
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
            gc.collect()  # rounds that failed are generators: the first time closes them
            gc.freeze()  # torch's own objects: walking them again costs 0.2 s a case


def _own_or_shared_gpu(rank: int, world: int) -> torch.device:
    """NCCL refuses two ranks of a host on one GPU: where they must share, each is its own host."""
    gpus = torch.cuda.device_count()
    if gpus < world:
        os.environ["NCCL_HOSTID"] = f"rank {rank}"  # data then goes through sockets
    return torch.device("cuda", rank % gpus)


def _unpack(order: bytes) -> tuple[int, Callable[..., Any], tuple[Any, ...], bytes | None]:
    try:
        return (*pickle.loads(order), None)
    except Exception as error:  # a test module that does not import here
        return 0, _rank_main, (), _packed(error)


def _outcome(fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(fn(rank, world, *args))
    except BaseException as error:
        return _packed(error)


def _packed(error: BaseException) -> bytes:
    return pickle.dumps(RankError(type(error).__name__, str(error), traceback.format_exc()))
