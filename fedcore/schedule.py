"""A server schedule, as data: how the server learning rate and the cohort change from round to round.

Charles, Garrett, Huo, Shmulyian, Smith, "On large-cohort training for federated learning", NeurIPS 2021. Rounds count
from 1.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fedcore.errors import ScheduleError
from fedcore.validation import Count, checked, type_error

_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@checked
class ServerSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default changes nothing. Raises ScheduleError naming the field.

    warmup_rounds: W; round r < W has r / W of the server learning rate.
    scaling: the server learning rate grows with a power of the cohort over `reference_cohort`: "none" is 0, "sqrt" ½,
        "linear" 1.
    reference_cohort: the cohort for which the learning rate is meant; needed for a scaling.
    double_every: R; the cohort doubles after every R rounds. 0 is never.
    largest_cohort: where the doubling ends; needed for `double_every`.
    """

    warmup_rounds: Count = 0
    scaling: Literal["none", "sqrt", "linear"] = "none"
    reference_cohort: Count = 0
    double_every: Count = 0
    largest_cohort: Count = 0

    def __post_init__(self) -> None:
        wrong = type_error(self)
        if wrong:
            raise ScheduleError(f"{wrong[0]} cannot be {wrong[1]!r}: {wrong[2]}")
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
