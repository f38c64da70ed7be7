"""The one timer: GPU time by events, whole time and host time by clock, all candidates in turn.

Candidates of one row take turns, so that a drift of the machine (clocks, heat, other work on the
cores) hits all of them. Before each run the last-level cache is filled with something else, by
reading: writes would still be on their way to memory while the candidate runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Work = Callable[[], object]
CPU_CACHE_BYTES = 64 << 20
# Rounded up: sleeping a little longer costs nothing.
SLEEP_CYCLES_PER_SECOND = 2.5e9
SLEEP_SECONDS = (50e-6, 20e-3)


@dataclass(frozen=True)
class Call:
    """One candidate. `run` is all of its work, on host and device; `kernel` only the device's.

    before: done untimed ahead of every run. bytes: what it has to move, if that differs from the
    row's. note: what a reader of the row has to know about this candidate.
    """

    run: Work
    kernel: Work | None = None
    before: Work | None = None
    bytes: int | None = None
    note: str | None = None


@dataclass
class Samples:
    """Seconds of each run."""

    device: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    spent: float = 0.0
    error: str | None = None
    note: str | None = None

    @property
    def ms(self) -> float:
        return statistics.median(self.device) * 1e3

    @property
    def ms_min(self) -> float:
        return min(self.device) * 1e3

    @property
    def ms_max(self) -> float:
        return max(self.device) * 1e3

    @property
    def whole_ms(self) -> float:
        return statistics.median(self.whole) * 1e3

    @property
    def host_us(self) -> float:
        return statistics.median(self.host) * 1e6


class Timer:
    """seconds: wall time per candidate and row. repeats: instead of it, the same on all ranks."""

    def __init__(
        self, device: torch.device, seconds: float, *, most: int = 50, repeats: int | None = None
    ) -> None:
        self.device, self.seconds, self.most, self.repeats = device, seconds, most, repeats
        cache = CPU_CACHE_BYTES
        if device.type == "cuda":
            cache = 4 * torch.cuda.get_device_properties(device).L2_cache_size
        self.other = torch.randn(cache // 4, device=device)

    def measure(self, calls: dict[str, Call]) -> dict[str, Samples]:
        """Samples by name; one that raises gets its `error` and takes no further part."""
        samples = {name: Samples(note=call.note) for name, call in calls.items()}
        live = dict(calls)
        for name in calls:
            self._guarded(live, samples, name, self._warm_up)
        while live:
            for name in list(live):
                self._guarded(live, samples, name, self._once)
                if name in live and self._enough(samples[name]):
                    del live[name]
        return samples

    def _guarded(
        self,
        live: dict[str, Call],
        samples: dict[str, Samples],
        name: str,
        work: Callable[[Call, Samples], None],
    ) -> None:
        start = time.perf_counter()
        try:
            work(live[name], samples[name])
        except Exception as error:
            samples[name].error = f"{type(error).__name__}: {str(error).strip()[:300]}"
            del live[name]
        samples[name].spent += time.perf_counter() - start

    def _enough(self, samples: Samples) -> bool:
        done = len(samples.device)
        if self.repeats is not None:
            return done >= self.repeats
        return done >= self.most or (samples.spent > self.seconds and done >= 2)

    def _warm_up(self, call: Call, samples: Samples) -> None:
        for work in (call.run, call.kernel or call.run):
            if call.before is not None:
                call.before()
            work()
            self._wait()
        # Compilation and first allocations are not part of the budget.
        samples.spent = 0.0

    def _once(self, call: Call, samples: Samples) -> None:
        self._ready(call)
        start = time.perf_counter()
        call.run()
        returned = time.perf_counter()
        self._wait()
        samples.whole.append(time.perf_counter() - start)
        samples.host.append(returned - start)
        if self.device.type == "cuda":
            samples.device.append(self._device_seconds(call, samples.host[-1]))
        elif call.kernel is None:
            samples.device.append(samples.whole[-1])
        else:
            self._ready(call)
            start = time.perf_counter()
            call.kernel()
            samples.device.append(time.perf_counter() - start)

    def _device_seconds(self, call: Call, host: float) -> float:
        """Between two events, with the GPU kept busy until the host has issued everything."""
        self._ready(call)
        shortest, longest = SLEEP_SECONDS
        sleep = min(max(1.5 * host, shortest), longest)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(sleep * SLEEP_CYCLES_PER_SECOND))
        begin.record()
        (call.kernel or call.run)()
        end.record()
        self._wait()
        return begin.elapsed_time(end) / 1e3

    def _ready(self, call: Call) -> None:
        if call.before is not None:
            call.before()
        self.other.sum()
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def profile_launches(call: Call, device: torch.device) -> dict[str, list[float]]:
    """Microseconds of everything that one run puts on the GPU, by name, in the profiler's words.

    To be used after all timing: the profiler leaves its hooks in the driver.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return {}
    if call.before is not None:
        call.before()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call.run()
        torch.cuda.synchronize(device)
    launches: dict[str, list[float]] = {}
    for event in profiler.events() or []:
        # record_function ranges are mirrored on the device; unlike kernels, copies and fills they
        # are named without parentheses.
        if event.device_type == DeviceType.CUDA and "(" in event.name:
            launches.setdefault(short_name(event.name), []).append(event.time_range.elapsed_us())
    return launches


def short_name(kernel: str) -> str:
    """A kernel's name without return type, namespaces, template and function arguments."""
    plain = kernel.replace("(anonymous namespace)::", "")
    return plain.split("<")[0].split("(")[0].split("::")[-1].strip().removeprefix("void ")
