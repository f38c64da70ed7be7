"""Norms, clipping and reading of reduced gradients: over the whole world, averaged and unscaled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reduction
from .layout import overlaps, unflatten
from .ops import RECORD_COLUMNS, ops
from .reduced import Gradients, Local
from .transports.control import NO_DETAIL, Agreed

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


def checked(
    max_norm: Any, norm_type: Any, name: str = "norm_type"
) -> tuple[tuple[float, float], ValueError | None]:
    """Both as numbers, and what is wrong with them: for all ranks to raise, not for this alone.

    name: of the second one, in the caller's arguments.
    """
    limit, order = as_number(max_norm), as_number(norm_type)
    if not limit >= 0:
        return NO_DETAIL, ValueError(f"max_norm: expected a number of at least 0, got {max_norm!r}")
    if not order > 0:
        return NO_DETAIL, ValueError(f"{name}: expected a number above 0 or inf, got {norm_type!r}")
    return (limit, order), None


def as_number(value: Any) -> float:
    """NaN for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def records(opt: ZeroOptimizer, grads: Gradients) -> Tensor:
    """Every rank's sum of squares and first offender, float64 [world, columns]."""
    if grads.in_place:
        compiled, scale = grads.plan.compiled, opt._scale.tensor
        alone: Tensor = ops.summarize_in_place(compiled, grads.ptrs, scale)
        return alone
    assert opt._mover is not None
    return opt._mover.gather_records(grads, opt._scale.tensor)


def total(opt: ZeroOptimizer, grads: Gradients | None, p: float) -> Tensor:
    """Global p-norm, float32 0-dim."""
    if grads is None:
        return torch.zeros((), dtype=torch.float32, device=opt._device)
    if p == 2.0:
        squares = records(opt, grads)[:, RECORD_COLUMNS["sumsq"]]
        return squares.sum().sqrt().to(torch.float32)
    own = [grads.averaged(i) for i in sorted(grads.plan.indices)]
    parts = [part.double().abs() for part in own if part.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=opt._device)
    if math.isinf(p):
        mine = torch.stack([part.max() for part in parts] or [zero]).max()
    else:
        mine = torch.stack([part.pow(p).sum() for part in parts] or [zero]).sum()
    # In stage 0 every rank holds every gradient: one of them counts.
    everybody = mine.unsqueeze(0)
    if opt._mover is not None and not opt._shard.whole:
        everybody = opt._mover.gather_rows(mine)
    norm = everybody.max() if math.isinf(p) else everybody.sum().pow(1 / p)
    return norm.to(torch.float32)


def clip(opt: ZeroOptimizer, grads: Gradients | None, max_norm: float, p: float) -> Tensor:
    """Multiply the window's gradients, wherever they are now, by the clip factor."""
    norm = total(opt, grads, p)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if opt._options.check_finite:
        # step() will skip this window: leave the offender alone, so that it can be named.
        factor = torch.where(torch.isfinite(norm), factor, 1.0)
    multiply(opt, factor)
    return norm


def multiply(opt: ZeroOptimizer, factor: Tensor) -> None:
    """All gradients of the window, wherever they are now, by `factor`, 0-dim."""
    if opt._rounds is not None:
        for buffer in opt._window.buffers:
            buffer.mul_(factor)
        opt._window.sumsq.mul_(factor.double().square())
    for values in local_values(opt):
        values.mul_(factor)


def local_values(opt: ZeroOptimizer) -> list[Tensor]:
    """What `p.grad` holds: the tensors themselves, of sparse ones the values, each place once."""
    for p in opt._params:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
        elif p.grad is not None and overlaps(p.grad):
            p.grad = p.grad.clone(memory_format=torch.contiguous_format)
    grads = [p.grad for p in opt._params if p.grad is not None]
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def full_grad(opt: ZeroOptimizer, local: Local, agreed: Agreed, index: int) -> Tensor | None:
    """The averaged gradient of one parameter, gathered from its owners."""
    grads = reduction.reduce(opt, local, agreed, only=index)
    if grads is None or index not in grads.plan.indices:
        return None
    return whole_tensor(opt, index, grads.averaged(index))


def whole_tensor(opt: ZeroOptimizer, i: int, piece: Tensor) -> Tensor:
    """Collective: the tensor, in the shape of parameter i, of which each rank holds a piece."""
    if opt._mover is not None and not opt._shard.whole:
        padded = torch.zeros(int(opt._layout.piece[i]), dtype=piece.dtype, device=piece.device)
        padded[: piece.numel()] = piece
        piece = opt._mover.gather_rows(padded).view(-1)[: int(opt._layout.numel[i])]
    return unflatten(piece, opt._params[i])


def unscale(
    opt: ZeroOptimizer, local: Local, agreed: Agreed, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Multiply the window's gradients by `inverse`, 0-dim.

    Returns 1.0 if any rank has a non-finite one, and every rank's `inverse`, [world]. In stage 2
    the window is reduced first, since that is where its gradients are. A rank that has joined
    brings 0 and takes the others'.
    """
    found = torch.zeros((), dtype=torch.float32, device=opt._device)
    if opt._rounds is not None:
        reduction.reduce(opt, local, agreed)
        found += (opt._window.nonfinite != 0).any()
    else:
        for grad in local_values(opt):
            found += (~torch.isfinite(grad)).any()
    rows = torch.stack([found, inverse.to(opt._device, torch.float32)]).unsqueeze(0)
    if opt._mover is not None:
        rows = opt._mover.gather_rows(rows[0])
    found, factor = rows.amax(0)
    multiply(opt, factor)
    return found, rows[:, 1]
