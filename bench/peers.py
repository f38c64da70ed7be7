"""What others would run for the same work: torch's own ops, Apex and DeepSpeed where installed.

Each function returns named candidates. Nothing here uses dynzero.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .timer import Call

NOT_INSTALLED = "not installed"


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def attempt(build: Callable[[], Call]) -> Call:
    """The candidate, or one that says why it could not be built."""
    try:
        return build()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"

    def fail() -> None:
        raise RuntimeError(reason)

    return Call(fail)


class Checks:
    """torch's non-finite test: one float for all tensors. An inverse scale of 1 leaves them as
    they are, at the same cost.

    Where this torch has no such kernel for the dtype of `like`, the norms, which are wanted anyway,
    tell as much: found where one is not finite. `note` then says so.
    """

    def __init__(self, like: Tensor) -> None:
        self.found = torch.zeros((), device=like.device)
        self.inverse = torch.ones(1, device=like.device)
        self.note: str | None = None
        try:
            self.check([torch.ones(1, dtype=like.dtype, device=like.device)])
        except NotImplementedError:
            dtype = str(like.dtype).removeprefix("torch.")
            self.note = (
                f"torch {torch.__version__} has no check-and-unscale kernel for {dtype}: the "
                "norms serve as non-finite test"
            )

    def check(self, tensors: list[Tensor]) -> None:
        self.found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, self.found, self.inverse)

    def norms(self, tensors: list[Tensor]) -> None:
        """The test, and each tensor's norm."""
        if self.note is None:
            self.check(tensors)
        norms = torch._foreach_norm(tensors)
        if self.note is not None:
            self.found.copy_(~torch.stack(norms).isfinite().all())


def pack_peers(grads: list[Tensor], views: list[Tensor], absent: list[Tensor]) -> dict[str, Call]:
    """grads -> views of a bucket, zeros into `absent` views, checked, with norms."""
    check = Checks(views[0])

    def fill() -> None:
        torch._foreach_copy_(views, grads)
        if absent:
            torch._foreach_zero_(absent)

    def foreach() -> None:
        fill()
        check.norms(views)

    def per_parameter() -> None:
        for view, grad in zip(views, grads, strict=True):
            view.copy_(grad)
            torch.isfinite(view).all()
            torch.linalg.vector_norm(view)
        for view in absent:
            view.zero_()

    calls = {"foreach": Call(foreach, note=check.note)}
    # Its time grows with nothing but the number of tensors, to seconds.
    if len(views) + len(absent) <= 5000:
        calls["per_parameter"] = Call(per_parameter)
    if installed("amp_C"):
        calls["apex"] = Call(ApexPack(grads, views, absent))
    return calls


class ApexPack:
    def __init__(self, grads: list[Tensor], views: list[Tensor], absent: list[Tensor]) -> None:
        self.grads, self.views, self.absent = grads, views, absent
        self.overflow = torch.zeros(1, dtype=torch.int32, device=views[0].device)

    def __call__(self) -> None:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        multi_tensor_applier(amp_C.multi_tensor_scale, self.overflow, [self.grads, self.views], 1.0)
        multi_tensor_applier(amp_C.multi_tensor_l2norm, self.overflow, [self.views], True)
        if self.absent:
            torch._foreach_zero_(self.absent)


def gather_peers(grads: list[Tensor], bucket: Tensor, world: int) -> dict[str, Call]:
    """Only the gathering, with neither check nor norm: torch.cat and FSDP2's _chunk_cat."""
    num_bytes = sum(g.numel() for g in grads) * (grads[0].element_size() + bucket.element_size())
    out = torch.empty_like(bucket.flatten()[: sum(g.numel() for g in grads)])
    calls = {"cat": Call(lambda: torch.cat(grads, out=out), bytes=num_bytes)}
    padded = sum(-(-g.numel() // world) for g in grads)
    chunked = out.view(1, -1)
    if world > 1:
        chunked = torch.empty(world, padded, dtype=bucket.dtype, device=bucket.device)
    calls["chunk_cat"] = Call(
        lambda: torch._chunk_cat(grads, dim=0, num_chunks=world, out=chunked), bytes=num_bytes
    )
    return calls


def check_peers(grads: list[Tensor]) -> dict[str, Call]:
    check = Checks(grads[0])

    def foreach() -> None:
        check.norms(grads)

    def per_parameter() -> None:
        for grad in grads:
            torch.isfinite(grad).all()
            torch.linalg.vector_norm(grad)

    calls = {
        "foreach": Call(foreach, note=check.note),
        "norm_only": Call(lambda: torch._foreach_norm(grads)),
    }
    if len(grads) <= 5000:
        calls["per_parameter"] = Call(per_parameter)
    return calls


def reduce_peers(received: Tensor, shard: Tensor) -> dict[str, Call]:
    """received [world, stride] -> shard [stride], checked, with norm. Reads absent slots too."""
    check = Checks(shard)

    def total() -> None:
        torch.sum(received, dim=0, dtype=shard.dtype, out=shard)

    def checked() -> None:
        total()
        check.check([shard])
        torch.linalg.vector_norm(shard)

    return {"sum_check_norm": Call(checked), "sum_only": Call(total)}


def unpack_peers(slots: list[Tensor], params: list[Tensor]) -> dict[str, Call]:
    def per_parameter() -> None:
        for param, slot in zip(params, slots, strict=True):
            param.copy_(slot)

    calls = {"foreach": Call(lambda: torch._foreach_copy_(params, slots))}
    if len(params) <= 5000:
        calls["per_parameter"] = Call(per_parameter)
    return calls


class Masters:
    """torch's way to train 16-bit parameters: a float32 copy with its own gradients.

    Parameters that are float32 already are their own masters. Gradients of `params` are checked,
    clipped, copied to the masters; the masters are stepped and copied back.
    """

    def __init__(self, params: list[Tensor], masters: list[Tensor], max_norm: float) -> None:
        self.params, self.masters, self.max_norm = params, masters, max_norm
        self.same = params[0].dtype == masters[0].dtype
        self.checks = Checks(params[0])
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad if self.same else torch.empty_like(master)
        self.master_grads: list[Any] = [m.grad for m in masters]
        self.grads: list[Any] = [p.grad for p in params]

    def fill_grads(self) -> None:
        if not self.same:
            torch._foreach_copy_(self.master_grads, self.grads)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.checks.note is None:
            self.checks.check(self.grads)
        total = torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
        if self.checks.note is not None:
            self.checks.found.copy_(~total.isfinite())
        self.fill_grads()
        # As GradScaler.step does: the fused kernel reads the flag itself, without a host sync.
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = self.checks.found  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.step()
        if not self.same:
            torch._foreach_copy_(self.params, self.masters)


def update_peers(params: list[Tensor], masters: list[Tensor], options: Any) -> dict[str, Call]:
    """AdamW over `masters`: the bare step on float32 gradients, and all the work around it."""
    work = Masters(params, masters, max_norm=1.0)
    work.fill_grads()
    numel = sum(m.numel() for m in masters)
    fused = torch.optim.AdamW(masters, fused=True, **options)
    foreach = torch.optim.AdamW(masters, foreach=True, **options)
    calls = {
        # Gradient read, parameter and two moments read and written, float32.
        "fused_adamw_only": Call(fused.step, bytes=28 * numel),
        "unscale_clip_fused_adamw": Call(lambda: work.step(fused), note=work.checks.note),
        "unscale_clip_foreach_adamw": Call(lambda: work.step(foreach), note=work.checks.note),
    }
    cuda = masters[0].is_cuda

    def apex() -> Call:
        from apex.optimizers import FusedAdam

        return Call(FusedAdam(masters, **options).step, bytes=28 * numel)

    def deepspeed() -> Call:
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

        kind = FusedAdam if cuda else DeepSpeedCPUAdam
        return Call(kind(masters, **options).step, bytes=28 * numel)

    if cuda and installed("apex"):
        calls["apex_fused_adam_only"] = attempt(apex)
    if installed("deepspeed"):
        calls["deepspeed_adam_only"] = attempt(deepspeed)
    return calls
