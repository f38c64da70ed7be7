"""ZeroOptimizer: presence -> plan -> pack -> reduce -> check -> step -> gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from . import construction, norms, state
from .construction import Options
from .layout import build_layout
from .loss_scale import ScaleState
from .ops import STATUS_FIELDS, ops
from .plan import Plan, counts_of, indices_of, make_plan, union
from .reduced import Gradients, Local, Reader
from .report import LastStep
from .rounds import Rounds, Waitable
from .shard import upload
from .transports.control import Action, Agreed, Control, Message, first_difference
from .window import Window, run

PLAN_CACHE = 256
# Ranks at these calls take part in the others' backward rounds until all have arrived.
REDUCING = (Action.STEP, Action.GRAD_NORM, Action.CLIP, Action.FULL_GRAD, Action.JOIN)


class ZeroOptimizer(Optimizer):
    """A sharded (ZeRO) optimizer with exact torch.optim semantics, whatever each rank trains.

    params: as for any torch optimizer: parameters, (name, parameter) pairs, or group dicts.
    optimizer_class: an elementwise torch.optim.Optimizer class; `defaults` go to it (lr, ...).
    stage: 0 nothing sharded; 1 optimizer state and masters; 2 gradients too.
    absent: "skip" leaves a parameter that no rank used untouched, as torch with `grad is None`;
        "zero" gives it a zero gradient. average: "world" divides the sum by the number of ranks, as
        DDP; "present" by the number of ranks that used the parameter. Both may be set per group.
    max_grad_norm: clip to this global 2-norm in step(), as torch.nn.utils.clip_grad_norm_.
    loss_scale: None, a number, "dynamic", or a LossScale.
    check_finite: an inf or NaN in any gradient on any rank makes every rank skip the step.
    process_group: default the world group; one process needs none. wire_dtype: float16, bfloat16
        or float32 for gradients on the wire, default each parameter's own. bucket_bytes: size of
        the buffers that travel. transport: "auto" or "collective". fused: None uses our kernels
        where they cover the options, True insists, False runs the torch class itself.
    sync_params: copy the first rank's parameters to all ranks; False checks that they agree.

    Raises ValueError, TypeError or RuntimeError, the same on every rank, for anything that cannot
    work. Source: Rajbhandari et al., "ZeRO", 2020; the update is the torch.optim class's.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        *,
        stage: int = 1,
        absent: str = "skip",
        average: str = "world",
        max_grad_norm: float | None = None,
        loss_scale: Any = None,
        check_finite: bool = True,
        process_group: Any = None,
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: float = 64 << 20,
        transport: str = "auto",
        fused: bool | None = None,
        sync_params: bool = True,
        **defaults: Any,
    ) -> None:
        self._control = Control(process_group)
        options = Options(
            stage, absent, average, max_grad_norm, loss_scale, check_finite, wire_dtype,
            bucket_bytes, transport, fused, sync_params,
        )  # fmt: skip
        error: Exception | None = None
        try:
            self._build_locally(params, optimizer_class, options, defaults)
        except (ValueError, TypeError, RuntimeError) as caught:
            error = caught
        self._control.raise_together(error)
        construction.agree_on_setup(self._control, self._description())
        self._mover = construction.build_mover(
            self._control, self._layout, self._device, process_group
        )
        if self._mover is not None:
            construction.sync_params(self._control, self._mover.collective, self._params,
                              self._layout.names, sync_params)  # fmt: skip
        self._shard = construction.build_shard(self)
        self._start()

    def _build_locally(
        self, params: Any, cls: type[Optimizer], options: Options, defaults: dict[str, Any]
    ) -> None:
        """Everything that needs no other rank, and so may fail on this one alone."""
        self._building = True
        options.check()
        self._options, self._class = options, cls
        self._class_kwargs = defaults
        torch_defaults = construction.defaults_of(cls, defaults)
        own = {"absent": options.absent, "average": options.average}
        super().__init__(construction.without_duplicates(params), {**torch_defaults, **own})
        self._params, self._names, group_of = construction.flatten_groups(self.param_groups)
        self._device = construction.common_device(self._params, self._names)
        self._layout = build_layout(
            self._params, self._names, group_of, world=self._control.world,
            rank=self._control.rank, wire_dtype=options.wire_dtype,
        )  # fmt: skip
        self._spec = construction.choose_spec(self)
        self._scale = ScaleState(options.loss_scale, self._device)
        self._reader = Reader(self._params, self._layout, self._device)
        self._building = False

    def _start(self) -> None:
        self._iteration, self._window_number = 0, 0
        self._plans: dict[tuple[bytes, bytes, bool], Plan] = {}
        self._mean_over_present = construction.mean_over_present(self.param_groups, self._layout)
        self._window = Window(self._layout, self._device)
        self._touched = torch.zeros(self._layout.bit_bytes, dtype=torch.uint8)
        self._fingerprint = 0
        self._fingerprinted: Any = None
        self._rounds: Rounds | None = None
        if self._options.stage == 2 and self._control.world > 1:
            self._rounds = Rounds(self._params, self._device, self._begin_round)
        self.last_step: LastStep | None = None

    def _description(self) -> list[str]:
        return construction.describe(self)

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, check, update and gather. Collective: every rank must call it.

        closure: optional, run once with gradients enabled; its value is returned. `last_step` tells
        what happened. Raises RuntimeError on every rank when ranks are out of step, ValueError when
        a parameter's dtype, device, shape or memory format has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local, agreed = self._agree(Action.STEP)
        with torch.no_grad():
            self._perform_step(local, agreed)
        return loss

    def _perform_step(self, local: Local, agreed: Agreed) -> None:
        grads = self._reduce(local, agreed, closing=True)
        iteration = self._iteration
        self._iteration += 1
        if grads is None:
            self.last_step = LastStep(iteration, self._layout.names, None, None)
        else:
            records = self._check(grads)
            self._update_and_gather(grads)
            self.last_step = LastStep(iteration, self._layout.names, grads.status, records)
            active = sorted(grads.plan.indices)
            self.last_step.active = tuple(self._layout.names[i] for i in active)
        self._end_window()

    def _check(self, grads: Gradients) -> Tensor:
        """Norm, non-finite flag, clip factor, step counts and loss scale, all on the device."""
        with record_function("dynzero::check"):
            records = norms.records(self, grads)
            grads.status = torch.empty(len(STATUS_FIELDS), dtype=torch.float64, device=self._device)
            grads.clipping = self._options.max_grad_norm is not None
            ops.begin_step(
                grads.plan.table.rows,
                records,
                self._options.max_grad_norm or 0.0,
                self._options.check_finite,
                self._scale.options,
                self._shard.steps,
                self._scale.tensor,
                grads.status,
            )
        return records

    def _update_and_gather(self, grads: Gradients) -> None:
        self._shard.ensure(grads.plan.indices, self.param_groups)
        self._reader.stage()
        with record_function("dynzero::step"):
            self._shard.begin(grads.plan, grads, self.param_groups)
            if self._mover is not None and not self._shard.whole:
                params = upload(grads.param_ptrs, self._device)
                self._mover.update_and_gather(grads.plan, self._shard, grads, params)
            else:
                for bucket in grads.plan.buckets:
                    self._shard.update(grads.plan, bucket, grads, None)
        self._reader.unstage()

    def _end_window(self) -> None:
        self._window_number += 1
        self._window = Window(self._layout, self._device)

    # Presence.

    def _message(self, action: Action, trouble: bool, detail: tuple[float, float]) -> Message:
        return Message(
            self._iteration, self._window_number, self._window.rounds, action,
            self._current_fingerprint(), int(trouble), detail,
        )  # fmt: skip

    def _current_fingerprint(self) -> int:
        seen = construction.hyperparameters(self.param_groups)
        if seen != self._fingerprinted:
            self._fingerprinted, self._fingerprint = seen, construction.fingerprint(seen)
        return self._fingerprint

    def _agree(
        self, action: Action, detail: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[Local, Agreed]:
        """Meet all ranks at `action`, taking part in the others' rounds until they arrive."""
        with record_function("dynzero::presence"):
            if self._rounds is not None:
                self._rounds.forget()
                self._rounds.finish()
            local, complaint = self._reader.read()
            bits = construction.message_bits(self, local.bits)
            while True:
                message = self._message(action, complaint is not None, detail)
                agreed = self._control.exchange(message, bits)
                self._judge(agreed, complaint)
                if not agreed.any_at(Action.ROUND):
                    return local, agreed
                self._take_part(agreed)

    def _judge(self, agreed: Agreed, complaint: str | None) -> None:
        """Raise, on every rank alike, what these messages show to be wrong."""
        if any(m.trouble for m in agreed.messages):
            self._control.raise_together(ValueError(complaint) if complaint else None)
        difference = first_difference(agreed.messages, REDUCING)
        if difference is not None:
            raise RuntimeError(difference)
        if len({m.fingerprint for m in agreed.messages}) > 1:
            construction.explain_fingerprints(self._control, self.param_groups)

    def _take_part(self, agreed: Agreed) -> None:
        """Take part, with nothing, in the others' backward round."""
        nothing, _ = self._reader.read()
        nothing.drop()
        self._window.rounds += 1
        run(self._reduce_round(nothing, agreed.taking_part(Action.ROUND)))

    def _begin_round(self) -> Iterator[Waitable]:
        """Stage 2, end of a backward pass: take the gradients, then announce, then reduce."""
        local, complaint = self._reader.read()
        self._reader.take(local)
        self._touched |= local.bits
        return self._round(local, complaint)

    @torch.no_grad()
    def _round(self, local: Local, complaint: str | None) -> Iterator[Waitable]:
        message = self._message(Action.ROUND, complaint is not None, (0.0, 0.0))
        exchange = self._control.start(message, construction.message_bits(self, local.bits))
        yield exchange
        agreed = exchange.wait()
        self._judge(agreed, complaint)
        self._window.rounds += 1
        yield from self._reduce_round(local, agreed.taking_part(Action.ROUND))

    def _reduce_round(self, local: Local, bits: Tensor) -> Iterator[Any]:
        present = bits[:, : self._layout.bit_bytes]
        plan = self._plan(union(present), None, whole=False)
        if plan is not None:
            assert self._mover is not None
            yield from self._mover.reduce(plan, local, present, self._window)

    # Plan, pack, reduce.

    def _plan(self, bits: Tensor, present: Tensor | None, *, whole: bool) -> Plan | None:
        """The cached plan of the parameters set in `bits`; None if there are none.

        present: uint8 [world, bytes], whose counts become the divisors of "present" averages; None
        divides by the world size (which a reduction never uses).
        """
        if not bool(self._mean_over_present.any()):
            present = None
        counts_key = b"" if present is None else bytes(present.flatten().tolist())
        key = (bytes(bits.tolist()), counts_key, whole)
        plan = self._plans.pop(key, None)
        if plan is None:
            with record_function("dynzero::plan"):
                active = indices_of(bits, self._layout.size)
                divisor = torch.full_like(active, self._layout.world)
                if present is not None:
                    counts = counts_of(present, active).clamp(min=1)
                    divisor = torch.where(self._mean_over_present[active], counts, divisor)
                plan = make_plan(
                    self._layout, active, divisor,
                    bucket_bytes=self._options.bucket_bytes, whole=whole,
                ).to(self._device)  # fmt: skip
            if len(self._plans) >= PLAN_CACHE:
                self._plans.pop(next(iter(self._plans)))
        self._plans[key] = plan
        return plan if plan.indices else None

    def _reduce(
        self, local: Local, agreed: Agreed, *, closing: bool = False, only: int | None = None
    ) -> Gradients | None:
        """The window's gradients on their owners, or None if no rank has any.

        closing: the step's own call, where parameters of absent="zero" groups join with zeros.
        only: just this parameter (its index), unless the window is already reduced.
        """
        size = self._layout.bit_bytes
        present, eligible = agreed.bits[:, :size], union(agreed.bits[:, size:])
        if only is not None:
            present = present & construction.bit_mask([only], self._layout.size)
        self._touched |= local.bits
        if self._mover is None:
            return self._gradients_in_place(local, present, eligible if closing else None)
        window = self._window if self._rounds is not None else Window(self._layout, self._device)
        now = union(present)
        if closing and eligible.numel():
            now = now | (eligible & ~union(window.present))
        plan = self._plan(now, None, whole=False)
        if plan is not None:
            if self._rounds is not None:
                self._reader.take(local)
            with record_function("dynzero::reduce"):
                run(self._mover.reduce(plan, local, present, window))
        final = self._plan(union(window.present) | now, window.present, whole=self._shard.whole)
        return None if final is None else self._gradients_of(final, local, window)

    def _gradients_in_place(
        self, local: Local, present: Tensor, eligible: Tensor | None
    ) -> Gradients | None:
        bits = present[0]
        if eligible is not None and eligible.numel():
            self._reader.fill_zeros(local, indices_of(eligible & ~bits, self._layout.size))
            bits = bits | eligible
        plan = self._plan(bits, present, whole=True)
        if plan is None:
            return None
        return Gradients(
            plan=plan, layout=self._layout, host_ptrs=local.ptrs[0], param_ptrs=local.ptrs[1],
            ptrs=upload(local.ptrs[0], self._device), buffers=[], in_place=True, local=local,
            reader=self._reader, own=self._layout.numel, scale=self._scale.factor,
        )  # fmt: skip

    def _gradients_of(self, plan: Plan, local: Local, window: Window) -> Gradients:
        ptrs, buffers, own = window.ptrs, window.buffers, self._layout.own
        if self._shard.whole:
            assert self._mover is not None
            ptrs, buffers = self._mover.gather_grads(plan, window)
            own = self._layout.numel
        return Gradients(
            plan=plan, layout=self._layout, host_ptrs=ptrs, param_ptrs=local.ptrs[1],
            ptrs=upload(ptrs, self._device), buffers=buffers, in_place=False, local=local,
            reader=self._reader, own=own, scale=self._scale.factor,
            sumsq=window.sumsq, nonfinite=window.nonfinite,
        )  # fmt: skip

    # Around the step.

    def scale(self, loss: Any) -> Any:
        """`loss` (a tensor, or a list or tuple of them) times the current loss scale."""
        return self._scale.multiply(loss)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`scale(loss).backward(**kwargs)`."""
        self.scale(loss).backward(**kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the window: gradients in `p.grad`, and in stage 2 what was reduced of them.

        set_to_none=False leaves zeros where there was a gradient, as torch: those parameters stay
        present, and moments and weight decay go on moving them.
        """
        if self._rounds is not None:
            self._rounds.forget()
            self._rounds.finish()
            if self._window.rounds:
                self._end_window()
        super().zero_grad(set_to_none)
        if set_to_none:
            self._touched.zero_()
        elif self._rounds is not None:
            for i in indices_of(self._touched, self._layout.size).tolist():
                if self._params[i].grad is None:
                    self._params[i].grad = torch.zeros_like(self._params[i])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally, in `p.grad`; the next one outside reduces."""
        if self._rounds is None:
            yield
            return
        before, self._rounds.deferred = self._rounds.deferred, True
        try:
            yield
        finally:
            self._rounds.deferred = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a training loop over uneven data: at its end, take part until all ranks are done.

        A rank that has left its loop contributes nothing to the others' steps but follows them, so
        that all ranks hold the same parameters in the end. An exception leaves without joining.
        """
        yield
        if self._control.world > 1:
            self._shadow()

    def _shadow(self) -> None:
        if self._rounds is not None:
            self._rounds.forget()
            self._rounds.finish()
        while True:
            local, complaint = self._reader.read()
            local.drop()
            message = self._message(Action.JOIN, complaint is not None, (0.0, 0.0))
            agreed = self._control.exchange(message, construction.message_bits(self, local.bits))
            self._judge(agreed, complaint)
            others = [m for m in agreed.messages if m.action is not Action.JOIN]
            if not others:
                return
            with torch.no_grad():
                self._follow(local, agreed, others[0])

    def _follow(self, local: Local, agreed: Agreed, other: Message) -> None:
        """Do, with nothing of our own, what the ranks still at work are doing."""
        if agreed.any_at(Action.ROUND):
            self._take_part(agreed)
        elif other.action is Action.STEP:
            self._perform_step(local, agreed)
        elif other.action is Action.GRAD_NORM:
            norms.total(self, self._reduce(local, agreed), other.detail[0])
        elif other.action is Action.CLIP:
            norms.clip(self, self._reduce(local, agreed), *other.detail)
        elif other.action is Action.FULL_GRAD:
            norms.full_grad(self, local, agreed, int(other.detail[0]))

    # Norms, gradients, scale.

    @torch.no_grad()
    def grad_norm(self, p: float = 2.0) -> Tensor:
        """Global p-norm of the averaged, unscaled gradients: float32 0-dim, on the device.

        Collective. p > 0, or inf; a complex number counts as its real and imaginary part.
        """
        local, agreed = self._agree(Action.GRAD_NORM, (norms.checked_order(p), 0.0))
        return norms.total(self, self._reduce(local, agreed), float(p))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the window's gradients so that their global norm is at most `max_norm`.

        Returns the norm before clipping, float32 0-dim on the device. Collective. Source:
        torch.nn.utils.clip_grad_norm_, applied to the averaged, unscaled gradients.
        """
        detail = (float(max_norm), norms.checked_order(norm_type))
        local, agreed = self._agree(Action.CLIP, detail)
        return norms.clip(self, self._reduce(local, agreed), *detail)

    @torch.no_grad()
    def full_grad(self, param: Tensor) -> Tensor | None:
        """The averaged, unscaled, whole gradient of `param` in this window; None if inactive.

        float32 (float64 for float64; complex for complex), shape of `param`. Collective: every rank
        must ask for the same parameter. Raises ValueError for a parameter of another optimizer.
        """
        index = next((i for i, p in enumerate(self._params) if p is param), None)
        if index is None:
            raise ValueError("full_grad: expected one of this optimizer's parameters")
        local, agreed = self._agree(Action.FULL_GRAD, (float(index), 0.0))
        return norms.full_grad(self, local, agreed, index)

    @property
    def loss_scale(self) -> float:
        """The current loss scale, 1.0 without loss scaling. Waits for the device."""
        return float(self._scale.value)

    @property
    def counters(self) -> dict[str, int]:
        """{"taken": steps taken, "skipped": steps skipped}. Waits for the device."""
        taken, skipped = self._scale.counters()
        return {"taken": taken, "skipped": skipped}

    # Groups and state.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch. Collective: every rank must add the same group, else every rank raises."""
        if self._building:
            super().add_param_group(param_group)
        else:
            construction.add_group(self, param_group, super().add_param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard, for this world size and rank: {"state", "param_groups", "dynzero"}.

        State tensors are 1-D pieces; not collective. Elsewhere use `full_state_dict`.
        """
        return state.shard_state_dict(self, super().state_dict)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state in the layout of torch.optim.Optimizer.state_dict(). Collective.

        Loads into the plain torch class as it is. float32 masters of 16-bit parameters appear as
        state entry "master", the loss scale under "dynzero". rank0_only: other ranks return {}.
        """
        return state.full_state_dict(self, rank0_only)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict` of this world size and rank, or any full or plain torch one.

        Collective. Raises ValueError on every rank, changing nothing, if one rank's does not fit.
        """
        state.load(self, state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ZeroOptimizer cannot be copied or pickled: it is tied to its parameters and process "
            "group; save opt.state_dict() or opt.full_state_dict() instead"
        )
