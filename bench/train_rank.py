"""One rank of `python -m bench train`: builds an implementation, checks its losses, times it."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from .train_impls import Trainer, bare, impls_of, without_wire
from .train_model import Case, Data, Place

CHECK_STEPS = 5
# Of the fall of the reference's loss in these steps. The peers round at other places (autocast
# keeps norms and losses in float32, masters start from the same 16-bit values in all of them).
TOLERANCE = 0.03
WARM_UP, QUICK_WARM_UP = 10, 2
# A multiple of 8, so that every head has its turn equally often.
ITERATIONS, QUICK_ITERATIONS = 24, 8


@dataclass(frozen=True)
class Job:
    """What one set of processes does. losses: of the reference, None for the reference itself."""

    impl: str
    device: str
    world: int
    dtype: torch.dtype
    quick: bool
    losses: list[float] | None
    timed: bool = True


def rank_main(rank: int, job: Job, groups: list[list[Case]], port: int, pipe: Connection) -> None:
    """Sends (None, results) for each group, or (message, None) and stops."""
    try:
        place = join_ranks(rank, job, port)
        for group in groups:
            pipe.send((None, run_group(place, job, group)))
            release(place)
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send((f"{type(error).__name__}: {str(error).strip()[:300]}", None))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # the others may still need this rank
    os._exit(0)  # what is left of a failed collective must not keep the process


def join_ranks(rank: int, job: Job, port: int) -> Place:
    # DeepSpeed reads these.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world)}
    device = torch.device(job.device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.world))
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=job.world
    )
    return Place(device, rank, job.world, job.dtype, job.quick)


def run_group(place: Place, job: Job, group: list[Case]) -> list[dict[str, Any]]:
    """Results by case, of this rank: milliseconds, bytes; and the losses of the check."""
    shape = group[0].shape(place)
    data = Data(place, shape)
    results: list[dict[str, Any]] = [{} for _ in group]
    ours = job.impl.startswith("dynzero")
    if ours:
        alone = bare(place, group[0])
        for case, result in zip(group, results, strict=True):
            result["bare_ms"] = Clock(place).run(alone, case, data)["iteration_ms"]
        del alone
        release(place)

    before = allocated(place)
    trainer = impls_of(place.world)[job.impl].build(place, group[0])
    if group[0].mode == "all":
        results[0]["losses"] = check(place, job, trainer, group[0], data)
    if not job.timed:
        return results
    for case, result in zip(group, results, strict=True):
        result |= Clock(place).run(trainer, case, data)
        if place.device.type == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    if ours and place.world > 1:
        with without_wire(trainer.optimizer):
            for case, result in zip(group, results, strict=True):
                result["no_wire_ms"] = Clock(place).run(trainer, case, data)["iteration_ms"]
        # A skipped step costs less than one that is made.
        if trainer.optimizer.counters["skipped"]:
            raise RuntimeError("a step overflowed, so that it cannot be timed")
    return results


def check(place: Place, job: Job, trainer: Trainer, case: Case, data: Data) -> list[float]:
    """Losses of the first steps, on one batch, against the reference's."""
    losses = []
    for _ in range(CHECK_STEPS):
        losses.append(trainer.backward((*data.batch(0), case.heads(0))).float())
        trainer.step()
    total = torch.stack(losses)
    dist.all_reduce(total)
    mean: list[float] = (total / place.world).tolist()
    wanted = job.losses or mean
    fall = wanted[0] - wanted[-1]
    if not fall > 0.1:
        raise RuntimeError(f"the loss does not fall in {CHECK_STEPS} steps, nothing timed: {mean}")
    if not max(abs(a - b) for a, b in zip(mean, wanted, strict=True)) <= TOLERANCE * fall:
        raise RuntimeError(f"losses differ from the reference's, nothing timed: {mean}, {wanted}")
    return mean


class Clock:
    """Times by events on the GPU's current stream (which waits for whatever runs beside it)."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.place.device.type == "cpu":
            self.marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)

    def between(self, start: int, stop: int) -> float:
        """Milliseconds."""
        a, b = self.marks[start], self.marks[stop]
        if self.place.device.type == "cpu":
            return float(b - a) * 1e3
        return float(a.elapsed_time(b))

    def run(self, trainer: Trainer, case: Case, data: Data) -> dict[str, Any]:
        """Medians over iterations; nothing waits for the GPU in between."""
        iterations = QUICK_ITERATIONS if self.place.quick else ITERATIONS
        for i in range(QUICK_WARM_UP if self.place.quick else WARM_UP):
            trainer.backward((*data.batch(i), case.heads(i)))
            trainer.step()
        dist.barrier()
        synchronize(self.place)
        if self.place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.marks = []
        for i in range(iterations):
            self.mark()
            trainer.backward((*data.batch(i), case.heads(i)))
            self.mark()
            trainer.step()
        self.mark()
        synchronize(self.place)
        starts = range(0, 2 * iterations, 2)

        def median(first: int, last: int) -> float:
            return statistics.median(self.between(i + first, i + last) for i in starts)

        return {
            "iteration_ms": median(0, 2),
            "forward_backward_ms": median(0, 1),
            "step_ms": median(1, 2),
        }


def synchronize(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def allocated(place: Place) -> int:
    return torch.cuda.memory_allocated() if place.device.type == "cuda" else 0


def release(place: Place) -> None:
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
