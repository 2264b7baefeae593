"""Blocks in order: workers train several at a time, and their sums are added in the order of the blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
AHEAD = 2
"""So many blocks for each worker are under way: the sums of one wait until those of all before it are added."""


def in_order(
    count: int,
    workers: int,
    idle: Collection[object],
    start: Callable[[int], None],
    ended: Callable[[], Iterable[tuple[int, T | None]]],
) -> Iterator[T]:
    """What each of `count` blocks ends with, in the order of the blocks; AHEAD · `workers` at most are under way.

    idle: the workers that have nothing to do. start: gives one of them a block. ended: waits, and gives the blocks that
    ended with what they ended with; None for one that has to be started again.
    """
    waiting, done = deque(range(count)), dict[int, T]()
    for wanted in range(count):
        while wanted not in done:
            while idle and waiting and waiting[0] < wanted + AHEAD * workers:
                start(waiting.popleft())
            for block, end in ended():
                if end is None:
                    waiting.appendleft(block)
                else:
                    done[block] = end
        yield done.pop(wanted)
