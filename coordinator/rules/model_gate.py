"""The gate of a model's version: figures of devices that evaluated it, against those of the one that all have. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.errors import InvalidModel
from coordinator.rules.roll_outs import ModelVersion, RollOut, for_all

PREFIX = "evaluate."
"""What the figures of an evaluation begin with, among the metrics of a round."""
_GATE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(>=|<=)\s*previous\s*")


class Gate(NamedTuple):
    """A metric, and whether more of it is better."""

    metric: str
    more_is_better: bool

    @classmethod
    def parse(cls, text: str) -> Gate:
        """The gate of `METRIC >= previous` or `METRIC <= previous`. Raises InvalidModel."""
        match = _GATE.fullmatch(text)
        if match is None:
            raise InvalidModel(f"{text!r} is no gate: it is METRIC >= previous, or <= for one of which less is better")
        return cls(match[1], match[2] == ">=")

    def check(self, new: Mapping[str, float], previous: Mapping[str, float]) -> str:
        """Raise InvalidModel when the whole interval of the new version is worse than the mean of the previous one.

        new, previous: figures by name, with `PREFIX`. Answers in words what was compared.
        """
        name = PREFIX + self.metric
        low, high = (_figure(new, f"{name}.{end}", "the new version") for end in ("low", "high"))
        mean = _figure(previous, name, "the version that all devices have")
        compared = f"{self.metric} of the new version is from {low:.6g} to {high:.6g}, of the previous one {mean:.6g}"
        if high < mean if self.more_is_better else low > mean:
            raise InvalidModel(f"the gate refuses the version: {compared}")
        return compared

    def compare(
        self, figures: Mapping[str, float], versions: Sequence[ModelVersion], roll_outs: Sequence[RollOut]
    ) -> str:
        """What a version with these figures is compared with, the one that all devices have, in words; as `check`."""
        number = for_all(roll_outs)
        if number is None:
            return "no version was rolled out to all devices yet: the gate compares nothing"
        return self.check(figures, versions[number - 1].statement.evaluation)


def _figure(figures: Mapping[str, float], name: str, whose: str) -> float:
    if name not in figures:
        raise InvalidModel(f"the evaluation of {whose} has no {name}: no gate can compare it")
    return figures[name]
