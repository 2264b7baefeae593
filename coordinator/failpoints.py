"""Failpoints: places at which a test can kill a process as by `kill -9`, to see how a restart goes on.

MUSTER_FAILPOINT names one, and after a colon its occurrence: `round.before-commit:2` is the second. Only this variable
turns them on; without it they cost one look into the environment.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "MUSTER_FAILPOINT"
FAILPOINTS = {
    "blob.before-write": "nothing of a blob is written",
    "blob.before-name": "the bytes of a blob are durable, under a name that nobody asks for",
    "blob.after-write": "a blob is durable under its name, and no row knows it",
    "task.before-commit": "a task is written, not committed",
    "task.after-commit": "a task is committed, and nobody was told",
    "assignment.before-commit": "a cohort is written, not committed",
    "assignment.after-commit": "a cohort is committed, and no device has its assignment",
    "report.before-commit": "reports are counted, not committed",
    "report.after-commit": "reports are committed, and no device has its receipt",
    "receipt.before-commit": "reports are counted at a replica that does not drive them, not committed",
    "receipt.after-commit": "they are committed, and no device has its receipt, nor the driver heard of them",
    "sum.before-hand-over": "a round has ended, and the driver does not have the sum of this replica",
    "masked.before-hand-over": "masked reports have come, and the driver does not have the sum of this replica",
    "masked.after-hand-over": "the driver has the sum of this replica, and announces whose reports are in it",
    "round.before-commit": "the blobs of a round are durable, its rows are written, not committed",
    "round.after-commit": "a round is committed, and the coordinator has not gone on",
    "migration.before-commit": "tables are changed, not committed",
    "migration.after-commit": "tables are changed and committed",
}


def reach(name: str) -> None:
    """Die here if MUSTER_FAILPOINT says so."""
    armed = os.environ.get(VARIABLE)
    if armed is not None:
        _count_down(name, armed)


def _count_down(name: str, armed: str) -> None:
    wanted, _, times = armed.partition(":")
    if not {name, wanted} <= FAILPOINTS.keys():
        raise ValueError(f"{VARIABLE}={armed}: there is no failpoint {wanted!r}")
    if name == wanted:
        left = int(times or 1) - 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        os.environ[VARIABLE] = f"{wanted}:{left}"
