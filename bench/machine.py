"""The machine that a run was made on: device, versions, commit, and how much memory is free."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


class BenchError(Exception):
    """Something that the user can change; printed without a traceback."""


def choose_device(wanted: str | None) -> torch.device:
    """The device named on the command line; without a name the GPU if there is one."""
    import dynzero

    built = bool(dynzero.build_info()["cuda"])
    if wanted is None:
        wanted = "cuda" if built and torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BenchError(
            f"--device cuda: no GPU is visible to torch {torch.__version__}; "
            "use --device cpu, or run where `nvidia-smi` lists a GPU"
        )
    if not built:
        raise BenchError(
            "--device cuda: this dynzero was built for the CPU only; rebuild it where nvcc is on "
            "the PATH and torch is a CUDA build"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """What every result file says about where it comes from."""
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "gpus": int(os.environ.get("WORLD_SIZE", "1")) if cuda else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version() if cuda else None,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def driver_version() -> str | None:
    answer = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def commit() -> str | None:
    """The checkout's commit, with +dirty where tracked files differ from it."""
    if os.environ.get("DYNZERO_COMMIT"):
        return os.environ["DYNZERO_COMMIT"]
    head = output_of("git", "rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if head is None:
        return None
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no")
    return head + "+dirty" if changed else head


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} processors" if names else platform.machine()


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors may take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lack_of_memory(what: str, needed: int, device: torch.device) -> str | None:
    """A sentence if `what` does not fit on the device."""
    free = free_bytes(device)
    if needed <= free:
        return None
    return f"{what} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on {device}"
