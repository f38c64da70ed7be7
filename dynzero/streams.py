"""Which CUDA stream is current, without the microseconds that torch.cuda.current_stream takes."""

from __future__ import annotations

import torch


def raw_stream(device_index: int) -> int:
    """The current stream of a device, as `torch.cuda.Stream.cuda_stream`."""
    stream: int = torch._C._cuda_getCurrentRawStream(device_index)
    return stream


def is_current(stream: torch.cuda.Stream) -> bool:
    """True if this is the current stream of its device."""
    return raw_stream(stream.device_index) == stream.cuda_stream
