"""Every op of csrc/ops.h: `ops.pack_grads(...)` and so on, and the same as `torch.ops.dynzero.*`.

`ops` is the compiled module itself. Our own code calls it directly, since the way through torch's
dispatcher to a kernel that is registered from Python costs some 8 us a call. The registered ops are
for tracing (fake tensors, torch.compile) and for whoever wants to call them as torch's own.

Tensors are on one device; where the memory behind a pointer table is written, the schema cannot say
so: the caller keeps those tensors alive and off other streams. The layouts of the tables come from
csrc/segments.h through `_C`.
"""

from __future__ import annotations

from typing import Any

import torch

from ._build import load_extension

_C = load_extension()

NONFINITE_BITS: dict[str, int] = _C.NONFINITE_BITS
RECORD_COLUMNS: dict[str, int] = _C.RECORD_COLUMNS
STATUS_FIELDS: dict[str, int] = _C.STATUS_FIELDS
SCALE_FIELDS: dict[str, int] = _C.SCALE_FIELDS
MAX_SCALE: float = _C.MAX_SCALE
HYPER_COLUMNS: dict[str, int] = _C.HYPER_COLUMNS
HYPER_FLAGS: dict[str, int] = _C.HYPER_FLAGS
STATE_POINTERS: dict[str, int] = _C.STATE_POINTERS
OPTIMIZER_KINDS: dict[str, int] = _C.OPTIMIZER_KINDS
IN_FLIGHT: int = _C.IN_FLIGHT

SCHEMAS = {
    "pack_grads": "Tensor rows, Tensor full_chunks, Tensor grad_ptrs, ScalarType grad_dtype, "
    "Tensor(a!) bucket, Tensor(b!)? partials, Tensor(c!) nonfinite",
    "reduce_shard": "Tensor rows, Tensor own_chunks, Tensor received, Tensor present, "
    "Tensor shard_ptrs, Tensor accumulate, Tensor(a!) partials, Tensor(b!) nonfinite",
    "check_shard": "Tensor rows, Tensor own_chunks, Tensor grad_ptrs, ScalarType grad_dtype, "
    "Tensor(a!) partials, Tensor(b!) nonfinite",
    "fold_sums": "Tensor rows, Tensor partials, bool full, int world, Tensor(a!) sumsq",
    "summarize_shard": "Tensor rows, Tensor sumsq, Tensor nonfinite, Tensor scale_state, "
    "Tensor(a!) record",
    "begin_step": "Tensor rows, Tensor records, float max_norm, bool check_finite, "
    "float[] scale_options, Tensor(a!) steps, Tensor(b!) scale_state, Tensor(c!) status",
    "update_shard": "int kind, Tensor rows, Tensor own_chunks, Tensor grad_ptrs, "
    "ScalarType grad_dtype, Tensor state_ptrs, ScalarType param_dtype, Tensor(a!)? out, "
    "Tensor hyper, Tensor steps, Tensor status",
    "unpack_params": "Tensor rows, Tensor full_chunks, Tensor bucket, Tensor param_ptrs, "
    "Tensor? status",
}


def _fake(*args: object) -> None:
    """Nothing to predict: the ops return nothing and write into tensors that exist."""


_library = torch.library.Library("dynzero", "DEF")
for _name, _arguments in SCHEMAS.items():
    _library.define(f"{_name}({_arguments}) -> ()")
    # One entry for both devices: the C++ side checks the arguments, then looks at the device.
    _library.impl(_name, getattr(_C, _name), "CPU")
    _library.impl(_name, getattr(_C, _name), "CUDA")
    torch.library.register_fake(f"dynzero::{_name}", _fake, lib=_library)

ops: Any = _C
# A range for the profiler, as torch.autograd.profiler.record_function, of which one costs 18 us
# when nothing is profiled.
Range = torch._C._profiler._RecordFunctionFast
