"""`python -m bench train`: shape of its rows, what becomes of ranks that fail, and its bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import train
from bench.__main__ import main
from bench.report import write_report
from bench.targets import verdicts
from bench.train_impls import impls_of
from bench.train_model import GROUPS, SHARES, Case, MultiTask, Place
from bench.train_rank import Job

ROOT = Path(__file__).parent.parent
NUMBERS = "iteration_ms", "forward_backward_ms", "step_ms", "bare_ms"


@pytest.mark.world
def test_bench_train_writes_rows_of_the_agreed_shape(tmp_path):
    path = tmp_path / "cpu-train-2026-01-01.json"
    command = "-m bench train --quick --device cpu --only dynzero_stage2,deepspeed_stage2 --output"
    done = subprocess.run(
        [sys.executable, *command.split(), str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    rows = [row for row in content["rows"] if row["impl"] == "dynzero_stage2"]
    cases = [(row["case"]["mode"], row["case"]["active"]) for row in rows]
    assert cases == [("all", 1.0), ("turn", 17 / 24), *(("share", share) for share in SHARES)]
    for row in rows:
        assert row["case"].items() >= {"world": 2, "stage": 2, "dtype": "bf16", "gpus": 0}.items()
        assert "error" not in row and all(row[name] > 0 for name in NUMBERS)
        assert row["beyond_bare_ms"] == pytest.approx(row["iteration_ms"] - row["bare_ms"])
        assert row["exposed_comm_ms"] is not None
        assert row["peak_gib"] is None  # a GPU's
    losses = rows[0]["check_losses"]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.1
    write_report(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page.count("| dynzero_stage2 |") == len(rows)
    assert (tmp_path / "cpu-train-2026-01-01-iterations.png").exists()


@pytest.mark.world
@pytest.mark.parametrize(
    ("impl", "losses", "limit", "words"),
    [
        ("ddp_adamw", None, 0.0, "failed: ranks [0, 1] not done within 0 s"),
        ("no such", None, 60.0, "failed: rank 0: KeyError: 'no such'; rank 1: KeyError"),
        ("dynzero_stage2", [2.6, 2.0, 1.5, 1.0, 0.5], 60.0, "losses differ from the reference's"),
    ],
)
def test_bench_train_says_why_an_implementation_has_no_times(
    monkeypatch, impl, losses, limit, words
):
    monkeypatch.setattr(train, "GROUPS", GROUPS[:1])
    job = Job(impl, "cpu", 2, torch.bfloat16, True, losses)
    ((case, result),) = train.run_impl(job, impls_of(2)["fsdp2"], limit)
    assert case.mode == "all"
    said = sorted(result["error"].removeprefix("failed: ").split("; "))
    assert words.removeprefix("failed: ") in "; ".join(said)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "cpu"), "error: --device cpu: the model is too large for it; add --quick"),
        (
            ("--device", "cpu", "--quick", "--gpus", "0"),
            "error: --gpus 0: expected at least 1",
        ),
        (
            ("--device", "cpu", "--quick", "--only", "ddp"),
            "error: --only ddp: with --gpus 2 expected ddp_adamw, dynzero_stage1,",
        ),
    ],
)
def test_bench_train_refuses(capsys, arguments, text):
    assert main(["train", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_bench_train_models_are_what_they_say():
    place = Place(torch.device("cpu"), 0, 2, torch.bfloat16, quick=False)
    for group in GROUPS:
        with torch.device("meta"):
            model = MultiTask(group[0].shape(place))
        total = sum(p.numel() for p in model.parameters())
        for case in group:
            assert len(set(case.heads(3))) == case.num_used
            used = (model.trunk, model.base, *(model.heads[k] for k in case.heads(3)))
            parts = [part for part in used if part is not None]
            active = sum(p.numel() for part in parts for p in part.parameters())
            assert active / total == pytest.approx(case.active, abs=1e-3)
        if group[0].mode == "all":
            assert round(total / 1e6) == 806


def fake_row(impl: str, case: Case, iteration: float, peak: float = 1.0) -> train.Row:
    place = Place(torch.device("cuda"), 0, 2, torch.bfloat16, quick=False)
    result = {"iteration_ms": iteration, "forward_backward_ms": 1.0, "step_ms": 1.0,
              "peak_bytes": peak * 2**30}  # fmt: skip
    if impl.startswith("dynzero"):
        result |= {"bare_ms": 2.0, "no_wire_ms": iteration - 0.5}
    return train.row_of(impl, impls_of(2)[impl], place, case, result)


def test_bench_train_compares_with_peers_and_with_everything_active():
    everything, one = Case("all"), Case("turn")
    rows = [
        fake_row("dynzero_stage2", everything, 12.0, peak=8.0),
        fake_row("dynzero_stage2", one, 10.2, peak=8.0),
        fake_row("dynzero_stage2", Case("share", 1.0), 22.0),
        fake_row("dynzero_stage2", Case("share", 0.1), 5.0),
        fake_row("fsdp2", everything, 36.0, peak=10.0),
        fake_row("ddp_zero_redundancy", everything, 30.0, peak=4.0),
    ]
    train.compare(rows)
    assert rows[0]["exposed_comm_ms"] == 0.5
    assert rows[0]["baselines"]["fsdp2"]["speedup"] == 3.0
    assert rows[1]["per_active"] == pytest.approx(10.2 / 12 * 24 / 17)
    assert rows[3]["of_full"] == pytest.approx(3 / 20)
    found = {v.target.text.removeprefix("training"): v for v in verdicts({"gpu": "H200"}, rows)}
    stage2 = ", all heads, stage 2: iterations times faster than "
    assert not found[f"{stage2}FSDP2's"].met
    assert found[f"{stage2}DDP + ZeroRedundancy"].worst == 2.5
    turn = ", one head in turn: iteration over its share of the one with all heads"
    assert found[turn].worst == rows[1]["per_active"] and not found[turn].met
    assert found[", 10 % active: step and exposed communication over those with all active"].met
    # Only stage 2 peers count: FSDP2 with 10, not ZeroRedundancyOptimizer with 4.
    assert found[": peak memory over the leanest peer's of the same stage"].worst == 0.8
