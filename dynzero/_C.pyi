from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, device, dtype

CHUNK: int
CHUNK_BITS: int
MAX_SCALE: float
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
def upload(tables: Sequence[Tensor], device: device) -> list[Tensor]: ...
def union_rows(rows: Tensor) -> Tensor: ...
def same_rows(rows: Tensor) -> bool: ...
def raw(bytes: Tensor) -> bytes: ...
def has_plain_data(tensor: Tensor) -> bool: ...

class ParamScan:
    def __init__(self, params: list[Tensor]) -> None: ...
    def snapshot(self) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]: ...
    def first_other(self, groups: list[list[Tensor]]) -> int: ...
    def take_open(
        self, open: Tensor, grad_ptrs: Tensor, present: Tensor, store: GradStore
    ) -> list[int]: ...

class Readback:
    def __init__(self, numbers: Tensor, stay: bool) -> None: ...
    def ready(self) -> bool: ...
    def numbers(self) -> list[float]: ...

class GradWatch:
    paused: bool
    def __init__(
        self, meet: Callable[[], bool], progress: Callable[[], None], stream_id: int
    ) -> None: ...
    def add(self, params: list[Tensor]) -> list[Callable[[Tensor], None]]: ...
    def begin(self, bits: Tensor, open: Tensor) -> None: ...
    def follow(self, feed: BucketFeed) -> None: ...
    def end(self) -> None: ...
    def streams(self) -> list[tuple[int, int, int]]: ...
    def all_on(self, stream_id: int) -> bool: ...

class TransportError(RuntimeError): ...

class Transfer:
    def __init__(self) -> None: ...
    def ready(self) -> bool: ...
    def wait(self) -> None: ...

class Transport:
    def __init__(self) -> None: ...
    def all_to_all(self, received: Tensor, sent: Tensor) -> Transfer: ...
    def all_gather(self, everybody: Tensor, mine: Tensor) -> Transfer: ...

def collective_transport(group: Any) -> Transport: ...
def loopback_transport(writes: bool = True) -> Transport: ...

IN_FLIGHT: int

class GradStore:
    def __init__(self) -> None: ...
    def get(self, param: int) -> Tensor: ...
    def clear(self) -> None: ...

class Buckets:
    def __init__(self, rows: Tensor, world: int) -> None: ...
    def add(
        self,
        full_chunks: Tensor,
        own_chunks: Tensor,
        wire: dtype,
        dtype: dtype,
        stride: int,
        first_own: int,
        params: Sequence[int],
    ) -> None: ...

class Reduction:
    in_step: bool
    sending: bool
    def push_on(self, store: GradStore) -> bool: ...
    def ready(self) -> bool: ...
    def receive(self) -> None: ...
    def fold(self, sumsq: Tensor) -> None: ...

class Uploads: ...

def empty_window(num_params: int, world: int, device: device) -> list[Tensor]: ...
def begin_reduction(
    buckets: Buckets,
    transport: Transport,
    rooms: Sequence[tuple[dtype, Tensor, Tensor, int]],
    grad_ptrs: Tensor,
    shard_ptrs: Tensor,
    present: Tensor,
    nonfinite: Tensor,
    in_step: bool,
    uploads: Uploads | None,
) -> tuple[Reduction, list[Tensor], Tensor]: ...
def summarize_and_gather(
    buckets: Buckets,
    transport: Transport,
    sumsq: Tensor,
    nonfinite: Tensor,
    scale_state: Tensor,
) -> Tensor: ...

class BucketFeed:
    done: bool
    in_step: bool
    sending: bool
    def __init__(
        self,
        reduction: Reduction,
        scan: ParamScan,
        store: GradStore,
        host_ptrs: Tensor,
        bits: Tensor,
        open: Tensor,
        places: Tensor,
    ) -> None: ...
    def close(self) -> None: ...
    def ready(self) -> bool: ...
    def push(self) -> list[int]: ...

class Gathering:
    in_flight: int
    def __init__(
        self,
        buckets: Buckets,
        transport: Transport,
        rank: int,
        param_ptrs: Tensor,
        status: Tensor,
    ) -> None: ...
    def room(self, number: int) -> Tensor: ...
    def send(self) -> None: ...
    def receive(self) -> None: ...

class Update:
    def __init__(
        self,
        kind: int,
        grad_ptrs: Tensor,
        state_ptrs: Tensor,
        hyper: Tensor,
        steps: Tensor,
        status: Tensor,
    ) -> None: ...

def update_and_gather(
    buckets: Buckets, gathering: Gathering, update: Update, receive: bool
) -> None: ...

class LocalBoard:
    MESSAGE_BYTES: int
    def __init__(self, fd: int, rank: int, world: int) -> None: ...
    @staticmethod
    def num_bytes(world: int) -> int: ...
    def start(self, head: bytes, bits: Tensor) -> LocalExchange: ...

class LocalExchange:
    def ready(self) -> bool: ...
    def wait(self, timeout_s: float) -> Tensor: ...

def summarize_in_place(buckets: Buckets, grad_ptrs: Tensor, scale_state: Tensor) -> Tensor: ...
def update_in_place(buckets: Buckets, update: Update) -> None: ...
