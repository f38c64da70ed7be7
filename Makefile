# make demo   sets up, then trains a multi-task model on real data under ZeRO and checks it
# make test   sets up, compiles every CUDA kernel if there is an nvcc, then runs the tests
# make bench  sets up, then runs the microbenchmarks     make lint   style and types
# make asan   runs the op tests with the CPU ops under AddressSanitizer and UBSan
# make sanitize  runs them on the GPU under compute-sanitizer (memcheck, racecheck, initcheck)
#
# Set-up makes .venv with torch, the build tools and the extension; a second run reuses it. With
# PYTHON=/path/to/python3 (a Python that has torch) that one is used as it is, nothing is installed.

VENV := .venv
ifdef PYTHON
  PY := $(PYTHON)
  TOOLS :=
else
  PY := $(abspath $(VENV))/bin/python
  TOOLS := $(VENV)/.tools
endif

# Without an NVIDIA GPU the release that the tests are run with. Which build of it comes, for the CPU
# or for CUDA, is up to the index that pip looks into.
TORCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),torch,torch==2.13.0)
RANKS ?= 2
WORKERS ?= 3
SOURCES := setup.py pyproject.toml CMakeLists.txt $(wildcard csrc/*)
# One stamp for each Python, since each needs its own module.
KEY := $(subst /,_,$(PY))
BUILT := build/built$(KEY)
RUN := PYTHONPATH=$(CURDIR) $(PY)

.PHONY: setup demo test asan sanitize bench lint format kernels clean
.DELETE_ON_ERROR:

setup: $(BUILT)

$(VENV)/.tools: requirements-dev.txt
	@python3 -c "import ensurepip, os, sysconfig as s; \
	  assert os.path.exists(s.get_path('include') + '/Python.h')" 2> /dev/null || { \
	  echo "python3 lacks venv or its headers: apt install python3-venv python3-dev"; exit 1; }
	@echo "*** dynzero: installing $(TORCH) and the build tools into $(VENV), minutes"
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet -r requirements-dev.txt
	@echo $(CURDIR) > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dynzero.pth"
	touch $@

$(BUILT): $(TOOLS) $(SOURCES)
	@echo "*** dynzero: compiling, a minute or two"
	PATH="$(dir $(PY)):$$PATH" $(PY) setup.py build_ext --inplace > build.log 2>&1 \
	  || { cat build.log; exit 1; }
	@grep '^\*\*\*' build.log; mkdir -p build; mv build.log build/; touch $@

demo: setup
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc-per-node=$(RANKS) \
	  examples/multitask_digits.py
	$(RUN) examples/alternating_heads.py

test: setup kernels
	$(RUN) -m pytest -n $(WORKERS) $(TESTS)

bench: setup
	$(RUN) -m bench kernels
	$(RUN) -m bench step
	$(RUN) -m bench report

# Compiles every .cu, on a machine without a GPU too, and with a CPU build of torch.
kernels: $(TOOLS)
	@if command -v nvcc > /dev/null; then \
	  include=$$($(PY) -c "import os, torch; print(os.path.dirname(torch.__file__) + '/include')") && \
	  export PATH="$(dir $(PY)):$$PATH" && \
	  cmake -S . -B build/kernels -G Ninja -DDYNZERO_CUDA=ON -DDYNZERO_TORCH_INCLUDE=$$include \
	    "-DCMAKE_CUDA_ARCHITECTURES=80-real;90-real" \
	    > build/kernels.log && cmake --build build/kernels; \
	else echo "*** dynzero: no nvcc on the PATH, the CUDA kernels are not compiled"; fi

# The op tests against a module of its own, whose CPU loops AddressSanitizer and UBSan watch.
ASAN_LIBS = $(foreach lib,libasan.so libubsan.so libstdc++.so,$(shell g++ -print-file-name=$(lib)))
asan: setup
	PATH="$(dir $(PY)):$$PATH" DYNZERO_SANITIZE=address,undefined $(PY) setup.py \
	  build_py --build-lib build/asan build_ext --build-lib build/asan > build/asan.log 2>&1 \
	  || { cat build/asan.log; exit 1; }
	rm -f build/asan/found.*
	export LD_PRELOAD="$(ASAN_LIBS)" ASAN_OPTIONS=detect_leaks=0:log_path=found && \
	  export PYTHONPATH=$(CURDIR)/build/asan && cd build/asan && \
	  $(PY) -c "import dynzero; assert 'asan' in dynzero.__file__, dynzero.__file__" && \
	  $(PY) -m pytest -n $(WORKERS) -k "not cuda" ../../tests/test_ops_*.py \
	  ../../tests/test_param_scan.py || { cat found.*; exit 1; }

# SANITIZERS processes at a time share the GPU.
SANITIZERS ?= 8
sanitize: setup
	@command -v compute-sanitizer > /dev/null || { \
	  echo "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"; exit 1; }
	$(RUN) tests/sanitize.py $(SANITIZERS)

lint: $(TOOLS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(dir $(PY))clang-format --dry-run -Werror $(filter %.h %.cpp %.cu %.cuh,$(wildcard csrc/*))

format: $(TOOLS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(dir $(PY))clang-format -i $(filter %.h %.cpp %.cu %.cuh,$(wildcard csrc/*))

clean:
	rm -rf build dynzero/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache
