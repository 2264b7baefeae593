"""Rounds whose sums several replicas share: what each must know, and what it tells the driver. Pure.

Spec: docs/spec/rounds.md §5.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.errors import MalformedMessage
from coordinator.rules.task_settings import ClearReports, TaskSettings
from fedcore.codecs.codec import RoundKey
from fedcore.decoding import UNDECODABLE, decoder
from fedcore.report import ReportLayout

_HEAD = struct.Struct(">I")
_FLOAT = np.dtype("<f8")


@dataclass(frozen=True, slots=True)
class SharedRound:
    """A round that another replica drives, as one that sums reports of it must know it. id: of its row.

    buffered: it drew its devices, and their reports belong to whichever round of its task is open when they come.
    """

    id: int
    layout: ReportLayout
    clear: ClearReports
    codec_key: RoundKey
    buffered: bool = False


class Counted(NamedTuple):
    """A report that a replica took: its assignment and device, and how many versions its model is old."""

    assignment: str
    device: str
    staleness: int = 0


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica tells the driver of one of its rounds.

    counted: the reports that it took, but for the `before` that it told of earlier.
    size: how many values the sum of all of them has that comes with this; 0 as long as there is none.
    """

    round: int
    before: int
    counted: list[Counted]
    size: int = 0


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica tells a driver at once. present: assignments whose reports are on their way to it."""

    replica: str
    present: list[str]
    shares: list[Share]


_shares = decoder(Shares)


def may_share(settings: TaskSettings) -> bool:
    """Whether replicas share the sums of a task's rounds: those in the clear whose estimator is the mean."""
    return settings.secagg is None and settings.clear.estimator == "mean"


def encode_shares(shares: Shares, sums: Sequence[NDArray[np.float64]]) -> bytes:
    """The bytes of a message: JSON behind its length, then the sums of the shares that have one."""
    head = msgspec.json.encode(shares)
    return b"".join([_HEAD.pack(len(head)), head, *(np.ascontiguousarray(one, _FLOAT).tobytes() for one in sums)])


def decode_shares(data: memoryview) -> tuple[Shares, list[NDArray[np.float64] | None]]:
    """A message, and the sum of each of its shares. Raises MalformedMessage."""
    try:
        (length,) = _HEAD.unpack(data[: _HEAD.size])
        shares, rest = _shares.decode(data[_HEAD.size : _HEAD.size + length]), data[_HEAD.size + length :]
    except (struct.error, *UNDECODABLE) as error:
        raise MalformedMessage(f"these shares are another version's, run one on all replicas: {error}") from error
    if len(rest) != sum(share.size for share in shares.shares) * _FLOAT.itemsize:
        raise MalformedMessage(f"the sums of these shares have {len(rest)} bytes, and not what they announce")
    sums: list[NDArray[np.float64] | None] = []
    for share in shares.shares:
        sums.append(np.frombuffer(rest, _FLOAT, share.size).astype(np.float64) if share.size else None)
        rest = rest[share.size * _FLOAT.itemsize :]
    return shares, sums
