"""join(): a rank that has left its loop takes part, with nothing, in what the others do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from . import norms, reduction, state
from .discard import lost
from .presence import judge, message, message_bits, read_with_values, take_back, take_part
from .reduced import Local
from .rounds import Until, Waitable
from .transports.control import LOST, NO_DETAIL, WITH_OTHERS, Action, Agreed, Message
from .window import run

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer

# Note [Joins inside each other]
# What the ranks that still train do with one optimizer may have to wait for this rank in another:
# they step them in turn, and a backward may fill buckets of both. So the joins of several
# optimizers end together, with the outermost: it sends the messages of all, and goes on with
# whichever hears from the others. Nothing in it waits for one optimizer alone unless all ranks are
# in the same call of that one; for GPUs see Note [Followed by others].

LOOK_EVERY_S = 5e-5


class Joined(threading.local):
    """The optimizers whose join() this thread is in, outermost first."""

    def __init__(self) -> None:
        self.optimizers: list[ZeroOptimizer] = []


JOINED = Joined()


@contextmanager
def joined(opt: ZeroOptimizer) -> Iterator[None]:
    """Around a loop; at the end of the outermost one, follow the ranks that still train."""
    depth = len(JOINED.optimizers)
    JOINED.optimizers.append(opt)
    try:
        yield
    except BaseException:
        del JOINED.optimizers[depth:]
        raise
    if depth == 0:
        members, JOINED.optimizers = JOINED.optimizers, []
        follow_all([*dict.fromkeys(o for o in members if o._control.world > 1)])


def follow_all(optimizers: list[ZeroOptimizer]) -> None:
    alone = len(optimizers) == 1
    works = [shadow(opt, alone=alone) for opt in optimizers]
    with torch.no_grad():
        if alone:
            run(works[0])
        else:
            run_together(optimizers, works)
    for opt in optimizers:  # in the same order on every rank
        adopt_scaler(opt)


def run_together(optimizers: list[ZeroOptimizer], works: list[Iterator[Waitable]]) -> None:
    """Drive all to their ends, each as soon as what it waits for has come."""
    waits_for = {k: next(work) for k, work in enumerate(works)}
    moved = time.monotonic()
    while waits_for:
        for k in [k for k, thing in waits_for.items() if thing.ready()]:
            try:
                waits_for[k] = next(works[k])
            except StopIteration:
                del waits_for[k]
            moved = time.monotonic()
        control = optimizers[next(iter(waits_for), 0)]._control
        if time.monotonic() - moved > control.timeout.total_seconds():
            raise control.lost(TimeoutError("nothing came for any of the optimizers"))
        time.sleep(LOOK_EVERY_S)


def shadow(opt: ZeroOptimizer, *, alone: bool) -> Iterator[Waitable]:
    """Do, with nothing of our own, what the others do, until all have joined."""
    if opt._rounds is not None:
        opt._rounds.end_pass()
        yield Until(partial(opt._rounds.finish_some, opt._rounds.last))
    finish_unless_lost(opt)
    for p in opt._params:
        p.grad = None  # nobody counts on them, and what follows would not leave them as they are
    while True:
        local, complaint = read_with_values(opt)
        opt._outcomes.poll()
        local.drop()
        mine = message(opt, Action.JOIN, complaint, NO_DETAIL if alone else WITH_OTHERS)
        exchange = opt._control.start(mine, message_bits(opt, local.bits, no_zeros=True))
        yield exchange
        agreed = exchange.wait()
        if any(m.trouble == LOST for m in agreed.messages):
            lost(opt)  # not this rank's business, but it counts anew like all
            continue
        if judge(opt, agreed, complaint):
            continue
        others = [m for m in agreed.messages if m.action is not Action.JOIN]
        if not others:
            return
        if agreed.any_at(Action.ROUND):
            yield from take_part(opt, agreed, in_step=alone)
        else:
            follow(opt, local, mine, agreed, others[0])


def adopt_scaler(opt: ZeroOptimizer) -> None:
    """All have joined: a GradScaler becomes what that of the rank that trained longest is."""
    scaler = opt._scaler()
    progress = opt._control.gather_objects(None if scaler is None else scaler.progress)
    known = [theirs for theirs in progress if theirs is not None]
    if scaler is not None and known:
        scaler.adopt(max(known))


def finish_unless_lost(opt: ZeroOptimizer) -> None:
    """Finish the rounds. That others count on a window given up here is not our business now."""
    while opt._rounds is not None:
        try:
            opt._rounds.finish()
            return
        except RuntimeError as error:
            if error is not opt._discards.told:
                raise


def follow(opt: ZeroOptimizer, local: Local, mine: Message, agreed: Agreed, other: Message) -> None:
    take_back(opt, mine, agreed)
    if other.action is Action.STEP:
        opt._perform_step(local, agreed)
    elif other.action is Action.GRAD_NORM:
        norms.total(opt, reduction.reduce(opt, local, agreed), other.detail[0])
    elif other.action is Action.CLIP:
        norms.clip(opt, reduction.reduce(opt, local, agreed), *other.detail)
    elif other.action is Action.FULL_GRAD:
        norms.full_grad(opt, local, agreed, int(other.detail[0]))
    elif other.action is Action.STATE:
        state.gather_whole(opt, keep=False)
    elif other.action is Action.UNSCALE:
        norms.unscale(opt, local, agreed, torch.zeros((), dtype=torch.float32, device="cpu"))
