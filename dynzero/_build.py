"""Loads the compiled module `_C` and says how it was built, or how to build it."""

from __future__ import annotations

from types import ModuleType

import torch

BUILD_COMMAND = "pip install --no-build-isolation --force-reinstall --no-deps ."


def load_extension() -> ModuleType:
    """The module `dynzero._C`; an ImportError with the remedy where it cannot be used."""
    try:
        # torch was imported above: the module is linked against torch's libraries.
        from . import _C
    except ImportError as error:
        raise ImportError(
            f"dynzero: the compiled module dynzero._C is missing, or was built for another torch "
            f"(this is torch {torch.__version__}): {error}. Build it, in dynzero's folder and in "
            f"this environment, with: {BUILD_COMMAND}"
        ) from error
    built = str(_C.build_info()["torch"])
    if minor_version(built) != minor_version(torch.__version__):
        raise ImportError(
            f"dynzero: dynzero._C was built for torch {built}, but this is torch "
            f"{torch.__version__}. Rebuild it, in dynzero's folder, with: {BUILD_COMMAND}"
        )
    return _C


def minor_version(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def build_info() -> dict[str, bool | str]:
    """How the extension was built.

    cuda: bool; cuda_archs: CUDA architectures, as CMake writes them; torch: version it was built
    against; compiler: of the kernels' C++.
    """
    return dict(load_extension().build_info())
