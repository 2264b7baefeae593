"""The owner's policy as data: a TOML file that no coordinator can change. The meaning: docs/device.md."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from device_runtime.errors import ConfigError
from device_runtime.protocol.connection import address_of
from fedcore.errors import InvalidKey, why
from fedcore.signing import public_key
from fedcore.validation import NotNegative, build, check, checked, setting

FILE = "policy.toml"
Amount = Annotated[int, msgspec.Meta(ge=0)]
Names = Annotated[tuple[str, ...], setting("", allowed="a list of one name or more", min_length=1)]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that are checked in every constructor. Raises ConfigError naming the key and its value."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class NamedAuthority:
    """The enrolment authority that the device's policy names. url: empty if the coordinator provides it."""

    key: bytes
    url: str = ""


@checked(ConfigError)
class PerDay(_Part, frozen=True, kw_only=True):
    """The most that a device uses within any 24 hours. None is no limit.

    compute_seconds: of work on plans. bytes: down and up together. sessions: those with an assignment.
    """

    compute_seconds: NotNegative | None = None
    bytes: Amount | None = None
    sessions: Amount | None = None


@checked(ConfigError)
class PlanLimits(_Part, frozen=True, kw_only=True):
    """The largest plan that a device runs, and the most that training uses. None is no limit.

    parameters: values of the longest vector of the plan. graph_bytes: all graphs of the device's format, and the frozen
    vectors. batch_examples: batch size × steps over all passes, the examples that a round visits, including padding.
    memory_bytes, compute_seconds: private memory and CPU time of the process that trains for one assignment. If plan,
    checkpoint, graphs and report together exceed memory_bytes, the plan is refused before graphs are fetched.
    """

    parameters: Amount | None = None
    graph_bytes: Amount | None = None
    batch_examples: Amount | None = None
    memory_bytes: Amount = 1_000_000_000
    compute_seconds: NotNegative = 600.0


@checked(ConfigError)
class Questions(_Part, frozen=True, kw_only=True):
    """What a device does when a plan asks a question. allowed: whether it answers any.

    per_week: the most answers within seven days, another round of a question included. None is no limit.
    """

    allowed: bool = True
    per_week: Amount | None = None


@checked(ConfigError)
class Policy(_Part, frozen=True, kw_only=True):
    """The limits of a device, which no coordinator can change. The default allows everything but secure rounds.

    populations, collections: the only ones that the device serves and shows; None means any. signers: public keys, as
    `muster key new` prints them. One of them must sign the plan of a plain round, or release a secure round. Without
    signers the device runs any plan in plain rounds, and takes part in no secure round. min_cohort: the fewest reports
    of a valid round. min_noise_multiplier: the least noise that a round's release must promise, added by the devices
    to their sum. require_secure_aggregation: refuse every assignment of a plain round.
    require_release_log: refuse a secure round whose release is not proven to be in the coordinator's log of releases.
    unsigned_programs: run ExecuTorch programs, which nothing can check, even without signers.
    require_https: call no coordinator whose URL is not https.
    authority, authority_url: the enrolment authority's public key, as `muster authority new-key` prints it, and its
    URL; without them the device pins the authority that its coordinator names first. cache_bytes: the most bytes of
    plans, graphs, frozen vectors and checkpoints in the state folder between sessions; a plan that needs more is
    refused, except by 0, which keeps none. state_bytes: the most bytes of vectors that all
    tasks together may keep on the device between their rounds; each needs room for them twice.
    """

    populations: Names | None = None
    collections: Names | None = None
    signers: tuple[str, ...] = ()
    min_cohort: Annotated[int, msgspec.Meta(ge=1)] = 1
    min_noise_multiplier: NotNegative = 0.0
    require_secure_aggregation: bool = False
    require_release_log: bool = False
    unsigned_programs: bool = False
    require_https: bool = False
    authority: str | None = None
    authority_url: str | None = None
    cache_bytes: Amount = 200_000_000
    state_bytes: Amount = 200_000_000
    per_day: PerDay = PerDay()
    plan: PlanLimits = PlanLimits()
    questions: Questions = Questions()

    def __post_init__(self) -> None:
        super().__post_init__()
        for signer in self.signers:
            try:
                public_key(signer)
            except InvalidKey as error:
                raise ConfigError(f"signers = {self.signers!r}: {error}") from error
        if self.authority_url is not None:
            address_of(self.authority_url, "authority_url")
            if self.authority is None:
                raise ConfigError("authority_url needs authority, the public key that is to be found there")
        if self.authority is not None:
            try:
                public_key(self.authority)
            except InvalidKey as error:
                raise ConfigError(f"authority = {self.authority!r}: {error}") from error

    @property
    def named_authority(self) -> NamedAuthority | None:
        """The enrolment authority that this policy names, if any."""
        if self.authority is None:
            return None
        return NamedAuthority(public_key(self.authority).public_bytes_raw(), self.authority_url or "")

    @classmethod
    def load(cls, path: Path) -> Policy:
        """The policy in a file. Raises ConfigError when the file is missing, or naming an unknown key or bad value."""
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"policy {path} cannot be read: {why(error)}") from error
        try:
            return build(cls, values)
        except ConfigError as error:
            raise ConfigError(f"policy {path}: {error}") from error


def policy_in(state: Path) -> Policy:
    """The policy of a state folder: its policy.toml, or the default when there is none. Raises ConfigError."""
    path = state / FILE
    return Policy.load(path) if path.exists() else Policy()
