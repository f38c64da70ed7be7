"""Gradients on their way: read from the parameters, and reduced onto their owners.

`Local` is what this rank's parameters hold now; `Gradients` is what a step updates from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .layout import (
    Layout,
    dense_strides,
    flat_copy,
    flat_view,
    is_dense,
    kind_of,
    shard_dtype,
)
from .loss_scale import ScaleState
from .ops import STATUS_FIELDS, ops
from .plan import Bucket, Plan
from .streams import outlive_current_stream
from .transports.collective import Collective


@dataclass
class Local:
    """This rank's gradients. ptrs: on the CPU, int64 [params]: of gradients, of parameters.

    bits: uint8 presence. All three are those of the last time where they have not changed, and may
    not be written to before `make_writable`. `own` holds, by parameter index, regular copies of
    gradients that a kernel cannot read where they lie; `taken` (a GradStore) those that have been
    taken out of the parameters. captured: they were read while a CUDA graph was being captured.
    """

    ptrs: list[Tensor]
    bits: Tensor
    own: dict[int, Tensor] = field(default_factory=dict)
    captured: bool = False
    taken: Any = field(default_factory=ops.GradStore)

    @property
    def located(self) -> bool:
        """All that a reduction will read is where `ptrs` says."""
        return True

    def feed(self, reduction: Any, plan: Plan, collective: Collective) -> Iterator[Any]:
        """Reduce what there is, bucket by bucket; yields what to wait for."""
        while True:
            with collective.naming_ranks():
                if reduction.push_on(self.taken):
                    return
            yield reduction
            with collective.naming_ranks():
                reduction.receive()

    def make_writable(self) -> None:
        self.ptrs[0], self.bits = self.ptrs[0].clone(), self.bits.clone()

    def drop(self, *, pinned: bool = False) -> None:
        """Forget the gradients: take part in a round with nothing."""
        size = self.ptrs[0].numel()
        self.ptrs[0] = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.bits = torch.zeros_like(self.bits)
        self.own = {}
        self.taken.clear()


class Reader:
    """Reads `p.grad` of all parameters; everything that may differ locally is found here."""

    def __init__(self, params: list[Tensor], layout: Layout, device: torch.device) -> None:
        self.params, self.layout, self.device = params, layout, device
        self.scan = ops.ParamScan(params)
        self._grads_there, self._params_there = Uploaded(device), Uploaded(device)
        self.staged = {i: flat_copy(p.detach(), p) for i, p in enumerate(params) if not is_dense(p)}

    def read(self) -> tuple[Local, Exception | None]:
        """What is there now, and a complaint if a parameter is not what it was."""
        grads, params, bits, odd, changed = self.scan.snapshot()
        local = Local([grads, params], bits, captured=capturing(self.device))
        if odd:
            local.make_writable()
        if changed:
            return local, self.complaint(changed[0])
        for i in odd:
            self.make_regular(local, i, self.params[i].grad)
        if self.staged:
            local.ptrs[1] = params.clone()
        for i, stand_in in self.staged.items():
            local.ptrs[1][i] = stand_in.data_ptr()
        return local, None

    def grad_ptrs(self, local: Local) -> Tensor:
        """Addresses of gradients in place, on the device.

        Those that have not changed are there already, so that a captured step copies nothing that a
        replay would read too late.
        """
        if local.captured and not self._grads_there.holds(local.ptrs[0]):
            raise RuntimeError(
                "step() in a CUDA graph: gradients are not where the step before the capture "
                "found them; keep them there with zero_grad(set_to_none=False), and give each "
                "parameter of an absent='zero' group one"
            )
        return self._grads_there.of(local.ptrs[0])

    def param_ptrs(self, local: Local) -> Tensor:
        """Addresses of the parameters, on the device."""
        return self._params_there.of(local.ptrs[1])

    def complaint(self, i: int) -> ValueError:
        p = self.params[i]
        if not ops.has_plain_data(p):
            return ValueError(
                f"parameter '{self.layout.names[i]}' has become {kind_of(p)}; expected a tensor "
                "whose elements lie in its memory, as at construction (.resolve_conj(), "
                ".resolve_neg())"
            )
        return ValueError(
            f"parameter '{self.layout.names[i]}' is not what it was at construction: it now has "
            f"dtype {p.dtype}, device {p.device}, shape {tuple(p.shape)} and strides "
            f"{tuple(p.stride())}; expected dtype {self.layout.dtypes[i]} on {self.device} and an "
            "unchanged shape and memory format. Convert or move the model first, then build the "
            "optimizer"
        )

    def tensor(self, local: Local, i: int) -> Tensor:
        """The local gradient of parameter i as 1-D reals in its memory order."""
        grad = local.own.get(i, self.params[i].grad)
        if grad is None:
            return self.zeros(int(self.layout.numel[i]), self.layout.dtypes[i])
        return grad if i in local.own else flat_view(grad)

    def make_regular(self, local: Local, i: int, grad: Tensor | None) -> None:
        """Keep a copy that the kernels can read."""
        assert grad is not None
        local.own[i] = regular_grad(self.params[i], grad)
        local.ptrs[0][i] = local.own[i].data_ptr()

    def take(self, local: Local, still_open: Tensor) -> None:
        """Move gradients into `local`, until they are packed.

        Of parameters that are open (bool [params]), which they then are not.
        """
        for i in self.scan.take_open(still_open, local.ptrs[0], local.bits, local.taken):
            self.make_regular(local, i, local.taken.get(i))

    def fill_zeros(self, local: Local, indices: Tensor) -> None:
        """Give zero gradients to parameters that have none; one stretch of zeros serves all."""
        local.ptrs[0] = local.ptrs[0].clone()
        for dtype in {self.layout.dtypes[i] for i in indices.tolist()}:
            some = [i for i in indices.tolist() if self.layout.dtypes[i] == dtype]
            zeros = self.zeros(max(int(self.layout.numel[i]) for i in some), dtype)
            for i in some:
                local.own[i] = zeros[: int(self.layout.numel[i])]
                local.ptrs[0][i] = zeros.data_ptr()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def stage(self) -> None:
        """Copy parameters whose memory has gaps into their stand-ins."""
        for i, stand_in in self.staged.items():
            stand_in.copy_(flat_copy(self.params[i].detach(), self.params[i]))

    def unstage(self, indices: Iterable[int] | None = None) -> None:
        """Copy stand-ins back: of these parameters, or all."""
        for i in self.staged if indices is None else self.staged.keys() & indices:
            stand_in = self.staged[i]
            p = self.params[i].detach()
            real = torch.view_as_real(p) if p.is_complex() else p
            real.copy_(stand_in.view(real.shape))


class Uploaded:
    """The copy on the device of a table that seldom changes; for all streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: Tensor | None = None
        self._there: Tensor | None = None
        self._streams: set[int] = set()

    def holds(self, host: Tensor) -> bool:
        return self._host is not None and same(self._host, host)

    def of(self, host: Tensor) -> Tensor:
        if self._there is None or not self.holds(host):
            self._host, self._there = host, upload(host, self.device)
            self._streams.clear()
        outlive_current_stream(self._there, self._streams)
        return self._there


def same(before: Tensor, now: Tensor) -> bool:
    """If two tensors on the CPU hold the same; in most steps they are the same object."""
    return before is now or torch.equal(before, now)


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is being captured, when the host may allocate no pinned memory."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def regular_grad(p: Tensor, grad: Tensor) -> Tensor:
    """The gradient made dense, as 1-D reals in the memory order and dtype of `p`."""
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    grad = grad.detach().to(dtype=p.dtype, device=p.device).resolve_conj().resolve_neg()
    if grad.stride() == dense_strides(p):
        return flat_view(grad)
    return flat_copy(grad, p)


@dataclass
class Gradients:
    """Gradients ready for a step: summed over ranks and micro-batches, not yet divided.

    host_ptrs: int64 [params] on the CPU; ptrs: the same on the device. in_place: they are the
    parameters' own `.grad`, in the parameter's dtype; otherwise pieces in the shard dtype.
    """

    plan: Plan
    host_ptrs: Tensor
    ptrs: Tensor
    buffers: list[Tensor]
    in_place: bool
    local: Local
    reader: Reader
    present: Tensor  # uint8 bits: parameters with a gradient on any rank
    own: Tensor  # int64 [params]: elements behind each pointer
    scaling: ScaleState
    sumsq: Tensor | None = None  # float64 [params], of reduced pieces
    nonfinite: Tensor | None = None  # int32 [params]
    status: Tensor | None = None  # once the step has begun, see begin_step
    clipping: bool = False
    checking: bool = False

    def dtype(self, bucket: Bucket) -> torch.dtype:
        return bucket.dtype if self.in_place else shard_dtype(bucket.dtype)

    @property
    def scale(self) -> Tensor | None:
        """Loss scale that they carry, on the device; None without scaling. A step changes it."""
        if not self.scaling.scaling:
            return None
        return self.scaling.value if self.status is None else self.decided("scale")

    def decided(self, field: str) -> Tensor:
        """What begin_step has decided, on the device, 0-dim."""
        assert self.status is not None
        return self.status[STATUS_FIELDS[field]]

    def piece(self, i: int) -> Tensor:
        """This rank's summed gradient piece of parameter i, 1-D."""
        if self.in_place:
            return self.reader.tensor(self.local, i)
        address, numel = int(self.host_ptrs[i]), int(self.own[i])
        dtype = shard_dtype(self.plan.layout.dtypes[i])
        for buffer in self.buffers:
            offset = (address - buffer.data_ptr()) // dtype.itemsize
            if buffer.dtype == dtype and 0 <= offset and offset + numel <= buffer.numel():
                return buffer[offset : offset + numel]
        assert numel == 0, "a gradient piece lies outside the shard buffers"
        return self.reader.zeros(0, dtype)

    def averaged(self, i: int) -> Tensor:
        """The piece in the update dtype: divided by ranks and loss scale. May be `piece` itself."""
        grad = self.piece(i)
        grad = grad.to(shard_dtype(grad.dtype))
        divisor = self.plan.divisors[i]
        scale = self.scale
        if scale is not None:
            return grad / (scale * divisor).to(grad.dtype)
        return grad if divisor == 1 else grad / divisor

    def writable(self, i: int) -> Tensor:
        """The same to write to, as torch's classes may: no part of zeros that several share."""
        grad = self.averaged(i)
        return grad.clone() if self.in_place and i in self.local.own else grad


def upload(table: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`; asynchronous, through pinned memory, on CUDA."""
    uploaded: list[Tensor] = ops.upload([table.contiguous()], device)
    return uploaded[0]
