"""A rank that raises in backward, clears and goes on, or that just discards its gradients.

If all ranks clear, all go on as if the window had never been; if one does not, every rank gets the
same error, naming the rank that gave up, and can go on after zero_grad().
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracle import Replica
from play import assert_close, assert_same_bits, stages, worlds
from scenario import Parameters, snapshot, weighted
from test_cases_h_rounds import fails
from torch import Tensor, nn
from world import check_words, message_of, rank_device, run_world

import dynzero

ADAMW = (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1})
# Which parameters have a gradient when the backward raises.
HAD = {"before any hook": [], "after some": ["b"], "after all": ["a", "b"], "forward": []}
RAISING = [where for where in HAD if where != "forward"]  # in a backward, that is


def two_params() -> Parameters:
    return Parameters(a=torch.ones(5), b=torch.arange(1.0, 8.0)).to(rank_device())


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    """Gradients are integers, so that sums over ranks are exact."""
    return weighted(model, {"a": 6.0 * (rank + number), "b": 6.0 * (rank - number)})


def bad_loss(model: nn.Module, where: str) -> Tensor:
    """Its backward meets b, then a, and raises before, between or after them."""
    if where == "forward":
        raise ArithmeticError("forward failed here")
    x = torch.ones(1, requires_grad=True, device=rank_device())
    product = model.a * (fails(x) if where == "after all" else x)
    if where == "after some":
        product = fails(product)
    loss = (product.sum() * model.b).sum()
    return fails(loss) if where == "before any hook" else loss


def adamw(model: nn.Module, stage: int) -> dynzero.ZeroOptimizer:
    cls, options = ADAMW
    return dynzero.ZeroOptimizer(model.named_parameters(), cls, stage=stage, fused=False, **options)


def train(
    opt: dynzero.ZeroOptimizer, model: nn.Module, rank: int, numbers: list[int], micros: int = 1
) -> None:
    for number in numbers:
        for micro in range(micros):
            opt.backward(loss_of(model, rank, number + micro))
        opt.step()
        opt.zero_grad()


def oracle(world: int, numbers: list[int], stage: int, micros: int = 1) -> dict[str, Tensor]:
    model = two_params()
    replica = Replica(model, model.named_parameters(), *ADAMW, world=world, by_round=stage == 2)
    for number in numbers:
        replica.collect(
            [
                [partial(loss_of, model, rank, number + micro) for micro in range(micros)]
                for rank in range(world)
            ]
        )
        replica.step()
    return snapshot(model)


def attempt(opt: dynzero.ZeroOptimizer, model: nn.Module, where: str, plain: bool = False) -> None:
    """The backward (or forward) that raises, after the gradients that `HAD` names have come."""
    had: list[str] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: had.append(name))
        for name, p in model.named_parameters()
    ]
    try:
        loss = bad_loss(model, where)
        if plain:
            loss.backward()
        else:
            opt.backward(loss)
    except ArithmeticError:
        assert sorted(had) == HAD[where], had
        return
    finally:
        for handle in handles:
            handle.remove()
    raise AssertionError("the backward did not raise")


def step_in_vain(opt: dynzero.ZeroOptimizer, model: nn.Module, rank: int) -> str:
    """A batch that another rank gives up, and the error."""
    opt.backward(loss_of(model, rank, 9))
    message = message_of(RuntimeError, opt.step)
    opt.zero_grad()
    return message


def assert_equal(
    results: list[dict[str, Tensor]], expected: dict[str, Tensor], backend: str = "gloo"
) -> None:
    """torch's AdamW rounds differently on a GPU."""
    compare = assert_same_bits if backend == "gloo" else assert_close
    for rank, params in enumerate(results):
        for name, value in expected.items():
            compare(params[name], value, f"rank {rank}, {name}")
            assert_same_bits(params[name], results[0][name], f"rank {rank}, {name}")


# All ranks clear.


def all_clear(rank: int, world: int, stage: int, micros: int, plain: bool) -> dict[str, Tensor]:
    """In every second batch rank 1 raises in its last backward; all learn of it and clear."""
    model = two_params()
    opt = adamw(model, stage)
    for number in range(2 * len(HAD)):
        bad = number % 2 == 0
        for micro in range(micros):
            if bad and rank == 1 and micro == micros - 1:
                attempt(opt, model, list(HAD)[number // 2], plain)
                opt.zero_grad()
            else:
                opt.backward(loss_of(model, rank, number + micro))
        trouble = torch.tensor(float(bad and rank == 1), device=rank_device())
        dist.all_reduce(trouble)  # of the user: nobody may wait for the others in zero_grad()
        if trouble:
            if rank != 1:
                opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()
    return snapshot(model)


@stages
@worlds(2, 3)
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("plain", [True, False])
def test_all_clear_after_one_raised(
    world: int, backend: str, stage: int, micros: int, plain: bool
) -> None:
    results = run_world(world, all_clear, stage, micros, plain, backend=backend)
    assert_equal(results, oracle(world, [1, 3, 5, 7], stage, micros), backend)


def uneven_discard(rank: int, world: int, stage: int, regular: bool) -> dict[str, Tensor]:
    """Rank r has r backwards and discards them, three windows in a row; then all train."""
    model = two_params()
    opt = adamw(model, stage)
    train(opt, model, rank, [0])
    for number in range(3):
        if regular:
            opt.zero_grad()  # a loop that clears at its start, too
        for micro in range(rank):
            opt.backward(loss_of(model, rank, 10 + number + micro))
        opt.zero_grad()
    train(opt, model, rank, [1, 2])
    return snapshot(model)


@stages
@worlds(2, 3)
@pytest.mark.parametrize("regular", [True, False])
def test_uneven_backwards_are_discarded(
    world: int, backend: str, stage: int, regular: bool
) -> None:
    results = run_world(world, uneven_discard, stage, regular, backend=backend)
    assert_equal(results, oracle(world, [0, 1, 2], stage), backend)


def others_have_no_data(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    """Only rank 1 has a backward, and gives it up: nobody else has anything to clear."""
    model = two_params()
    opt = adamw(model, stage)
    for number, where in enumerate(RAISING):
        train(opt, model, rank, [number])
        if rank == 1:
            attempt(opt, model, where)
            opt.zero_grad()
        opt.step()
        assert not opt.last_step.stepped
    return snapshot(model)


@stages
@worlds(2, 3)
def test_ranks_without_gradients_need_not_clear(world: int, backend: str, stage: int) -> None:
    results = run_world(world, others_have_no_data, stage, backend=backend)
    assert_equal(results, oracle(world, [0, 1, 2], stage), backend)


def all_discard_and_step(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    """Nothing comes between zero_grad() and step(), where all ranks say the very same."""
    model = two_params()
    opt = adamw(model, stage)
    opt.backward(loss_of(model, rank, 9))
    opt.zero_grad()
    opt.step()
    assert not opt.last_step.stepped
    train(opt, model, rank, [0, 1])
    return snapshot(model)


@stages
@worlds(2)
def test_a_step_after_all_have_cleared_has_nothing(world: int, backend: str, stage: int) -> None:
    results = run_world(world, all_discard_and_step, stage, backend=backend)
    assert_equal(results, oracle(world, [0, 1], stage), backend)


def rounds_in_the_background(rank: int, world: int) -> tuple[bool, bool]:
    """Rank 0 gives a round up; its thread goes on with it while rank 0 may write to `p.grad`.

    Returns if another thread has read parameters, and if one has announced something.
    """
    model = two_params()
    opt = adamw(model, 2)
    readers, speakers = set(), set()
    if rank == 0:
        attempt(opt, model, "after some")
    else:
        opt.backward(loss_of(model, rank, 9))
    # From here on: on CUDA hooks run in a thread of autograd, which reads as it should.
    read, start = opt._reader.read, opt._control.start
    opt._reader.read = lambda: readers.add(threading.get_ident()) or read()
    opt._control.start = lambda *said: speakers.add(threading.get_ident()) or start(*said)
    opt.zero_grad()
    me = {threading.get_ident()}
    deadline = time.monotonic() + 20
    while rank == 0 and not speakers - me and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    opt.step()
    return bool(readers - me), bool(speakers - me)


@worlds(2)
def test_rounds_in_the_background_read_no_gradients(world: int, backend: str) -> None:
    (read, spoke), (others, _) = run_world(world, rounds_in_the_background, backend=backend)
    assert spoke and not read and not others


# Some ranks do not clear.


def some_do_not_clear(
    rank: int, world: int, stage: int, micros: int, goes_on: str, earlier: str
) -> tuple[list[str], list[dict[str, Tensor]]]:
    """Rank 1 clears and goes on to step() or to its next batch; the others call step().

    earlier: what all ranks have cleared in this iteration before.
    """
    model = two_params()
    opt = adamw(model, stage)
    messages, params = [], []

    def go_on() -> None:
        if rank == 1 and goes_on == "next batch":
            opt.backward(loss_of(model, rank, 8))
        opt.step()

    for number, where in enumerate(RAISING):
        if earlier == "raised":
            attempt(opt, model, where)
        if earlier == "discarded":
            opt.backward(loss_of(model, rank, 6))
        if earlier != "nothing":
            opt.zero_grad()
        for micro in range(micros - 1):
            opt.backward(loss_of(model, rank, 7 + micro))
        if rank == 1:
            attempt(opt, model, where)
            opt.zero_grad()
        else:
            opt.backward(loss_of(model, rank, 9))
        messages.append(message_of(RuntimeError, go_on))
        params.append(snapshot(model))
        opt.zero_grad()
        train(opt, model, rank, [number, number + 1], micros)
        params.append(snapshot(model))
    return messages, params


@stages
@worlds(2, 3)
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize(
    ("goes_on", "earlier"),
    [("step", "nothing"), ("next batch", "nothing"), ("step", "raised"), ("step", "discarded")],
)
def test_who_does_not_clear_gets_the_same_error_as_all(
    world: int, backend: str, stage: int, micros: int, goes_on: str, earlier: str
) -> None:
    results = run_world(world, some_do_not_clear, stage, micros, goes_on, earlier, backend=backend)
    for k, messages in enumerate(zip(*(texts for texts, _ in results), strict=True)):
        assert len(set(messages)) == 1
        words = ["out of step", "rank 1 gave up", f"iteration {2 * k}", "rank 0"]
        check_words(messages[0], words)
    for k in range(2 * len(RAISING)):  # by turns after an error and after two good steps
        numbers = [0, 1, 1, 2, 2, 3][: 2 * ((k + 1) // 2)]
        assert_equal(
            [params[k] for _, params in results], oracle(world, numbers, stage, micros), backend
        )


def waits_elsewhere(rank: int, world: int, where: str) -> tuple[str, dict[str, Tensor]]:
    """Stage 2. Rank 1 clears and waits for the others in a collective of the user."""
    model = two_params()
    opt = adamw(model, 2)
    on_host = dist.new_group(backend="gloo")
    message = ""
    if rank == 1:
        attempt(opt, model, where)
        opt.zero_grad()
    else:
        message = step_in_vain(opt, model, rank)
    dist.barrier(on_host)
    if rank == 1:
        message = message_of(RuntimeError, opt.step)
        opt.zero_grad()
    dist.barrier(on_host)
    train(opt, model, rank, [1])
    return message, snapshot(model)


@worlds(2, 3)
@pytest.mark.parametrize("where", RAISING)
def test_the_error_does_not_wait_for_the_rank_that_gave_up(
    world: int, backend: str, where: str
) -> None:
    results = run_world(world, waits_elsewhere, where, backend=backend)
    assert len({message for message, _ in results}) == 1
    check_words(results[0][0], ["out of step", "rank 1 gave up"])
    assert_equal([params for _, params in results], oracle(world, [1], 2), backend)


def discard_alone(rank: int, world: int, stage: int) -> tuple[str, dict[str, Tensor]]:
    """Nothing raises, but rank 1 clears its gradients where the others count theirs."""
    model = two_params()
    opt = adamw(model, stage)
    opt.backward(loss_of(model, rank, 4))
    if rank == 1:
        opt.zero_grad()
    message = message_of(RuntimeError, opt.step) if stage == 2 else opt.step() or ""
    opt.zero_grad()
    return message, snapshot(model)


@worlds(2, 3)
def test_stage_2_refuses_a_window_that_one_rank_has_discarded(world: int, backend: str) -> None:
    results = run_world(world, discard_alone, 2, backend=backend)
    assert len({message for message, _ in results}) == 1
    check_words(results[0][0], ["out of step", "rank 1 gave up", "zero_grad()"])
    assert_equal([params for _, params in results], snapshot(two_params()), backend)


@worlds(2, 3)
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_0_and_1_count_what_is_in_grad(world: int, backend: str, stage: int) -> None:
    model = two_params()
    replica = Replica(model, model.named_parameters(), *ADAMW, world=world)
    replica.collect([[partial(loss_of, model, r, 4)] if r != 1 else [] for r in range(world)])
    replica.step()
    results = run_world(world, discard_alone, stage, backend=backend)
    assert_equal([params for _, params in results], snapshot(model), backend)


def one_has_joined(rank: int, world: int, stage: int) -> tuple[str, dict[str, Tensor]]:
    """Rank 2 is out of data; rank 1 raises, rank 0 does not clear; both recover."""
    model = two_params()
    opt = adamw(model, stage)
    message = ""
    with opt.join():
        if rank < 2:
            if rank == 1:
                attempt(opt, model, "after some")
                opt.zero_grad()
            else:
                opt.backward(loss_of(model, rank, 9))
            message = message_of(RuntimeError, opt.step)
            opt.zero_grad()
            train(opt, model, rank, [1])
    return message, snapshot(model)


@stages
def test_a_joined_rank_follows_through_the_error(stage: int) -> None:
    results = run_world(3, one_has_joined, stage)
    check_words(results[0][0], ["rank 1 gave up", "rank 0"])
    assert results[0][0] == results[1][0]
    model = two_params()
    replica = Replica(model, model.named_parameters(), *ADAMW, world=3)
    replica.collect([[partial(loss_of, model, rank, 1)] for rank in range(2)])
    replica.step()
    assert_equal([params for _, params in results], snapshot(model))


def other_numbers_of_clears(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    """zero_grad() where there is nothing to clear is nobody's business, however often."""
    model = two_params()
    opt = adamw(model, stage)
    for number in range(3):
        for _ in range(rank + number):
            opt.zero_grad()
        opt.backward(loss_of(model, rank, number))
        opt.step()
        if rank:
            opt.zero_grad()
        else:
            model.zero_grad()
    return snapshot(model)


@stages
@worlds(2, 3)
def test_clearing_nothing_may_differ_between_ranks(world: int, backend: str, stage: int) -> None:
    results = run_world(world, other_numbers_of_clears, stage, backend=backend)
    assert_equal(results, oracle(world, [0, 1, 2], stage), backend)


# All of it at random.


def micros_of(seed: int, rank: int, window: int) -> int:
    return random.Random(f"{seed} {rank} {window} micros").choice([0, 1, 1, 2, 3])


def is_discarded(seed: int, window: int) -> bool:
    return random.Random(f"{seed} {window}").random() < 0.5


def random_windows(rank: int, world: int, stage: int, seed: int) -> dict[str, Tensor]:
    """Any numbers of backwards, late ranks; half the windows are discarded, by all ranks."""
    model = two_params()
    opt = adamw(model, stage)
    lot = random.Random(f"{seed} {rank}")
    for window in range(12):
        if random.Random(f"{seed} {window} clears").random() < 0.5:
            opt.zero_grad()  # nothing to clear, but all ranks do it
        micros, discarded = micros_of(seed, rank, window), is_discarded(seed, window)
        for micro in range(micros):
            time.sleep(
                lot.choice([0.0, 0.0, 0.0, 0.01, 0.3])
            )  # some wait longer than a backward does
            if discarded and micro == micros - 1 and lot.random() < 0.5:
                attempt(opt, model, lot.choice(list(HAD)), plain=lot.random() < 0.5)
                continue
            with opt.no_sync() if lot.random() < 0.3 else contextlib.nullcontext():
                opt.backward(loss_of(model, rank, window + micro))
        if not discarded:
            opt.step()
        opt.zero_grad()
    return snapshot(model)


@stages
@worlds(2, 3)
@pytest.mark.parametrize("seed", range(2))
def test_random_windows_and_discards(world: int, backend: str, stage: int, seed: int) -> None:
    model = two_params()
    replica = Replica(model, model.named_parameters(), *ADAMW, world=world)
    for window in range(12):
        if not is_discarded(seed, window):
            counts = [micros_of(seed, rank, window) for rank in range(world)]
            replica.collect(
                [
                    [partial(loss_of, model, rank, window + micro) for micro in range(count)]
                    for rank, count in enumerate(counts)
                ]
            )
            replica.step()
    assert_equal(
        run_world(world, random_windows, stage, seed, backend=backend), snapshot(model), backend
    )


def clears_twice(rank: int, world: int) -> tuple[str, dict[str, Tensor]]:
    """Stage 2. Rank 1 learns, clearing a second batch, that the others counted on the first."""
    model = two_params()
    opt = adamw(model, 2)
    message = ""
    if rank == 1:
        for where in ("after some", "before any hook"):  # not told by the second backward
            attempt(opt, model, where)
            opt.zero_grad()
            while where != "after some" and opt._rounds.pending:  # the others have not answered
                time.sleep(0.01)
    else:
        message = step_in_vain(opt, model, rank)
    train(opt, model, rank, [1])
    return message, snapshot(model)


@worlds(2, 3)
def test_zero_grad_never_raises(world: int, backend: str) -> None:
    results = run_world(world, clears_twice, backend=backend)
    messages = [message for message, _ in results]
    assert messages.pop(1) == "" and len(set(messages)) == 1
    check_words(messages[0], ["out of step", "rank 1 gave up"])
    assert_equal([params for _, params in results], oracle(world, [1], 2), backend)


def leaves_after_giving_up(rank: int, world: int) -> tuple[str, dict[str, Tensor]]:
    """Stage 2. Rank 1 gives up two batches, and leaves its loop; the others count on the first."""
    model = two_params()
    opt = adamw(model, 2)
    message = ""
    with opt.join():
        if rank == 0:
            time.sleep(0.5)  # so rank 1 is told neither by its backward nor by zero_grad()
        if rank == 1:
            attempt(opt, model, "after some")
            opt.zero_grad()
            opt.backward(loss_of(model, rank, 5))
            opt.zero_grad()
        else:
            message = step_in_vain(opt, model, rank)
            train(opt, model, rank, [1])
    return message, snapshot(model)


def test_join_of_a_rank_that_has_given_up() -> None:
    model = two_params()
    replica = Replica(model, model.named_parameters(), *ADAMW, world=2)
    replica.collect([[partial(loss_of, model, 0, 1)], []])
    replica.step()
    results = run_world(2, leaves_after_giving_up)
    check_words(results[0][0], ["out of step", "rank 1 gave up"])
    assert_equal([params for _, params in results], snapshot(model))


END = """
import os, time, torch, dynzero
import torch.distributed as dist
from torch.autograd import Function

class Fails(Function):
    forward = staticmethod(lambda ctx, x: x.clone())

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("planned")

dist.init_process_group("gloo")
a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
opt = dynzero.ZeroOptimizer([a, b], torch.optim.SGD, lr=0.1, stage=2)
if dist.get_rank() == 0:
    try:
        opt.backward((Fails.apply(a * 1) * b).sum())
    except ArithmeticError:
        opt.zero_grad()
else:
    time.sleep(1.0)  # a collective of rank 0 that fails just as it ends: torch aborts then
"""


def test_a_program_ends_while_a_round_waits() -> None:
    """Rank 0 ends after its last backward has raised, and nobody answers the round."""
    assert run_program(END) == [0, 0]


DROPPED = """
import gc, time, torch, dynzero, torch.distributed as dist
dist.init_process_group("gloo")
a, b = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
opt = dynzero.ZeroOptimizer([a, b], torch.optim.SGD, lr=1.0, stage=2, bucket_bytes=1)
x = a * 1.0
if dist.get_rank() == 1:
    x.register_hook(lambda g: time.sleep(1.0))  # between the two buckets
opt.backward((x * b).sum())
dist.destroy_process_group()
del opt
gc.collect()
"""


def test_the_last_of_a_group_goes_while_a_bucket_travels() -> None:
    """It joins threads of Gloo, which take the GIL before they end."""
    assert run_program(DROPPED) == [0, 0]


def run_program(text: str) -> list[int]:
    """Exit codes of two ranks that run it."""
    environment = dict(
        os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, "-c", text], env={**environment, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        return [process.wait(60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
