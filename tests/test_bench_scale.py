"""`python -m bench scale`: simulated ranks, and the shape of its rows."""

from __future__ import annotations

import json

import torch

from bench.__main__ import main
from bench.report import write_report
from bench.scale import ACTIVE, Exchanged
from dynzero.plan import counts_of


def test_a_thousand_ranks_exchange_less_than_20_mb():
    exchanged = Exchanged(1024, 100_000)
    assert exchanged.all.nbytes < 20e6
    plan = exchanged.plan()
    assert len(plan.indices) == ACTIVE * 100_000
    bits = exchanged.all[:, -exchanged.layout.bit_bytes :]
    users = counts_of(bits, torch.arange(exchanged.layout.size))
    assert sorted(plan.indices) == users.nonzero().flatten().tolist()
    assert set(users.tolist()) == {0, 128}


def test_bench_scale_writes_rows_and_a_plot(tmp_path):
    path = tmp_path / "cpu-scale-2026-01-01.json"
    assert main(["scale", "--quick", "--device", "cpu", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["bench"] for row in rows} == {"scale"}
    steps = [row["case"] for row in rows if row["op"] == "step"]
    sizes = [(case["world"], case["params"]) for case in steps]
    assert sizes == [(world, n) for world in (1, 2) for n in (100, 1000, 10_000)]
    hooks = [row for row in rows if row["op"] == "hooks"]
    assert [row["case"]["params"] for row in hooks] == [100, 1000, 10_000]
    assert all(row["added_us"] < row["host_us"] for row in hooks)
    assert all(row["ms"] > 0 and row["host_us"] > 0 for row in rows)
    ways = {(row["case"]["over"], row["case"]["params"]) for row in rows if row["op"] == "exchange"}
    assert ways == {(way, n) for way in ("shared memory", "Gloo") for n in (1000, 100_000)}
    write_report(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| plan | 1024 | 10000 |" in page
    assert "| exchange (shared memory) | 2 | 100000 |" in page
    assert (tmp_path / "cpu-scale-2026-01-01-host.png").exists()
