"""Pacing: retry windows, return tokens, and notices by which replicas pace alike. Pure; docs/spec/rounds.md §7.

Pace steering as in Bonawitz et al. 2019, *Towards federated learning at scale*, section 2.3: a small population is
brought back together when the next selection opens, a large one spread so that no more come than rounds consume.

Both come of one rule. A round has HEADROOM × cohort places. As long as there are places, a device that is sent away is
told to be there when the next selection opens. One that comes when they are gone is put at the end of a queue that
moves at the pace at which rounds are opened. The length of this queue is the estimate of the population's size: all
devices of a large population stand in it. Devices that no round can use have a queue of their own, so that they keep
nobody else away.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from coordinator.rules.rounds import RoundPolicy
from coordinator.rules.selection import Needs
from fedcore.validation import decoder
from fedcore.wire.messages import RetryWindow

# Return tokens: what a device that was sent away shows when it comes back. Pure; spec: docs/spec/rounds.md §7.
#
# A token says when a device of a population may come, and a MAC proves that this coordinator wrote it. So nobody has to
# remember the device.

_TIMES = struct.Struct(">dd")
_NAME_BYTES, _MAC_BYTES = 8, 18
MARK_BYTES = 8
_BYTES = _NAME_BYTES + _TIMES.size + _MAC_BYTES


class Return(NamedTuple):
    """When a device may come back: from `first` on, and in time until `last`, in seconds on the writer's clock."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens of a population that hold together: a new generation voids those of all others.

    key: the secret of the coordinator's replicas; name: 8 bytes, in every token.
    """

    key: bytes
    population: str
    name: bytes

    @classmethod
    def new(cls, key: bytes, population: str) -> Generation:
        """A generation with a name of its own."""
        return cls(key, population, secrets.token_bytes(_NAME_BYTES))

    def token(self, device: str, when: Return) -> str:
        """The token of a device, 56 characters: the same for the same times."""
        said = self.name + _TIMES.pack(*when)
        return base64.urlsafe_b64encode(said + self._mac(device, said)).decode()

    def read(self, device: str, token: str) -> Return | None:
        """The times in a token; None unless it is of this generation and of this device."""
        try:
            data = base64.urlsafe_b64decode(token)
        except (binascii.Error, ValueError):
            return None
        said, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if (
            len(data) != _BYTES
            or not said.startswith(self.name)
            or not hmac.compare_digest(mac, self._mac(device, said))
        ):
            return None
        return Return(*_TIMES.unpack(said[_NAME_BYTES:]))

    def mark(self, device: str) -> bytes:
        """What is kept of a device: MARK_BYTES, which say nothing without the key."""
        return _mark(self.key, self.population, device)

    def _mac(self, device: str, said: bytes) -> bytes:
        # Of a known length first, and no name has a zero byte: two things that are said are never the same bytes.
        return _hmac(self.key, said + f"{self.population}\0{device}".encode())[:_MAC_BYTES]


@lru_cache(maxsize=64)  # a visit asks for it again and again
def _mark(key: bytes, population: str, device: str) -> bytes:
    return _hmac(key, f"{population}\0{device}".encode())[:MARK_BYTES]


def _hmac(key: bytes, said: bytes) -> bytes:
    keyed = _keyed(key).copy()
    keyed.update(said)
    return keyed.digest()


@lru_cache(maxsize=4)  # OpenSSL takes longer to set up a key than to hash
def _keyed(key: bytes) -> hmac.HMAC:
    return hmac.new(key, digestmod="sha256")


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
    """The notice in a row. Raises one of fedcore.validation.UNDECODABLE: another version wrote it."""
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


HEADROOM = 1.6
"""Devices told to come for each that a round draws: some do not come, and none waits for ever."""
JITTER = 0.25
"""How far from its middle a long window reaches, as a share; more would blur the learned hours."""
IDLE_S, IDLE_PER_S = 60.0, 10.0
"""How long devices that no round needs stay away: IDLE_S, or as long as it takes to see IDLE_PER_S of them a second."""
HOUR_S, HOURS = 3600.0, 24
FORGETTING = 0.3
"""The weight of the last such hour in the estimate for an hour of the day."""
LEAST, MOST = 0.1, 10.0
ENOUGH = 20.0
"""Devices that must have been due within an hour before it teaches anything."""
GATHER_S = 20.0
"""Devices wait half a minute, as a rule: within less than that they must be there to be drawn together."""
_WEIGHT = 0.3
"""The weight of the round that ended last in the estimate for the next."""


class RoundTimes(msgspec.Struct, frozen=True):
    """When a task's round was drawn last, if that is known, and how long its rounds take from there, in seconds."""

    drawn_at: float | None = None
    measured_s: float | None = None

    def drawn(self, now: float, *, buffered: bool) -> RoundTimes:
        """A round draws devices now."""
        # Whoever comes to a buffered round is drawn, again and again: the first of them counts.
        return self if buffered and self.drawn_at is not None else replace(self, drawn_at=now)

    def ended(self, now: float, *, buffered: bool) -> RoundTimes:
        """A round that had drawn devices ends now."""
        if self.drawn_at is None:
            return self
        took_s = now - self.drawn_at
        before_s = took_s if self.measured_s is None else self.measured_s
        return RoundTimes(now if buffered else None, before_s + _WEIGHT * (took_s - before_s))

    def takes_s(self, policy: RoundPolicy) -> float:
        """From the draw of a round to its end; until one has ended, half of what it may take."""
        return policy.reporting_deadline_s / 2 if self.measured_s is None else self.measured_s

    def left_s(self, policy: RoundPolicy, now: float) -> float:
        """Until the round that is drawn ends."""
        return max(0.0, (now if self.drawn_at is None else self.drawn_at) + self.takes_s(policy) - now)


class Demand(msgspec.Struct, frozen=True):
    """The demand of a population's rounds for devices.

    cohort: devices that the next rounds draw, together. opens_in_s: until the next selection opens. every_s: from one
    selection to the next. gather_s: within which devices must be there to be drawn together.
    """

    cohort: int
    opens_in_s: float
    every_s: float
    gather_s: float

    @property
    def places(self) -> float:
        """Devices that should be there when a selection opens."""
        return HEADROOM * self.cohort

    @property
    def per_s(self) -> float:
        """Devices a second that should arrive over the whole day."""
        return self.places / max(self.every_s, self.gather_s)


def together(demands: Sequence[Demand]) -> Demand | None:
    """The demand of several tasks of a population; None without any."""
    if not demands:
        return None
    cohort = sum(one.cohort for one in demands)
    per_s = sum(one.cohort / one.every_s for one in demands)
    return Demand(cohort, min(one.opens_in_s for one in demands), cohort / per_s, demands[0].gather_s)


class Pace(msgspec.Struct, frozen=True):
    """The arrivals of a population, as of `at`, in seconds from anywhere.

    queued: devices that stand in the queue; idle: those that no round can use, in theirs. booked: devices that were
    told to be there at `opening`.
    showing: of the devices due in each hour of the day, how many come, as a ratio; above 1 where others come late.
    due, came: devices of this hour, so far.
    """

    at: float
    queued: float = 0.0
    idle: float = 0.0
    booked: float = 0.0
    opening: float = 0.0
    showing: tuple[float, ...] = (1.0,) * HOURS
    due: float = 0.0
    came: float = 0.0


def observe(pace: Pace, arrivals: float, now: float, demand: Demand | None) -> Pace:
    """The pace after `arrivals` since `pace.at`: the queue has moved, and the hour's estimate is updated."""
    hour, passed_s = _hour(pace.at), now - pace.at
    per_s = IDLE_PER_S if demand is None else demand.per_s / pace.showing[hour]
    moved = min(pace.queued, per_s * passed_s)
    idle_moved = min(pace.idle, IDLE_PER_S * passed_s)
    # A device that was told to be there has come by the end of the opening, and is booked again if it was sent away.
    since_s = min(passed_s, max(0.0, now - pace.opening))
    booked = pace.booked if demand is None else pace.booked * math.exp(-since_s / demand.gather_s)
    pace = replace(
        pace,
        at=now,
        queued=pace.queued - moved,
        idle=pace.idle - idle_moved,
        booked=booked,
        due=pace.due + moved + idle_moved,
        came=pace.came + arrivals,
    )
    return pace if _hour(now) == hour else _learn(pace, hour)


def _learn(pace: Pace, hour: int) -> Pace:
    showing = list(pace.showing)
    if pace.due >= ENOUGH:
        ratio = min(max(pace.came / pace.due, LEAST), MOST)
        showing[hour] += FORGETTING * (ratio - showing[hour])
    return replace(pace, showing=tuple(showing), due=0.0, came=0.0)


def drawn(pace: Pace) -> Pace:
    """A selection is over: the places of the next one are free."""
    return replace(pace, booked=0.0)


def window(pace: Pace, demand: Demand | None, bounds: RetryWindow, devices: float = 1.0) -> tuple[Pace, RetryWindow]:
    """When `devices` that rounds could use should come back, and the pace that counts them. Without demand: idle."""
    if demand is None:
        return idle_window(pace, bounds, devices)
    free = demand.places - pace.booked
    if devices <= free or (pace.queued == 0.0 and free > 0):
        opening = max(pace.at + demand.opens_in_s, pace.opening)
        pace = replace(pace, booked=pace.booked + devices, opening=opening)
        first = demand.opens_in_s - demand.gather_s / 2
        return pace, _within(first, first + demand.gather_s, bounds)
    pace = replace(pace, queued=pace.queued + devices)
    stay_s = demand.opens_in_s + _queue_s(pace, demand)
    return pace, _spread(stay_s, bounds)


def after(usual: RetryWindow, rest_s: float, bounds: RetryWindow) -> RetryWindow:
    """The window `usual` for a device that must rest before."""
    first = min(max(usual.min_s, rest_s), max(bounds.max_s, usual.min_s))
    return RetryWindow(first, max(first, min(first + usual.max_s - usual.min_s, bounds.max_s)))


def idle_window(pace: Pace, bounds: RetryWindow, devices: float = 1.0) -> tuple[Pace, RetryWindow]:
    """When `devices` that no round could use should come back, and the pace that knows of them."""
    pace = replace(pace, idle=pace.idle + devices)
    return pace, away(pace.idle / IDLE_PER_S, bounds)


def away(queue_s: float, bounds: RetryWindow) -> RetryWindow:
    """When a device that no round could use should come back, once the queue of such devices is so long."""
    return _spread(max(IDLE_S, queue_s), bounds)


def _queue_s(pace: Pace, demand: Demand) -> float:
    """The length of the queue in seconds, by the estimates for the hours to come."""
    left, at, seconds = pace.queued, pace.at, 0.0
    whole = demand.per_s * HOUR_S
    for _ in range(HOURS):
        hour_s = HOUR_S - at % HOUR_S
        moves = whole / pace.showing[_hour(at)] * hour_s / HOUR_S
        if moves >= left:
            return seconds + hour_s * left / moves
        left, at, seconds = left - moves, at + hour_s, seconds + hour_s
    return seconds * pace.queued / (pace.queued - left)


def _spread(stay_s: float, bounds: RetryWindow) -> RetryWindow:
    # What lies beyond the bound is spread below it: all of it at the bound would come at once.
    middle = min(stay_s, bounds.max_s / (1 + JITTER))
    return _within((1 - JITTER) * middle, (1 + JITTER) * middle, bounds)


def _within(first_s: float, last_s: float, bounds: RetryWindow) -> RetryWindow:
    """A window of the same length, if it can be, within the bounds."""
    first = min(max(first_s, bounds.min_s), bounds.max_s)
    last = min(max(last_s, first + (last_s - first_s)), bounds.max_s)
    return RetryWindow(first, max(first, last))


def _hour(at: float) -> int:
    return int(at // HOUR_S) % HOURS
