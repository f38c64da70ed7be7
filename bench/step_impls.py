"""Whole optimizer steps over the same model: dynzero and everything else that is installed.

The model's gradients are constants, so that a backward pass costs next to nothing. One process:
the gradients are made once and `step` alone is timed. Several: a whole iteration is, because
implementations reduce at different places (DDP and FSDP2 in backward).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dynzero

from .cases import short, tensor_sizes
from .peers import Masters
from .timer import Call

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
MAX_NORM = 1.0
# Parameters of one block: what FSDP2 gathers and reduces at a time.
BLOCK = 20


@dataclass(frozen=True)
class Spec:
    """One comparison. dtype: of dynzero's parameters and gradients."""

    numel: int
    tensors: int
    dtype: torch.dtype
    device: torch.device
    world: int
    rank: int

    @property
    def bytes(self) -> int:
        """One process: the check reads gradients, the update reads and writes all the rest."""
        return self.numel * 32

    def as_json(self) -> dict[str, Any]:
        return {
            "elements": self.numel,
            "tensors": self.tensors,
            "dtype": short(self.dtype),
            "world": self.world,
            "max_grad_norm": MAX_NORM,
            "optimizer": "AdamW",
            "timed": "step" if self.world == 1 else "forward, backward and step",
        }


class Block(nn.Module):
    def __init__(self, values: list[Tensor], slopes: list[Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(value) for value in values])
        self.slopes = slopes  # the gradients; not buffers, so that no wrapper touches them

    def forward(self) -> Tensor:
        pairs = zip(self.values, self.slopes, strict=True)
        return torch.stack([(p * s).sum(dtype=torch.float32) for p, s in pairs]).sum()


class Model(nn.Module):
    """`spec.tensors` parameters; the same on every rank, with other gradients on each."""

    def __init__(self, spec: Spec, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        dtype = dtype or spec.dtype
        values = draw(spec, 0, 0.02, dtype)
        slopes = draw(spec, 1 + spec.rank, 1.0, dtype)
        starts = range(0, spec.tensors, BLOCK)
        self.blocks = nn.ModuleList(
            Block(values[i : i + BLOCK], slopes[i : i + BLOCK]) for i in starts
        )

    def forward(self, start: Tensor) -> Tensor:
        """start: 0-dim zero. FSDP2 moves inputs to the GPU and fails where there are none."""
        return start + torch.stack([block() for block in self.blocks]).sum()


def backward(spec: Spec, model: nn.Module) -> None:
    model(torch.zeros((), device=spec.device)).backward()


def draw(spec: Spec, seed: int, scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Random tensors in the precision of spec.dtype, as `dtype`."""
    generator = torch.Generator(spec.device).manual_seed(seed)
    sizes = tensor_sizes(spec.numel, spec.tensors)
    made = []
    for size in sizes:
        value = torch.randn(size, generator=generator, device=spec.device) * scale
        made.append(value.to(spec.dtype).to(dtype))
    return made


def call_of(
    spec: Spec, model: nn.Module, step: Callable[[], object], clear: Callable[[], object]
) -> Call:
    if spec.world == 1:
        backward(spec, model)
        return Call(step)

    def iteration() -> None:
        backward(spec, model)
        step()
        clear()

    return Call(iteration, before=dist.barrier)


def build_dynzero(spec: Spec, stage: int = 1) -> tuple[Call, Model, dynzero.ZeroOptimizer]:
    model = Model(spec)
    # Scale 1 in every implementation: unscaling in place would shrink repeated gradients to 0.
    scale = dynzero.LossScale(init=1.0) if spec.dtype == torch.float16 else None
    optimizer = dynzero.ZeroOptimizer(
        model.named_parameters(), torch.optim.AdamW, stage=stage, max_grad_norm=MAX_NORM,
        loss_scale=scale, **OPTIONS,
    )  # fmt: skip
    return call_of(spec, model, optimizer.step, optimizer.zero_grad), model, optimizer


def torch_amp(spec: Spec, **kind: Any) -> Call:
    """float32 parameters and gradients, GradScaler: the usual way. DDP where there are ranks."""
    model = Model(spec, torch.float32)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, **kind, **OPTIONS)
    scaler = torch.amp.GradScaler(spec.device.type, init_scale=1.0, growth_interval=10**6)
    scaler.scale(torch.ones((), device=spec.device))  # creates the scale

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return call_of(spec, replicated(spec, model), step, optimizer.zero_grad)


def half_with_masters(spec: Spec, **kind: Any) -> Call:
    """Parameters and gradients in 16 bits, float32 masters stepped by torch."""
    model = Model(spec)
    backward(spec, model)
    params: list[Tensor] = list(model.parameters())
    masters = [p.detach().float() for p in params]
    work = Masters(params, masters, MAX_NORM)
    optimizer = torch.optim.AdamW(masters, **kind, **OPTIONS)
    return Call(torch.no_grad()(lambda: work.step(optimizer)), note=work.checks.note)


def zero_redundancy(spec: Spec) -> Call:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Model(spec, torch.float32)
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        params, optimizer_class=torch.optim.AdamW, fused=True, **OPTIONS
    )

    def step() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return call_of(spec, replicated(spec, model), step, optimizer.zero_grad)


def fsdp2(spec: Spec) -> Call:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Model(spec, torch.float32)
    options: dict[str, Any] = {"mesh": init_device_mesh(spec.device.type, (spec.world,))}
    if spec.dtype.itemsize == 2:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=spec.dtype, reduce_dtype=torch.float32
        )
        for block in model.blocks:
            block.slopes = [slope.to(spec.dtype) for slope in block.slopes]
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **OPTIONS)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return call_of(spec, model, step, optimizer.zero_grad)


def deepspeed(spec: Spec, stage: int) -> Call:
    import deepspeed as library

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)  # as torchrun sets them; DeepSpeed insists
    model = Model(spec)
    torch_adam, note = deepspeed_adam(spec.device)
    adam = {**OPTIONS, "torch_adam": torch_adam, "adam_w_mode": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": adam},
    }
    if spec.dtype == torch.float16:
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}
    elif spec.dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    start = torch.zeros((), device=spec.device)

    def iteration() -> None:
        engine.backward(engine(start))
        engine.step()

    if spec.world == 1:  # its step consumes the gradients
        return Call(engine.step, before=lambda: engine.backward(engine(start)), note=note)
    return Call(iteration, before=dist.barrier, note=note)


def deepspeed_adam(device: torch.device) -> tuple[bool, str]:
    """Whether to take torch's AdamW, since DeepSpeed cannot build its own here; and what to say."""
    if device.type == "cpu":
        return True, "with torch's AdamW"
    from deepspeed.ops.op_builder import FusedAdamBuilder

    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:80]}"
        return True, f"with torch's AdamW, since FusedAdam cannot be built here ({reason})"
    return False, "with its FusedAdam"


def replicated(spec: Spec, model: nn.Module) -> nn.Module:
    if spec.world == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def peers_of(spec: Spec) -> dict[str, tuple[str | None, Callable[[], Call]]]:
    """Name -> the module that has to be installed, and how to build the candidate."""
    peers: dict[str, tuple[str | None, Callable[[], Call]]] = {
        "torch_amp_fused": (None, lambda: torch_amp(spec, fused=True)),
        "torch_amp_foreach": (None, lambda: torch_amp(spec, foreach=True)),
    }
    if spec.world == 1 and spec.dtype.itemsize == 2:
        peers["half_masters_fused"] = (None, lambda: half_with_masters(spec, fused=True))
        peers["half_masters_foreach"] = (None, lambda: half_with_masters(spec, foreach=True))
    peers["zero_redundancy"] = (None, lambda: zero_redundancy(spec))
    peers["fsdp2"] = (None, lambda: fsdp2(spec))
    peers["deepspeed_stage1"] = ("deepspeed", lambda: deepspeed(spec, 1))
    peers["deepspeed_stage2"] = ("deepspeed", lambda: deepspeed(spec, 2))
    if spec.world > 1:
        peers["dynzero_stage2"] = (None, lambda: build_dynzero(spec, 2)[0])
    return peers
