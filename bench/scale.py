"""`python -m bench scale`: what a step costs on the host, by the numbers of ranks and parameters.

For `plan` the ranks are simulated: their messages are made here and handled as if they had come. So
is the second rank of `step` and `hooks` (one_of_two.py): collectives and waiting do not count.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import torch

import dynzero
from dynzero.layout import build_layout
from dynzero.plan import Plan, indices_of, make_plan, union
from dynzero.transports.control import (
    MESSAGE_BYTES,
    Action,
    Agreed,
    Message,
    first_difference,
    unpack_all,
)

from . import exchange, results
from .one_of_two import one_of_two
from .timer import Call, Samples, Timer

RANKS = (8, 64, 1024)
PARAMS = (100, 1_000, 10_000, 100_000)
ACTIVE = 0.01
NUMEL = 1000  # of each simulated parameter
# Elements of the whole model, the same for every number of parameters.
STEP_NUMEL = {"cuda": 1 << 28, "cpu": 1 << 24}
QUICK_STEP_NUMEL = {"cuda": 1 << 24, "cpu": 1 << 20}
OPTIONS = dict(lr=1e-3, max_grad_norm=1.0)


class Exchanged:
    """What has arrived when `world` ranks have said which of `params` parameters they use."""

    def __init__(self, world: int, params: int) -> None:
        meta = [torch.nn.Parameter(torch.empty(NUMEL, device="meta")) for _ in range(params)]
        names = [f"p{i}" for i in range(params)]
        self.world, self.names = world, list(range(world))
        self.layout = build_layout(
            meta, names, [0] * params, world=world, rank=0, wire_dtype=torch.bfloat16
        )
        message = Message(0, 0, 0, Action.STEP, 0, 0, 0, 0, 0, (0.0, 0.0))
        row = torch.frombuffer(bytearray(message.pack()), dtype=torch.uint8)
        self.all = torch.zeros(world, MESSAGE_BYTES + self.layout.bit_bytes, dtype=torch.uint8)
        self.all[:, :MESSAGE_BYTES] = row
        draw = random.Random(0)
        for i in draw.sample(range(params), max(1, int(ACTIVE * params))):
            for rank in draw.sample(range(world), max(1, world // 8)):
                self.all[rank, MESSAGE_BYTES + i // 8] |= 1 << (i % 8)

    def agree(self) -> torch.Tensor:
        """Read and compare the messages; the active set, uint8 bits."""
        agreed = Agreed(unpack_all(self.all), self.all[:, MESSAGE_BYTES:])
        assert first_difference(agreed.messages, self.names) is None
        return union(agreed.bits)

    def plan(self) -> Plan:
        """A plan with its tables, for a set that has not been seen before."""
        active = indices_of(self.agree(), self.layout.size)
        divisor = torch.full_like(active, self.world)
        return make_plan(self.layout, active, divisor, bucket_bytes=float(64 << 20))


def run(device: torch.device, *, quick: bool) -> list[dict[str, Any]]:
    timer = Timer(device, 0.2 if quick else 1.0, most=20)
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # plans: what one core does
    cases = [(world, params) for world in RANKS for params in (PARAMS[:3] if quick else PARAMS)]
    for world, params in results.progress(cases, "plan"):
        rows.append(plan_row(Exchanged(world, params), timer))
    torch.set_num_threads(threads)
    steps = [(world, params) for world in (1, 2) for params in (PARAMS[:3] if quick else PARAMS)]
    for world, params in results.progress(steps, "step"):
        rows.append(step_row(world, params, device, timer, quick))
    for params in results.progress(PARAMS[:3], "hooks"):
        rows.append(hooks_row(params, device, timer))
    for (way, params), samples in exchange.measure(quick=quick).items():
        case = {"world": exchange.WORLD, "params": params, "active": 1.0, "over": way}
        size = exchange.WORLD * (MESSAGE_BYTES + params // 8)
        rows.append(row_of("exchange", case, samples, size))
    for row in rows:
        case = row["case"]
        results.say(
            f"{title(row):23} {case['params']:7} parameters, {case['world']:5} ranks: "
            f"{row['ms']:9.3f} ms, host {row['host_us']:9.0f} us"
        )
    return rows


def plan_row(exchanged: Exchanged, timer: Timer) -> dict[str, Any]:
    """Host time from arrived messages to a new plan; `bytes` that the exchange holds."""
    samples = timer.measure({"plan": Call(exchanged.plan)})["plan"]
    case = {"world": exchanged.world, "params": exchanged.layout.size, "active": ACTIVE}
    return row_of("plan", case, samples, exchanged.all.nbytes)


def step_row(
    world: int, params: int, device: torch.device, timer: Timer, quick: bool
) -> dict[str, Any]:
    """A whole step with this many parameters, of the same bytes altogether."""
    numel = (QUICK_STEP_NUMEL if quick else STEP_NUMEL)[device.type] // params
    model = [torch.nn.Parameter(torch.randn(numel, device=device)) for _ in range(params)]
    for p in model:
        p.grad = torch.randn_like(p)
    with one_of_two() if world == 2 else nullcontext():
        # What does not arrive may be anything, also not finite.
        opt = dynzero.ZeroOptimizer(model, torch.optim.AdamW, check_finite=world == 1, **OPTIONS)
    opt.step()
    samples = timer.measure({"step": Call(opt.step)})["step"]
    assert opt.last_step is not None and opt.last_step.stepped
    case = {"world": world, "params": params, "active": 1.0, "elements": numel * params}
    return row_of("step", case, samples, None)


def hooks_row(params: int, device: torch.device, timer: Timer) -> dict[str, Any]:
    """Backward through small parameters: what stage 2 adds to it on the host, all buckets sent."""
    models = [
        [torch.nn.Parameter(torch.randn(8, device=device)) for _ in range(params)] for _ in range(2)
    ]
    with one_of_two():
        opt = dynzero.ZeroOptimizer(models[0], torch.optim.SGD, stage=2, check_finite=False, lr=0.0)

    def after_step() -> None:
        opt.step()  # without it zero_grad() would give the window up, which costs more
        opt.zero_grad()
        for p in models[1]:
            p.grad = None

    losses = [torch.cat(model).square().sum() for model in models]
    calls = {
        name: Call(lambda loss=loss: loss.backward(retain_graph=True), before=after_step)
        for name, loss in zip(("hooks", "bare"), losses, strict=True)
    }
    samples = timer.measure(calls)
    hooked, bare = samples["hooks"], samples["bare"]
    row = row_of("hooks", {"world": 2, "params": params, "active": 1.0}, hooked, None)
    row["added_us"] = hooked.host_us - bare.host_us
    return row


def row_of(
    op: str, case: dict[str, Any], samples: Samples, num_bytes: int | None
) -> dict[str, Any]:
    assert samples.error is None, samples.error
    return {
        "bench": "scale", "op": op, "case": case, "ms": samples.ms, "ms_min": samples.ms_min,
        "ms_max": samples.ms_max, "bytes": num_bytes, "whole_ms": samples.whole_ms,
        "host_us": samples.host_us, "repeats": len(samples.device), "baselines": {},
    }  # fmt: skip


def title(row: dict[str, Any]) -> str:
    over = row["case"].get("over")
    return row["op"] if over is None else f"{row['op']} ({over})"


def scale_table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "`plan`: from arrived messages to buckets and tables, one core, 1 % active; `step`: all of",
        "`step()`, the same bytes in more and more parameters, with two ranks but for wire and",
        "waiting; `hooks`: backward with stage 2, and what it takes longer than without;",
        "`exchange`: from one rank's message to everybody's, two processes on this host that do",
        "nothing else.",
        "",
        "| | ranks | parameters | ms | host us | added us | MB exchanged |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        case = row["case"]
        megabytes = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.2f}"
        added = f"{row['added_us']:.0f}" if "added_us" in row else ""
        lines.append(
            f"| {title(row)} | {case['world']} | {case['params']} | {row['ms']:.3f} "
            f"| {row['host_us']:.0f} | {added} | {megabytes} |"
        )
    return [*lines, ""]


def step_lines(axes: Any, rows: list[dict[str, Any]], machine: dict[str, Any]) -> bool:
    """Host time and whole time of a step against the number of parameters."""
    some = [row for row in rows if row["bench"] == "scale" and row["op"] == "step"]
    if len(some) < 2:
        return False
    slopes = []
    for world in sorted({row["case"]["world"] for row in some}):
        line = [row for row in some if row["case"]["world"] == world]
        params = [row["case"]["params"] for row in line]
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        axes.loglog(params, [row["whole_ms"] for row in line], "o-", label=f"whole step, {ranks}")
        axes.loglog(params, [row["host_us"] / 1e3 for row in line], "s--", label=f"host, {ranks}")
        slope = (line[-1]["host_us"] - line[0]["host_us"]) / (params[-1] - params[0])
        slopes.append(f"{slope:.2f}")
    elements = some[0]["case"]["elements"] / 1e6
    axes.set_title(f"{elements:.0f} M elements: {' and '.join(slopes)} us a parameter")
    axes.set_xlabel("parameters")
    axes.set_ylabel("ms")
    axes.legend()
    return True
