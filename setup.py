"""Builds dynzero._C: CMake compiles the kernels (CMakeLists.txt), setuptools links the module.

Needs torch in the environment that dynzero is for: pip install --no-build-isolation .
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent.resolve()
MODULE_SOURCES = [
    "bindings.cpp",
    "bucket_feed.cpp",
    "bucket_mover.cpp",
    "grad_watch.cpp",
    "local_exchange.cpp",
    "ops.cpp",
    "ops_cpu.cpp",
    "param_scan.cpp",
    "presence.cpp",
    "readback.cpp",
    "transport.cpp",
    "upload.cpp",
]
# A library is searched for once, in the order of the command line: the kernels' own come last.
CUDA_LIBRARIES = ["-lc10_cuda", "-ldl", "-lrt", "-lpthread"]

# The one that torch has loaded, also where g++ links its own copy statically: the two copies number
# their locale facets differently, and the first error message with a number in it would crash.
SHARED_LIBSTDCXX = "-l:libstdc++.so.6"


def cuda_choice() -> str:
    """Value of the CMake option DYNZERO_CUDA. Says what was chosen, and why."""
    if torch.version.cuda is None:
        choice, why = "OFF", f"torch {torch.__version__} is built without CUDA"
    elif shutil.which("nvcc") is None:
        choice, why = (
            "OFF",
            f"torch is built for CUDA {torch.version.cuda}, but nvcc is not on PATH",
        )
    else:
        choice, why = "ON", f"torch is built for CUDA {torch.version.cuda}, and nvcc is on PATH"
    kind = "with CUDA" if choice == "ON" else "for the CPU only"
    print(f"*** dynzero: building {kind}: {why}", file=sys.stderr)
    return choice


class BuildKernelsAndModule(BuildExtension):
    def build_extensions(self) -> None:
        build, library = self.build_kernels("kernels")
        info = json.loads((build / "kernels.json").read_text())
        (module,) = self.extensions
        module.include_dirs += [str(build)]
        # See `make asan`.
        if sanitizers := os.environ.get("DYNZERO_SANITIZE"):
            _, library = self.build_kernels("sanitized", f"-DDYNZERO_SANITIZE={sanitizers}")
            module.extra_link_args += [f"-fsanitize={sanitizers}"]
        module.extra_objects += [library]
        module.depends += [library]
        if info["cuda"]:
            module.sources += ["csrc/ops_cuda.cpp"]
            module.define_macros += [("DYNZERO_CUDA", None)]
            module.include_dirs += info["cuda_include"]
            module.extra_link_args += [info["cudart"], *CUDA_LIBRARIES]
        super().build_extensions()

    def build_kernels(self, folder: str, *options: str) -> tuple[Path, str]:
        build = Path(self.build_temp).resolve() / folder
        configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options]
        torch_include = Path(torch.__file__).parent / "include"
        configure += [f"-DDYNZERO_CUDA={cuda_choice()}", f"-DDYNZERO_TORCH_INCLUDE={torch_include}"]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", build], check=True)
        return build, str(build / "libdynzero_kernels.a")


# cmake and ninja of this environment, also when it is not activated: another ninja starts over.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
headers = [str(path) for path in (ROOT / "csrc").glob("*.h*")]
setup(
    ext_modules=[
        CppExtension(
            "dynzero._C",
            [f"csrc/{name}" for name in MODULE_SOURCES],
            depends=headers,
            extra_compile_args=["-O2", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall"],
            extra_link_args=["-fopenmp", SHARED_LIBSTDCXX],
        )
    ],
    cmdclass={"build_ext": BuildKernelsAndModule},
)
