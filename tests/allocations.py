"""What tensors hold: storages made while a mode is on (CPU), or alive in given objects."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Allocations(TorchDispatchMode):
    """Bytes of the storages made by operations under this mode: alive `now`, and at `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tree_map_only(Tensor, self._meet, (args, kwargs))  # these are older than the mode
        out = func(*args, **kwargs)
        tree_map_only(Tensor, self._count, out)
        return out

    def _meet(self, tensor: Tensor) -> None:
        self._remember(tensor.untyped_storage(), 0)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._remember(storage, storage.nbytes())

    def _remember(self, storage: Any, size: int) -> None:
        if storage._cdata in self._known:
            return
        self._known[storage._cdata] = weakref.finalize(storage, self._gone, storage._cdata, size)
        self.now += size
        self.most = max(self.most, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind the tensors, each piece of it counted once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
