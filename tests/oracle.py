"""The independent oracle: one process, plain `torch.optim`, one replica.

Per step the batch of every rank is run in turn on the replica; local gradients are added up in
rank order, an absent one counts as zero; the sum is divided by W (or by the number of ranks that
have the parameter); a parameter absent on all ranks keeps `grad = None` (or gets zeros, for
absent="zero"). 16-bit weights have a float32 copy here that the optimizer steps, cast back after
each step. dynzero is not imported here, on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from scenario import Record, Scenario, Turn, snapshot, state_by_name
from torch import Tensor, nn

HALVES = (torch.float16, torch.bfloat16)


class Lion(torch.optim.Optimizer):
    """Lion as its paper has it (arXiv 2302.06675, program 1), with decoupled decay."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * momentum + (1 - beta1) * p.grad).sign()
                p.copy_(p - group["lr"] * (update + group["weight_decay"] * p))
                momentum.copy_(beta2 * momentum + (1 - beta2) * p.grad)


class Replica:
    """One model, its torch optimizer over float32 masters, and the averaging of gradients."""

    def __init__(
        self,
        model: nn.Module,
        groups: Any,
        optimizer: type[torch.optim.Optimizer],
        options: dict[str, Any],
        *,
        world: int,
        average: str = "world",
        absent: str = "skip",
        max_grad_norm: float | None = None,
        loss_scale: float = 1.0,
        by_round: bool = False,
    ) -> None:
        self.model, self.world, self.average, self.absent = model, world, average, absent
        self.max_grad_norm, self.loss_scale, self.by_round = max_grad_norm, loss_scale, by_round
        self.masters: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}  # name -> weight, master
        self.optimizer = optimizer(self._with_masters(groups), **options)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.norm = 0.0
        self.trained: set[str] = set()

    def _with_masters(self, groups: Any) -> list[dict[str, Any]]:
        groups = list(groups)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        return [group | {"params": self._named_masters(group["params"])} for group in groups]

    def _named_masters(self, params: Iterable[Any]) -> list[tuple[str, nn.Parameter]]:
        result = []
        for name, p in params:
            master = p
            if p.dtype in HALVES:
                master = nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
            self.masters[name] = (p, master)
            result.append((name, master))
        return result

    def add_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group | {"params": self._named_masters(group["params"])})

    def clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def collect(self, losses: list[list[Any]]) -> None:
        """`losses[rank][micro]()` gives a loss or None. Fills the sums and the counts of a window.

        by_round adds up the ranks of a backward round first, then the rounds (stage 2, in float32);
        otherwise a rank's rounds are added up first, in the parameter's dtype, as torch does. A
        turn without a loss is no round: the ranks' first backwards belong together, and so on."""
        self.sums, present = {}, {}
        rounds = max((len(turns) for turns in losses), default=0) if self.by_round else 1
        left = [iter(turns) for turns in losses]
        for _ in range(rounds):
            round_sums: dict[str, Tensor] = {}
            for rank, turns in enumerate(left):
                self.clear()
                for turn in turns:
                    loss = turn()
                    if loss is not None:
                        (loss * self.loss_scale).backward()
                        if self.by_round:
                            break
                for name, grad in self._local_grads():
                    present.setdefault(name, set()).add(rank)
                    round_sums[name] = round_sums[name] + grad if name in round_sums else grad
            for name, total in round_sums.items():
                self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.clear()
        self.counts = {name: len(ranks) for name, ranks in present.items()}

    def _local_grads(self) -> Iterable[tuple[str, Tensor]]:
        for name, (p, master) in self.masters.items():
            if p.grad is not None:
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                yield name, grad.detach().to(master.dtype, copy=True)

    def average_grads(self) -> dict[str, Tensor]:
        """G of design section 2.1, by name; active parameters only."""
        grads = {}
        for name, total in self.sums.items():
            divisor = self.world if self.average == "world" else self.counts[name]
            grads[name] = total / (divisor * self.loss_scale)
        return grads

    def step(self) -> set[str]:
        """Steps on the window's averaged gradients; returns the active names."""
        grads = self.average_grads()
        for group in self.optimizer.param_groups:
            zero = group.get("absent", self.absent) == "zero"
            for name, master in zip(group["param_names"], group["params"], strict=True):
                p = self.masters[name][0]
                master.grad = grads.get(name)
                if master.grad is None and zero and p.requires_grad:
                    master.grad = torch.zeros_like(master)
        squares = sum(float(g.abs().double().square().sum()) for g in grads.values())
        self.norm = float(squares) ** 0.5
        if self.max_grad_norm is not None:
            masters = [master for _, master in self.masters.values()]
            nn.utils.clip_grad_norm_(masters, self.max_grad_norm)
        self.trained |= {name for name, (_, m) in self.masters.items() if m.grad is not None}
        self.optimizer.step()
        for p, master in self.masters.values():
            master.grad = None
            if p is not master:
                p.data.copy_(master.data)
        return set(grads)

    def state(self) -> dict[str, dict[str, Any]]:
        """State and, for 16-bit ones, master of the parameters that have trained, by name.

        A few torch classes (Adagrad) create the others' state at construction; it says nothing."""
        state = state_by_name(self.optimizer.state_dict())
        state = {name: state[name] for name in state if name in self.trained}
        for name in self.trained:
            p, master = self.masters[name]
            if p is not master:
                state.setdefault(name, {})["master"] = master.detach().cpu().clone()
        return state


def play_oracle(
    scenario: Scenario,
    world: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Record:
    """The run of `scenario` on `world` ranks as it should come out; dtype=float64 for the truth."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: the bits of a matrix product depend on it
    try:
        model = scenario.model(device).to(dtype=dtype)
        groups = scenario.groups(model)
        replica = Replica(
            model, groups, scenario.optimizer, scenario.options, world=world, **options
        )
        return _play(scenario, replica)
    finally:
        torch.set_num_threads(threads)


def _play(scenario: Scenario, replica: Replica) -> Record:
    model, optimizer = replica.model, replica.optimizer
    scheduler = scenario.scheduler(optimizer) if scenario.scheduler else None
    record = Record([snapshot(model)], [], [], [{}], [])
    for step in range(scenario.steps):
        record.lrs.append([group["lr"] for group in optimizer.param_groups])
        losses = [
            [
                partial(scenario.loss, model, Turn(step, micro, rank, replica.world))
                for micro in range(scenario.micros(step, rank))
            ]
            for rank in range(replica.world)
        ]
        replica.collect(losses)
        record.active.append(replica.step())
        record.norms.append(replica.norm)
        record.params.append(snapshot(model))
        record.states.append(replica.state())
        if scheduler is not None:
            scheduler.step()
    return record
