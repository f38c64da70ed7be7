"""ZeroOptimizer: presence -> plan -> pack -> reduce -> check -> step -> gather."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import construction, joining, lazy, norms, presence, reduction, state
from .construction import Options
from .discard import Discards
from .fused import Seen
from .hooks import hooked
from .layout import build_layout
from .loss_scale import ScaleState
from .ops import SCALE_FIELDS, STATUS_FIELDS, Range, ops
from .plan import PlanCache, indices_of
from .reduced import Gradients, Local, Reader, capturing, upload
from .report import LastStep, Outcome, Outcomes
from .rounds import Pass, Rounds, Waitable, supersede
from .static import Repeated
from .transports.control import Action, Agreed, Control
from .window import Window


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
    presence: "exact" asks in every window who has which gradients. "static" promises that every
        window repeats the first (calls and parameters, on each rank): nothing is asked any more,
        and with one process `step()` can be captured in a CUDA graph.
    gather: "eager" brings all new values back in step(). "lazy" lets them arrive while the next
        forward runs: each parameter is waited for when the module that holds it runs; to read
        weights otherwise, call `wait_for_parameters()` first. Stages 1 and 2, several ranks.

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
        bucket_bytes: float = 128 << 20,
        transport: str = "auto",
        fused: bool | None = None,
        sync_params: bool = True,
        presence: str = "exact",
        gather: str = "eager",
        **defaults: Any,
    ) -> None:
        lazy.finish_all()  # these parameters may have been another optimizer's
        self._control = Control(process_group)
        options = Options(
            stage, absent, average, max_grad_norm, loss_scale, check_finite, wire_dtype,
            bucket_bytes, transport, fused, sync_params, presence, gather,
        )  # fmt: skip
        error: Exception | None = None
        try:
            self._build_locally(params, optimizer_class, options, defaults)
        except Exception as caught:  # whatever it is, the others must not wait for this rank
            error = caught
        self._control.raise_together(error)
        construction.agree_on_setup(self._control, construction.describe(self))
        self._mover = construction.build_mover(self._control, self._device, process_group)
        if self._mover is not None:
            construction.sync_params(self._control, self._mover.collective, self._params,
                              self._layout.names, sync_params)  # fmt: skip
        self._shard = construction.build_shard(self)
        self._shard.staged = self._reader.staged
        self._start()

    def _build_locally(
        self, params: Any, cls: type[Optimizer], options: Options, defaults: dict[str, Any]
    ) -> None:
        """Everything that needs no other rank, and so may fail on this one alone."""
        self._building = True
        options.check()
        self._options, self._class = options, cls
        self._class_kwargs = defaults
        torch_defaults, self._state_keys = construction.probe(cls, defaults)
        own = {"absent": options.absent, "average": options.average}
        super().__init__(construction.without_duplicates(params), {**torch_defaults, **own})
        self._params, names, group_of = construction.flatten_groups(self.param_groups)
        self._device = construction.common_device(self._params, names)
        self._layout = build_layout(
            self._params, names, group_of, world=self._control.world,
            rank=self._control.rank, wire_dtype=options.wire_dtype,
        )  # fmt: skip
        self._spec = construction.choose_spec(cls, self.param_groups, options.fused)
        self._scale = ScaleState(options.loss_scale, self._device)
        self._reader = Reader(self._params, self._layout, self._device)
        self._building = False

    def _start(self) -> None:
        self._iteration, self._window_number = 0, 0
        self._discards = Discards(self._control.world)
        self._repeated = Repeated() if self._options.presence == "static" else None
        self._in_backward = False  # also after a backward() that raised
        self._plans = PlanCache()
        self._window = Window(self._layout, self._device)
        self._options_seen = Seen()
        self._touched = torch.zeros(self._layout.bit_bytes, dtype=torch.uint8, device="cpu")
        self._fingerprint = presence.Fingerprint()
        self._rounds: Rounds | None = None
        supersede(self._params)
        if self._options.stage == 2 and self._control.world > 1:
            self._rounds = Rounds(
                self._params, self._device, self._open_pass, self._close_pass, self._excused
            )
        self._arrivals: lazy.Arrivals | None = None
        if self._options.gather == "lazy" and self._mover is not None and not self._shard.whole:
            naming_ranks = self._mover.collective.naming_ranks
            self._arrivals = lazy.Arrivals(self._params, self._device, naming_ranks)
            weakref.finalize(self, self._arrivals.finish).atexit = False
        self._may_zero = any(group["absent"] == "zero" for group in self.param_groups)
        self.last_step: LastStep | None = None
        self._outcomes = Outcomes(self._scale.scaling)
        self._agreed_scaler = False  # set while a dynzero.GradScaler steps
        # That dynzero.GradScaler, if there is one: a weak reference.
        self._scaler: Callable[[], Any] = lambda: None

    def _open_pass(self, watch: Any) -> tuple[Pass, Iterator[Waitable]]:
        return presence.open_pass(self, watch)

    def _close_pass(self, current: Pass) -> None:
        presence.close_pass(self, current)

    def _excused(self, error: BaseException) -> bool:
        return presence.excused(self, error)

    # The step.

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, check, update and gather. Collective: every rank must call it.

        closure: optional, run once with gradients enabled; its value is returned. `last_step` tells
        what happened. Raises RuntimeError on every rank when ranks are out of step, ValueError when
        a parameter's dtype, device, shape or memory format has changed.
        """
        loss, wrong = None, None
        self._check_capture()
        if closure is not None and not callable(closure):
            wrong = TypeError(f"closure: expected a callable or None, got {closure!r}")
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        local, agreed = presence.agree(self, Action.STEP, wrong=wrong)
        unused = self._scale.scaling and not self._scale.used
        if unused and (local.bits.any() or self._window.had.any()):
            self._scale.warn_unused()
        with torch.no_grad():
            self._perform_step(local, agreed)
        return loss

    def _check_capture(self) -> None:
        if capturing(self._device) and (self._repeated is None or not self._repeated.closed):
            raise RuntimeError(
                "step() in a CUDA graph: a replay cannot ask which parameters are active; build "
                "the optimizer with presence='static' and take a step before the capture"
            )

    def _perform_step(self, local: Local, agreed: Agreed) -> None:
        grads = reduction.reduce(self, local, agreed, closing=True)
        iteration = self._iteration
        self._iteration += 1
        names, ranks = self._layout.names, self._control.ranks
        if grads is None:
            scale = self._scale.value.clone()
            self.last_step = LastStep(iteration, names, ranks, None, scale)
        else:
            status = grads.status = self._check(grads)
            self._update_and_gather(grads)
            outcome = Outcome(status, local.captured)
            self.last_step = LastStep(iteration, names, ranks, outcome)
            self.last_step.present = grads.present
            if not outcome.captured:
                self._outcomes.follow(self.last_step)
        self._end_window()
        self._discards = Discards(self._control.world)

    def _check(self, grads: Gradients) -> Tensor:
        """Norm, non-finite flag, clip factor, step counts and loss scale, all on the device."""
        with Range("dynzero::check"):
            records = norms.records(self, grads)
            size = len(STATUS_FIELDS) + len(SCALE_FIELDS) + records.numel()
            status = torch.empty(size, dtype=torch.float64, device=self._device)
            grads.clipping = self._options.max_grad_norm is not None
            grads.checking = self._options.check_finite or self._agreed_scaler
            ops.begin_step(
                grads.plan.table.rows,
                records,
                self._options.max_grad_norm or 0.0,
                grads.checking,
                self._scale.options,
                self._shard.steps,
                self._scale.tensor,
                status,
            )
        return status

    def _update_and_gather(self, grads: Gradients) -> None:
        self._reader.stage()
        self._shard.ensure(grads.plan.active, self.param_groups)
        with Range("dynzero::step"):
            self._shard.begin(grads.plan, grads, self.param_groups)
            if self._arrivals is not None:
                self._update_and_send(grads, self._arrivals)
                return
            if self._mover is not None and not self._shard.whole:
                params = self._reader.param_ptrs(grads.local)
                self._mover.update_and_gather(grads.plan, self._shard, grads, params)
            else:
                self._shard.update_whole(grads.plan, grads)
        self._reader.unstage()

    def _update_and_send(self, grads: Gradients, arrivals: lazy.Arrivals) -> None:
        assert self._mover is not None
        ptrs = upload(grads.local.ptrs[1], self._device)  # of its own: Sent may change it
        gathering = self._mover.update_and_gather(
            grads.plan, self._shard, grads, ptrs, receive=False
        )
        sent = lazy.Sent(gathering, grads.plan, grads, ptrs, self._params)
        arrivals.expect(sent, self._reader)

    def _end_window(self) -> None:
        self._window_number += 1
        if self._rounds is not None:  # what zero_grad(set_to_none=False) leaves zeros for
            self._touched = self._window.had.clone()
        if self._window.used:
            self._window = Window(self._layout, self._device)

    # Around the step.

    def wait_for_parameters(self) -> None:
        """gather="lazy": wait until every parameter holds its new value. Not collective.

        Needed only to read weights other than in the forward of the module that holds them.
        """
        if self._arrivals is not None:
            self._arrivals.finish()

    def scale(self, loss: Any) -> Any:
        """`loss` (a tensor or number, or a list or tuple of them) times the current loss scale.

        Raises TypeError for others.
        """
        return self._scale.multiply(loss)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`scale(loss).backward(**kwargs)`. TypeError if `loss` is no tensor."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss: expected a tensor, got {type(loss).__name__} {loss!r}")
        self._in_backward = True
        self.scale(loss).backward(**kwargs)
        self._in_backward = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the window: gradients in `p.grad`, and in stage 2 what was reduced of them.

        set_to_none=False leaves zeros where there was a gradient, as torch: those parameters stay
        present, and moments and weight decay go on moving them. Waits for nobody. Where gradients
        are discarded, ranks without any must call it as well.
        """
        super().zero_grad(set_to_none)
        presence.discard(self)
        if not capturing(self._device):
            self._outcomes.poll()
        if self._arrivals is not None:
            self._arrivals.clear()
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
        before, self._rounds.paused = self._rounds.paused, True
        try:
            yield
        finally:
            self._rounds.paused = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a training loop over uneven data: at its end, take part until all ranks are done.

        A rank that has left its loop contributes nothing to the others' steps but follows them, so
        that all ranks hold the same parameters in the end. Gradients that it has not stepped with
        are dropped, in stage 2 those that have not been reduced yet; all `p.grad` are None then. An
        exception leaves without joining. Joins of several optimizers, one inside the other, end
        together with the outermost.
        """
        if self._repeated is not None:
            raise ValueError(
                "join: a rank that has left its loop does not repeat the first window; build the "
                "optimizer with presence='exact'"
            )
        with joining.joined(self):
            yield

    # Norms, gradients, scale.

    @torch.no_grad()
    def grad_norm(self, p: float = 2.0) -> Tensor:
        """Global p-norm of the averaged, unscaled gradients: float32 0-dim, on the device.

        Collective. p > 0, or inf; a complex number counts as its real and imaginary part.
        """
        (_, order), wrong = norms.checked(0.0, p, "p")
        local, agreed = presence.agree(self, Action.GRAD_NORM, (order, 0.0), wrong)
        return norms.total(self, reduction.reduce(self, local, agreed), order)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the window's gradients so that their global norm is at most `max_norm`.

        Returns the norm before clipping, float32 0-dim on the device. Collective. Source:
        torch.nn.utils.clip_grad_norm_, applied to the averaged, unscaled gradients.
        """
        detail, wrong = norms.checked(max_norm, norm_type)
        local, agreed = presence.agree(self, Action.CLIP, detail, wrong)
        return norms.clip(self, reduction.reduce(self, local, agreed), *detail)

    @torch.no_grad()
    def full_grad(self, param: Tensor) -> Tensor | None:
        """The averaged, unscaled, whole gradient of `param` in this window; None if inactive.

        float32 (float64 for float64; complex for complex), shape of `param`. Collective: every rank
        must ask for the same parameter. Raises ValueError for a parameter of another optimizer.
        """
        index = next((i for i, p in enumerate(self._params) if p is param), -1)
        wrong = None
        if index < 0:
            got = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
            wrong = ValueError(
                f"full_grad: expected one of this optimizer's parameters, got another: {got}; ask "
                "for the object that it was built with"
            )
        local, agreed = presence.agree(self, Action.FULL_GRAD, (float(index), 0.0), wrong)
        return norms.full_grad(self, local, agreed, index)

    @property
    def loss_scale(self) -> float:
        """The current loss scale, 1.0 without loss scaling. Waits for the device."""
        return float(self._scale.value)

    @property
    def counters(self) -> dict[str, int]:
        """{"taken": steps taken, "skipped": steps skipped}. Waits for the device."""
        self._outcomes.poll(wait=True)
        taken, skipped = self._scale.counters()
        return {"taken": taken, "skipped": skipped}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler.step; its own non-finite check knows one rank only."""
        if self._control.world > 1 and not self._agreed_scaler:
            raise RuntimeError(
                "torch.amp.GradScaler decides on each rank by itself whether to step, so ranks "
                "would drift apart; use dynzero.GradScaler, which agrees on it"
            )
        return False

    # Groups and state.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch. Collective: every rank must add the same group, else every rank raises."""
        if self._building:
            super().add_param_group(param_group)
        else:
            presence.agree(self, Action.ADD_GROUP)
            construction.add_group(self, param_group, super().add_param_group)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard, for this world size and rank: {"state", "param_groups", "dynzero"}.

        State tensors are 1-D pieces; not collective. Elsewhere use `full_state_dict`.
        """
        self.wait_for_parameters()
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
