"""Whether all ranks of a group run on one host: then messages go through memory that they share.

The memory is a file without a name in any folder, so nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING, Any

from ..ops import ops

if TYPE_CHECKING:
    from .control import Control

logger = logging.getLogger("dynzero")


def open_board(control: Control) -> Any:
    """Collective. A LocalBoard on every rank, or None on every rank if one of them cannot use it.

    Only speed depends on it, so a log line says why not.
    """
    board, why, name, fd = None, "", "", -1
    if control.rank == 0:
        try:
            name, fd = create(control.world)
        except (OSError, AttributeError) as error:  # no such call, or it is not permitted
            why = str(error)
    offers = control.gather_objects((os.getpid(), fd, name))
    pids, (pid, fd_of_first, name) = [offer[0] for offer in offers], offers[0]
    try:
        if len(set(pids)) < len(pids):
            raise OSError("two ranks have the same process id")  # a lock would not tell them apart
        if control.rank > 0:
            fd = open_offered(pid, fd_of_first, name)
        if fd >= 0:
            fd, taken = -1, fd
            board = ops.LocalBoard(taken, control.rank, control.world)
    except (OSError, RuntimeError) as error:
        why = str(error)
    if fd >= 0:
        os.close(fd)
    reasons = control.gather_objects(why)
    for rank, reason in zip(control.ranks, reasons, strict=True):
        if reason:
            logger.debug("messages go over Gloo, not shared memory: rank %d: %s", rank, reason)
            return None
    logger.debug("messages go through shared memory")
    return board


def create(world: int) -> tuple[str, int]:
    """Its name, which no other file in the world has, and its descriptor."""
    name = f"dynzero-{secrets.token_hex(16)}"
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, ops.LocalBoard.num_bytes(world))
    except OSError:
        os.close(fd)
        raise
    return name, fd


def open_offered(pid: int, fd: int, name: str) -> int:
    """The first rank's file, found under /proc; OSError if that is another host or container."""
    path, expected = f"/proc/{pid}/fd/{fd}", f"/memfd:{name} (deleted)"
    # Looked at before it is opened: here it might be anything.
    if not name or os.readlink(path) != expected:
        raise OSError(f"{path} is not the first rank's memory")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
