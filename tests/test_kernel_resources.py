"""The compiled kernels: no spills, wide loads and stores, no float atomics, and that whoever starts
early waits first. Needs nvcc, no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

CSRC = Path(__file__).parents[1] / "csrc"
NVCC = shutil.which("nvcc")
SOURCES = sorted(CSRC.glob("*.cu"))
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
WALKING_TABLES = {"pack_grads", "reduce_shard", "check_shard", "update_shard", "unpack_params"}


class Kernel(NamedTuple):
    name: str  # mangled
    stem: str  # pack_grads
    usage: str  # what ptxas says about it
    sass: str  # empty without a disassembler


def disassembler() -> str | None:
    pip = Path(sysconfig.get_path("purelib"))
    folders = [str(f) for f in pip.glob("nvidia/*/bin")] + [os.environ.get("PATH", "")]
    path = os.pathsep.join(folders)
    return path if shutil.which("cuobjdump", path=path) else None


def run(command: list[str | Path], path: str | None = None) -> str:
    env = {**os.environ, "PATH": path} if path else None
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def compile_kernels(source: Path, folder: Path) -> list[Kernel]:
    assert NVCC is not None
    cubin = folder / f"{source.stem}.cubin"
    include = Path(torch.__file__).parent / "include"
    flags = ["-O3", "-cubin", "-gencode", "arch=compute_90,code=sm_90", "-Xptxas", "-v"]
    log = run([NVCC, *flags, "-I", include, "-o", cubin, source])
    usage = dict(re.findall(r"entry function '(\w+)' for 'sm_90'\n(.*?Used.*?)\n", log, re.S))
    path = disassembler()
    sass = run(["cuobjdump", "-sass", cubin], path) if path else ""
    bodies = dict(re.findall(r"Function : (\w+)\n(.*?)(?=Function : |\Z)", sass, re.S))
    kernels = []
    for name, text in usage.items():
        stem = re.search(r"\d([a-z_]+)_kernel", name)
        assert stem, f"{source.name}: {name} is not called *_kernel"
        kernels.append(Kernel(name, stem[1], text, bodies.get(name, "")))
    return kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    if NVCC is None:
        pytest.skip("no nvcc on the PATH to compile the kernels with")
    folder = tmp_path_factory.mktemp("cubin")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(lambda source: compile_kernels(source, folder), SOURCES)
        return [kernel for part in parts for kernel in part]


@pytest.fixture
def disassembled(kernels: list[Kernel]) -> list[Kernel]:
    if not disassembler():
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    assert all(kernel.sass for kernel in kernels)
    return kernels


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
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert [k.name for k in kernels if clean not in k.usage] == []


def test_enough_threads_fit(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        used = re.search(r"Used (\d+) registers", kernel.usage)
        assert used, kernel.usage
        # Registers are given out by 8 a thread.
        fit = REGISTERS // (-(-int(used[1]) // 8) * 8)
        assert fit >= RESIDENT.get(kernel.stem, 512), f"{kernel.name}: {used[0]}"


def test_no_local_memory(disassembled: list[Kernel]) -> None:
    assert [k.name for k in disassembled if re.search(r"\b(LDL|STL)\b", k.sass)] == []


def test_no_float_atomics(disassembled: list[Kernel]) -> None:
    float_atomic = r"\b(ATOMG?|RED|ATOMS)\.\S*(F16|BF16|F32|F64)"
    assert [k.name for k in disassembled if re.search(float_atomic, k.sass)] == []


def test_loads_and_stores_are_16_bytes_wide(disassembled: list[Kernel]) -> None:
    for kernel in disassembled:
        loads = len(re.findall(r"\bLDG\.E\S*\.128", kernel.sass))
        stores = len(re.findall(r"\bSTG\.E\S*\.128", kernel.sass))
        found = f"{kernel.name}: {loads} wide loads, {stores} wide stores"
        assert loads >= WIDE_LOADS.get(kernel.stem, 0), found
        assert stores >= WIDE_STORES.get(kernel.stem, 0), found
        if kernel.stem == "pack_grads":
            assert max(loads, stores) >= 2, found
            assert min(loads, stores) >= 2 or not same_types(kernel), found


def test_packs_of_a_tile_are_loaded_together(disassembled: list[Kernel]) -> None:
    """All loads of a tile stand in the code before anything waits for the first of them."""
    for kernel in disassembled:
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


def test_who_is_launched_early_waits_before_any_access(disassembled: list[Kernel]) -> None:
    """Note [Dependent launches]: ACQBULK is the wait, PREEXIT lets the next kernel start."""
    access = r"\b(LD|LDG|ST|STG|ATOM|ATOMG|RED|LDGSTS)\.E"
    early = launched_dependent()
    assert {k.stem for k in disassembled if "ACQBULK" in k.sass} == early != set()
    for kernel in disassembled:
        if kernel.stem in early:
            before = kernel.sass.split("ACQBULK")[0]
            assert not re.search(rf"{access}|\b(BRA|EXIT|CALL)\b", before), (
                f"{kernel.name}:\n{before}"
            )
            assert re.search(access, kernel.sass), kernel.name


def test_who_lets_the_next_kernel_start(disassembled: list[Kernel]) -> None:
    for kernel in disassembled:
        assert ("PREEXIT" in kernel.sass) == (kernel.stem in LETTING_GO), kernel.name


def test_tables_are_asked_for(disassembled: list[Kernel]) -> None:
    for kernel in disassembled:
        assert ("CCTL.E.PF2" in kernel.sass) == (kernel.stem in WALKING_TABLES), kernel.name
