"""For every test: the same random numbers each time, and the device fixture.

Op tests run on the CPU, and on CUDA where GPU and build allow.
"""

import pytest
import torch

import dynzero


def devices() -> list:
    reason = None
    if not torch.cuda.is_available():
        reason = "torch.cuda.is_available() is False on this machine"
    elif not dynzero.build_info()["cuda"]:
        reason = "dynzero was built without CUDA"
    skip = pytest.mark.skipif(reason is not None, reason=reason or "")
    return [pytest.param("cpu"), pytest.param("cuda", marks=[pytest.mark.cuda, skip])]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
