"""What the examples need around torch.distributed: joining the ranks, and collecting from them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


def start_ranks() -> torch.device:
    """Joins the ranks that torchrun started; returns this rank's device. One process: no group."""
    torch.set_num_threads(1)  # the examples' layers are too small to share among threads
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(values: Tensor, world_size: int) -> Tensor:
    """Every rank's `values` [n] on every rank, as [world size, n] on the CPU."""
    rows = [torch.empty_like(values) for _ in range(world_size)]
    if world_size > 1:
        dist.all_gather(rows, values)
    else:
        rows[0] = values
    return torch.stack(rows).cpu()
