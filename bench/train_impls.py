"""What trains the model of train_model.py: dynzero and its peers, each as its documentation says.

Matrix products in 16 bits and float32 masters everywhere: dynzero and DeepSpeed hold 16-bit
parameters and keep masters, DDP holds float32 parameters under autocast, FSDP2 float32 shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dynzero
from dynzero._C import loopback_transport

from .train_model import BATCH, Case, MultiTask, Place, build_model

MAX_NORM = 1.0
# Low enough that no step overflows.
FP16_SCALE_BITS = 10

Batch = tuple[Tensor, Tensor, list[int]]


@dataclass
class Trainer:
    """backward: forward and backward of one batch, returns the loss. step: includes clearing."""

    backward: Callable[[Batch], Tensor]
    step: Callable[[], object]
    optimizer: Any = None


def options(place: Place) -> dict[str, Any]:
    # By the width, so that a few steps reduce the loss visibly at every size.
    return {"lr": 0.1 / place.sizes[0], "betas": (0.9, 0.95), "weight_decay": 0.01}


def in_16_bits(place: Place, model: nn.Module, batch: Batch) -> Tensor:
    x, labels, heads = batch
    loss: Tensor = model(x.to(place.dtype), labels, heads)
    return loss


def bare(place: Place, case: Case) -> Trainer:
    """Forward and backward of dynzero's model, with nothing attached to it."""
    model = build_model(place, case.shape(place), place.dtype)

    def backward(batch: Batch) -> Tensor:
        loss = in_16_bits(place, model, batch)
        loss.backward()
        return loss.detach()

    return Trainer(backward, model.zero_grad)


def dynzero_of(place: Place, case: Case, stage: int, gather: str = "eager") -> Trainer:
    model = build_model(place, case.shape(place), place.dtype)
    half = place.dtype == torch.float16
    opt = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, stage=stage, gather=gather,
        max_grad_norm=MAX_NORM,
        loss_scale=dynzero.LossScale(init=2.0**FP16_SCALE_BITS) if half else None, **options(place),
    )  # fmt: skip

    def backward(batch: Batch) -> Tensor:
        loss = in_16_bits(place, model, batch)
        opt.backward(loss)
        return loss.detach()

    def step() -> None:
        opt.step()
        opt.zero_grad()

    return Trainer(backward, step, opt)


@contextmanager
def without_wire(opt: Any) -> Iterator[None]:
    """What an iteration of the optimizer takes less here, it waited for the wire."""
    with mock.patch.object(opt._mover.collective, "transport", loopback_transport()):
        yield


def replicated(place: Place, case: Case, zero: bool = False) -> Trainer:
    """float32 parameters under autocast, in DDP where there are ranks, with fused AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model: nn.Module = build_model(place, case.shape(place), torch.float32)
    params = list(model.parameters())
    if place.world > 1:
        # Its documentation: needed where not every parameter takes part.
        unused = case.mode != "all"
        model = DistributedDataParallel(
            model, find_unused_parameters=unused, gradient_as_bucket_view=True
        )
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(
            params, optimizer_class=torch.optim.AdamW, fused=True, **options(place)
        )
    else:
        optimizer = torch.optim.AdamW(params, fused=True, **options(place))
    half = place.dtype == torch.float16
    scaler = torch.amp.GradScaler(place.device.type, init_scale=2.0**FP16_SCALE_BITS, enabled=half)

    def backward(batch: Batch) -> Tensor:
        with torch.autocast(place.device.type, place.dtype):
            loss = model(*batch)
        scaler.scale(loss).backward()
        return loss.detach()

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Trainer(backward, step)


def fsdp2(place: Place, case: Case) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: MultiTask = build_model(place, case.shape(place), torch.float32)
    kind: dict[str, Any] = {
        "mesh": init_device_mesh(place.device.type, (place.world,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=place.dtype),
        "reshard_after_forward": False,
    }
    for block in (*model.trunk, *model.heads):
        fully_shard(block, **kind)
    fully_shard(model, **kind)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **options(place))

    def backward(batch: Batch) -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss.detach()

    def step() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(backward, step)


def deepspeed(place: Place, case: Case, stage: int) -> Trainer:
    import deepspeed as library

    model = build_model(place, case.shape(place), place.dtype)
    half = place.dtype == torch.float16
    kind = {"fp16": {"enabled": True, "initial_scale_power": FP16_SCALE_BITS}}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,
        **(kind if half else {"bf16": {"enabled": True}}),
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options(place))
    engine = library.initialize(model=model, optimizer=optimizer, config=config)[0]

    def backward(batch: Batch) -> Tensor:
        loss = in_16_bits(place, engine, batch)
        engine.backward(loss)
        return loss.detach()

    return Trainer(backward, engine.step)


@dataclass(frozen=True)
class Impl:
    """stage: as the reader understands ZeRO. module: what has to be installed. share: whether the
    sweep over active shares is run as well."""

    build: Callable[[Place, Case], Trainer]
    stage: int
    module: str | None = None
    share: bool = False


def impls_of(world: int) -> dict[str, Impl]:
    """By name; the first is the one whose losses the others must reproduce."""
    ours = {
        "dynzero_stage1": Impl(lambda p, c: dynzero_of(p, c, 1), 1, share=True),
        "dynzero_stage2": Impl(lambda p, c: dynzero_of(p, c, 2), 2, share=True),
        "dynzero_stage1_lazy": Impl(lambda p, c: dynzero_of(p, c, 1, "lazy"), 1),
        "dynzero_stage2_lazy": Impl(lambda p, c: dynzero_of(p, c, 2, "lazy"), 2),
    }
    others = {
        "deepspeed_stage1": Impl(lambda p, c: deepspeed(p, c, 1), 1, "deepspeed"),
        "deepspeed_stage2": Impl(lambda p, c: deepspeed(p, c, 2), 2, "deepspeed"),
    }
    if world == 1:
        amp = {"amp_adamw": Impl(replicated, 0)}
        return {**amp, "dynzero_stage1": ours["dynzero_stage1"], **others}
    plain = {
        "ddp_adamw": Impl(replicated, 0, share=True),
        **ours,
        "ddp_zero_redundancy": Impl(lambda p, c: replicated(p, c, zero=True), 1),
        "fsdp2": Impl(fsdp2, 2),
    }
    return plain | others
