"""Capabilities of this installation, as stated to a coordinator at check-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from heapq import nlargest
from importlib.metadata import version

from device_runtime.trainer import Trainer
from fedcore.conditions import rounded_down, rounded_mb
from fedcore.wire.messages import LONGEST_NAME, MOST_COLLECTIONS, StatedCapabilities

SECAGG = ("SA1",)


def capabilities(trainer: Trainer) -> StatedCapabilities:
    """The capabilities of a device with this trainer."""
    return StatedCapabilities(
        runtime="muster",
        version=_version(),
        engine=trainer.runtime,
        formats=(trainer.format,),
        secagg=SECAGG,
        keeps_vectors=True,
        memory_mb=_memory_mb(),
    )


def stated_examples(counts: Mapping[str, int]) -> dict[str, int]:
    """The numbers of examples that a device states, by collection: rounded down, only for the largest collections."""
    short = (name for name in counts if len(name) <= LONGEST_NAME)
    return {name: rounded_down(counts[name]) for name in nlargest(MOST_COLLECTIONS, short, key=counts.__getitem__)}


@cache
def _version() -> str:
    # The lookup searches the files of all installed packages, which takes milliseconds.
    return version("muster-fl")


def _memory_mb() -> int | None:
    try:
        return rounded_mb(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # a system that does not say
        return None
