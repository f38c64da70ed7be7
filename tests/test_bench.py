"""The benchmark command line: shape of its results, its page, and its errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import machine, run_kernels
from bench.__main__ import main
from bench.cases import Case, kernel_cases, tensor_sizes
from bench.report import write_report
from bench.targets import verdicts

ROOT = Path(__file__).parent.parent
MACHINE = {"gpu", "gpus", "torch", "cuda", "driver", "commit", "date"}
ROW = {
    "bench", "op", "case", "ms", "ms_min", "ms_max", "bytes", "gb_per_s", "ceiling_gb_per_s",
    "of_ceiling", "host_us", "launches", "baselines",
}  # fmt: skip


def test_bench_writes_rows_of_the_agreed_shape(tmp_path):
    path = tmp_path / "cpu-kernels-2026-01-01.json"
    command = "-m bench kernels --quick --device cpu --filter pack_grads --output".split()
    done = subprocess.run(
        [sys.executable, *command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert set(content["machine"]) >= MACHINE
    assert len(content["rows"]) == len(kernel_cases("cpu", quick=True, wanted=["pack_grads"]))
    for row in content["rows"]:
        assert set(row) >= ROW and row["bench"] == "kernels" and row["op"] == "pack_grads"
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
        assert row["of_ceiling"] == pytest.approx(row["gb_per_s"] / row["ceiling_gb_per_s"])
        for entry in row["baselines"].values():
            assert entry["ms"] / row["ms"] == pytest.approx(entry["speedup"])
    write_report(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page.count("| pack_grads |") == len(content["rows"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("kernels", "--device", "cuda"), "error: --device cuda: no GPU is visible to torch"),
        (("kernels", "--filter", "pack"), "error: --filter pack: expected one of pack_grads,"),
        (("report", "--results", "nowhere"), "error: no JSON file in nowhere; run `python -m"),
    ],
)
def test_bench_says_why_it_cannot_run(monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(list(arguments)) == 2
    assert text in capsys.readouterr().err


def test_bench_says_how_much_memory_is_missing(monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda device: 10**9)
    cases = [Case("pack_grads", 10**9, 580), Case("pack_grads", 10**6, 20)]
    device = torch.device("cpu")
    words = r"pack_grads 1000 M in 580 fp16->fp16 needs 10\.5 GB, 1\.0 GB are free on cpu; --fit"
    with pytest.raises(machine.BenchError, match=words):
        run_kernels.fitting(cases, device, fit=False)
    assert run_kernels.fitting(cases, device, fit=True) == cases[1:]


def test_bench_refuses_to_time_a_wrong_result(monkeypatch):
    from bench import kernels

    op = kernels.PackGrads(Case("pack_grads", 1000, 3), torch.device("cpu"))
    op.check()
    monkeypatch.setattr(op, "kernel", lambda: None)
    with pytest.raises(machine.BenchError, match="bucket differs from the reference"):
        op.check()


def test_bench_cases_are_what_they_say():
    for numel, tensors in ((1000, 1), (25_000_000, 580), (25_000_000, 20000)):
        sizes = tensor_sizes(numel, tensors)
        assert len(sizes) == tensors and min(sizes) > 0 and sum(sizes) == numel
    assert all(256 <= size <= 65536 for size in tensor_sizes(0, 4096, small=True))
    for device in ("cpu", "cuda"):
        assert {case.op for case in kernel_cases(device, quick=False, wanted=[])} == {
            "pack_grads", "check_shard", "reduce_shard", "update_shard", "unpack_params",
            "reduce_buckets",
        }  # fmt: skip


def test_bench_targets_take_the_worst_row():
    case = Case("pack_grads", 400_000_000, 580).as_json(400_000_000)
    rows = [
        {"op": "pack_grads", "case": case, "of_ceiling": value, "host_us": 20.0, "baselines": {}}
        for value in (0.99, 0.95, 0.97)
    ]
    found = {v.target.text: v for v in verdicts({"gpu": "H200"}, rows)}
    copy = found["pack_grads, 16-bit to the same, 400 MB and more: of the copy"]
    assert copy.worst == 0.95 and not copy.met


def test_bench_counts_host_time_by_bucket():
    """16 buckets of 20 tensors: 25 us and 20 x 40 ns for each."""
    case = Case("reduce_buckets", 320_000, 320, world=2, buckets=16)
    row = {"op": case.op, "case": case.as_json(320_000), "host_us": 16 * (25 + 20 * 0.040)}
    (found,) = verdicts({"gpu": "H200"}, [row])
    assert found.target.text.startswith("host time per bucket") and found.worst == 1.0


def test_bench_times_no_wrong_sum(monkeypatch):
    from bench import buckets

    case = Case("reduce_buckets", 3200, 32, world=2, buckets=4)
    op = buckets.ReduceBuckets(case, torch.device("cpu"))
    op.check()
    right = list(op._sums())
    op.params[3][0] += 1
    monkeypatch.setattr(op, "_sums", lambda: iter(right))
    with pytest.raises(machine.BenchError, match="sum of the slots differs"):
        op.check()
