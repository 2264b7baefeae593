"""The loop of a pass, its weight in a mean, a server's schedule over rounds, and ranges of a report's values: data.

Source of the schedule: Charles, Garrett, Huo, Shmulyian, Smith, "On large-cohort training for federated learning",
NeurIPS 2021. Rounds count from 1.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec.structs import force_setattr

from fedcore.errors import PlanError, ReportError, ScheduleError
from fedcore.validation import Count, check, checked, setting

# Ranges: the bounds and the precision of a segment's values, where these are known beforehand. It needs no NumPy.
#
# Spec: docs/spec/plan.md §5.3.


MOST_BITS = 20
LEAST_WIDTH, MOST_WIDTH = 1e-30, 1e30
"""Of a range: its steps, too, are then normal numbers in float32."""


class Range(msgspec.Struct, frozen=True):
    """The numbers from `low` to `high`, 0 among them, in 2^bits − 1 equal steps.

    Whole numbers are exact where high − low is 2^bits − 1 and low is whole: Range(0, 2**20 - 1, 20) counts. Raises
    ReportError for a range without 0, one that is empty or wider than 10^30, and more than 20 bits.
    """

    low: float
    high: float
    bits: Annotated[int, msgspec.Meta(ge=1, le=MOST_BITS)]

    def __post_init__(self) -> None:
        for name in ("low", "high"):  # a plan has one spelling of a number
            force_setattr(self, name, float(getattr(self, name)))
        if not (self.low <= 0 <= self.high and LEAST_WIDTH <= self.high - self.low <= MOST_WIDTH):
            raise ReportError(
                f"a range must hold 0 and be from {LEAST_WIDTH:g} to {MOST_WIDTH:g} wide, not from {self.low:g} to "
                f"{self.high:g}"
            )
        if not 1 <= self.bits <= MOST_BITS:
            raise ReportError(f"a range has from 1 to {MOST_BITS} bits, not {self.bits}")


# The loop of a pass on a device, its weight in a mean, and the schedule of a server over rounds, as data.


Weighting = Literal["examples", "uniform"]
"""What a device counts for in a mean: its examples, or 1."""


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    """The sweeps of a pass over the local examples.

    `epochs` sweeps in batches of `batch_size`. `steps` limits the steps of all sweeps, if set; with `shuffle` every
    sweep has a new order.
    """

    batch_size: int
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1, not {value}")

    def step_count(self, examples: int) -> int:
        """Number of batches over `examples` local examples."""
        total = self.epochs * -(-examples // self.batch_size)
        return total if self.steps is None else min(total, self.steps)


LONGEST_REPORTING_S = 7 * 86_400
"""The longest time that a device may have for a report, in seconds."""
_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@checked(ScheduleError)
class ServerSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default changes nothing. Raises ScheduleError naming the field.

    Round r < `warmup_rounds` W has r / W of the server learning rate. The powers of `scaling` are 0, ½ and 1.
    """

    warmup_rounds: Annotated[Count, setting("Rounds in which the server learning rate grows to its value.")] = 0
    scaling: Annotated[
        Literal["none", "sqrt", "linear"],
        setting("How the server learning rate grows with the cohort over reference_cohort."),
    ] = "none"
    reference_cohort: Annotated[Count, setting("Cohort that the learning rate is meant for; needed for a scaling.")] = 0
    double_every: Annotated[Count, setting("Rounds after which the cohort doubles; 0 is never.")] = 0
    largest_cohort: Annotated[Count, setting("Cohort at which the doubling ends; needed for it.")] = 0

    def __post_init__(self) -> None:
        check(self)
        if self.scaling != "none" and not self.reference_cohort:
            raise ScheduleError(
                f"scaling {self.scaling} needs reference_cohort, the cohort that server_lr is meant for"
            )
        if self.double_every and not self.largest_cohort:
            raise ScheduleError("double_every needs largest_cohort, where the doubling ends")

    def lr_scale(self, number: int, cohort: int) -> float:
        """The factor on the server learning rate of round `number`, in which `cohort` devices reported."""
        warmed = min(1.0, number / self.warmup_rounds) if self.warmup_rounds else 1.0
        power = _POWERS[self.scaling]
        return warmed * (cohort / self.reference_cohort) ** power if power else warmed

    def cohort(self, number: int, first: int) -> int:
        """The cohort of round `number`, of a task that starts with `first`."""
        if not self.double_every or first >= self.largest_cohort:
            return first
        doublings = min((number - 1) // self.double_every, self.largest_cohort.bit_length())
        return min(first << doublings, self.largest_cohort)


def first_of_pair(number: int) -> int:
    """The round that runs the first of two trips, of the pair of rounds to which round `number` belongs."""
    return number - (number - 1) % 2
