"""Marks for tests that need GPUs and a build with CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dynzero


def needs_gpus(count: int) -> pytest.MarkDecorator:
    reason = ""
    if torch.cuda.device_count() < count:
        reason = f"needs {count} CUDA device(s), this machine has {torch.cuda.device_count()}"
    elif not dynzero.build_info()["cuda"]:
        reason = "dynzero was built without CUDA"
    elif not dist.is_nccl_available():
        reason = "torch was built without NCCL"
    return pytest.mark.skipif(bool(reason), reason=reason)


# For tests whose ranks run under the backend "nccl", one GPU each; two share one if need be.
nccl_worlds = pytest.mark.parametrize(
    "world", [pytest.param(n, marks=[pytest.mark.cuda, needs_gpus(1)]) for n in (1, 2)]
)
