"""The parts of a coordinator that both of its APIs use."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from authority.attestation import Attestation
from coordinator.api.authentication import Authenticator
from coordinator.api.check_in_counts import CheckInCounts
from coordinator.api.enrolment import Registry
from coordinator.api.limits import Limits
from coordinator.driver.driver import Driver
from coordinator.driver.replica_membership import Membership, ReplicaConfig
from coordinator.keys import Keys, open_both
from coordinator.metrics import Metrics
from coordinator.recent_lines import RecentLines
from coordinator.secure.beacon_client import BeaconClient
from coordinator.secure.group import Executors
from coordinator.secure.round import SecureRoundFactory
from coordinator.secure.unmask_workers import Unmasker
from coordinator.settings import Settings
from coordinator.store.tasks import CoordinatorStore, open_coordinator_store
from coordinator.webhook import Webhook
from fedcore.signing import public_key
from fedcore.wire.messages import SecaggParties


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

        Raises UnsupportedDatabase, WrongRevision, UnreadableTask, MissingStore, BadSecret, BadAndroidFile, BadAppleFile
        or InvalidKey; KeysMissing, KeysDamaged or KeysDiffer.
        """
        store = open_coordinator_store(settings.database, settings.blobs, algorithm_modules=settings.algorithm_modules)
        try:
            keys, lineage = open_both(settings.keys_file, store.database)
        except BaseException:
            store.close()
            raise
        store.lineage_key = lambda: lineage
        limits, unmasker, beacons = Limits(settings), Unmasker(), BeaconClient(settings.authority_url, keys)
        membership = Membership(store, ReplicaConfig(lease_s=settings.lease_s, drives=settings.role != "api"), keys)
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


def _parties(settings: Settings, keys: Keys) -> SecaggParties | None:
    """The parties of secure rounds, as devices learn them now."""
    if settings.authority is None or settings.authority_url is None:
        return None
    authority = public_key(settings.authority).public_bytes_raw()
    return SecaggParties(keys.server.succession, authority, settings.authority_url)
