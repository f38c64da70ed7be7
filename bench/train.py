"""`python -m bench train`: whole training iterations, on ranks that it starts itself.

Each implementation gets a set of processes of its own with a time limit: what fails, dies or hangs
becomes a row that says so, and the next implementation starts afresh.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from . import results
from .cases import BF16, F16
from .machine import BenchError
from .peers import NOT_INSTALLED, installed
from .train_impls import Impl, impls_of
from .train_model import GROUPS, Case, Place
from .train_rank import Job, rank_main

Row = dict[str, Any]
LIMIT_SECONDS = 120.0
# After one rank has failed, the others get this long to say what they know.
GRACE_SECONDS = 3.0
METRICS = ("iteration_ms", "forward_backward_ms", "step_ms", "peak_gib")


class RanksFailed(Exception):
    """Some rank raised, died or did not finish."""


def run(
    device: torch.device, *, world: int, quick: bool, only: list[str], limit: float = LIMIT_SECONDS
) -> list[Row]:
    impls = impls_of(world)
    unknown = sorted(set(only) - set(impls))
    if unknown:
        raise BenchError(f"--only {unknown[0]}: with --gpus {world} expected {', '.join(impls)}")
    dtype = F16 if world == 1 else BF16
    place = Place(device, 0, world, dtype, quick)
    reference, *_ = impls
    job = Job(reference, device.type, world, dtype, quick, None, timed=reference in (only or impls))
    rows: list[Row] = []
    for name in [reference, *(n for n in impls if n != reference and n in (only or impls))]:
        impl = impls[name]
        job = dataclasses.replace(job, impl=name, timed=name in (only or impls))
        found = run_impl(job, impl, limit)
        if name == reference:
            job = dataclasses.replace(job, losses=reference_losses(name, found))
        if job.timed:
            some = [row_of(name, impl, place, case, result) for case, result in found]
            for row in some:
                results.say(sentence(row))
            rows += some
    compare(rows)
    return rows


def reference_losses(name: str, found: list[tuple[Case, Row]]) -> list[float]:
    result = found[0][1]
    if "error" in result:
        raise BenchError(f"{name}, whose losses the others must reproduce: {result['error']}")
    losses: list[float] = result["losses"]
    return losses


def run_impl(job: Job, impl: Impl, limit: float) -> list[tuple[Case, Row]]:
    """Results by case, {"error": reason} where there are none."""
    groups = [g for g in GROUPS if job.world > 1 or g[0].mode == "all"]
    groups = [g for g in groups if impl.share or g[0].mode != "share"]
    if not job.timed:
        groups = groups[:1]
    if impl.module is not None and not installed(impl.module):
        return [(case, {"error": NOT_INSTALLED}) for group in groups for case in group]
    found: list[tuple[Case, Row]] = []
    while groups:
        with Ranks(job, groups, time.monotonic() + limit) as ranks:
            while groups:
                group = groups.pop(0)
                try:
                    merged = ranks.next_results(f"{limit:.0f} s")
                except RanksFailed as failure:
                    merged = [{"error": f"failed: {failure}"} for _ in group]
                    found += zip(group, merged, strict=True)
                    break
                found += zip(group, merged, strict=True)
    return found


class Ranks:
    """A set of processes, all of them gone at the end of the `with`."""

    def __init__(self, job: Job, groups: list[list[Case]], deadline: float) -> None:
        self.deadline = deadline
        # A server that has torch loaded: a rank starts in a fraction of a second.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([rank_main.__module__])
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(job.world):
            here, there = context.Pipe()
            setup = (rank, job, groups, self.store.port, there)
            process = context.Process(target=rank_main, args=setup, daemon=True)
            process.start()
            there.close()  # so that a dead rank reads as the end of its pipe
            self.pipes.append(here)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def next_results(self, limit: str) -> list[Row]:
        """Of the next group, by case: the slowest and largest of all ranks."""
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        errors: list[str] = []
        by_rank: list[list[Row]] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, self.deadline - time.monotonic()))
            if not ready:
                if not errors:
                    errors.append(f"ranks {sorted(waiting.values())} not done within {limit}")
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    error, some = pipe.recv()
                except EOFError:
                    error, some = "the process died", []
                if error is None:
                    by_rank.append(some)
                else:
                    errors.append(f"rank {rank}: {error}")
                    self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)
        if errors:
            raise RanksFailed("; ".join(errors))
        return [merge(case) for case in zip(*by_rank, strict=True)]


def merge(by_rank: tuple[Row, ...]) -> Row:
    return {key: max(result[key] for result in by_rank) for key in by_rank[0]}


def row_of(name: str, impl: Impl, place: Place, case: Case, result: Row) -> Row:
    row: Row = {"bench": "train", "impl": name, "case": case.as_json(place, impl.stage)}
    row |= {metric: result.get(metric) for metric in METRICS}
    if "peak_bytes" in result:
        row["peak_gib"] = result["peak_bytes"] / 2**30
    if "error" in result:
        row["error"] = result["error"]
    elif "bare_ms" in result:
        row["bare_ms"] = result["bare_ms"]
        row["beyond_bare_ms"] = result["iteration_ms"] - result["bare_ms"]
        row["exposed_comm_ms"] = None
        if "no_wire_ms" in result:
            row["exposed_comm_ms"] = result["iteration_ms"] - result["no_wire_ms"]
    if "losses" in result:
        row["check_losses"] = result["losses"]
    return row


def compare(rows: list[Row]) -> None:
    """Puts into dynzero's rows how they stand to the peers and to the row with everything active.

    `baselines`: by peer, how many times as long its iteration takes. `of_full`: this row's cost
    beyond forward and backward, and `per_active` its iteration, over those of all heads.
    """
    by_key = {(r["impl"], r["case"]["mode"], r["case"]["active"]): r for r in rows}
    for row in rows:
        if "beyond_bare_ms" not in row:
            continue
        mode, active = row["case"]["mode"], row["case"]["active"]
        row["baselines"] = {
            other["impl"]: entry(row, other)
            for other in rows
            if other["case"]["mode"] == mode and other["case"]["active"] == active
            and not other["impl"].startswith("dynzero")
        }  # fmt: skip
        full = by_key.get((row["impl"], "share" if mode == "share" else "all", 1.0))
        if full is not None and full is not row and "error" not in full:
            row["of_full"] = row["beyond_bare_ms"] / full["beyond_bare_ms"]
            row["per_active"] = row["iteration_ms"] / full["iteration_ms"] / active


def entry(ours: Row, theirs: Row) -> Row:
    if "error" in theirs:
        return {"error": theirs["error"]}
    return {
        "iteration_ms": theirs["iteration_ms"],
        "speedup": theirs["iteration_ms"] / ours["iteration_ms"],
        "stage": theirs["case"]["stage"],
        "peak_gib": theirs["peak_gib"],
    }


def sentence(row: Row) -> str:
    case = row["case"]
    title = f"{row['impl']:20}{case['mode']:6}{case['active']:5.0%} active  "
    if "error" in row:
        return f"{title}{row['error']}"
    words = [
        f"{row['iteration_ms']:9.2f} ms = {row['forward_backward_ms']:.2f} forward, backward "
        f"+ {row['step_ms']:.2f} step"
    ]
    if row["peak_gib"] is not None:
        words.append(f"peak {row['peak_gib']:.2f} GiB")
    if "bare_ms" in row:
        words.append(f"bare {row['bare_ms']:.2f}")
    if row.get("exposed_comm_ms") is not None:
        words.append(f"exposed communication {row['exposed_comm_ms']:.2f}")
    return title + ", ".join(words)
