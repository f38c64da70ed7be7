"""The compiled kernels: no spills, wide loads and stores, no float atomics, and that whoever starts
early waits first. Needs nvcc, no GPU.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "csrc").glob("*.cu"))
# 16-byte loads and stores that a kernel's code must hold at least: master and first state of an
# update, the packs of a tile elsewhere. A cast is 16 bytes wide on its wider side only.
WIDE_LOADS = {"check_shard": 4, "update_shard": 2, "unpack_params": 2}
WIDE_STORES = {"reduce_shard": 2, "update_shard": 2, "unpack_params": 2}
PACKS_OF_A_TILE = {"pack_grads": 2, "check_shard": 4}
# Threads of a block and blocks that a multiprocessor should hold, by kernel.
RESIDENT = {"pack_grads": 2048, "check_shard": 1536, "reduce_shard": 2048, "unpack_params": 2048}
REGISTERS = 65536  # of a multiprocessor
# Kernels after which a dependent launch starts early: none that writes parameters.
LETTING_GO = {"pack_grads", "reduce_shard", "check_shard", "fold_sums", "summarize_shard"}
READING_TABLES = set(
    "pack_grads reduce_shard check_shard fold_sums update_shard unpack_params".split()
)


class Kernel(NamedTuple):
    name: str  # mangled
    stem: str  # pack_grads
    usage: str  # registers and memory
    sass: str


def tools() -> str | None:
    """A PATH with what takes compiled kernels apart: of the CUDA toolkit, or from pip."""
    pip = Path(sysconfig.get_path("purelib"))
    folders = [str(f) for f in pip.glob("nvidia/*/bin")] + [os.environ.get("PATH", "")]
    path = os.pathsep.join(folders)
    found = all(shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm"))
    return path if found else None


def run(*command: str | Path, path: str | None = None) -> str:
    env = {**os.environ, "PATH": path} if path else None
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    """Those for sm_90 in the library that `make test` has built before it starts the tests."""
    path = tools()
    if shutil.which("nvcc") is None or path is None:
        pytest.skip("needs nvcc, cuobjdump and nvdisasm on the PATH")
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "kernels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers want it as well
        run("make", "kernels", f"PYTHON={sys.executable}")
    library = ROOT / "build" / "kernels" / "libdynzero_kernels.a"
    usage = run("cuobjdump", "-res-usage", "-arch", "sm_90", library, path=path)
    sass = run("cuobjdump", "-sass", "-arch", "sm_90", library, path=path)
    bodies = dict(re.findall(r"Function : (\w+)\n(.*?)(?=Function : |\Z)", sass, re.S))
    found = []
    for name, text in re.findall(r"Function (\w+):\n\s*(REG.*)", usage):
        stem = re.search(r"\d([a-z_]+)_kernel", name)
        assert stem, f"{name} is not called *_kernel"
        found.append(Kernel(name, stem[1], text, bodies[name]))
    return found


def same_types(kernel: Kernel) -> bool:
    """Both template types are one: the second is a letter again, or refers back to the first."""
    return bool(re.search(r"_kernelI(?:([a-z])\1|N3c10\d+\w+?ES\w*_)E", kernel.name))


def test_every_op_has_its_kernels(kernels: list[Kernel]) -> None:
    count = {stem: sum(k.stem == stem for k in kernels) for stem in {k.stem for k in kernels}}
    assert count == {
        "pack_grads": 10,  # {f16, bf16, f32} to {f16, bf16, f32}, f64 to f64
        "reduce_shard": 4,
        "check_shard": 4,
        "fold_sums": 1,
        "summarize_shard": 1,
        "begin_step": 1,
        "update_shard": 18,  # (gradient, parameter) types x optimizers
        "unpack_params": 3,
    }


def test_no_spills(kernels: list[Kernel]) -> None:
    kept = [k.name for k in kernels if re.search(r"STACK:0 .*LOCAL:0 ", k.usage) is None]
    assert kept == []


def test_enough_threads_fit(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        used = re.search(r"REG:(\d+)", kernel.usage)
        assert used, kernel.usage
        # Registers are given out by 8 a thread.
        fit = REGISTERS // (-(-int(used[1]) // 8) * 8)
        assert fit >= RESIDENT.get(kernel.stem, 512), f"{kernel.name}: {used[0]}"


def test_no_local_memory(kernels: list[Kernel]) -> None:
    assert [k.name for k in kernels if re.search(r"\b(LDL|STL)\b", k.sass)] == []


def test_no_float_atomics(kernels: list[Kernel]) -> None:
    float_atomic = r"\b(ATOMG?|RED|ATOMS)\.\S*(F16|BF16|F32|F64)"
    assert [k.name for k in kernels if re.search(float_atomic, k.sass)] == []


def test_loads_and_stores_are_16_bytes_wide(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        loads = len(re.findall(r"\bLDG\.E\S*\.128", kernel.sass))
        stores = len(re.findall(r"\bSTG\.E\S*\.128", kernel.sass))
        found = f"{kernel.name}: {loads} wide loads, {stores} wide stores"
        assert loads >= WIDE_LOADS.get(kernel.stem, 0), found
        assert stores >= WIDE_STORES.get(kernel.stem, 0), found
        if kernel.stem == "pack_grads":
            assert max(loads, stores) >= 2, found
            assert min(loads, stores) >= 2 or not same_types(kernel), found


def test_packs_of_a_tile_are_loaded_together(kernels: list[Kernel]) -> None:
    """All loads of a tile stand in the code before anything waits for the first of them."""
    for kernel in kernels:
        if kernel.stem not in PACKS_OF_A_TILE:
            continue
        lines = kernel.sass.splitlines()
        wide = [
            i
            for i, line in enumerate(lines)
            if re.search(r"LDG\.E\.(NA\.)?(64|128)\.CONSTANT", line)
        ]
        between = "\n".join(lines[wide[0] : wide[PACKS_OF_A_TILE[kernel.stem] - 1] + 1])
        assert not re.search(r"\b(BRA|CALL|FFMA|DFMA|STG)\b", between), f"{kernel.name}:\n{between}"


def launched_dependent() -> set[str]:
    return {
        name
        for source in SOURCES
        for name in re.findall(r"launch_dependent\((\w+)_kernel", source.read_text())
    }


def test_who_is_launched_early_waits_before_any_access(kernels: list[Kernel]) -> None:
    """Note [Dependent launches]: ACQBULK is the wait, PREEXIT lets the next kernel start."""
    access = r"\b(LD|LDG|ST|STG|ATOM|ATOMG|RED|LDGSTS)\.E"
    early = launched_dependent()
    assert {k.stem for k in kernels if "ACQBULK" in k.sass} == early != set()
    for kernel in kernels:
        if kernel.stem in early:
            before = kernel.sass.split("ACQBULK")[0]
            assert not re.search(rf"{access}|\b(BRA|EXIT|CALL)\b", before), (
                f"{kernel.name}:\n{before}"
            )
            assert re.search(access, kernel.sass), kernel.name


def test_who_lets_the_next_kernel_start(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert ("PREEXIT" in kernel.sass) == (kernel.stem in LETTING_GO), kernel.name


def test_tables_are_asked_for(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert ("CCTL.E.PF2" in kernel.sass) == (kernel.stem in READING_TABLES), kernel.name
