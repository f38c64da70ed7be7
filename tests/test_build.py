"""How the extension is found: what build_info() says, and what one reads when it cannot be used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

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


def members(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def signature(doc: str) -> list[str]:
    """Names of the parameters, from the first line that pybind11 writes."""
    inside = doc.splitlines()[0].partition("(")[2].rpartition(") ->")[0]
    return re.findall(r"(?:^|, )(\w+): ", inside)


def check_arguments(definition: ast.FunctionDef, real: object) -> None:
    names = signature(real.__doc__)
    if not any(name.startswith("arg") for name in names):
        assert [arg.arg for arg in definition.args.args] == names, definition.name


def test_the_stub_is_that_of_the_extension():
    """Nothing else compares it: the callers of our own go through `ops`, which has no types."""
    stub = ast.parse(Path(dynzero.__file__).with_name("_C.pyi").read_text())
    known, classes = set(), {}
    for node in stub.body:
        if isinstance(node, ast.AnnAssign):
            known.add(node.target.id)
        elif isinstance(node, ast.ClassDef):
            known.add(node.name)
            classes[node.name] = node
        elif isinstance(node, ast.FunctionDef):
            known.add(node.name)
            check_arguments(node, getattr(dynzero._C, node.name))
    assert known == members(dynzero._C)
    for name, node in classes.items():
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
        methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        real = getattr(dynzero._C, name)
        assert fields | methods.keys() - {"__init__"} == members(real), name
        for method, definition in methods.items():
            check_arguments(definition, getattr(real, method))
