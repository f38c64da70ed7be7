from collections.abc import Callable

from torch import Tensor, dtype

CHUNK: int
ROW_COLUMNS: dict[str, int]
NONFINITE_BITS: dict[str, int]
RECORD_COLUMNS: dict[str, int]
STATUS_FIELDS: dict[str, int]
SCALE_FIELDS: dict[str, int]
HYPER_COLUMNS: dict[str, int]
HYPER_FLAGS: dict[str, int]
STATE_POINTERS: dict[str, int]
OPTIMIZER_KINDS: dict[str, int]

def build_info() -> dict[str, bool | str]: ...
def pack_grads(
    rows: Tensor,
    full_chunks: Tensor,
    grad_ptrs: Tensor,
    grad_dtype: dtype,
    bucket: Tensor,
    partials: Tensor | None,
    nonfinite: Tensor,
) -> None: ...
def reduce_shard(
    rows: Tensor,
    own_chunks: Tensor,
    received: Tensor,
    present: Tensor,
    shard_ptrs: Tensor,
    accumulate: Tensor,
    partials: Tensor,
    nonfinite: Tensor,
) -> None: ...
def check_shard(
    rows: Tensor,
    own_chunks: Tensor,
    grad_ptrs: Tensor,
    grad_dtype: dtype,
    partials: Tensor,
    nonfinite: Tensor,
) -> None: ...
def fold_sums(rows: Tensor, partials: Tensor, full: bool, world: int, sumsq: Tensor) -> None: ...
def summarize_shard(
    rows: Tensor, sumsq: Tensor, nonfinite: Tensor, scale_state: Tensor, record: Tensor
) -> None: ...
def begin_step(
    rows: Tensor,
    records: Tensor,
    max_norm: float,
    check_finite: bool,
    scale_options: list[float],
    steps: Tensor,
    scale_state: Tensor,
    status: Tensor,
) -> None: ...
def update_shard(
    kind: int,
    rows: Tensor,
    own_chunks: Tensor,
    grad_ptrs: Tensor,
    grad_dtype: dtype,
    state_ptrs: Tensor,
    param_dtype: dtype,
    out: Tensor | None,
    hyper: Tensor,
    steps: Tensor,
    status: Tensor,
) -> None: ...
def unpack_params(
    rows: Tensor,
    full_chunks: Tensor,
    bucket: Tensor,
    param_ptrs: Tensor,
    status: Tensor | None,
) -> None: ...

class ParamScan:
    def __init__(self, params: list[Tensor]) -> None: ...
    def snapshot(self, pinned: bool) -> tuple[Tensor, Tensor, list[int], list[int]]: ...
    def first_other(self, groups: list[list[Tensor]]) -> int: ...
    def read(
        self, grad_ptrs: Tensor, param_ptrs: Tensor, present: Tensor
    ) -> tuple[list[int], list[int]]: ...
    def take(
        self, indices: Tensor, grad_ptrs: Tensor, present: Tensor
    ) -> tuple[list[Tensor | None], list[int]]: ...

class GradWatch:
    paused: bool
    def __init__(self, meet: Callable[[int], bool], progress: Callable[[], None]) -> None: ...
    def add(self, params: list[Tensor]) -> list[Callable[[Tensor], None]]: ...
    def begin(self, bits: Tensor) -> None: ...
    def plan(self, bucket_of: Tensor, num_buckets: int) -> None: ...
    def filled(self, place: int) -> bool: ...
    def end(self) -> None: ...
    def streams(self) -> list[tuple[int, int, int]]: ...
