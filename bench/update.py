"""update_shard with AdamW, prepared like the ops of kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynzero.fused import adam_row
from dynzero.ops import OPTIMIZER_KINDS, STATE_POINTERS, STATUS_FIELDS, ops
from dynzero.reduced import upload

from . import peers
from .cases import Case
from .inputs import Planned, choose, random_tensors
from .kernels import require
from .timer import Call

OPTIONS: dict[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01,
}  # fmt: skip
# What the gradients carry when they come: a loss scale; and the clip factor to apply.
SCALE, CLIP = 1024.0, 0.5
STEP = 10


class UpdateShard:
    """source: dtype of the gradients; wire: of the parameters. Masters where wire is 16-bit."""

    ceiling = "copy"

    @staticmethod
    def bytes_per_element(case: Case) -> int:
        """About 20 of ours, the rest for two torch optimizers and their temporaries."""
        return 56

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device, sizes = case, device, case.sizes()
        self.half = case.wire.itemsize == 2
        _, params = random_tensors(sizes, case.wire, device, aligned=case.aligned)
        _, self.grads = random_tensors(sizes, case.source, device, aligned=case.aligned)
        _, self.masters = random_tensors(sizes, torch.float32, device)
        _, self.exp_avg = random_tensors(sizes, torch.float32, device)
        _, self.exp_avg_sq = random_tensors(sizes, torch.float32, device)
        self.active = choose(case.tensors, case.active)
        self.planned = Planned(
            case, device, params, wire=case.wire, active=self.active, present=self.active
        )
        self._realistic_values()
        self._tables()
        chosen = self.planned.numel(self.active)
        # Master (or parameter), two moments: read and written in float32. The gradient is read. A
        # 16-bit parameter is read (masters follow it) and written.
        each = 24 + case.source.itemsize + (2 * case.wire.itemsize if self.half else 0)
        self.elements, self.bytes = chosen, each * chosen
        self.ours = Call(self.run, self.kernel)

    def _realistic_values(self) -> None:
        params = self.planned.params
        for grad, master, avg, sq in zip(
            self.grads, self.masters, self.exp_avg, self.exp_avg_sq, strict=True
        ):
            grad.mul_(SCALE / 64)
            master.mul_(0.02)
            avg.mul_(1e-2)
            sq.square_().mul_(1e-4).add_(1e-6)
        for param, master, grad in zip(params, self.masters, self.grads, strict=True):
            param.copy_(master)
            if param.grad is not None and param.dtype == grad.dtype:
                param.grad = grad

    def _tables(self) -> None:
        case, device = self.case, self.device
        table = torch.zeros(len(STATE_POINTERS), case.tensors, dtype=torch.int64)
        columns = {"param": self.planned.params, "state1": self.exp_avg, "state2": self.exp_avg_sq}
        if self.half:
            columns["master"] = self.masters
        for name, tensors in columns.items():
            table[STATE_POINTERS[name]] = torch.tensor([t.data_ptr() for t in tensors])
        self.state_ptrs = upload(table, device)
        group = {**OPTIONS, "decoupled_weight_decay": True}
        self.hyper = torch.tensor([adam_row(group)], dtype=torch.float64, device=device)
        self.steps = torch.full((case.tensors,), float(STEP), device=device)
        status = torch.zeros(len(STATUS_FIELDS), dtype=torch.float64)
        status[STATUS_FIELDS["scale"]], status[STATUS_FIELDS["clip"]] = SCALE, CLIP
        self.status = status.to(device)
        self.host_ptrs = torch.tensor([g.data_ptr() for g in self.grads])
        self.ptrs = upload(self.host_ptrs, device)

    def kernel(self) -> None:
        table = self.planned.table
        ops.update_shard(
            OPTIMIZER_KINDS["adam"], table.rows, table.own_chunks, self.ptrs, self.case.source,
            self.state_ptrs, self.case.wire, None, self.hyper, self.steps, self.status,
        )  # fmt: skip

    def run(self) -> None:
        if self.case.source == self.case.wire:
            self.ptrs, _ = self.planned.grad_ptrs()
        else:  # a reduced shard: its addresses are known, nothing is to be read from parameters
            self.ptrs = upload(self.host_ptrs, self.device)
        self.kernel()

    def _chosen(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t for t, chosen in zip(tensors, self.active.tolist(), strict=True) if chosen]

    def check(self) -> None:
        """One step of torch.optim.AdamW from the same state on the same, unscaled gradients."""
        case = self.case
        source = self.masters if self.half else self.planned.params
        expected = [t.clone() for t in self._chosen(source)]
        optimizer = torch.optim.AdamW(expected, fused=True, **OPTIONS)
        state = zip(expected, self._chosen(self.grads), self._chosen(self.exp_avg),
                    self._chosen(self.exp_avg_sq), strict=True)  # fmt: skip
        for p, grad, avg, sq in state:
            p.grad = (grad.float() / SCALE) * CLIP
            step = torch.tensor(float(STEP - 1), device=self.device)
            optimizer.state[p] = {
                "step": step, "exp_avg": avg.clone(), "exp_avg_sq": sq.clone()
            }  # fmt: skip
        before = [t.clone() for t in expected]
        optimizer.step()
        self.run()
        params = self._chosen(self.planned.params)
        results = zip(expected, self._chosen(source), self._chosen(self.exp_avg),
                      self._chosen(self.exp_avg_sq), params, before, strict=True)  # fmt: skip
        for want, got, avg, sq, param, start in results:
            state_of = optimizer.state[want]
            # A few roundings of what was added, which may be much larger than the result.
            slack = 2e-6 * (want.abs() + (want - start).abs()) + 1e-8
            require(bool(((got - want).abs() <= slack).all()), case, "parameter")
            for a, b, name in (
                (avg, state_of["exp_avg"], "exp_avg"), (sq, state_of["exp_avg_sq"], "exp_avg_sq"),
            ):  # fmt: skip
                require(torch.allclose(a, b, rtol=2e-6, atol=1e-8), case, name)
            require(torch.equal(param, got.to(param.dtype)), case, "16-bit parameter")

    def baselines(self) -> dict[str, Call]:
        params = [p.detach().clone() for p in self._chosen(self.planned.params)]
        masters = [m.clone() for m in self._chosen(self.masters)] if self.half else params
        for param, grad in zip(params, self._chosen(self.grads), strict=True):
            # Unscaled once and for all, so that repeats do not shrink them.
            param.grad = (grad / SCALE).to(param.dtype)
        return peers.update_peers(params, masters, OPTIONS)
