"""Roll-outs of models: which version a device is given, and the gate before a version goes on. Pure.

Spec: docs/spec/wire.md §11. The newest roll-out names a version and a share of the population's devices. A device is
inside by a hash that depends on nothing but the population, the model's name and the device's id, and if its labels
match the roll-out's target. So a share that grows keeps the devices that it had, and the hash of hold-outs and the draw
of rounds are independent of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from coordinator.errors import InvalidModel, UnknownModel
from coordinator.rules.task_settings import wanted
from fedcore import checkpoint
from fedcore.errors import SchemaError
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, Plan
from fedcore.release import Signed
from fedcore.signing import ModelRelease, decode_model_release
from fedcore.targets import parse

_DOMAIN = b"muster.roll-out.v1\0"


class RollOutKind(StrEnum):
    """What an operator did."""

    PROMOTE = "promote"
    ROLL_BACK = "roll-back"


@dataclass(frozen=True, slots=True, kw_only=True)
class RollOut:
    """A version of a model for a share of the devices, up to 1; 0 withdraws it, and no device is given any.

    at: in seconds since 1970. actor: who did it. gate: what a gate compared, in words; empty without one. target: the
    share is of the devices whose labels match; "" is all.
    """

    population: str
    name: str
    number: int
    share: float
    kind: RollOutKind
    at: float
    actor: str = ""
    gate: str = ""
    target: str = ""

    @property
    def to_all(self) -> bool:
        """Whether every device is given the version."""
        return self.share == 1 and not self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A released version of a model: the signed statement, and when it was released, in seconds since 1970."""

    population: str
    name: str
    number: int
    release: Signed
    created_at: float

    @property
    def statement(self) -> ModelRelease:
        """What was signed. Its signature was checked when it was released."""
        return decode_model_release(self.release.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and what devices have of it now.

    versions: how many were released. current, share: the version of the newest roll-out, and for which share of the
    devices that match `target`, 0 of one that was withdrawn; None before the first. others: the version of all other
    devices; None where they have none.
    """

    population: str
    name: str
    versions: int
    current: int | None
    share: float | None
    others: int | None
    target: str = ""

    @property
    def wanted(self) -> str:
        """The devices of its target in words; "" without one."""
        return wanted(self.target)

    @property
    def state(self) -> str:
        """What devices have of it, in a word or two."""
        if self.share is None:
            return "not rolled out"
        if self.share == 0:
            return "withdrawn"
        return "for all" if self.share == 1 and not self.target else "for a share"


@dataclass(frozen=True, slots=True)
class ModelCount:
    """How many check-ins of a day (UTC, as 2026-11-26) stated that the device has a version, or that it refused it.

    A device that checks in twice is counted twice.
    """

    day: str
    number: int
    check_ins: int
    refused: int


def version_for(device: str, labels: Mapping[str, str], roll_outs: Sequence[RollOut]) -> int | None:
    """The version of a model for a device that tells these labels; None when it has none.

    roll_outs: those of the model, in order.
    """
    if not roll_outs:
        return None
    newest = roll_outs[-1]
    salt = b"\0".join((newest.population.encode(), newest.name.encode(), device.encode()))
    place = int.from_bytes(hashlib.sha256(_DOMAIN + salt).digest()[:8], "big")
    # A power of two scales a float exactly, and Python compares integers and floats exactly.
    inside = place < newest.share * 2**64 and (not newest.target or parse(newest.target).matches(labels))
    return newest.number if inside else for_all(roll_outs)


def for_all(roll_outs: Sequence[RollOut]) -> int | None:
    """The version that the last roll-out to all devices gave; None without one, and after a withdrawal."""
    whole = [one.number if one.share else None for one in roll_outs if one.to_all or not one.share]
    return whole[-1] if whole else None


def earlier(roll_outs: Sequence[RollOut], number: int | None) -> int | None:
    """The version to which a roll-back returns: `number`, or what all devices had before the current one.

    None where they had none: the current one is withdrawn. Raises UnknownModel before any roll-out; InvalidModel when
    `number` is not an earlier version, and when the current one was withdrawn before.
    """
    if not roll_outs:
        raise UnknownModel("no version of the model was rolled out yet; `muster model promote` does that")
    newest, base = roll_outs[-1], for_all(roll_outs)
    if number is not None:
        if number >= newest.number and (number != base or newest.to_all):
            raise InvalidModel(
                f"version {number} is not earlier than version {newest.number}, which devices have: promote it"
            )
        return number
    if newest.share == 0:
        raise InvalidModel(
            f"version {newest.number} was withdrawn, and no device is given any: promote a version, or name an earlier "
            "one with --to"
        )
    return for_all([one for one in roll_outs if one.number < newest.number]) if newest.to_all else base


def check_withdrawal(roll_outs: Sequence[RollOut], to: int | None, *, withdraw: bool) -> None:
    """Raise InvalidModel unless a roll-back to that version, or to none, is what was asked for."""
    number = roll_outs[-1].number
    if to is None and not withdraw:
        raise InvalidModel(
            f"no version was before version {number}: to withdraw it, so that no further device is given any, say "
            "--withdraw"
        )
    if to is not None and withdraw:
        raise InvalidModel(f"version {to} was before version {number}: roll back to it without --withdraw")


def share_of(text: str) -> float:
    """The share of the devices in `5%` or `0.05`, whatever it is. Raises InvalidModel for what is no number."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise InvalidModel(f"{text!r} is no share: give 20% or 0.2") from error


def check_share(share: float) -> None:
    """Raise InvalidModel unless a roll-out may be to this share of the devices."""
    if not 0 < share <= 1:
        raise InvalidModel(
            f"a share of {share:g} of the devices cannot be: it is above 0 and at most 1, which is all; of a hundred, "
            "write 5%"
        )


def check_promotion(roll_outs: Sequence[RollOut], number: int, share: float, target: str = "") -> None:
    """Raise InvalidModel unless a version can be given to such a share of the devices of a target after these
    roll-outs of its model.

    Devices go back to an earlier version by a roll-back alone, which is all of them at once.
    """
    check_share(share)
    if not roll_outs or roll_outs[-1].share == 0:
        return
    newest = roll_outs[-1]
    if number < newest.number:
        raise InvalidModel(
            f"version {number} is earlier than version {newest.number}, which devices have: `muster model roll-back "
            f"{newest.name} --to {number}` returns to it"
        )
    if number == newest.number and newest.to_all and (share < 1 or target):
        raise InvalidModel(
            f"all devices have version {number} already: `muster model roll-back {newest.name}` takes it from them"
        )


def check_next(release: ModelRelease, signer: str, versions: Sequence[ModelVersion], at: float) -> None:
    """Raise InvalidModel unless a release can follow the versions of its model, at a time in seconds since 1970."""
    wanted = len(versions) + 1
    if release.number != wanted:
        raise InvalidModel(
            f"version {release.number} of model {release.name!r} is not the next: that is version {wanted}"
        )
    check_counter(release, signer, versions)
    check_unexpired(release, at)


def check_counter(release: ModelRelease, signer: str, shown: Sequence[ModelVersion]) -> None:
    """Raise InvalidModel when devices that saw one of these versions refuse a release, for its lower counter."""
    for other in shown:
        counter = other.statement.counter
        if other.release.signer == signer and counter > release.counter:
            raise InvalidModel(
                f"version {release.number} has the counter {release.counter}, and version {other.number} of the same "
                f"key {counter}: devices that saw that one refuse this one"
            )


def check_unexpired(release: ModelRelease, at: float) -> None:
    """Raise InvalidModel when no device takes the version any more, at a time in seconds since 1970."""
    if release.expires_at is not UNSET and release.expires_at <= at:
        raise InvalidModel(f"version {release.number} of model {release.name!r} has expired: release it anew")


def check_origin(release: ModelRelease, population: str, plan_sha256: str) -> None:
    """Raise InvalidModel unless a release can be from the task that it names, of this population and plan."""
    if (release.population, release.plan.sha256) != (population, plan_sha256):
        raise InvalidModel(
            f"version {release.number} of model {release.name!r} names an origin of another population or plan"
        )


def predicting(plan: Plan) -> tuple[BlobRef, ...]:
    """The blobs that apps need to predict with a plan, beside the parameters."""
    graphs = () if plan.predict is None else tuple(plan.predict.graphs.values())
    return graphs if plan.frozen is None else (*graphs, plan.frozen.blob)


def check_model(plan: Plan, parameters: bytes) -> None:
    """Raise InvalidModel unless apps can predict with a plan, and with these parameters."""
    if plan.question is not UNSET:
        raise InvalidModel(f"plan {plan.name!r} asks a question: its task has an answer, and no model for apps")
    if plan.predict is None:
        raise InvalidModel(f"plan {plan.name!r} has no predict graph, so no app can predict with it")
    try:
        vectors = checkpoint.decode(parameters, (VectorSpec("params", plan.schema.size),))
    except SchemaError as error:
        raise InvalidModel(f"the parameters do not fit plan {plan.name!r}: {error}") from error
    if not np.isfinite(vectors["params"]).all():
        raise InvalidModel("the parameters hold an infinite or undefined number")


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
