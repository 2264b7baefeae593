"""The parts of a coordinator that both of its APIs use, enrolment and counts of check-ins among them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

from msgspec import UNSET, UnsetType
from sqlalchemy.exc import IntegrityError

from authority import errors
from authority.attestation import Attestation
from coordinator.api.authentication import Authenticator, demand_allowed
from coordinator.api.limits import Limits
from coordinator.driver.driver import Driver
from coordinator.driver.replica_membership import Membership, ReplicaConfig
from coordinator.driver.watch import Webhook
from coordinator.errors import NotAttested
from coordinator.keys import Keys, open_both
from coordinator.monitoring import Metrics, RecentLines
from coordinator.rules.alerts import Action
from coordinator.rules.entities import Token
from coordinator.rules.selection import LabelSet, Matching
from coordinator.rules.task_settings import canonical
from coordinator.secure.beacon_client import BeaconClient
from coordinator.secure.group import Executors, Unmasker
from coordinator.secure.round import SecureRoundFactory
from coordinator.settings import Settings
from coordinator.store.tasks import CoordinatorStore, open_coordinator_store
from fedcore.signing import public_key
from fedcore.wire import messages
from fedcore.wire.signatures import device_id
from secagg.errors import SecaggError
from secagg.keys import check_credential

# Counts of check-ins by population, for the dashboard: devices, what they run, and when they came.
#
# In the memory of this process, and bounded, whatever devices state; nothing of it is written. Populations are those
# that operators made: a check-in for another one is refused and not counted.

_MOST_KINDS, _LONGEST = 30, 60
_MOST_LABEL_SETS = 2_000
"""Kinds of labels that are kept of a population, at 1.5 kB each at most."""
_MOST_DEVICES = 100_000
"""Devices that are remembered at once, of all populations together."""
SPAN_S, _SPANS = 600.0, 144
"""Check-ins are counted in spans of ten minutes, for a day."""
AWAKE_S = 600.0
OTHER = "other"


@dataclass(frozen=True, slots=True)
class PopulationCounts:
    """Counts of a population: devices of the last day, and of the last ten minutes; check-ins by what devices state.

    over_time: check-ins by when their span began, in seconds since 1970, ascending, from the first to this moment's.
    """

    devices: int
    awake: int
    runtimes: Mapping[str, int]
    versions: Mapping[str, int]
    over_time: tuple[tuple[float, int], ...]


@dataclass(slots=True)
class _Kind:
    """The devices that tell the same labels; those of labels that are not kept have no kind of their own."""

    told: LabelSet
    devices: int = 0


@dataclass(slots=True)
class _Population:
    runtimes: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    spans: Counter[int] = field(default_factory=Counter)
    kinds: dict[LabelSet, _Kind] = field(default_factory=dict)
    unkept: _Kind = field(default_factory=lambda: _Kind(()))

    @property
    def devices(self) -> int:
        """How many are remembered."""
        return self.unkept.devices + sum(kind.devices for kind in self.kinds.values())

    def enter(self, told: LabelSet) -> _Kind:
        """Count a device that tells these labels."""
        kind = self.kinds.get(told)
        if kind is None:
            room = len(self.kinds) < _MOST_LABEL_SETS
            kind = self.kinds.setdefault(told, _Kind(told)) if room else self.unkept
        kind.devices += 1
        return kind

    def leave(self, kind: _Kind) -> None:
        """Count it no longer."""
        kind.devices -= 1
        if not kind.devices and kind is not self.unkept:
            del self.kinds[kind.told]


class CheckInCounts:
    """The check-ins at this process since it began. Safe from any thread; times in seconds since 1970."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._populations: defaultdict[str, _Population] = defaultdict(_Population)
        self._seen: OrderedDict[tuple[str, int], tuple[float, _Kind]] = OrderedDict()
        """When each device of a population last came, and its kind, the latest last."""

    def add(
        self,
        population: str,
        device: str,
        able: messages.StatedCapabilities,
        now: float,
        labels: Mapping[str, str] | UnsetType = UNSET,
    ) -> None:
        """Count a check-in of a device for a population that exists."""
        with self._lock:
            counts = self._populations[population]
            runtime, version = _kinds(able.runtime, able.engine, able.version)
            _count(counts.runtimes, runtime)
            _count(counts.versions, version)
            span = int(now // SPAN_S)
            if span not in counts.spans:
                _forget_spans(counts, now)
                self._forget_devices(now)
            counts.spans[span] += 1
            self._saw(population, device, now, tuple(sorted(labels.items())) if labels else ())

    def _saw(self, population: str, device: str, now: float, told: LabelSet) -> None:
        """Count a device, under the lock, among those that tell the same labels."""
        # Only a hash is kept, not the id: we only count devices.
        key, counts = (population, hash(device)), self._populations[population]
        before, kind = self._seen.pop(key, None), counts.kinds.get(told)
        if kind is None or before is None or before[1] is not kind:
            kind = counts.enter(told)
            if before is not None:
                counts.leave(before[1])
        self._seen[key] = now, kind
        if len(self._seen) > _MOST_DEVICES:
            self._forget_devices(now)

    def of(self, population: str, now: float) -> PopulationCounts:
        """The counts of a population."""
        with self._lock:
            counts = self._populations.get(population, _Population())
            _forget_spans(counts, now)
            self._forget_devices(now)
            latest = takewhile(lambda seen: seen[1][0] >= now - AWAKE_S, reversed(self._seen.items()))
            awake = sum(name == population for (name, _), _ in latest)
            spans = range(min(counts.spans), int(now // SPAN_S) + 1) if counts.spans else ()
            over_time = tuple((span * SPAN_S, counts.spans[span]) for span in spans)
            runtimes, versions = (dict(tally.most_common()) for tally in (counts.runtimes, counts.versions))
            return PopulationCounts(counts.devices, awake, runtimes, versions, over_time)

    def matching(self, population: str, where: str, least: int, now: float) -> Matching:
        """The devices of a population by a target, which is canonical. least: as of `Matching`."""
        with self._lock:
            self._forget_devices(now)
            counts = self._populations.get(population, _Population())
            kinds, unkept = {told: kind.devices for told, kind in counts.kinds.items()}, counts.unkept.devices
        return Matching.of(where, kinds, unkept, least)

    def _forget_devices(self, now: float) -> None:
        first = now - SPAN_S * _SPANS
        while self._seen and (len(self._seen) > _MOST_DEVICES or next(iter(self._seen.values()))[0] < first):
            (population, _), (_, kind) = self._seen.popitem(last=False)
            self._populations[population].leave(kind)


@lru_cache(maxsize=_MOST_KINDS)
def _kinds(runtime: str, engine: str, version: str) -> tuple[str, str]:
    """What a device runs, as it is counted: its runtime and engine; its runtime and version."""
    return f"{runtime}, {engine}"[:_LONGEST], f"{runtime} {version}"[:_LONGEST]


def _count(counts: Counter[str], kind: str) -> None:
    counts[kind if kind in counts or len(counts) < _MOST_KINDS else OTHER] += 1


def _forget_spans(counts: _Population, now: float) -> None:
    first = int(now // SPAN_S) - _SPANS
    for span in [span for span in counts.spans if span < first]:
        del counts.spans[span]


@dataclass(frozen=True, slots=True)
class Registry:
    """Enrols devices, from any thread. parties: gives those of secure rounds; None where there are none."""

    store: CoordinatorStore
    attestation: Attestation
    parties: Callable[[], messages.SecaggParties | None]

    def enrol(self, message: messages.Enrol, key: str, created: int) -> messages.Enrolled:
        """Make the holder of `key` a device; its row is durable when this returns. May be repeated.

        `created` is when the request was signed. Raises NotAttested, or DeviceRevoked.
        """
        kind = self._check(message.attestation, key, created)
        device = device_id(key)
        self._write_once(device, key, kind)
        return messages.Enrolled(device, self.parties())

    def _check(self, evidence: messages.AttestationEvidence, key: str, created: int) -> str:
        """The kind of the evidence. Raises NotAttested."""
        try:
            if isinstance(evidence, messages.HeldCredential):
                return self._check_credential(evidence, key, created)
            return self.attestation.check(evidence, key, created)
        except (errors.NotAttested, SecaggError) as error:
            raise NotAttested(str(error)) from error

    def _check_credential(self, held: messages.HeldCredential, key: str, created: int) -> str:
        parties = self.parties()
        if parties is None:
            raise NotAttested("this coordinator has no enrolment authority")
        credential = check_credential(parties.authority, held.secagg, held.credential, created)
        if credential.device.hex() != device_id(key):
            raise NotAttested("the credential is another device's")
        return "credential"

    def _write_once(self, device: str, key: str, kind: str) -> None:
        with self.store.database.reading() as records:
            enrolled = records.devices.find(device)
        if enrolled is not None:
            demand_allowed(enrolled)
            return
        try:
            with self.store.database.writing() as records:
                records.devices.add(device, key, kind)
                records.audit.append("a device", Action.DEVICE_ENROLLED, device, kind)
        except IntegrityError:
            # Another process enrolled the same key meanwhile: its row is this one.
            with self.store.database.reading() as records:
                if records.devices.find(device) is None:
                    raise


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one process: made, and not yet started."""

    settings: Settings
    store: CoordinatorStore
    membership: Membership
    keys: Keys
    unmasker: Unmasker
    beacons: BeaconClient
    driver: Driver
    metrics: Metrics
    limits: Limits
    registry: Registry
    authenticator: Authenticator
    webhook: Webhook | None
    check_ins: CheckInCounts = field(default_factory=CheckInCounts)
    lines: RecentLines = field(default_factory=RecentLines)

    @classmethod
    def open(cls, settings: Settings, source: random.Random | None = None) -> Service:
        """The parts that `settings` ask for. `source` draws cohorts; by default the system's own.

        Raises UnusableStore, BadSecret, BadAndroidFile, BadAppleFile or InvalidKey; KeysMissing, KeysDamaged or
        KeysDiffer.
        """
        store = open_coordinator_store(settings.database, settings.blobs, algorithm_modules=settings.algorithm_modules)
        try:
            keys, lineage = open_both(settings.keys_file, store.database)
        except BaseException:
            store.close()
            raise
        store.lineage_key = lambda: lineage
        limits, unmasker, beacons = Limits(settings), Unmasker(), BeaconClient(settings.authority_url, keys)
        quiet_s = 3600 * settings.no_devices_after_h
        replica = ReplicaConfig(lease_s=settings.lease_s, drives=settings.role != "api", quiet_s=quiet_s)
        membership = Membership(store, replica, keys)
        authority = None if settings.authority is None else public_key(settings.authority).public_bytes_raw()
        secure = SecureRoundFactory(keys, authority, Executors(unmasker, beacons), lineage)
        driver = Driver(membership, secure, settings.retry, settings.queue_limit, source=source)
        driver.metrics.watch(driver.queue_depth, lambda: limits.connections.held)
        files = settings.enrolment_secret_file, settings.android_file, settings.apple_file
        attestation = Attestation.of(settings.accept_unattested, *files)
        registry = Registry(store, attestation, lambda: _parties(settings, keys))
        authenticator = Authenticator(store, limits.device, driver.metrics)
        webhook = Webhook.of(settings.alert_webhook, settings.alert_webhook_secret_file)
        membership.took_over, limits.sent_away = authenticator.begin, driver.presence.heard
        driver.revocations.changed = authenticator.refuse
        return cls(
            settings,
            store,
            membership,
            keys,
            unmasker,
            beacons,
            driver,
            driver.metrics,
            limits,
            registry,
            authenticator,
            webhook,
        )


def matching(service: Service, token: Token, population: str, where: str) -> Matching:
    """The devices that came to this process lately, by a target. Raises InvalidTask for one that does not parse.

    Counts are as coarse as the groups that questions to the population may show. A population that is not for the
    holder of the token has no devices, as one that is not there.
    """
    where = canonical(where)
    with service.store.limited(token.populations).database.reading() as records:
        there, budget = population in records.populations(), records.budgets.of(population)
    least = 1 if budget is None else budget.minimum_devices
    return service.check_ins.matching(population if there else "", where, least, time.time())


def _parties(settings: Settings, keys: Keys) -> messages.SecaggParties | None:
    """The parties of secure rounds, as devices learn them now."""
    if settings.authority is None or settings.authority_url is None:
        return None
    authority = public_key(settings.authority).public_bytes_raw()
    return messages.SecaggParties(keys.server.succession, authority, settings.authority_url)
