"""What dynzero has to reach, as functions of the rows: the report says which bars are met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """`value` of every row that `applies` must be at least `bar` (at most, if `at_most`)."""

    text: str
    applies: Callable[[Row], bool]
    value: Callable[[Row], float | None]
    bar: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.bar if self.at_most else value >= self.bar


@dataclass(frozen=True)
class Verdict:
    target: Target
    worst: float
    row: Row

    @property
    def met(self) -> bool:
        return self.target.met(self.worst)


def pack(row: Row, *, source: str | None = None, wire: str | None = None) -> bool:
    """A plain pack row: everything present, aligned, one rank."""
    case = row["case"]
    return (
        row.get("op") == "pack_grads"
        and case["active"] == 1
        and case["aligned"]
        and case["world"] == 1
        and source in (None, case["source"])
        and wire in (None, case["wire"])
    )


def same_half(row: Row) -> bool:
    case = row["case"]
    return pack(row) and case["source"] == case["wire"] != "fp32"


def op(row: Row, name: str) -> bool:
    return row.get("op") == name and row["case"]["active"] == 1


def of_ceiling(row: Row) -> float | None:
    return row["of_ceiling"]


def against(name: str, key: str = "whole_speedup") -> Callable[[Row], float | None]:
    """How many times faster than a baseline; None where it did not run."""
    return lambda row: row["baselines"].get(name, {}).get(key)


def of_fused_adamw(row: Row) -> float | None:
    speed = row["baselines"].get("fused_adamw_only", {}).get("gb_per_s")
    return None if speed is None else row["gb_per_s"] / speed


def host_over_budget(row: Row) -> float | None:
    """Host microseconds of a bucket relative to 25 us + 40 ns per tensor."""
    case = row["case"]
    return row["host_us"] / (25 * case["buckets"] + 0.040 * case["tensors"])


def step_over_budget(row: Row) -> float | None:
    """Host microseconds of step() relative to 300 us + 0.1 us per parameter."""
    return row["host_us"] / (300 + 0.1 * row["case"]["params"])


def scale(row: Row, op: str) -> bool:
    return row.get("bench") == "scale" and row["op"] == op


def big(row: Row) -> bool:
    return bool(row["case"]["elements"] >= 200e6)


def step(row: Row, dtype: str) -> bool:
    case = row["case"]
    return bool(row.get("impl") == "dynzero" and case["dtype"] == dtype and case["world"] == 1)


def train(row: Row, mode: str, stage: int | None = None, *, alone: bool = False) -> bool:
    """A row of dynzero in `python -m bench train`; alone: on one GPU, else on several.

    Those of gather="lazy" are for comparison: it trades memory for time.
    """
    case = row["case"]
    return (
        row.get("bench") == "train"
        and row["impl"] in ("dynzero_stage1", "dynzero_stage2")
        and "error" not in row
        and case["mode"] == mode
        and stage in (None, case["stage"])
        and (case["world"] == 1) == alone
    )


def deepspeed(row: Row) -> float | None:
    return against(f"deepspeed_stage{row['case']['stage']}", "speedup")(row)


def of_peers_peak(row: Row) -> float | None:
    """Peak memory over that of the leanest peer of the same stage."""
    peers = [
        entry["peak_gib"]
        for entry in row["baselines"].values()
        if entry.get("stage") == row["case"]["stage"] and entry.get("peak_gib")
    ]
    return row["peak_gib"] / min(peers) if peers and row["peak_gib"] else None


GPU = [
    Target("pack_grads, 16-bit to the same, 400 MB and more: of the copy",
           lambda r: same_half(r) and big(r) and r["case"]["tensors"] <= 580, of_ceiling, 0.96),
    Target("pack_grads, 25 M elements cold: of the copy",
           lambda r: same_half(r) and r["case"]["elements"] <= 26e6, of_ceiling, 0.80),
    Target("pack_grads, 4096 small tensors: of the copy",
           lambda r: same_half(r) and r["case"]["small"], of_ceiling, 0.85),
    Target("pack_grads, fp32 to fp16: of the copy",
           lambda r: pack(r, source="fp32", wire="fp16"), of_ceiling, 0.96),
    Target("pack_grads, fp16 to fp32: of the copy",
           lambda r: pack(r, source="fp16", wire="fp32"), of_ceiling, 0.82),
    Target("pack_grads, half absent: of the copy, by the bytes that move",
           lambda r: r.get("op") == "pack_grads" and r["case"]["active"] == 0.5 and big(r),
           of_ceiling, 0.96 / 1.05),
    # torch has no check for bf16: that row's peer does less.
    Target("pack_grads, fp16, 1.5 G elements: times faster than foreach, host included",
           lambda r: same_half(r) and r["case"]["source"] == "fp16"
           and r["case"]["elements"] > 1e9, against("foreach"), 3.5),
    Target("pack_grads, 4096 small tensors: times faster than foreach, host included",
           lambda r: same_half(r) and r["case"]["small"], against("foreach"), 4.0),
    Target("pack_grads, 580 and 4096 tensors: times faster than one op per parameter",
           lambda r: same_half(r) and r["case"]["tensors"] in (580, 4096),
           against("per_parameter"), 20.0),
    Target("check_shard, 400 MB and more: of the read bandwidth",
           lambda r: op(r, "check_shard") and big(r), of_ceiling, 0.95),
    Target("update_shard, 16-bit: of the bandwidth of torch's fused AdamW on its own 28 B",
           lambda r: op(r, "update_shard") and big(r) and r["case"]["source"] == r["case"]["wire"]
           and r["case"]["wire"] != "fp32", of_fused_adamw, 0.98),
    Target("host time per bucket, in 25 us + 40 ns per tensor",
           lambda r: r.get("op") == "reduce_buckets", host_over_budget, 1.0, at_most=True),
    Target("step(), without collectives: host time, in 0.3 ms + 0.1 us per parameter",
           lambda r: scale(r, "step"), step_over_budget, 1.0, at_most=True),
    Target("exchange of presence between two ranks of one host: ms",
           lambda r: scale(r, "exchange"), lambda r: r["ms"], 0.25, at_most=True),
    Target("hooks, 10,000 parameters: host us that each adds to backward, buckets sent",
           lambda r: scale(r, "hooks") and r["case"]["params"] == 10_000,
           lambda r: r["added_us"] / r["case"]["params"], 1.0, at_most=True),
    Target("step, fp16: times faster than torch AMP + clip + fused AdamW",
           lambda r: step(r, "fp16"), against("torch_amp_fused"), 1.6),
    Target("step, fp16: times faster than DeepSpeed stage 1",
           lambda r: step(r, "fp16"), against("deepspeed_stage1"), 6.0),
    Target("training, all heads, stage 2: iterations times faster than DeepSpeed's",
           lambda r: train(r, "all", 2), deepspeed, 4.0),
    Target("training, all heads, stage 2: iterations times faster than FSDP2's",
           lambda r: train(r, "all", 2), against("fsdp2", "speedup"), 4.0),
    Target("training, all heads, stage 2: iterations times faster than DDP + ZeroRedundancy",
           lambda r: train(r, "all", 2), against("ddp_zero_redundancy", "speedup"), 2.0),
    Target("training, one head in turn: iterations times faster than DeepSpeed's",
           lambda r: train(r, "turn"), deepspeed, 4.0),
    Target("training, one head in turn: iteration over its share of the one with all heads",
           lambda r: train(r, "turn"), lambda r: r.get("per_active"), 1.1, at_most=True),
    Target("training, 10 % active: step and exposed communication over those with all active",
           lambda r: train(r, "share") and r["case"]["active"] == 0.1, lambda r: r.get("of_full"),
           0.15, at_most=True),
    Target("training, one GPU, fp16: iterations times faster than DeepSpeed's",
           lambda r: train(r, "all", alone=True), deepspeed, 5.0),
    Target("training, one GPU, fp16: iterations times faster than AMP + fused AdamW",
           lambda r: train(r, "all", alone=True), against("amp_adamw", "speedup"), 1 / 0.6),
    Target("training: peak memory over the leanest peer's of the same stage",
           lambda r: any(train(r, m, alone=a) for m in ("all", "turn") for a in (True, False)),
           of_peers_peak, 1.0, at_most=True),
]  # fmt: skip
CPU = [
    Target("pack_grads, fp32, 200 M elements: of copy_",
           lambda r: pack(r, source="fp32", wire="fp32") and big(r), against("copy"), 0.85),
    Target("update_shard, fp32: times faster than torch's fused AdamW",
           lambda r: op(r, "update_shard") and r["case"]["source"] == "fp32" == r["case"]["wire"],
           against("fused_adamw_only"), 1.0),
    Target("update_shard, fp32: times faster than DeepSpeed's CPUAdam",
           lambda r: op(r, "update_shard") and r["case"]["source"] == "fp32" == r["case"]["wire"],
           against("deepspeed_adam_only"), 1.0),
    Target("step, fp32: times faster than clip_grad_norm_ + AdamW(fused=True)",
           lambda r: step(r, "fp32"), against("torch_amp_fused"), 1.0),
]  # fmt: skip


def verdicts(machine: Row, rows: list[Row]) -> list[Verdict]:
    """The worst row of each target that any row bears on."""
    result = []
    for target in CPU if machine["gpu"] is None else GPU:
        values = [(target.value(row), row) for row in rows if target.applies(row)]
        known = [(value, row) for value, row in values if value is not None]
        if known:
            pick = max if target.at_most else min
            worst, row = pick(known, key=lambda pair: pair[0])
            result.append(Verdict(target, worst, row))
    return result
