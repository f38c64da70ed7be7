"""`make sanitize`: the op tests on a GPU under compute-sanitizer's memcheck, racecheck, initcheck.

One process for each tool and test file, a few at a time. Every tensor is an allocation of its own
(no caching allocator), so that reading past its end, or before anything was written, is seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent
# Exit status of the sanitizer that no test run has.
FOUND = 86
# A graph is captured with memory from the caching allocator, which is switched off here.
SMALL = "cuda and not large_bucket and not every_16_bit and not captured"
# Tool -> its options, and which tests: racecheck follows every access to shared memory, of which
# the kernels make the same ones whatever dtype and pattern.
OURS = ["--kernel-name", "kns=dynzero"]
TOOLS = {
    "memcheck": (OURS, SMALL),
    "racecheck": (OURS, f"{SMALL} and not is_as_exact and not follows_the_reference"),
    # Without a filter: it has to see the writes of torch's kernels too.
    "initcheck": (["--check-api-memory-access", "no"], f"{SMALL} and not is_as_exact"),
}


def run(tool: str, file: Path) -> str | None:
    """What went wrong, if anything."""
    options, chosen = TOOLS[tool]
    command = [
        "compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "0",
        "--show-backtrace", "no", *options,
        sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", chosen, str(file),
    ]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    print(f"{tool} {file.name}: {passed[0] if passed else 'nothing ran'}", flush=True)
    # torch's own kernels may read what nobody wrote: of initcheck only what names ours counts.
    ours = re.search(r"(?m)^={9} .*\bdynzero::", done.stdout)
    good = (0, FOUND) if tool == "initcheck" else (0,)
    if passed is not None and ours is None and done.returncode in good:
        return None
    title = f"--- {tool} {file.name}, status {done.returncode}"
    return f"{title}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def main() -> int:
    files = sorted(TESTS.glob("test_ops_*.py"))
    jobs = [(tool, file) for tool in TOOLS for file in files]
    with ThreadPoolExecutor(max_workers=int(sys.argv[1])) as pool:
        failures = [text for text in pool.map(lambda job: run(*job), jobs) if text]
    print("\n".join(failures) or "memcheck, racecheck and initcheck found nothing")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
