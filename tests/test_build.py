"""How the extension is found: what build_info() says, and what one reads when it cannot be used."""

import subprocess
import sys

import pytest
import torch

import dynzero
from dynzero import _build


def test_build_info_says_how_the_extension_was_built():
    info = dynzero.build_info()
    assert set(info) == {"cuda", "cuda_archs", "torch", "compiler"}
    assert isinstance(info["cuda"], bool)
    assert bool(info["cuda_archs"]) == info["cuda"]
    if torch.version.cuda is None:
        assert not info["cuda"]


def test_a_missing_extension_names_the_build_command(monkeypatch):
    monkeypatch.delattr(dynzero, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "dynzero._C", None)
    with pytest.raises(ImportError, match="is missing, or was built for another torch") as error:
        _build.load_extension()
    assert _build.BUILD_COMMAND in str(error.value)


def test_an_extension_for_another_torch_names_both(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.99.0+cpu")
    with pytest.raises(ImportError, match="built for torch .*, but this is torch 1.99.0") as error:
        _build.load_extension()
    assert _build.BUILD_COMMAND in str(error.value)


def test_the_extension_has_no_libstdcxx_of_its_own():
    command = ["nm", "--dynamic", "--defined-only", dynzero._C.__file__]
    defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "PyInit__C" in defined
    assert "__cxa_throw" not in defined
