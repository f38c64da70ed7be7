"""Row `reduce_buckets`: what a rank of two does for its gradients in a step, but for the wire.

All of it: reading where gradients are, tables and their upload, and for each of many buckets pack,
hand over, receive and sum. Its host time by bucket is what an optimizer pays.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dynzero._C import loopback_transport
from dynzero.layout import build_layout
from dynzero.plan import bit_mask, make_plan
from dynzero.reduced import Reader
from dynzero.window import Mover, Window, run

from .cases import Case
from .inputs import random_tensors
from .kernels import require
from .one_of_two import Echo, NoWire
from .timer import Call


class ReduceBuckets:
    ceiling = "copy"

    @staticmethod
    def bytes_per_element(case: Case) -> int:
        """Gradients, shard (two: the check's), buckets on their way."""
        return case.source.itemsize + 4 + case.wire.itemsize

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        _, tensors = random_tensors(case.sizes(), case.source, device, aligned=case.aligned)
        self.params = [t.detach() for t in tensors]
        for param in self.params:
            param.grad = param.detach()
        names = [f"p{i}" for i in range(case.tensors)]
        self.layout = build_layout(
            self.params, names, [0] * case.tensors, world=case.world, rank=0, wire_dtype=case.wire
        )
        indices = torch.arange(case.tensors)
        room = int(self.layout.piece.sum()) * case.world * case.wire.itemsize
        plan = make_plan(
            self.layout, indices, torch.full_like(indices, case.world),
            bucket_bytes=room // case.buckets,
        )  # fmt: skip
        self.plan = plan.to(device)
        require(len(plan.buckets) == case.buckets, case, "the number of buckets")
        mask = bit_mask(list(range(case.tensors)), case.tensors)
        self.present = mask.repeat(case.world, 1)
        self.reader = Reader(self.params, self.layout, device)
        self.rank = NoWire(None, Echo(None), device)
        self.mover = Mover(self.layout, device, self.rank)
        self.elements = sum(case.sizes())
        moved = case.source.itemsize + 2 * case.wire.itemsize + 4 // case.world
        self.bytes = self.elements * moved
        self.ours = Call(self.run)

    def run(self) -> Window:
        window = Window(self.layout, self.reader.device)
        local, complaint = self.reader.read()
        assert complaint is None
        run(self.mover.reduce(self.plan, local, self.present, window, in_step=True))
        return window

    def check(self) -> None:
        silent, self.rank.transport = self.rank.transport, loopback_transport()
        window = self.run()
        self.rank.transport = silent
        got = torch.cat([buffer[:-1] for buffer in window.buffers])
        expected = torch.cat(list(self._sums()))
        require(torch.equal(got, expected), self.case, "sum of the slots")

    def _sums(self) -> Iterator[Tensor]:
        """Of this rank's slots for all ranks, which it has received: in row order, padded."""
        for index in self.plan.indices:
            piece = int(self.layout.piece[index])
            padded = self.params[index].new_zeros(self.case.world * piece)
            padded[: self.params[index].numel()] = self.params[index]
            slots = padded.view(self.case.world, piece).float()
            total = slots[0].clone()
            for slot in slots[1:]:
                total += slot
            yield total

    def baselines(self) -> dict[str, Call]:
        return {}
