"""Settings of a task, as an operator decides them, and their defaults."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace

from coordinator.errors import InvalidTask
from coordinator.rules.clear_reports import ClearReports
from coordinator.rules.eligibility import OnDevice, Requires, demand
from coordinator.rules.rounds import RoundPolicy
from fedcore.decoding import converter
from fedcore.errors import PrivacyError
from fedcore.plan import first_of_pair
from fedcore.privacy.matrices import MOST_TREE_ROUNDS
from fedcore.privacy.settings import Mechanism, Privacy
from fedcore.release import SumBounds
from fedcore.schedule import ServerSchedule
from fedcore.wire.messages import LONGEST_REPORTING_S
from secagg.parameters import LEAST_COHORT, least_honest

LEAST_GROUP, MOST_GROUP = 2 * LEAST_COHORT, 500
"""Bounds on the size of a group in a secure round: a group of one too many, halved, still holds LEAST_COHORT."""
MOST_COUNT = 2**31 - 1
"""The largest number of rounds, reports or examples in a setting: columns hold no more."""
MOST_STALENESS = 1000
"""The largest bound on staleness: so many models may have to be kept for devices that have not fetched theirs."""
PHASES_AFTER_TRAINING = 5
"""Phases of a secure round that follow the training: shares, masked reports, confirmations, shares revealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FootprintBudget:
    """The largest footprint that a task's devices can bear, of each format; None bounds nothing.

    peak_rss_mb: memory at the peak, in megabytes. step_cpu_ms: CPU time of a step, in milliseconds. graph_bytes: all
    graphs and what is frozen.

    Raises InvalidTask naming the part and what it may be.
    """

    peak_rss_mb: float | None = None
    step_cpu_ms: float | None = None
    graph_bytes: float | None = None

    def __post_init__(self) -> None:
        for name in ("peak_rss_mb", "step_cpu_ms", "graph_bytes"):
            most = getattr(self, name)
            demand(most is None or 0 < most < math.inf, name, "a finite number above 0", most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secagg:
    """How reports are masked (docs/spec/wire.md §8).

    clip_norm: the L2 norm to which a device scales a longer mean segment down, and the range of its values. bits: of
    precision per value of a mean segment. max_examples: the weight that a device with more examples counts with, under
    weighting by examples; precision is lost by the factor that devices stay below it. phase_s: how long each phase
    after training waits for devices. group_size: how many devices are summed together at most; a larger cohort is
    divided. With more, the coordinator learns sums over more devices, and a device and the coordinator make more masks
    (docs/performance.md).

    Raises InvalidTask naming the setting and what it may be.
    """

    clip_norm: float = 10.0
    bits: int = 20
    max_examples: int = 100
    phase_s: float = 30.0
    group_size: int = 200

    def __post_init__(self) -> None:
        demand(1e-6 <= self.clip_norm <= 1e6, "clip_norm", "from 1e-6 to 1e6", self.clip_norm)
        demand(2 <= self.bits <= 20, "bits", "from 2 to 20", self.bits)
        demand(1 <= self.max_examples <= 2**20, "max_examples", "from 1 to 2**20", self.max_examples)
        demand(0 < self.phase_s < math.inf, "phase_s", "a finite number of seconds above 0", self.phase_s)
        within = LEAST_GROUP <= self.group_size <= MOST_GROUP
        demand(within, "group_size", f"from {LEAST_GROUP} to {MOST_GROUP}", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffered:
    """How devices come and report at their own speed (docs/spec/rounds.md §10).

    concurrency: devices at work at once, at most. max_staleness: how many versions of the model may be committed while
    a device works; after more, its report is refused.

    Raises InvalidTask naming the setting and what it may be.
    """

    concurrency: int = 100
    max_staleness: int = 50

    def __post_init__(self) -> None:
        demand(1 <= self.concurrency <= MOST_COUNT, "concurrency", "from 1 to below 2**31", self.concurrency)
        most = self.max_staleness
        demand(0 <= most <= MOST_STALENESS, "max_staleness", f"from 0 to {MOST_STALENESS}", most)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyBudget:
    """The noise on the sums of rounds, and the budget at which a task ends before its last (docs/spec/privacy.md).

    epsilon: the most that all models together may say of a device; a round that would exceed it is not begun. delta:
    the chance that epsilon leaves open, below 1 / users. users: size of the population. mechanism: how sums are noised;
    distributed goes with secagg, and the others without. bands: diagonals of the matrix of the mechanism banded, from 2
    to the min_separation_rounds of the task. noise_multiplier: standard deviation of the noise on a sum, over the bound
    on a report; by default the least with which the budget lasts for all rounds.
    """

    epsilon: float
    delta: float
    users: int
    mechanism: Mechanism = "gaussian"
    bands: int = 1
    noise_multiplier: float | None = None

    def promise(self, noise_multiplier: float, min_separation_rounds: int) -> Privacy:
        """The promise with such noise, of a task with such a separation. Raises InvalidTask naming what cannot be."""
        found = {"noise_multiplier": noise_multiplier, "min_separation_rounds": min_separation_rounds}
        try:
            return Privacy(**asdict(self) | found)
        except PrivacyError as error:
            raise InvalidTask(f"privacy: {error}") from error


to_privacy_budget = converter(PrivacyBudget, strict=False)
"""A function from plain values, also of text, to a budget; it raises msgspec.ValidationError."""


@dataclass(frozen=True, slots=True)
class Separation:
    """The least distance between two participations of a device in a task.

    seconds: from one assignment to the next. rounds: from the number of one round to that of the other; 1 is none.
    """

    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """How a task runs.

    population: whose devices take part. goal: reports that end a round. rounds: committed rounds after which the task
    is completed. minimum: reports that a round must have to count; the goal when not given. over_selection: devices
    selected per report wanted. selection_timeout_s: how long a round waits for devices. reporting_deadline_s: how long
    it waits for reports, from the draw to the last one; in a secure round the last five `phase_s` of it follow the
    training. max_attempts: failed attempts at a round in a row after which the task is paused. max_loss_growth: how
    many times the median of its first five values a loss may be; after three rounds in a row above that the task is
    paused as diverged; 0 looks at no loss.

    min_examples: examples that a device must hold. requires: rules on its check-in. on_device: rules that only the
    device checks. min_separation_s, min_separation_rounds: how far two participations of a device are apart, at least.

    seed: key of every random number that a device draws. formats: formats that the plan must have, because a runtime of
    the population needs them. budget: the largest footprint that its devices can bear. secagg: how reports are masked,
    so that the coordinator sees only sums; None lets it see every report, and then `clear` bounds each of them.

    schedule: how the server learning rate and the goal change from round to round; `goal` and `minimum` are those of
    round 1.

    same_cohort: whether the second of two trips draws only devices that the first one counted. Then both rounds of a
    pair have the goal and the minimum of the first, and no separation may be asked for.

    buffered: how devices come and report at their own speed, in mode "buffered", where `goal` reports of any age make
    the next version; over_selection and selection_timeout_s mean nothing then. None draws a cohort for every round.

    privacy: the noise on the sums of rounds, and the budget at which the task ends before its last round. The
    separation in rounds is that of the task. None promises nothing.

    Raises InvalidTask naming the setting and what it may be.
    """

    population: str
    goal: int
    rounds: int
    minimum: int | None = None
    over_selection: float = 1.3
    selection_timeout_s: float = 60.0
    reporting_deadline_s: float = 600.0
    max_attempts: int = 5
    max_loss_growth: float = 10.0
    min_examples: int = 1
    min_separation_s: float = 0.0
    min_separation_rounds: int = 1
    requires: Requires = field(default_factory=Requires)
    on_device: OnDevice = field(default_factory=OnDevice)
    seed: int = 0
    formats: tuple[str, ...] = ("onnx",)
    budget: FootprintBudget = field(default_factory=FootprintBudget)
    secagg: Secagg | None = None
    clear: ClearReports = field(default_factory=ClearReports)
    schedule: ServerSchedule = field(default_factory=ServerSchedule)
    same_cohort: bool = False
    buffered: Buffered | None = None
    privacy: PrivacyBudget | None = None

    def __post_init__(self) -> None:
        for name in ("goal", "rounds", "max_attempts", "min_examples", "min_separation_rounds"):
            demand(1 <= getattr(self, name) <= MOST_COUNT, name, "from 1 to below 2**31", getattr(self, name))
        for name in ("selection_timeout_s", "reporting_deadline_s"):
            seconds = getattr(self, name)
            demand(0 < seconds < math.inf, name, "a finite number of seconds above 0", seconds)
        deadline_s = self.reporting_deadline_s
        demand(deadline_s <= LONGEST_REPORTING_S, "reporting_deadline_s", "a week at most", deadline_s)
        apart_s = self.min_separation_s
        demand(0 <= apart_s < math.inf, "min_separation_s", "a finite number of seconds, at least 0", apart_s)
        wording = "left out with same_cohort: a device of a first trip must take part in the next round too"
        demand(not self.same_cohort or self.separation is None, "min_separation", wording, self.separation)
        named = 0 < len(self.population) <= 200 and self.population.isprintable()
        demand(named, "population", "a name of 1 to 200 printable characters", self.population)
        reachable = "/" not in self.population and self.population not in {".", ".."}
        demand(
            reachable, "population", "a name without / that is not . or .., as it is a part of a URL", self.population
        )
        demand(1 <= self.over_selection <= 100, "over_selection", "from 1 to 100", self.over_selection)
        grown = self.max_loss_growth
        demand(grown == 0 or 1 < grown < math.inf, "max_loss_growth", "a finite number above 1, or 0", grown)
        demand(0 <= self.seed < 2**63, "seed", "from 0 to below 2**63", self.seed)
        demand(bool(self.formats) and all(self.formats), "formats", "the name of one format or more", self.formats)
        largest = self.schedule.largest_cohort
        demand(largest <= MOST_COUNT, "largest_cohort of schedule", "below 2**31", largest)
        if self.minimum is not None:
            demand(1 <= self.minimum <= self.goal, "minimum", f"from 1 to the goal, {self.goal}", self.minimum)
        least = self.clear.least_reports
        wording = f"at least {least} with estimator {self.clear.estimator} and tolerate {self.clear.tolerate}"
        demand(
            self.policy.minimum >= least, "goal" if self.minimum is None else "minimum", wording, self.policy.minimum
        )
        if self.secagg is not None:
            self._check_secagg(self.secagg)
        if self.buffered is not None:
            self._check_buffered()
        if self.privacy is not None:
            self._check_privacy(self.privacy)

    def _check_secagg(self, secagg: Secagg) -> None:
        least = self.policy.minimum
        wording = f"at least {LEAST_COHORT} with secure aggregation: a sum over fewer says too much about each"
        demand(least >= LEAST_COHORT, "minimum" if self.goal >= LEAST_COHORT else "goal", wording, least)
        wording = "mean with secagg: other estimators need every report, and only their sum is known"
        demand(self.clear.estimator == "mean", "estimator", wording, self.clear.estimator)
        after_s, deadline_s = PHASES_AFTER_TRAINING * secagg.phase_s, self.reporting_deadline_s
        wording = f"above {after_s:g} ({PHASES_AFTER_TRAINING} × phase_s) with secagg, to leave time for training"
        demand(deadline_s > after_s, "reporting_deadline_s", wording, deadline_s)

    def _check_buffered(self) -> None:
        wording = "absent in mode buffered: the devices of a secure sum must start from one model"
        demand(self.secagg is None, "secagg", wording, self.secagg)
        wording = "mean in mode buffered: other estimators do not know of staleness"
        demand(self.clear.estimator == "mean", "estimator", wording, self.clear.estimator)
        wording = f"the goal, {self.goal}, or not given in mode buffered: nothing else ends a round"
        demand(self.minimum in (None, self.goal), "minimum", wording, self.minimum)

    def _check_privacy(self, privacy: PrivacyBudget) -> None:
        noise = 1.0 if privacy.noise_multiplier is None else privacy.noise_multiplier  # any, where it is to be found
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
        )


def _least_sum(policy: RoundPolicy, group_size: int) -> int:
    """The fewest devices in a sum: of one group the round's minimum; of several, half of their even shares in it.

    Groups differ in luck, and the round has its own minimum: a group below its share must not be lost for that.
    """
    groups = -(-policy.cohort // group_size)
    return policy.minimum if groups == 1 else max(LEAST_COHORT, -(-policy.minimum // (2 * groups)))
