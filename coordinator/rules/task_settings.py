"""Settings of a task, as an operator decides them, and their defaults.

Each class raises InvalidTask, which names the setting and says what it may be.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec

from coordinator.errors import CoordinatorError, Demands, InvalidTask, demand
from coordinator.rules.rounds import RoundPolicy
from coordinator.rules.states import OnDevice, Requires
from fedcore.errors import BadTarget, PrivacyError
from fedcore.privacy.settings import BANDS, DELTA, LEAST_NOISE, MOST_NOISE, MOST_TREE_ROUNDS, Mechanism, Privacy
from fedcore.release import SumBounds
from fedcore.schedule import LONGEST_REPORTING_S, ServerSchedule, first_of_pair
from fedcore.targets import parse
from fedcore.validation import LONGEST_SENTENCE, check, checked, setting
from secagg.parameters import LEAST_COHORT, least_honest

MOST_LOSS_GROWTH = 10.0
"""A loss that is above so many times the first has exploded, unless a task says otherwise."""
LEAST_GROUP, MOST_GROUP = 2 * LEAST_COHORT, 500
"""Bounds on the size of a group in a secure round: a group of one too many, halved, still holds LEAST_COHORT."""
MOST_COUNT = 2**31 - 1
"""The largest number of rounds, reports or examples in a setting."""
MOST_STALENESS = 1000
"""The largest bound on staleness: this many models may have to be kept for devices that have not fetched theirs."""
PHASES_AFTER_TRAINING = 5
"""Phases of a secure round that follow the training: shares, masked reports, confirmations, shares revealed."""
Estimator: TypeAlias = Literal["mean", "trimmed-mean", "median", "krum"]
NAME, GROWTH = "a name of 1 to 200 printable characters", "a number above 1, or 0"
SENTENCE = f"at most {LONGEST_SENTENCE} printable characters"
_TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)$"
TIME = "a time with its zone, such as 2026-11-27T06:00:00Z"
START = "TASK or TASK@ROUND"
TARGET = "an expression on labels"
Seconds = partial(setting, unit="seconds", gt=0)
"""Describes a time that is above 0."""


@checked(InvalidTask)
@dataclass(frozen=True, slots=True, kw_only=True)
class FootprintBudget:
    """The largest footprint per format that devices can bear, and the longest report; None is no bound."""

    peak_rss_mb: Annotated[float, setting("Most memory at the peak.", unit="MB", gt=0)] | None = None
    step_cpu_ms: Annotated[float, setting("Most CPU time of a step.", unit="milliseconds", gt=0)] | None = None
    graph_bytes: Annotated[float, setting("Most bytes of graphs and frozen vectors.", unit="bytes", gt=0)] | None = None
    report_bytes: Annotated[float, setting("Most bytes of a sent report.", unit="bytes", gt=0)] | None = None

    def __post_init__(self) -> None:
        check(self)


@checked(InvalidTask)
@dataclass(frozen=True, slots=True, kw_only=True)
class ClearReports:
    """The bounds on a report of a task without secure aggregation, and the estimate that is made of all of them.

    A longer mean segment is scaled down to `max_norm` (docs/spec/rounds.md §8).
    No honest device is expected to meet the defaults.
    """

    max_norm: Annotated[float, setting("Longest update, as an L2 norm.", ge=1e-6, le=1e6)] = 1000.0
    max_weight: Annotated[float, setting("Greatest weight that a report counts with.", ge=1, le=2**31)] = 10_000.0
    estimator: Annotated[Estimator, setting("Estimate of a round; all but the mean keep every report in memory.")] = (
        "mean"
    )
    tolerate: Annotated[int, setting("False reports that a trimmed mean or krum expects.", ge=0, le=2**31 - 1)] = 0

    def __post_init__(self) -> None:
        check(self)
        counts = self.estimator in ("trimmed-mean", "krum")
        wording = f"at least 1 with {self.estimator}" if counts else f"0 with {self.estimator}"
        demand(self.tolerate >= 1 if counts else self.tolerate == 0, "tolerate", wording, self.tolerate)

    @property
    def least_reports(self) -> int:
        """So many reports a round must have for the estimate to exist."""
        return {"trimmed-mean": 2 * self.tolerate + 1, "krum": 2 * self.tolerate + 3}.get(self.estimator, 1)


@checked(InvalidTask)
@dataclass(frozen=True, slots=True, kw_only=True)
class Secagg:
    """How reports are masked (docs/spec/wire.md §8).

    `clip_norm` is also the range of a segment's values. Precision is lost by the factor that devices stay below
    `max_examples`. With a larger `group_size` the coordinator learns sums over more devices, and a device and the
    coordinator make more masks (docs/performance.md).
    """

    clip_norm: Annotated[float, setting("Longest update, as an L2 norm.", ge=1e-6, le=1e6)] = 10.0
    bits: Annotated[int, setting("Precision of each value, in bits.", ge=2, le=20)] = 20
    max_examples: Annotated[int, setting("Greatest weight of a device.", ge=1, le=2**20)] = 100
    phase_s: Annotated[float, Seconds("How long each later phase waits for devices.")] = 30.0
    group_size: Annotated[int, setting("Most devices in a sum; above it, groups.", ge=LEAST_GROUP, le=MOST_GROUP)] = 200

    def __post_init__(self) -> None:
        check(self)


@checked(InvalidTask)
@dataclass(frozen=True, slots=True, kw_only=True)
class Buffered:
    """How devices come and report at their own speed (docs/spec/rounds.md §10)."""

    concurrency: Annotated[int, setting("Most devices at work at once.", ge=1, le=MOST_COUNT)] = 100
    max_staleness: Annotated[int, setting("Most versions that a report may be behind.", ge=0, le=MOST_STALENESS)] = 50

    def __post_init__(self) -> None:
        check(self)


@checked(InvalidTask)
@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyBudget:
    """The noise on the sums of rounds, and the budget at which a task ends before its last (docs/spec/privacy.md)."""

    epsilon: Annotated[float, setting("Most that all models together may say of a device.", gt=0)]
    delta: Annotated[float, setting(DELTA, gt=0, lt=1)]
    users: Annotated[int, setting("Size of the population.", ge=1, le=2**63 - 1)]
    mechanism: Annotated[
        Mechanism, setting("How sums are noised; distributed goes with secagg, and the others without.")
    ] = "gaussian"
    bands: Annotated[int, setting(BANDS, ge=1, le=2**63 - 1)] = 1
    noise_multiplier: (
        Annotated[
            float,
            setting(
                "Noise on a sum over the bound on a report; by default the least that lasts for all rounds.",
                ge=LEAST_NOISE,
                le=MOST_NOISE,
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        check(self)

    def promise(self, noise_multiplier: float, min_separation_rounds: int) -> Privacy:
        """The promise with such noise, of a task with such a separation. Raises InvalidTask naming what cannot be."""
        fields = {"noise_multiplier": noise_multiplier, "min_separation_rounds": min_separation_rounds}
        try:
            return Privacy(**asdict(self) | fields)
        except PrivacyError as error:
            raise InvalidTask(f"privacy: {error}") from error


@dataclass(frozen=True, slots=True)
class Separation:
    """The least distance between two participations of a device in a task.

    seconds: from one assignment to the next. rounds: from the number of one round to that of the other; 1 is none.
    """

    seconds: float
    rounds: int


def canonical(where: str, wrong: type[CoordinatorError] = InvalidTask) -> str:
    """The canonical text of a target; "" for none. wrong: what is raised for one that does not parse."""
    try:
        return str(parse(where)) if where else ""
    except BadTarget as error:
        raise wrong(f"where must be {TARGET}; {error}") from error


def wanted(where: str) -> str:
    """The devices of a target in words; "" without one."""
    return f"devices whose {parse(where).words}" if where else ""


@checked(InvalidTask)
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """How a task runs.

    In a secure round the last five `phase_s` of `reporting_deadline_s` follow the training. `goal` and `minimum` are
    those of round 1; with `same_cohort` both rounds of a pair have those of the first. In mode "buffered", `goal`
    reports of any age make the next version, and `over_selection` and `selection_timeout_s` mean nothing. The
    `hold_out_devices` are a share of the population, the same for all its tasks (docs/spec/rounds.md §6). `where` is
    kept as its canonical text (`fedcore.targets`).
    """

    population: Annotated[str, setting("Whose devices take part.", min_length=1, max_length=200, allowed=NAME)]
    goal: Annotated[int, setting("Reports that end a round.", ge=1, le=MOST_COUNT)]
    rounds: Annotated[int, setting("Rounds to commit.", ge=1, le=MOST_COUNT)]
    purpose: Annotated[
        str,
        setting("What it is for, in a sentence for owners.", allowed=SENTENCE, max_length=LONGEST_SENTENCE),
    ] = ""
    where: Annotated[str, setting("Devices wanted.", allowed=TARGET)] = ""
    starts_at: Annotated[str, setting("Draw no device before.", pattern=_TIME, allowed=TIME)] | None = None
    starts_from: (
        Annotated[str, setting("Begin at this model.", pattern=r"^\w+(@[1-9]\d{0,9})?$", allowed=START)] | None
    ) = None
    minimum: Annotated[int, setting("Least reports; by default the goal.", ge=1, le=MOST_COUNT)] | None = None
    clients: Annotated[int, setting("All devices, if the algorithm asks.", ge=1, le=MOST_COUNT)] | None = None
    over_selection: Annotated[float, setting("Devices drawn per report wanted.", ge=1, le=100)] = 1.3
    selection_timeout_s: Annotated[float, Seconds("How long a round waits for devices.")] = 60.0
    reporting_deadline_s: Annotated[float, Seconds("How long a round waits for reports.", le=LONGEST_REPORTING_S)] = (
        600.0
    )
    max_attempts: Annotated[int, setting("Failed attempts at a round that pause the task.", ge=1, le=MOST_COUNT)] = 5
    max_loss_growth: Annotated[
        float,
        setting("Pause when the loss is above this multiple of the first; 0 disables.", allowed=GROWTH, ge=0),
    ] = MOST_LOSS_GROWTH
    min_examples: Annotated[int, setting("Examples a device needs.", ge=1, le=MOST_COUNT)] = 1
    min_separation_s: Annotated[
        float, setting("Least time between two participations of a device.", unit="seconds", ge=0)
    ] = 0.0
    min_separation_rounds: Annotated[
        int, setting("Least rounds between two participations; 1 is none.", ge=1, le=MOST_COUNT)
    ] = 1
    requires: Annotated[Requires, setting("Rules on what devices state at check-in.")] = field(default_factory=Requires)
    on_device: Annotated[OnDevice, setting("Rules that only the device checks, telling nobody.")] = field(
        default_factory=OnDevice
    )
    hold_out_devices: Annotated[float, setting("Share to hold out.", ge=0, lt=1)] = 0.0
    on_held_out: Annotated[bool, setting("Run on exactly the held-out devices.")] = False
    seed: Annotated[int, setting("Seed of devices' draws.", ge=0, le=2**63 - 1)] = 0
    formats: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        setting("Formats that the plan must have.", allowed="the name of one format or more", min_length=1),
    ] = ("onnx",)
    budget: Annotated[FootprintBudget, setting("Largest footprint that its devices can bear.")] = field(
        default_factory=FootprintBudget
    )
    secagg: Annotated[Secagg | None, setting("Mask reports: the coordinator sees sums.")] = None
    clear: Annotated[ClearReports, setting("Bounds on reports that are not masked, and their estimate.")] = field(
        default_factory=ClearReports
    )
    schedule: Annotated[ServerSchedule, setting("How learning rate and goal change over rounds.")] = field(
        default_factory=ServerSchedule
    )
    same_cohort: Annotated[bool, setting("Draw second trips from the first's devices.")] = False
    buffered: Annotated[Buffered | None, setting("Let devices report at their own speed.")] = None
    privacy: Annotated[
        PrivacyBudget | None, setting("Noise on the sums of rounds, and a budget that ends the task.")
    ] = None

    def __post_init__(self) -> None:
        check(self)
        demand = Demands()
        wording = "left out with same_cohort: a device of a first trip must take part in the next round too"
        demand(not self.same_cohort or self.separation is None, "min_separation", wording, self.separation)
        name = self.population
        demand(name.isprintable(), "population", NAME, name)
        demand(self.purpose.isprintable(), "purpose", SENTENCE, self.purpose)
        with demand.noting():
            object.__setattr__(self, "where", canonical(self.where))
        wording = "a name without / that is not . or .., as it is a part of a URL"
        demand("/" not in name and name not in {".", ".."}, "population", wording, name)
        grown = self.max_loss_growth
        demand(grown == 0 or grown > 1, "max_loss_growth", GROWTH, grown)
        largest = self.schedule.largest_cohort
        demand(largest <= MOST_COUNT, "largest_cohort of schedule", "below 2**31", largest)
        if self.minimum is not None:
            demand(self.minimum <= self.goal, "minimum", f"from 1 to the goal, {self.goal}", self.minimum)
        least = self.clear.least_reports
        wording = f"at least {least} with estimator {self.clear.estimator} and tolerate {self.clear.tolerate}"
        demand(
            self.policy.minimum >= least, "goal" if self.minimum is None else "minimum", wording, self.policy.minimum
        )
        if self.clients is not None:
            self._check_clients(demand, self.clients)
        wording = "false without hold_out_devices: no device is held out"
        demand(self.hold_out_devices > 0 or not self.on_held_out, "on_held_out", wording, self.on_held_out)
        if self.secagg is not None:
            self._check_secagg(demand, self.secagg)
        if self.buffered is not None:
            self._check_buffered(demand)
        if self.privacy is not None:
            self._check_privacy(demand, self.privacy)
        demand.settle()

    def _check_clients(self, demand: Demands, clients: int) -> None:
        goal = self.largest_goal
        demand(clients >= goal, "clients", f"at least the goal, {goal}: they are all devices that take part", clients)
        wording = "mean with clients: else the server's vectors are not the mean of those that devices keep"
        demand(self.clear.estimator == "mean", "estimator", wording, self.clear.estimator)

    def _check_secagg(self, demand: Demands, secagg: Secagg) -> None:
        least = self.policy.minimum
        wording = f"at least {LEAST_COHORT} with secure aggregation: a sum over fewer says too much about each"
        demand(least >= LEAST_COHORT, "minimum" if self.goal >= LEAST_COHORT else "goal", wording, least)
        wording = "mean with secagg: other estimators need every report, and only their sum is known"
        demand(self.clear.estimator == "mean", "estimator", wording, self.clear.estimator)
        after_s, deadline_s = PHASES_AFTER_TRAINING * secagg.phase_s, self.reporting_deadline_s
        wording = f"above {after_s:g} ({PHASES_AFTER_TRAINING} × phase_s) with secagg, to leave time for training"
        demand(deadline_s > after_s, "reporting_deadline_s", wording, deadline_s)

    def _check_buffered(self, demand: Demands) -> None:
        wording = "absent in mode buffered: the devices of a secure sum must start from one model"
        demand(self.secagg is None, "secagg", wording, self.secagg)
        wording = "mean in mode buffered: other estimators do not know of staleness"
        demand(self.clear.estimator == "mean", "estimator", wording, self.clear.estimator)
        wording = f"the goal, {self.goal}, or not given in mode buffered: nothing else ends a round"
        demand(self.minimum in (None, self.goal), "minimum", wording, self.minimum)

    def _check_privacy(self, demand: Demands, privacy: PrivacyBudget) -> None:
        noise = 1.0 if privacy.noise_multiplier is None else privacy.noise_multiplier  # any, where it is to be found
        with demand.noting():
            privacy.promise(noise, self.min_separation_rounds)
        wording = "synchronous with privacy: a buffered report counts in a later round than that which drew its device"
        demand(self.buffered is None, "mode", wording, self.mode)
        wording = "mean with privacy: the noise is sized for what one report moves in a sum"
        demand(self.clear.estimator == "mean", "estimator", wording, self.clear.estimator)
        of_devices = privacy.mechanism == "distributed"
        wording = "other than distributed without secagg: a device's share of the noise hides no single report"
        demand(self.secagg is not None or not of_devices, "mechanism", wording, privacy.mechanism)
        wording = (
            "distributed with secagg: whether a masked sum is possible is checked before the coordinator could add "
            "noise, and everybody learns the answer"
        )
        demand(self.secagg is None or of_devices, "mechanism", wording, privacy.mechanism)
        few = privacy.mechanism != "tree" or self.rounds < MOST_TREE_ROUNDS
        wording = f"below {MOST_TREE_ROUNDS} with the mechanism tree, whose accounting is slow: take banded for more"
        demand(few, "rounds", wording, self.rounds)

    @property
    def wanted(self) -> str:
        """The devices of its target in words; "" without one."""
        return wanted(self.where)

    @property
    def mode(self) -> str:
        """How rounds get their reports: "synchronous", each from a cohort of its own, or "buffered"."""
        return "synchronous" if self.buffered is None else "buffered"

    @property
    def max_staleness(self) -> int:
        """How many versions old the model may be that a report starts from."""
        return 0 if self.buffered is None else self.buffered.max_staleness

    @property
    def separation(self) -> Separation | None:
        """The least distance between two participations of a device; None when there is none."""
        if self.min_separation_s == 0 and self.min_separation_rounds == 1:
            return None
        return Separation(self.min_separation_s, self.min_separation_rounds)

    @property
    def policy(self) -> RoundPolicy:
        """The part that governs a round."""
        minimum = self.goal if self.minimum is None else self.minimum
        times_s = self.selection_timeout_s, self.reporting_deadline_s
        concurrency = 0 if self.buffered is None else self.buffered.concurrency
        return RoundPolicy(self.goal, minimum, self.over_selection, *times_s, concurrency=concurrency)

    @property
    def largest_goal(self) -> int:
        """The goal of the last round, which no round exceeds."""
        return self.schedule.cohort(self.rounds, self.goal)

    def in_round(self, number: int) -> TaskSettings:
        """The settings with the goal of a round, and as large a share of it as the minimum."""
        if self.same_cohort:
            number = first_of_pair(number)
        goal = self.schedule.cohort(number, self.goal)
        if goal == self.goal:
            return self
        return replace(self, goal=goal, minimum=-(-self.policy.minimum * goal // self.goal))

    @property
    def promise(self) -> Privacy:
        """What the task promises, whole. It must promise privacy, and its noise be known (`with_least_noise`)."""
        if self.privacy is None or self.privacy.noise_multiplier is None:
            raise ValueError("the task promises no privacy, or its noise is yet to be found")
        return self.privacy.promise(self.privacy.noise_multiplier, self.min_separation_rounds)

    @property
    def sum_bounds(self) -> SumBounds:
        """How its secure rounds make their sums, as a release must allow it. The task must ask for masked reports."""
        secagg = self.secagg or Secagg()
        every = self.schedule.double_every or self.rounds
        doublings = range(1, min(self.rounds, 32 * every) + 1, every)
        least = min(_least_sum(self.in_round(number).policy, secagg.group_size) for number in doublings)
        noise = 0.0 if self.privacy is None else self.promise.noise_of_devices
        groups = {min(self.in_round(number).policy.cohort, secagg.group_size) for number in doublings}
        return SumBounds(
            clip_norm=secagg.clip_norm,
            bits=secagg.bits,
            max_examples=secagg.max_examples,
            min_sum=least,
            noise_multiplier=noise,
            honest=min(least_honest(least, most) for most in groups) if noise else 0,
            target=self.where or msgspec.UNSET,
        )


def _least_sum(policy: RoundPolicy, group_size: int) -> int:
    """The fewest devices in a sum: of one group the round's minimum; of several, half of their even shares in it.

    Groups differ in luck, and the round has its own minimum: a group below its share must not be lost for that.
    """
    groups = -(-policy.cohort // group_size)
    return policy.minimum if groups == 1 else max(LEAST_COHORT, -(-policy.minimum // (2 * groups)))
