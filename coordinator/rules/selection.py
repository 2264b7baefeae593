"""Selection: who may take part in a task, who did too recently, and who is drawn. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from coordinator.rules.rounds import Round
from coordinator.rules.states import Requires, RoundState
from coordinator.rules.task_settings import Separation
from fedcore.batching import is_held_out
from fedcore.conditions import StatedConditions, rounded_down
from fedcore.targets import parse
from fedcore.wire.messages import CheckIn, RejectionReason

T = TypeVar("T")
UNRELIABLE_ROUNDS = 20
"""A device that held up a round without a report is unreliable, and drawn last, for this many committed rounds."""


class Capabilities(msgspec.Struct, frozen=True):
    """The statements of a device at check-in: formats that it runs, examples per collection, its state, its labels.

    examples: rounded down to powers of two. version: of its runtime; memory_mb: of the machine, in MiB, None when it
    did not say. keeps_vectors: between rounds, where a plan asks for it.
    """

    formats: frozenset[str]
    examples: Mapping[str, int]
    version: str = ""
    memory_mb: int | None = None
    keeps_vectors: bool = False
    conditions: StatedConditions = StatedConditions()
    labels: Mapping[str, str] = {}

    @classmethod
    def stated_by(cls, message: CheckIn) -> Capabilities:
        """The capabilities in a check-in."""
        able = message.capabilities
        return cls(
            formats=frozenset(able.formats),
            examples=message.examples,
            version=able.version,
            memory_mb=able.memory_mb,
            keeps_vectors=able.keeps_vectors,
            conditions=message.conditions or StatedConditions(),
            labels=message.labels or {},
        )


@dataclass(frozen=True, slots=True)
class DeviceHoldOut:
    """The share of a population's devices that a task leaves out, or runs on."""

    population: str
    share: float
    on_held_out: bool

    def unmet_by(self, device: str) -> str:
        """The obstacle for the device with this id; "" for none."""
        if is_held_out(self.population, device, self.share) == self.on_held_out:
            return ""
        return "not-held-out" if self.on_held_out else "held-out"


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a task: a device has one of `formats`, `min_examples` in `collection`, and meets `requires`.

    hold_out: None where every device may take part. keeps_vectors: whether devices keep some between rounds. target: an
    expression on labels, or "".
    """

    formats: frozenset[str]
    collection: str
    min_examples: int
    requires: Requires = field(default_factory=Requires)
    hold_out: DeviceHoldOut | None = None
    keeps_vectors: bool = False
    target: str = ""

    def unmet_by(self, device: str, able: Capabilities) -> str:
        """The obstacle for a device by its id and its statements, one of progress.OBSTACLES, or "".

        It is "format" only when nothing else is one. A device that may hold enough examples passes: whether it does, it
        checks itself before it waits.
        """
        if able.examples.get(self.collection, 0) < rounded_down(self.min_examples):
            return "examples"
        if self.target and not parse(self.target).matches(able.labels):
            return "labels"
        unmet = self.requires.unmet_by(able.version, able.memory_mb, able.conditions)
        if self.keeps_vectors and not able.keeps_vectors:
            unmet = "keeps-nothing"
        if not unmet and self.hold_out is not None:
            unmet = self.hold_out.unmet_by(device)
        return unmet or ("format" if self.formats.isdisjoint(able.formats) else "")


class Eligibility(msgspec.Struct, frozen=True):
    """The eligibility of one device for tasks, by its check-in. Each task is judged once, however often it is asked.

    Neither the needs of a task nor the capabilities that a device stated ever change. device: its id.
    """

    device: str
    capabilities: Capabilities
    _obstacles: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, device: str, message: CheckIn) -> Eligibility:
        """The eligibility of the device with this id, which sent this."""
        return cls(device, Capabilities.stated_by(message))

    def only(self, tasks: Iterable[Needs]) -> Eligibility:
        """The same with only the statements that these tasks ask for: a device that waits must not cost memory."""
        asked, able = tuple(tasks), self.capabilities
        held = {
            needs.collection: able.examples[needs.collection] for needs in asked if needs.collection in able.examples
        }
        formats = able.formats & frozenset().union(*(needs.formats for needs in asked))
        named = {name for needs in asked if needs.target for name in parse(needs.target).names}
        told = {name: value for name, value in able.labels.items() if name in named}
        only = replace(able, formats=formats, examples=held, labels=told)
        return Eligibility(self.device, only, self._obstacles)

    def obstacle(self, task: str, needs: Needs) -> str:
        """The obstacle for the task with this id and these needs; "" for none."""
        if task not in self._obstacles:
            self._obstacles[task] = needs.unmet_by(self.device, self.capabilities)
        return self._obstacles[task]


class Unfit(NamedTuple):
    """Why no task can use a device. formats: those of the tasks that it could serve but for its formats, by name."""

    reason: RejectionReason
    formats: tuple[str, ...] = ()


def unfit(tasks: Mapping[str, Needs], obstacles: Mapping[str, str]) -> Unfit:
    """Why none of a population's active tasks can use a device, from the needs of each and the obstacle to it."""
    wanted = frozenset().union(*(needs.formats for task, needs in tasks.items() if obstacles[task] == "format"))
    if wanted:
        return Unfit("unsupported-format", tuple(sorted(wanted)))
    return Unfit("not-eligible" if tasks else "no-task")


LabelSet: TypeAlias = tuple[tuple[str, str], ...]
"""The labels that a device tells, by name in order; empty where it tells none."""


class Matching(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a population that checked in lately, by a target: counts of many, and nothing of one.

    where: the canonical text; "" matches all. matching: devices whose labels match. untold: those that tell no labels;
    unkept: those of whose labels there are too many kinds to keep. labels: the names that devices tell. least: counts
    are rounded down to multiples of it, and names that fewer tell are left out.
    """

    where: str
    devices: int
    matching: int
    untold: int
    unkept: int
    labels: tuple[str, ...]
    least: int = 1

    @classmethod
    def of(cls, where: str, kinds: Mapping[LabelSet, int], unkept: int, least: int) -> Matching:
        """Those of so many devices of each kind, and others. where: canonical."""
        tellers: Counter[str] = Counter()
        for told, devices in kinds.items():
            tellers.update({name: devices for name, _ in told})
        matches = parse(where).matches if where else lambda labels: True
        counts = {
            "devices": sum(kinds.values()) + unkept,
            "matching": sum(devices for told, devices in kinds.items() if matches(dict(told))),
            "untold": kinds.get((), 0),
            "unkept": unkept,
        }
        return cls(
            where=where,
            labels=tuple(sorted(name for name, devices in tellers.items() if devices >= least)),
            least=least,
            **{name: count - count % least for name, count in counts.items()},
        )

    @property
    def sentence(self) -> str:
        """The counts for people."""
        kept = f"; the labels of {self._shown(self.unkept)} are not counted" if self.unkept else ""
        return (
            f"{self._shown(self.matching)} of {self._shown(self.devices)} devices that came within a day match; "
            f"{self._shown(self.untold)} tell no labels{kept}"
        )

    def concerns(self, goal: int) -> list[str]:
        """What should worry whoever starts a task with such a goal, in sentences."""
        unknown = [name for name in (parse(self.where).names if self.where else ()) if name not in self.labels]
        there = f"they tell {', '.join(self.labels)}" if self.labels else "they tell none"
        found = [f"no device told a label {name} within a day; {there}" for name in unknown]
        if self.matching < goal:
            found.append(f"{self._shown(self.matching)} devices match, and the goal is {goal:,}")
        return found

    def _shown(self, count: int) -> str:
        if self.least == 1:
            return f"{count:,}"
        return f"at least {count:,}" if count else f"fewer than {self.least:,}"


def drawable(waiting: list[T], unreliable: Callable[[T], int], round_: Round, now: float) -> list[T]:
    """Those of the waiting that a round may draw now: unreliable ones only where nobody else can be hoped for.

    unreliable: for how many committed rounds one is so from now on; more than UNRELIABLE_ROUNDS if it held up an
    attempt at this very round.
    """
    others = [one for one in waiting if not unreliable(one)]
    if len(others) == len(waiting) or round_.state is RoundState.REPORTING or round_.held or now < round_.deadline:
        return others
    patient = [one for one in waiting if unreliable(one) <= UNRELIABLE_ROUNDS]
    return patient if len(patient) >= round_.policy.minimum else waiting


def draw(
    waiting: Sequence[T], count: int, source: random.Random, unreliable: Callable[[T], bool] = lambda one: False
) -> list[T]:
    """`count` of the waiting, every subset and order equally likely: a fast phone has no advantage.

    Unreliable devices are drawn only where there are too few others.
    """
    others, last = ([one for one in waiting if unreliable(one) == is_so] for is_so in (False, True))
    first = source.sample(others, min(count, len(others)))
    return first + source.sample(last, count - len(first))


class Participation(NamedTuple):
    """The last participation of a device: when it was assigned, on the driver's clock, and in which round."""

    device: str
    at: float
    number: int


class Participations:
    """A task's participations, as far back as its separation asks.

    A participation is an assignment in a committed round, unless the device gave it up or was lost; so long as the
    round runs, it counts too. A device that is left out of further attempts at a round took part in that round, as
    somebody may know a sum with its report. Only the driver's thread changes them; other threads may read.
    """

    def __init__(self, separation: Separation, committed: int, earlier: Iterable[Participation] = ()) -> None:
        """`committed` is the number of the last committed round; participations in a later one are of one that runs."""
        last = {participation.device: participation for participation in earlier}
        self._separation = separation
        self._committed = committed
        self._last = {device: taken for device, taken in last.items() if taken.number <= committed}
        self._running = {device: taken for device, taken in last.items() if taken.number > committed}
        self._left_out: AbstractSet[str] = frozenset()

    def add(self, devices: Iterable[str], now: float) -> None:
        """Add devices to the round that runs."""
        self._running |= {device: Participation(device, now, self._committed + 1) for device in devices}

    def leave(self, device: str) -> None:
        """Drop a device that gave its assignment up, or was lost."""
        self._running.pop(device, None)

    def leave_out(self, devices: AbstractSet[str]) -> None:
        """Take these devices, and no others, for those left out of further attempts at the round that is next."""
        self._left_out = devices

    def end(self, now: float, *, committed: bool, going_on: AbstractSet[str] = frozenset()) -> None:
        """End the round that ran. going_on: devices whose assignments go on in the next one, which is buffered."""
        working = {device: taken for device, taken in self._running.items() if device in going_on}
        if committed:
            over = {device: taken for device, taken in self._running.items() if device not in going_on}
            candidates = {**self._last, **{device: self._in_next(device, now) for device in self._left_out}, **over}
            self._committed += 1
            number = self._committed + 1
            self._last = {device: taken for device, taken in candidates.items() if self._is_resting(taken, now, number)}
            self._left_out = frozenset()
        self._running = working

    def is_resting(self, device: str, now: float, rounds_before: int | None = None) -> bool:
        """Whether a device may not yet be drawn for a round.

        rounds_before: how many other rounds, which have not ended, come before it; by default, as many as run.
        """
        last = self._participation(device, now)
        if rounds_before is None:
            # Behind a round that runs there is only the one after it.
            rounds_before = 1 if self._running else 0
        return last is not None and self._is_resting(last, now, self._committed + 1 + rounds_before)

    def remaining(self, device: str, now: float) -> tuple[float, int]:
        """Seconds and committed rounds until a device may take part again; both at least 0."""
        last = self._participation(device, now)
        if last is None:
            return 0.0, 0
        rounds = last.number + self._separation.rounds - 1 - self._committed
        return max(0.0, last.at + self._separation.seconds - now), max(0, rounds)

    def _participation(self, device: str, now: float) -> Participation | None:
        if device in self._left_out:
            return self._in_next(device, now)
        return self._running.get(device) or self._last.get(device)

    def _in_next(self, device: str, now: float) -> Participation:
        return Participation(device, now, self._committed + 1)

    def _is_resting(self, last: Participation, now: float, number: int) -> bool:
        return now < last.at + self._separation.seconds or number < last.number + self._separation.rounds
