"""The owner's policy, which no coordinator can change, and its demands on releases of rounds and models."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
from msgspec import UNSET

from device_runtime.conditions import Clock
from device_runtime.errors import ConfigError, ModelRefused, PlanRefused
from device_runtime.protocol.connection import address_of
from device_runtime.state.database import StateDatabase
from device_runtime.state.records import ModelStore
from fedcore import checkpoint
from fedcore.errors import FedcoreError, InvalidKey, why
from fedcore.labels import check_label_name
from fedcore.params import Float32
from fedcore.release import LineageEntry, LogProof, Release, Signed, TreeHead, decode_entry, decode_head, decode_release
from fedcore.signing import ModelRelease, public_key, verified
from fedcore.validation import NotNegative, build, check, checked, setting
from fedcore.wire.messages import Assignment
from secagg.keys import climb, depth

FILE = "policy.toml"
Amount = Annotated[int, msgspec.Meta(ge=0)]
Names = Annotated[tuple[str, ...], setting("", allowed="a list of one name or more", min_length=1)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings that are checked in every constructor, encoded as far as they were chosen.

    Raises ConfigError naming the key and its value.
    """

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

    populations, collections: the only ones that the device serves and shows; None means any. labels: the names of those
    that the app states and the device tells. signers: public keys, as
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
    labels: tuple[str, ...] = ()
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
        for name in self.labels:
            try:
                check_label_name(name)
            except ValueError as error:
                raise ConfigError(f"labels = {self.labels!r}: {error}") from error
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


# Releases: a device's demands on a secure round and on a model before it takes part or fetches.
#
# A secure round hides a report among others, but the plan decides what is in the report. So a key that the owner's
# policy names must have released the plan, its first checkpoint and the parameters of sums. Every later checkpoint must
# descend from the first, and a model that is evaluated be that of such a checkpoint.


_LOG = "require_release_log"


@dataclass(frozen=True, slots=True)
class Releases:
    """The check of releases for one population. The state database remembers them, so that none can be rolled back.

    Methods raise PlanRefused, which names the broken rule, or StateError.
    """

    policy: Policy
    database: StateDatabase
    clock: Clock
    population: str

    def check(self, assignment: Assignment, *, again: bool = False) -> None:
        """Check an assignment of a secure round against its release, and remember the release and the checkpoint.

        again: an earlier session accepted it, so that a newer head of the log may have been shown since.
        """
        signed = assignment.release
        if signed is None:
            raise _refused("signers", "the secure round has no signed release")
        if not self.policy.signers:
            raise _refused("signers", "it names no key, and a secure round must be released by one that it names")
        if signed.signer not in self.policy.signers:
            raise _refused("signers", f"the release is signed by {signed.signer}, which the policy does not name")
        try:
            release = verified(signed, Release)
            entry = None if assignment.lineage is None else verified(assignment.lineage, LineageEntry)
        except FedcoreError as error:
            raise _refused("signers", str(error)) from error
        with self.database.transaction():
            self._check_release(release, signed, assignment)
            if release.evaluation_by(assignment.plan.sha256) is None:
                self._check_checkpoint(release, signed, assignment, entry)
            else:
                self._check_evaluated(release, signed, assignment, entry)
            if self.policy.require_release_log:
                head = _proven_head(release, signed, assignment.log)
                if not again:
                    self._check_growth(release, head)

    def _check_release(self, release: Release, signed: Signed, assignment: Assignment) -> None:
        if release.population != self.population:
            raise _refused("release", f"it is for population {release.population!r}")
        plan = assignment.plan.sha256
        if release.plan != plan and release.evaluation_by(plan) is None:
            raise _refused("release", f"it is for plan {release.plan[:12]}…, not {plan[:12]}…")
        if release.expires_at <= self.clock.wall():
            raise _refused("release", "it has expired")
        promised, least = release.bounds_of(plan).noise_multiplier, self.policy.min_noise_multiplier
        if promised < least:
            raise _refused(
                "min_noise_multiplier", f"devices would add noise of {promised:g}, the least allowed is {least:g}"
            )
        query = "SELECT counter FROM released WHERE signer = ? AND population = ?"
        rows = self.database.execute(query, signed.signer, self.population)
        highest = max((int(counter) for (counter,) in rows), default=0)
        if release.counter < highest:
            raise _refused("release", f"its counter is {release.counter}; this device has seen {highest}")
        row = (signed.signer, self.population, release.counter)
        self.database.execute("INSERT OR REPLACE INTO released VALUES (?, ?, ?)", *row)

    def _check_checkpoint(
        self, release: Release, signed: Signed, assignment: Assignment, entry: LineageEntry | None
    ) -> None:
        last = self._last_entry(signed.digest)
        if entry is None or assignment.lineage is None:
            if assignment.checkpoint.sha256 != release.checkpoint:
                raise _refused("lineage", "the checkpoint is not the release's, and no signed entry comes with it")
            if assignment.round != 1:
                raise _refused("lineage", f"no signed entry comes with the checkpoint of round {assignment.round}")
            if last is not None:
                raise _refused("lineage", f"the first checkpoint comes again after that of round {last.round}")
            return
        if entry.checkpoint != assignment.checkpoint.sha256:
            raise _refused("lineage", "the signed entry is for another checkpoint")
        if entry.round != assignment.round - 1 or entry.round < 1:
            raise _refused("lineage", f"the checkpoint of round {entry.round} comes in round {assignment.round}")
        if last is not None and entry.round < last.round:
            raise _refused("lineage", f"the checkpoint of round {entry.round} comes after that of round {last.round}")
        self._remember(release, signed, assignment.lineage, entry)

    def _check_evaluated(
        self, release: Release, signed: Signed, assignment: Assignment, entry: LineageEntry | None
    ) -> None:
        if entry is None or assignment.lineage is None:
            raise _refused("lineage", "no signed entry comes with the model that is evaluated")
        if entry.params is UNSET or entry.round < 1:
            raise _refused("lineage", f"the signed entry of round {entry.round} names no model to evaluate")
        if assignment.round != 1:
            raise _refused(
                "lineage", f"an evaluation of the release has one round, and this is round {assignment.round}"
            )
        self._remember(release, signed, assignment.lineage, entry)

    def _remember(self, release: Release, signed: Signed, statement: Signed, entry: LineageEntry) -> None:
        """Check that an entry belongs to a release and to the last entry that this device was shown; keep the newer."""
        last = self._last_entry(signed.digest)
        if statement.signer != release.lineage:
            raise _refused("lineage", f"the checkpoint is signed by {statement.signer}, not by the release's key")
        if entry.release != signed.digest:
            raise _refused("lineage", "the signed entry is for another release")
        if entry.round == 1 and entry.parent != release.checkpoint:
            raise _refused("lineage", "the checkpoint of round 1 does not descend from the release's")
        if last is not None:
            _check_descent(*sorted((last, entry), key=lambda one: one.round))
        if last is None or entry.round > last.round:
            self.database.execute("INSERT OR REPLACE INTO lineage VALUES (?, ?)", signed.digest, statement.text)

    def _check_growth(self, release: Release, signed: Signed) -> None:
        head = decode_head(signed.text)
        rows = self.database.execute("SELECT head FROM log_head WHERE signer = ?", release.lineage)
        last = decode_head(rows[0][0]) if rows else head
        if head.size < last.size or (head.size == last.size and head.root != last.root):
            raise _refused(_LOG, f"the head of {head.size} contradicts one of {last.size} that was shown before")
        self.database.execute("INSERT OR REPLACE INTO log_head VALUES (?, ?)", release.lineage, signed.text)

    def _last_entry(self, release: str) -> LineageEntry | None:
        rows = self.database.execute("SELECT entry FROM lineage WHERE release = ?", release)
        return decode_entry(rows[0][0]) if rows else None


def check_model(assignment: Assignment, received: Mapping[str, Float32]) -> None:
    """Check the vectors of a secure assignment that was checked: the model that its entry names, if any, and the
    constants of an evaluation.

    Who trains checks it too: else the entry of a round could name any model to those who evaluate. Raises PlanRefused.
    """
    if assignment.secagg is None or assignment.release is None or assignment.lineage is None:
        return
    evaluation = decode_release(assignment.release.text).evaluation_by(assignment.plan.sha256)
    entry = decode_entry(assignment.lineage.text)
    if evaluation is None:
        received = {} if entry.params is UNSET else {"params": received["params"]}
    named = {**(evaluation.constants if evaluation else {}), "params": entry.params}
    for name, vector in received.items():
        if named.get(name) != checkpoint.digest(vector):
            origin = f"the model of round {entry.round}" if name == "params" else "the released one"
            raise _refused("lineage", f"the vector {name!r} of the checkpoint is not {origin}")


def _check_descent(before: LineageEntry, after: LineageEntry) -> None:
    """Raise PlanRefused unless two entries are the same, or the checkpoint of the later can follow the other's."""
    if after.round == before.round and after != before:
        raise _refused("lineage", f"two checkpoints of round {after.round} are signed: the coordinator has lied")
    if after.round == before.round + 1 and after.parent != before.checkpoint:
        raise _refused("lineage", f"the checkpoint of round {after.round} does not descend from that of {before.round}")


def _proven_head(release: Release, signed: Signed, proof: LogProof | None) -> Signed:
    """The head of a log that holds the release. Raises PlanRefused."""
    if proof is None or proof.head.signer != release.lineage:
        raise _refused(_LOG, "no head that the release's lineage key signed comes with it")
    try:
        head = verified(proof.head, TreeHead)
    except FedcoreError as error:
        raise _refused(_LOG, str(error)) from error
    fits = proof.position < head.size and len(proof.path) == 32 * depth(head.size)
    if not fits or climb(signed.leaf, proof.position, proof.path).hex() != head.root:
        raise _refused(_LOG, "the proof does not lead from the release to the head")
    return proof.head


def _refused(rule: str, why: str) -> PlanRefused:
    return PlanRefused(f"against {rule} of this device's policy", why)


def signed_release(policy: Policy, signed: Signed) -> ModelRelease:
    """The release, if a key that the policy names signed it; any key if it names none, as for plans of plain rounds.

    Raises ModelRefused.
    """
    if policy.signers and signed.signer not in policy.signers:
        raise ModelRefused(
            "against signers of this device's policy",
            f"the model release is signed by {signed.signer}, which the policy does not name",
        )
    try:
        return verified(signed, ModelRelease)
    except FedcoreError as error:
        raise ModelRefused(str(error)) from error


def check_release(
    release: ModelRelease, signer: str, name: str, population: str, *, store: ModelStore, now: float
) -> None:
    """Check a release for the model `name` of a population, and remember its counter. now: seconds since 1970.

    Raises ModelRefused or StateError.
    """
    if release.population != population:
        _refuse(f"it is for population {release.population!r}")
    if release.name != name:
        _refuse(f"it is for model {release.name!r}")
    if release.expires_at is not UNSET and release.expires_at <= now:
        _refuse("it has expired")
    highest = store.highest(signer)
    if release.counter < highest:
        _refuse(f"its counter is {release.counter}; this device has seen {highest}")
    store.see(signer, release.counter)


def _refuse(why: str) -> NoReturn:
    raise ModelRefused(f"the model release is refused: {why}")
