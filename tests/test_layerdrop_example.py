"""examples/layerdrop_transformer.py on two ranks, against its oracle, run again in this process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
STEPS, LR, SCALE = 12, 3e-3, 2.0**19


@pytest.mark.world
def test_layerdrop_transformer_ends_at_the_loss_of_torch_optim(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from layerdrop_transformer import DROP_ODDS, NUM_MICRO, Data, train_reference

    command = "-m torch.distributed.run --standalone --nproc-per-node=2 --local-ranks-filter=0"
    script = f"examples/layerdrop_transformer.py --steps {STEPS} --lr {LR} --loss-scale {SCALE}"
    files = ["--json", str(tmp_path / "runs.json"), "--output", str(tmp_path / "runs.png")]
    done = subprocess.run(
        [sys.executable, *command.split(), *script.split(), *files],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs.png").stat().st_size > 0
    content = json.loads((tmp_path / "runs.json").read_text())

    data = Data(torch.device("cpu"))
    used = [
        [data.batch(s, r, m)[1] for r in (0, 1)] for s in range(STEPS) for m in range(NUM_MICRO)
    ]
    assert any(a != b for a, b in used), "LayerDrop is to differ between the ranks"
    absent = [
        not any(use[block] for pair in used[i : i + NUM_MICRO] for use in pair)
        for i in range(0, len(used), NUM_MICRO)
        for block in range(len(DROP_ODDS))
    ]
    assert any(absent), "some block is to be without a gradient on every rank"

    expected = train_reference(argparse.Namespace(steps=STEPS, lr=LR), data, world=2).losses
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        row, losses = content["rows"][f"{name}, dynzero"], content["losses"][f"{name}, dynzero"]
        # No more than one rounding of the loss itself would do; training does ten times that.
        tolerance = torch.finfo(dtype).eps * expected[0]
        assert expected[0] - expected[-1] > 10 * tolerance
        assert losses == pytest.approx(expected, abs=tolerance)
        assert row["final loss"] == pytest.approx(sum(expected) / STEPS, abs=tolerance)
        assert 0 < row["difference"] <= row["bound"] < tolerance
    assert content["rows"]["bf16, dynzero"]["skipped"] == 0
    row = content["rows"]["fp16, dynzero"]
    assert row["skipped"] > 0 and row["scale at end"] == SCALE / 2 ** row["skipped"]
