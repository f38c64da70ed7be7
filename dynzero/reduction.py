"""From agreed presence to reduced gradients: plan, pack, reduce.

One process has no wire and no bucket: its gradients are read where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .ops import Range
from .plan import Plan, bit_mask, counts_of, indices_of, make_plan, raw, union
from .reduced import Gradients, Local, upload
from .transports.control import Agreed
from .window import Window, run

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


# Note [In step]
# On a GPU the cheapest way to make room for a bucket is to let the stream wait for one that was
# sent: the host goes on, and memory stays low. But then all that the user launches waits for the
# other ranks, too, and what they have to send first may wait for something behind it: a collective
# of the user's in the middle of backward, a bucket of another optimizer. If all ranks do the same
# things in the same order, each of them has launched what the others wait for, before it waits
# itself. So the stream waits during backward only in rounds where all ranks have the same
# gradients, no rank has a second optimizer that reduces during backward, and all have announced the
# round at the same time: one that is far ahead ends its backward without an answer, sends nothing
# before it comes back here, and may first wait for a collective of the user's. In other rounds a
# bucket is received once the host sees that it has arrived, and the rest leaves when the ranks next
# meet. All ranks decide alike: one that waits counts on the others to send all they have.


def reduce_round(
    opt: ZeroOptimizer, local: Local, agreed: Agreed, *, in_step: bool
) -> Iterator[Any]:
    present, _ = halves(opt, agreed.round_bits())
    plan = plan_of(opt, union(present), None, whole=False)
    if plan is not None:
        assert opt._mover is not None
        yield from opt._mover.reduce(plan, local, present, opt._window, in_step=in_step)


def halves(opt: ZeroOptimizer, bits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Presence, and where absent="zero" is in use who may get zeros: uint8 [world, bytes] each."""
    if not opt._may_zero:
        return bits, None
    size = opt._layout.bit_bytes
    return bits[:, :size], bits[:, size:]


def plan_of(
    opt: ZeroOptimizer, bits: Tensor, present: Tensor | None, *, whole: bool
) -> Plan | None:
    """The cached plan of the parameters set in `bits`; None if there are none.

    present: uint8 [world, bytes], whose counts become the divisors of "present" averages; None
    divides by the world size (which a reduction never uses).
    """
    averages = tuple(group["average"] for group in opt.param_groups)
    if "present" not in averages:
        present = None
    key = (raw(bits), b"" if present is None else raw(present), averages, whole)
    plan = opt._plans.get(key)
    if plan is None:
        with Range("dynzero::plan"):
            active = indices_of(bits, opt._layout.size)
            divisor = torch.full_like(active, opt._layout.world)
            if present is not None:
                counts = counts_of(present, active).clamp(min=1)
                by_count = torch.tensor(
                    [average == "present" for average in averages], device="cpu"
                )
                divisor = torch.where(by_count[opt._layout.group[active]], counts, divisor)
            # With one process nothing travels: a bucket is just one launch, for all there is.
            bucket_bytes = opt._options.bucket_bytes if opt._mover is not None else math.inf
            plan = make_plan(
                opt._layout, active, divisor,
                bucket_bytes=bucket_bytes, whole=whole,
            ).to(opt._device)  # fmt: skip
        opt._plans.put(key, plan)
    return plan if plan.indices else None


def reduce(
    opt: ZeroOptimizer,
    local: Local,
    agreed: Agreed,
    *,
    closing: bool = False,
    only: int | None = None,
) -> Gradients | None:
    """The window's gradients on their owners, or None if no rank has any.

    closing: the step's own call, where parameters of absent="zero" groups join with zeros.
    only: just this parameter (its index); stage 2, which keeps what it reduces, takes all.
    """
    present, may_get_zeros = halves(opt, agreed.bits)
    if opt._mover is None:
        eligible = may_get_zeros[0] if closing and may_get_zeros is not None else None
        return gradients_in_place(opt, local, eligible, only)
    if only is not None and opt._rounds is None:
        present = present & bit_mask([only], opt._layout.size)
    if opt._rounds is not None:
        opt._touched |= local.bits
        opt._window.had |= local.bits
    window = opt._window if opt._rounds is not None else Window(opt._layout, opt._device)
    now = had = union(present)
    if opt._rounds is not None:
        had = union(window.present) | now
    if closing and may_get_zeros is not None:
        now = now | (union(may_get_zeros) & ~had)
    plan = plan_of(opt, now, None, whole=False)
    if plan is not None:
        if opt._rounds is not None:
            everything = torch.ones(opt._layout.size, dtype=torch.bool, device="cpu")
            local.make_writable()
            opt._reader.take(local, everything)
        with Range("dynzero::reduce"):
            run(opt._mover.reduce(plan, local, present, window, in_step=True))
    final = plan_of(opt, had | now, window.present, whole=opt._shard.whole)
    return None if final is None else gradients_of(opt, final, local, window, had)


def gradients_in_place(
    opt: ZeroOptimizer, local: Local, eligible: Tensor | None, only: int | None
) -> Gradients | None:
    """One process: what it has is what there is."""
    bits = local.bits
    if only is not None:
        bits = bits & bit_mask([only], opt._layout.size)
    active = bits
    if eligible is not None:
        opt._reader.fill_zeros(local, indices_of(eligible & ~bits, opt._layout.size))
        bits = bits | eligible
    plan = opt._plans.latest(bits)
    if plan is None:
        plan = plan_of(opt, bits, None, whole=True)
        if plan is None:
            return None
        opt._plans.keep(bits, plan)
    return Gradients(
        plan=plan, host_ptrs=local.ptrs[0], ptrs=opt._reader.grad_ptrs(local), buffers=[],
        in_place=True, local=local, reader=opt._reader, present=active,
        own=opt._layout.numel, scaling=opt._scale,
    )  # fmt: skip


def gradients_of(
    opt: ZeroOptimizer, plan: Plan, local: Local, window: Window, present: Tensor
) -> Gradients:
    ptrs, buffers, own, there = window.ptrs, window.buffers, opt._layout.own, window.ptrs_there
    if opt._shard.whole:
        assert opt._mover is not None
        ptrs, buffers = opt._mover.gather_grads(plan, window)
        own, there = opt._layout.numel, None
    return Gradients(
        plan=plan, host_ptrs=ptrs,
        ptrs=upload(ptrs, opt._device) if there is None else there, buffers=buffers, in_place=False,
        local=local, reader=opt._reader, present=present, own=own, scaling=opt._scale,
        sumsq=window.sumsq, nonfinite=window.nonfinite,
    )  # fmt: skip
