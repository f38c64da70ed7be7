"""The current CUDA stream, without the microseconds that torch.cuda.current_stream takes."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_stream(device_index: int) -> int:
    """The current stream of a device, as `torch.cuda.Stream.cuda_stream`."""
    stream: int = torch._C._cuda_getCurrentRawStream(device_index)
    return stream


def outlive_current_stream(tensor: Tensor, known: set[int]) -> None:
    """`tensor` may be freed while kernels on the current stream, perhaps not its own, read it.

    known: the streams for which that has been said; this one is added.
    """
    if tensor.is_cuda:
        stream = raw_stream(tensor.get_device())
        if stream not in known:
            known.add(stream)
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def is_current(stream: torch.cuda.Stream) -> bool:
    """True if this is the current stream of its device."""
    return raw_stream(stream.device_index) == stream.cuda_stream
