"""The parts of a coordinator that both of its APIs stand on."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.api.signed import Gate
from coordinator.attestation import Attestation
from coordinator.drivers import Driver
from coordinator.enrolment import Registry
from coordinator.keys import Keys
from coordinator.limits import Limits
from coordinator.metrics import Metrics
from coordinator.runtimes import Runtimes
from coordinator.secure import SecureMeans
from coordinator.settings import Settings
from coordinator.tasks import CoordinatorStore, open_coordinator_store
from coordinator.tenure import Place, Tenure
from coordinator.unmasker import Unmasker


@dataclass(frozen=True, slots=True)
class Service:
    """One process's parts: made, and not yet started."""

    settings: Settings
    store: CoordinatorStore
    tenure: Tenure
    keys: Keys
    unmasker: Unmasker
    driver: Driver
    metrics: Metrics
    limits: Limits
    runtimes: Runtimes
    registry: Registry
    gate: Gate

    @classmethod
    def open(cls, settings: Settings) -> Service:
        """The parts that `settings` ask for. Raises UnsupportedDatabase, WrongRevision, MissingStore or BadSecret."""
        store = open_coordinator_store(settings.database, settings.blobs)
        keys, limits, unmasker = Keys.at(settings.keys_file), Limits(settings), Unmasker()
        place = Place(keys=keys.fingerprint, lease_s=settings.lease_s, drives=settings.role != "api")
        tenure = Tenure(store, place)
        driver = Driver(tenure, SecureMeans(keys, unmasker), settings.retry, settings.queue_limit)
        driver.metrics.watch(driver.queue_depth, lambda: limits.connections.held)
        registry = Registry(store, keys, Attestation.of(settings.accept_unattested, settings.enrolment_secret_file))
        gate = Gate(store, limits.device, driver.metrics)
        tenure.took_over, limits.sent_away = gate.begin, driver.presence.heard
        return cls(settings, store, tenure, keys, unmasker, driver, driver.metrics, limits, Runtimes(), registry, gate)
