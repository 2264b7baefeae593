"""Notices and tallies: what replicas tell each other of a population, so that each can send its devices away.

Spec: docs/spec/rounds.md §5.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from coordinator.rules.return_tokens import MARK_BYTES, Return
from coordinator.rules.selection import Needs
from fedcore.decoding import decoder

_VISIT = struct.Struct(f">{MARK_BYTES}sdd")


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What decides that a device is sent away, as the driver of its population publishes it.

    generation: the name of the return tokens that hold. tasks: the needs of the active tasks, by id. idle_until: when
    the queue of the devices that no round can use ends, in seconds on the driver's clock.
    """

    generation: bytes
    tasks: dict[str, Needs]
    idle_until: float


class Tally(msgspec.Struct, frozen=True):
    """What a replica that does not drive a population tells its driver of the devices that it sent away.

    generation: the name of the return tokens that it gave; what was told under another says nothing. visits: those that
    count, packed. obstacles: check-ins by task, and by the obstacle between the device and it.
    """

    generation: bytes
    visits: bytes
    obstacles: dict[str, dict[str, int]]

    @classmethod
    def of(
        cls, generation: bytes, visits: Iterable[tuple[bytes, Return]], obstacles: Mapping[tuple[str, str], int]
    ) -> Tally:
        """Of the mark of each device and what it was told, and of check-ins by task and obstacle."""
        by_task: dict[str, dict[str, int]] = {}
        for (task, obstacle), count in obstacles.items():
            by_task.setdefault(task, {})[obstacle] = count
        return cls(generation, b"".join(_VISIT.pack(mark, *told) for mark, told in visits), by_task)

    def each(self) -> Iterator[tuple[bytes, Return]]:
        """The mark of each device, and what it was told."""
        return ((mark, Return(first, last)) for mark, first, last in _VISIT.iter_unpack(self.visits))


_notice, _tally = decoder(Notice), decoder(Tally)


def notice_of(text: str) -> Notice:
    """The notice in a row. Raises one of fedcore.decoding.UNDECODABLE: another version wrote it."""
    return _notice.decode(text)


def tally_of(text: str) -> Tally:
    """The tally in a row. Raises as above."""
    tally = _tally.decode(text)
    if len(tally.visits) % _VISIT.size:
        raise msgspec.ValidationError(f"visits have {len(tally.visits)} bytes, no multiple of {_VISIT.size}")
    return tally


def text_of(message: Notice | Tally) -> str:
    """The text of a row."""
    return msgspec.json.encode(message).decode()
