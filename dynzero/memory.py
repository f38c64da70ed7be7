"""How much memory a ZeroOptimizer will need, worked out from sizes: nothing is allocated.

Follows, allocation by allocation, what shard.py keeps and what window.py holds during a step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from .construction import (
    Options,
    choose_spec,
    flatten_groups,
    plain_numbers,
    probe,
    without_duplicates,
)
from .fused import FusedSpec, check_elementwise
from .layout import Layout, build_layout, is_dense, shard_dtype
from .ops import HYPER_COLUMNS, IN_FLIGHT, STATE_POINTERS
from .optimizer import ZeroOptimizer
from .plan import Plan, make_plan
from .shard import ALIGN

ROWS = (
    "masters", "moments", "tables", "between_steps", "gradients", "reduced", "buckets", "peak",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training adds to parameters and activations, on the rank that holds most.

    Kept between steps: `masters` (float32 copies of 16-bit parameters), `moments` (optimizer
    state), `tables` (pointers, counters, plan; stand-ins for parameters whose memory has gaps).
    On top at the fullest moment, when a backward pass has ended or in step(): `gradients` (what
    `p.grad` holds), `reduced` (gradients summed over ranks), `buckets` (what is travelling; with
    gather="lazy" it stays until the next forward has received it).
    """

    masters: int
    moments: int
    tables: int
    gradients: int
    reduced: int
    buckets: int

    @property
    def between_steps(self) -> int:
        """What stays after step() and zero_grad()."""
        return self.masters + self.moments + self.tables

    @property
    def peak(self) -> int:
        """The most there ever is at once."""
        return self.between_steps + self.gradients + self.reduced + self.buckets

    def __str__(self) -> str:
        return "\n".join(f"{row:<14}{getattr(self, row) / 2**20:>12,.1f} MiB" for row in ROWS)


class Groups(Optimizer):
    """Parameter groups as torch reads them."""


class Moment(NamedTuple):
    """What there is at one moment on top of what stays, in bytes."""

    gradients: int
    reduced: int
    buckets: int


@dataclass(frozen=True)
class Setup:
    """All that decides sizes. `indices`: the parameters that train, ascending."""

    layout: Layout
    plan: Plan
    indices: list[int]
    spec: FusedSpec | None
    options: Options
    whole: bool  # nothing is sharded

    @property
    def own(self) -> Tensor:
        return self.layout.numel if self.whole else self.layout.own

    def shard_bytes(self, numel: Tensor, indices: Iterable[int]) -> int:
        """Bytes of `numel` [params] elements of each parameter in its update dtype."""
        return sum(int(numel[i]) * shard_dtype(self.layout.dtypes[i]).itemsize for i in indices)


def estimate_memory(
    params: Any,
    world_size: int = 1,
    stage: int = 1,
    optimizer_class: type[Optimizer] = AdamW,
    *,
    active: float | Iterable[Any] | None = None,
    **options: Any,
) -> MemoryEstimate:
    """Bytes that `ZeroOptimizer(params, optimizer_class, stage=stage, **options)` will need.

    params: a module, or what ZeroOptimizer takes; may be on the "meta" device, which holds no
    memory. world_size: number of ranks. active: the parameters that train, all in the same step:
    a fraction of the elements (at least 0, at most 1), or names or parameters; default, all that
    require a gradient. options: those of ZeroOptimizer (process_group makes no difference here),
    the others go to the optimizer class.

    In stage 2 `peak` is what it comes to when a backward pass has ended before its first bucket can
    leave, as with a slow other rank or no_sync(); buckets that leave earlier lower it.
    Counts what is asked of the allocator (CUDA's rounds each tensor up to 512 bytes, of large ones
    up to 1 MiB is left over). With fused=False the torch class's own temporaries come on top.
    Raises ValueError and TypeError as ZeroOptimizer does.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size: expected a number of ranks from 1, got {world_size!r}")
    ours = inspect.signature(ZeroOptimizer).parameters
    names = [field.name for field in fields(Options) if field.name != "stage"]
    zero = Options(stage=stage, **{k: options.pop(k, ours[k].default) for k in names})
    zero.check()
    options.pop("process_group", None)
    if isinstance(params, nn.Module):
        params = list(params.named_parameters())
    defaults, _ = probe(optimizer_class, options)
    own = {"absent": zero.absent, "average": zero.average}
    groups = Groups(without_duplicates(params), {**defaults, **own}).param_groups
    setup, tensors = sized(groups, optimizer_class, world_size, zero, active)
    half = [i for i in setup.indices if setup.layout.dtypes[i].itemsize == 2]
    room = -(-setup.own // ALIGN) * ALIGN
    fullest = max(moments_of_step(setup), key=sum, default=Moment(0, 0, 0))
    return MemoryEstimate(
        masters=setup.shard_bytes(room, half),
        moments=state_bytes(setup, groups, optimizer_class, room),
        tables=table_bytes(setup, len(groups), tensors),
        gradients=fullest.gradients,
        reduced=fullest.reduced,
        buckets=fullest.buckets,
    )


def sized(
    groups: list[dict[str, Any]],
    cls: type[Optimizer],
    world: int,
    options: Options,
    active: float | Iterable[Any] | None,
) -> tuple[Setup, list[Tensor]]:
    params, names, group_of = flatten_groups(groups)
    # Pieces are cut from the front, so the first rank never holds less than another.
    layout = build_layout(
        params, names, group_of, world=world, rank=0, wire_dtype=options.wire_dtype
    )
    indices = chosen_params(params, names, layout, active)
    rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
    whole = world == 1 or options.stage == 0
    plan = make_plan(
        layout, rows, torch.full_like(rows, world), whole=world == 1,
        bucket_bytes=options.bucket_bytes if world > 1 else math.inf,
    )  # fmt: skip
    spec = choose_spec(cls, groups, options.fused)
    return Setup(layout, plan, indices, spec, options, whole), params


def chosen_params(params: list[Tensor], names: list[str], layout: Layout, active: Any) -> list[int]:
    """Indices of the parameters that train."""
    if active is None:
        return [i for i, p in enumerate(params) if p.requires_grad]
    if isinstance(active, (int, float)):
        if not 0 <= active <= 1:
            raise ValueError(f"active: expected a fraction from 0 to 1, got {active!r}")
        return spread(layout.numel.tolist(), active)
    known: dict[Any, int] = {name: i for i, name in enumerate(names)}
    known.update({id(p): i for i, p in enumerate(params)})
    indices = set()
    for item in active:
        key = id(item) if isinstance(item, Tensor) else item
        if key not in known:
            raise ValueError(
                f"active: expected parameters of the model or their names, got {item!r}"
            )
        indices.add(known[key])
    return sorted(indices)


def spread(sizes: list[int], fraction: float) -> list[int]:
    """Items spread over the whole list that hold about `fraction` of the sum of `sizes`."""
    due, indices = 0.0, []
    for i, size in enumerate(sizes):
        due += fraction * size
        if due >= size / 2 and due > 0:
            indices.append(i)
            due -= size
    return indices


def state_bytes(
    setup: Setup, groups: list[dict[str, Any]], cls: type[Optimizer], room: Tensor
) -> int:
    if setup.spec is not None:
        return len(setup.spec.keys) * setup.shard_bytes(room, setup.indices)
    accepted = inspect.signature(cls).parameters.keys() - {"params"}
    total = 0
    for g, group in enumerate(groups):
        options = plain_numbers({k: v for k, v in group.items() if k in accepted})
        state = check_elementwise(cls, options).values()
        pieces = [value for value in state if isinstance(value, Tensor) and value.dim() > 0]
        members = [i for i in setup.indices if setup.layout.group[i] == g]
        total += len(pieces) * setup.shard_bytes(setup.own, members)
    return total


def table_bytes(setup: Setup, num_groups: int, params: list[Tensor]) -> int:
    """Step counts, sums and flags of a window, the plan; pointers and options for the kernels."""
    total = 4 * len(params) + 16 * len(params)
    layout = setup.layout
    total += 8 * len(params)  # addresses of gradients, those of the last step
    if layout.world > 1:  # and of parameters and pieces, what accumulates, and presence
        total += 24 * len(params) + layout.world * layout.bit_bytes
    plans = 2 if setup.whole and layout.world > 1 else 1
    total += plans * setup.plan.table.nbytes
    if setup.spec is not None:
        total += 8 * (len(STATE_POINTERS) * len(params) + len(HYPER_COLUMNS) * num_groups)
    return total + sum(p.numel() * p.element_size() for p in params if not is_dense(p))


def moments_of_step(setup: Setup) -> Iterator[Moment]:
    """What there is, one after the other, from the end of a backward pass to the new values."""
    layout, plan, active = setup.layout, setup.plan, setup.indices
    local_bytes = layout.numel * layout.itemsize
    local = int(local_bytes[active].sum())
    if layout.world == 1:
        yield Moment(local, 0, averaged_bytes(setup))
        return
    shard = setup.shard_bytes(layout.piece, active)
    flying: list[int] = []
    for bucket in reversed(plan.buckets):
        sent = layout.world * bucket.stride * bucket.wire.itemsize
        yield Moment(local, shard, sum(flying) + sent)
        if setup.options.stage == 2:  # packed gradients are released at once
            local -= int(local_bytes[plan.active[bucket.rows]].sum())
        flying.append(2 * sent)  # and as much received
        yield Moment(local, shard, sum(flying))
        flying = flying[-IN_FLIGHT + 1 :]
    reduced = shard
    if setup.options.stage == 0:
        reduced = shard * layout.world
        whole = [layout.world * b.stride * shard_dtype(b.dtype).itemsize for b in plan.buckets]
        yield Moment(local, shard + reduced, fullest_run(whole))
    yield Moment(local, reduced, averaged_bytes(setup))
    if setup.options.stage != 0:
        values = [layout.world * b.stride * b.dtype.itemsize for b in plan.buckets]
        stay = sum(values) if setup.options.gather == "lazy" else fullest_run(values)
        yield Moment(local, reduced, stay)


def fullest_run(sizes: list[int]) -> int:
    """The most that IN_FLIGHT consecutive buckets hold."""
    return max((sum(sizes[k : k + IN_FLIGHT]) for k in range(len(sizes))), default=0)


def averaged_bytes(setup: Setup) -> int:
    """The torch class reads averaged gradients from copies; the kernels average on the fly."""
    if setup.spec is not None:
        return 0
    options = setup.options
    copied = setup.layout.world > 1 or options.loss_scale is not None
    copied = copied or options.max_grad_norm is not None
    half = [i for i in setup.indices if setup.layout.dtypes[i].itemsize == 2]
    return setup.shard_bytes(setup.own, setup.indices if copied else half)
