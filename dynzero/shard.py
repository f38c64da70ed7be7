"""This rank's pieces: float32 masters, optimizer state, and the update of both.

`FusedShard` runs our kernels, `TorchShard` runs the torch.optim class itself on 1-D pieces. State
is created at a parameter's first active step; activity is agreed, so all ranks create the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .fused import MEMBERS, FusedSpec, Seen
from .hooks import no_global_hooks
from .layout import REAL_DTYPE, Layout, flat_view, shard_dtype
from .ops import HYPER_COLUMNS, IN_FLIGHT, STATE_POINTERS, ops
from .plan import Bucket, Plan
from .reduced import Gradients, capturing, same, upload

# Keys of a parameter group that are ours or torch's bookkeeping, not the optimizer's options.
NOT_OPTIONS = (*MEMBERS, "absent", "average")
# Slices of one allocation start at multiples of 16 bytes.
ALIGN = 4


class Shard:
    """What both kinds share: where each own piece lies, masters, step counts.

    `whole`: nothing is sharded (stage 0, or one process): the piece is the whole parameter.
    """

    def __init__(
        self, params: list[Tensor], layout: Layout, device: torch.device, whole: bool
    ) -> None:
        self.params, self.device, self.whole = params, device, whole
        self.staged: dict[int, Tensor] = {}  # stand-ins of parameters whose memory has gaps
        self.masters: dict[int, Tensor] = {}
        self.live: set[int] = set()
        self._is_live = torch.zeros(layout.size, dtype=torch.bool, device="cpu")  # by index
        self._ensured: Tensor | None = None  # `active` of the last step
        self.relayout(layout)
        self.steps = torch.zeros(layout.size, dtype=torch.float32, device=device)

    def relayout(self, layout: Layout) -> None:
        """Take over a layout with more parameters than before."""
        self.layout = layout
        self.own = layout.numel if self.whole else layout.own
        self.start = torch.zeros_like(layout.start) if self.whole else layout.start
        self._own, self._start = self.own.tolist(), self.start.tolist()

    def grow(self, layout: Layout) -> None:
        added = (0, layout.size - self.layout.size)
        self.steps = torch.nn.functional.pad(self.steps, added)
        self._is_live = torch.nn.functional.pad(self._is_live, added)
        self.relayout(layout)

    def own_view(self, i: int) -> Tensor:
        """This rank's piece of parameter i, 1-D, in the parameter's memory and dtype."""
        flat = self.staged[i] if i in self.staged else flat_view(self.params[i])
        return flat[self._start[i] : self._start[i] + self._own[i]]

    def ensure(self, active: Tensor, groups: list[dict[str, Any]]) -> None:
        """Create masters and state of the parameters that are active for the first time."""
        if active is self._ensured or len(self.live) == self.layout.size:
            return
        self._ensured = active
        new = active[~self._is_live[active]].tolist()
        if not new:
            return
        self._now_live(new)
        half = [i for i in new if self.layout.dtypes[i].itemsize == 2]
        for i, master in self.allocate(half).items():
            self.masters[i] = master.copy_(self.own_view(i))
        self.create(new, groups)

    def _now_live(self, indices: list[int]) -> None:
        self.live.update(indices)
        self._is_live[indices] = True

    def allocate(self, indices: list[int]) -> dict[int, Tensor]:
        """Zeros of each own piece's size, in the update dtype; one allocation per dtype."""
        out: dict[int, Tensor] = {}
        for dtype in {shard_dtype(self.layout.dtypes[i]) for i in indices}:
            some = [i for i in indices if shard_dtype(self.layout.dtypes[i]) == dtype]
            room = [-(-self._own[i] // ALIGN) * ALIGN for i in some]
            flat = torch.zeros(sum(room), dtype=dtype, device=self.device)
            for i, part in zip(some, flat.split(room), strict=True):
                out[i] = part[: self._own[i]]
        return out

    def create(self, new: list[int], groups: list[dict[str, Any]]) -> None:
        raise NotImplementedError

    def begin(self, plan: Plan, grads: Gradients, groups: list[dict[str, Any]]) -> None:
        """Once per step, after begin_step has decided on the device."""
        raise NotImplementedError

    def update(self, plan: Plan, bucket: Bucket, grads: Gradients, out: Tensor | None) -> None:
        """Update the bucket's own pieces; new values also go to `out` [stride], if given."""
        raise NotImplementedError

    def update_whole(self, plan: Plan, grads: Gradients) -> None:
        """Update all buckets where nothing is sharded."""
        for bucket in plan.buckets:
            self.update(plan, bucket, grads, None)

    def update_and_gather(
        self, plan: Plan, grads: Gradients, gathering: Any, *, receive: bool
    ) -> None:
        """Update bucket by bucket; each goes out by `gathering` while the next one is updated.

        receive: do so with all; otherwise they stay on their way.
        """
        for bucket in plan.buckets:
            self.update(plan, bucket, grads, gathering.room(bucket.number))
            gathering.send()
            if receive and gathering.in_flight == IN_FLIGHT:
                gathering.receive()
        while receive and gathering.in_flight:
            gathering.receive()

    def entries(self, i: int) -> dict[str, Any]:
        """State of parameter i, tensors of the own piece's size or 0-dim; empty if none yet."""
        raise NotImplementedError

    def load(
        self, i: int, state: dict[str, Any], master: Tensor | None, groups: list[dict[str, Any]]
    ) -> None:
        """Replace the state of parameter i by `state`, pieces like those of `entries`."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all state."""
        self.masters.clear()
        self.live.clear()
        self._is_live.zero_()
        self._ensured = None
        self.steps.zero_()

    def restore_master(self, i: int, master: Tensor | None) -> None:
        self._now_live([i])
        if self.layout.dtypes[i].itemsize == 2:
            self.masters[i] = next(iter(self.allocate([i]).values()))
            self.masters[i].copy_(self.own_view(i) if master is None else master)


class FusedShard(Shard):
    """State updated by the kernel update_shard."""

    def __init__(
        self,
        params: list[Tensor],
        layout: Layout,
        device: torch.device,
        whole: bool,
        spec: FusedSpec,
    ) -> None:
        self.spec = spec
        self.state: dict[str, dict[int, Tensor]] = {key: {} for key in spec.keys}
        empty = torch.empty(0, device=device)
        self._device_table, self._hyper, self._rests = empty, empty, empty
        self._hyper_rows: list[list[float]] = []
        self._options_seen = Seen()
        self._table_is_old = True
        self._pointed: Tensor  # param_ptrs that the table was made from
        super().__init__(params, layout, device, whole)

    def relayout(self, layout: Layout) -> None:
        super().relayout(layout)
        size = len(STATE_POINTERS), layout.size
        self._table = torch.zeros(size, dtype=torch.int64, device="cpu")
        self._offset_bytes = self.start * layout.itemsize
        for i in self.live:
            self._point(i)
        self._table_is_old = True
        self._resting: list[int] = []  # groups without momentum, for which `_rests` is the mask
        self._resting_plan: Plan | None = None

    def respec(self, spec: FusedSpec) -> None:
        """The options now need more state than before (SGD that got a momentum)."""
        for key in spec.keys[len(self.spec.keys) :]:
            self.state[key] = self.allocate(sorted(self.live))
        self.steps.zero_()  # the first gradient from now on is the first of the buffer
        self.spec = spec
        self.relayout(self.layout)

    def create(self, new: list[int], groups: list[dict[str, Any]]) -> None:
        for key in self.spec.keys:
            self.state[key].update(self.allocate(new))
        for i in new:
            self._point(i)
        self._table_is_old = True

    def _point(self, i: int) -> None:
        tensors = [self.masters.get(i), *(self.state[key].get(i) for key in self.spec.keys)]
        names = ("master", "state1", "state2")
        for name, tensor in zip(names, tensors, strict=False):
            self._table[STATE_POINTERS[name], i] = 0 if tensor is None else tensor.data_ptr()

    def begin(self, plan: Plan, grads: Gradients, groups: list[dict[str, Any]]) -> None:
        if self._table_is_old or not same(self._pointed, grads.local.ptrs[1]):
            torch.add(grads.local.ptrs[1], self._offset_bytes, out=self._table[0])
            self._device_table = renewed(self._device_table, self._table)
            self._table_is_old = False
        self._pointed = grads.local.ptrs[1]
        if self.spec.keys == ("momentum_buffer",):
            self._count_with_momentum(plan, grads, groups)
        if not self._options_seen.again(groups):
            self._follow_options(groups)

    def _follow_options(self, groups: list[dict[str, Any]]) -> None:
        rows = [self.spec.row(group) for group in groups]
        if rows != self._hyper_rows:
            hyper = torch.tensor(rows, dtype=torch.float64, device="cpu")
            self._hyper = renewed(self._hyper, hyper)
            self._hyper_rows = rows
        for g, group in enumerate(groups):
            if isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
                self._hyper[g, HYPER_COLUMNS["lr"]] = group["lr"]

    def _count_with_momentum(
        self, plan: Plan, grads: Gradients, groups: list[dict[str, Any]]
    ) -> None:
        """Without momentum torch keeps the buffer that there is, and makes none: take back the step
        that begin_step has counted, so that `steps` tells which gradient is a buffer's first.
        """
        resting = [g for g, group in enumerate(groups) if group["momentum"] == 0]
        if not resting:
            return
        if resting != self._resting or plan is not self._resting_plan:
            rests = torch.zeros(self.layout.size, dtype=torch.float32, device="cpu")
            group_of = self.layout.group[plan.active]
            rests[plan.active[torch.isin(group_of, torch.tensor(resting, device="cpu"))]] = 1.0
            self._resting, self._resting_plan = resting, plan
            self._rests = renewed(self._rests, rests)
        self.steps.sub_(self._rests * (grads.decided("found") == 0))

    def update(self, plan: Plan, bucket: Bucket, grads: Gradients, out: Tensor | None) -> None:
        ops.update_shard(
            self.spec.kind,
            plan.table.rows,
            plan.own_chunks[bucket.number],
            grads.ptrs,
            grads.dtype(bucket),
            self._device_table,
            bucket.dtype,
            out,
            self._hyper,
            self.steps,
            grads.status,
        )

    def update_whole(self, plan: Plan, grads: Gradients) -> None:
        if not grads.in_place:
            super().update_whole(plan, grads)
            return
        ops.update_in_place(plan.compiled, self._updating(grads))

    def update_and_gather(
        self, plan: Plan, grads: Gradients, gathering: Any, *, receive: bool
    ) -> None:
        ops.update_and_gather(plan.compiled, gathering, self._updating(grads), receive)

    def _updating(self, grads: Gradients) -> Any:
        """What is the same for all buckets."""
        return ops.Update(
            self.spec.kind, grads.ptrs, self._device_table, self._hyper, self.steps, grads.status
        )

    def entries(self, i: int) -> dict[str, Any]:
        if i not in self.live:
            return {}
        state: dict[str, Any] = {"step": self.steps[i]} if self.spec.has_step else {}
        state.update({key: self.state[key][i] for key in self.spec.keys})
        return state

    def load(
        self, i: int, state: dict[str, Any], master: Tensor | None, groups: list[dict[str, Any]]
    ) -> None:
        self.restore_master(i, master)
        # torch keeps no step count for momentum: a loaded buffer is simply not a first one.
        known = not self.spec.keys or state.get(self.spec.keys[0]) is not None
        self.steps[i] = state.get("step", 1.0 if known else 0.0)
        for key in self.spec.keys:
            piece = next(iter(self.allocate([i]).values()))
            if state.get(key) is not None:
                piece.copy_(state[key])
            self.state[key][i] = piece
        self._point(i)
        self._table_is_old = True

    def clear(self) -> None:
        super().clear()
        for pieces in self.state.values():
            pieces.clear()
        self._table.zero_()
        self._table_is_old = True


def renewed(there: Tensor, table: Tensor) -> Tensor:
    """A table of the CPU on the device, in the same place as the one before if that fits: a CUDA
    graph that has been captured goes on reading it there.
    """
    if capturing(there.device):
        raise RuntimeError(
            "step() in a CUDA graph: options, or where parameters and state are, have changed "
            "since the step before the capture; take another step, then capture"
        )
    new = upload(table, there.device)
    return there.copy_(new) if there.shape == new.shape else new


class TorchShard(Shard):
    """Any elementwise torch.optim class, run on 1-D pieces (as torch's ZeroRedundancyOptimizer)."""

    def __init__(
        self,
        params: list[Tensor],
        layout: Layout,
        device: torch.device,
        whole: bool,
        build: Any,
    ) -> None:
        self.build = build
        self.inner: Any = None
        self.pieces: dict[int, Tensor] = {}
        self.stand_ins: dict[int, Tensor] = {}  # by group, empty
        super().__init__(params, layout, device, whole)

    def create(self, new: list[int], groups: list[dict[str, Any]]) -> None:
        for i in new:
            self._wrap(i)
        # Some classes (Adagrad) create their state at construction, hence an instance for these.
        fresh = self.build(self._inner_groups(new, groups))
        if self.inner is None:
            self.inner = fresh
        else:
            self.inner.state.update(fresh.state)

    def _wrap(self, i: int) -> None:
        value = self.masters[i] if i in self.masters else self.own_view(i)
        if i in self.pieces:
            self.pieces[i].data = value
        else:
            self.pieces[i] = torch.nn.Parameter(value, requires_grad=False)

    def _inner_groups(
        self, indices: Iterable[int], groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The user's groups with the pieces of `indices` in place of the parameters.

        Where there are none, something without a gradient, as torch's classes would find it: they
        may look at the first parameter of a group.
        """
        members: list[list[Tensor]] = [[] for _ in groups]
        group_of = self.layout.group.tolist()
        for i in indices:
            members[group_of[i]].append(self.pieces[i])
        for g, (pieces, group) in enumerate(zip(members, groups, strict=True)):
            if not pieces and group["params"]:
                pieces.append(self._stand_in(g, group["params"][0]))
        return [
            {**{k: v for k, v in group.items() if k not in NOT_OPTIONS}, "params": pieces}
            for group, pieces in zip(groups, members, strict=True)
        ]

    def _stand_in(self, g: int, like: Tensor) -> Tensor:
        if g not in self.stand_ins:
            dtype = shard_dtype(REAL_DTYPE[like.dtype])
            empty = torch.empty(0, dtype=dtype, device=self.device)
            self.stand_ins[g] = torch.nn.Parameter(empty, requires_grad=False)
        return self.stand_ins[g]

    def begin(self, plan: Plan, grads: Gradients, groups: list[dict[str, Any]]) -> None:
        self.stepped = not (grads.checking and bool(grads.decided("found")))
        if not self.stepped:
            return
        active = sorted(plan.indices)
        clip = grads.decided("clip") if grads.clipping else None
        for i in active:
            self._refresh(i)
            grad = grads.writable(i)
            self.pieces[i].grad = grad if clip is None else grad * clip.to(grad.dtype)
        self.inner.param_groups = self._inner_groups(active, groups)
        with no_global_hooks():
            self.inner.step()
        for group, inner in zip(groups, self.inner.param_groups, strict=True):
            group.update({k: v for k, v in inner.items() if k != "params"})
        for i in active:
            self.pieces[i].grad = None

    def _refresh(self, i: int) -> None:
        """Follow weights that were loaded, moved or edited behind our back."""
        own = self.own_view(i)
        if i in self.masters:
            master = self.masters[i]
            torch.where(master.to(own.dtype) == own, master, own.to(master.dtype), out=master)
        elif own.data_ptr() != self.pieces[i].data_ptr():
            self.pieces[i].data = own

    def update(self, plan: Plan, bucket: Bucket, grads: Gradients, out: Tensor | None) -> None:
        if not self.stepped:
            return
        rows = zip(plan.indices[bucket.rows], plan.offsets[bucket.rows], strict=True)
        for i, offset in rows:
            if out is not None:
                out[offset : offset + self._own[i]].copy_(self.pieces[i])
            elif i in self.masters:
                self.own_view(i).copy_(self.masters[i])

    def entries(self, i: int) -> dict[str, Any]:
        return dict(self.inner.state.get(self.pieces[i], {})) if i in self.live else {}

    def load(
        self, i: int, state: dict[str, Any], master: Tensor | None, groups: list[dict[str, Any]]
    ) -> None:
        self.restore_master(i, master)
        self._wrap(i)
        if self.inner is None:
            self.inner = self.build(self._inner_groups([i], groups))
        piece = self.pieces[i]
        self.inner.state[piece] = {k: loaded(k, v, piece) for k, v in state.items()}

    def clear(self) -> None:
        super().clear()
        self.inner = None
        self.pieces.clear()


def loaded(key: str, value: Any, piece: Tensor) -> Any:
    """A copy of a state entry; torch keeps step counts on the CPU."""
    if not isinstance(value, Tensor):
        return value
    dtype = piece.dtype if value.dim() > 0 else value.dtype
    return value.to(value.device if key == "step" else piece.device, dtype, copy=True)
