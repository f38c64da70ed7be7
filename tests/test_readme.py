"""The Python blocks of README.md run as they stand, in order, as one script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def python_blocks() -> str:
    """All blocks as one module, each on its own line of the README so that errors point there."""
    text = README.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    lines = [""] * len(text.splitlines())
    for block in blocks:
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


def test_readme_python_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    code = python_blocks()
    assert "opt.full_state_dict()" in code
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})


def test_readme_training_loop_is_short() -> None:
    first = python_blocks().split("import torch, dynzero")[1].split("opt.zero_grad()")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 12
