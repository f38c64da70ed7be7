"""Cases 8-10 and 13 of the public reports: ranks whose gradients differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from play import assert_ranks_agree, check, make, play, stages, worlds
from scenario import Parameters, Record, Scenario, Turn, data, weighted
from torch import Tensor, nn
from world import run_world

ADAM = (torch.optim.Adam, {"lr": 0.05})
SGD_1 = (torch.optim.SGD, {"lr": 1.0})

# Which experts a rank's tokens go to, by step; ranks beyond the table repeat it.
ROUTES = (((0, 1), (2,)), ((3,), (3,)), ((0,), (0, 1, 2)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def routed_loss(model: nn.Module, turn: Turn) -> Tensor:
    x = data(turn, 6, 8, like=model.router.weight)
    gates = model.router(x).softmax(-1)
    chosen = ROUTES[turn.step][turn.rank % 2]
    mixed = sum(gates[:, k : k + 1] * torch.tanh(model.experts[k](x)) for k in chosen)
    return (mixed - x).square().mean()


@stages
@worlds(1, 2, 3)
@pytest.mark.parametrize("fused", [None, False])
def test_case_08_moe_expert_without_tokens(
    world: int, backend: str, stage: int, fused: bool | None
) -> None:
    scenario = Scenario(Experts, routed_loss, *ADAM, steps=3)
    exact = fused is False and backend == "gloo"
    record = check(
        scenario, world, backend=backend, exact=exact, every_state=True, stage=stage, fused=fused
    )
    used = [
        {int(n.split(".")[1]) for n in names if n.startswith("experts")} for names in record.active
    ]
    assert used == ([{0, 1, 2}, {3}, {0, 1, 2}] if world > 1 else [{0, 1}, {3}, {0}])


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = nn.Linear(16, 8), nn.Linear(8, 8)


def sees_image(turn: Turn) -> bool:
    """Step 0: only the last rank; step 1: only rank 0; step 2: nobody; step 3: everybody."""
    return [turn.rank == turn.world - 1, turn.rank == 0, False, True][turn.step]


def towers_loss(model: nn.Module, turn: Turn) -> Tensor:
    hidden = model.text(data(turn, 4, 8, like=model.text.weight))
    if sees_image(turn):
        hidden = hidden + model.vision(data(turn, 4, 16, like=model.text.weight))
    return hidden.square().mean()


@stages
@worlds(1, 2, 3)
def test_case_09_text_only_batch(world: int, backend: str, stage: int) -> None:
    options = {"lr": 0.05, "weight_decay": 0.1}
    scenario = Scenario(TwoTowers, towers_loss, torch.optim.AdamW, options, steps=4)
    record = check(scenario, world, backend=backend, stage=stage, every_state=True)
    sighted = ["vision.weight" in active for active in record.active]
    assert sighted == [True, True, False, True]
    assert int(record.states[-1]["vision.weight"]["step"]) == 3


def one_parameter() -> nn.Module:
    return Parameters(a=torch.zeros(5))


def eight_on_rank_2(model: nn.Module, turn: Turn) -> Tensor | None:
    return weighted(model, {"a": 8.0} if turn.rank == 2 else {})


@stages
@pytest.mark.parametrize(("average", "end"), [("world", -2.0), ("present", -8.0)])
def test_case_10_divide_by_what(stage: int, average: str, end: float) -> None:
    scenario = Scenario(one_parameter, eight_on_rank_2, *SGD_1, steps=1)
    record = check(scenario, 4, exact=True, stage=stage, average=average)
    assert torch.equal(record.params[-1]["a"], torch.full((5,), end))


def test_case_10_default_divides_by_world() -> None:
    scenario = Scenario(one_parameter, eight_on_rank_2, *SGD_1, steps=1)
    for record in run_world(4, play, scenario, {"stage": 1}):
        assert torch.equal(record.params[-1]["a"], torch.full((5,), -2.0))


def three_elements() -> nn.Module:
    return Parameters(a=torch.tensor([1.0, 2.0, 3.0]))


def one_scalar() -> nn.Module:
    return Parameters(a=torch.tensor(1.5))


def small_and_large() -> nn.Module:
    """Four float32 elements are one piece: whenever only `a` is present, one rank has all of it."""
    return Parameters(large=torch.linspace(-1, 1, 100), a=torch.ones(4), empty=torch.zeros(0))


def only_a(model: nn.Module, turn: Turn) -> Tensor:
    return (model.a * data(turn, *model.a.shape, like=model.a)).sum() + model.a.square().sum()


@stages
@worlds(1, 2, 4)
@pytest.mark.parametrize("build", [three_elements, one_scalar, small_and_large])
def test_case_13_fewer_elements_than_ranks(
    world: int, backend: str, stage: int, build: Any
) -> None:
    scenario = Scenario(build, only_a, *ADAM, steps=3)
    exact = backend == "gloo"
    check(scenario, world, backend=backend, exact=exact, every_state=True, stage=stage, fused=False)


def reload_shard(rank: int, world: int, stage: int) -> Record:
    """A rank whose shard is empty saves it, loads it into a new optimizer, and goes on."""
    scenario = Scenario(three_elements, only_a, *ADAM)
    model = scenario.model()
    record = Record([], [], [], [], [])
    state = None
    for step in range(4):
        opt = make(scenario, model, stage=stage)  # a new one each step
        if state is not None:
            opt.load_state_dict(state)
        opt.backward(only_a(model, Turn(step, 0, rank, world)))
        opt.step()
        opt.zero_grad()
        state = opt.state_dict()
        record.params.append({"a": model.a.detach().clone()})
    return record


@stages
@pytest.mark.parametrize("world", [2, 4])
def test_case_13_state_of_an_empty_shard(world: int, stage: int) -> None:
    through_state = run_world(world, reload_shard, stage)
    assert_ranks_agree(through_state)
    straight = run_world(world, play, Scenario(three_elements, only_a, *ADAM), {"stage": stage})
    for saved, kept in zip(through_state[0].params, straight[0].params[1:], strict=True):
        assert torch.equal(saved["a"], kept["a"])


def no_loss_on_rank_0(model: nn.Module, turn: Turn) -> Tensor | None:
    silent = turn.rank == 0 or turn.step == 1
    return None if silent else only_a(model, turn)


@stages
@worlds(2, 3)
def test_a_rank_without_backward_takes_part(world: int, backend: str, stage: int) -> None:
    """Contract 10; in step 1 nobody has a loss."""
    scenario = Scenario(small_and_large, no_loss_on_rank_0, *ADAM, steps=3)
    record = check(scenario, world, backend=backend, every_state=True, stage=stage)
    assert record.active == [{"a"}, set(), {"a"}]
