"""The state folder while a model changes: held, with the coordinator's transport and the owner's limits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from device_runtime.backends.backend import Backend
from device_runtime.clock import Clock
from device_runtime.config import DeviceConfig
from device_runtime.identification import enrolments, sealer_of
from device_runtime.models.kept import personal_store, policy_of
from device_runtime.permission.guard import Guard
from device_runtime.permission.releases import Releases
from device_runtime.protocol.transport import Transport
from device_runtime.state.cache import BLOBS, BlobCache, trim
from device_runtime.state.database import StateDatabase, open_database
from device_runtime.state.folder import only_session
from device_runtime.state.journal import Journal
from device_runtime.state.models import ModelStore, kept_blobs
from device_runtime.state.spending import Spending
from device_runtime.trainer import Trainer


class Held:
    """What changes one model, by the holder of the state folder."""

    def __init__(
        self,
        config: DeviceConfig,
        name: str,
        backend: Backend,
        transport: Transport,
        database: StateDatabase,
        clock: Clock,
    ) -> None:
        self.config, self.name, self.backend = config, name, backend
        self.transport, self.database, self.clock = transport, database, clock
        self.policy = policy_of(config)
        self.store = ModelStore(database, config.population, name)
        self.personal = personal_store(config, name)
        self.spending = Spending(database, clock)
        self.journal = Journal(database, clock)
        self.trainer: Trainer | None = None
        releases = Releases(self.policy, database, clock, config.population)
        self.guard = Guard(self.policy, self.spending, releases, timer=self._cpu_s)

    def identify(self) -> None:
        """Have requests signed by this device, which may enrol for it."""
        config, transport = self.config, self.transport
        transport.stopping, transport.wall = config.stopping, self.clock.wall
        transport.identity = enrolments(config, self.policy, self.database, sealer_of(config), self.clock)

    def cache(self) -> BlobCache:
        """The cache, which keeps what models need now."""
        transport = self.transport
        return BlobCache(self.config.state / BLOBS, transport.blob, transport.delta, kept_blobs(self.database))

    def trim(self) -> None:
        """Remove blobs that exceed the policy's bytes, except what models need."""
        trim(self.config.state / BLOBS, self.policy.cache_bytes, kept_blobs(self.database))

    def forget(self, why: str) -> bool:
        """Delete the model's personal parameters; whether there were any. The journal says so."""
        dropped = self.personal.drop()
        if dropped:
            self.journal.remark("personal-dropped", f"the personal parameters of model {self.name} are deleted: {why}")
        return dropped

    def _cpu_s(self) -> float:
        """CPU seconds of this process and of its training processes."""
        return time.process_time() + (self.trainer.cpu_s if self.trainer else 0.0)


@contextlib.contextmanager
def held(config: DeviceConfig, name: str, backend: Backend) -> Iterator[Held]:
    """Hold the state folder to change a model. Raises StateError, and StateInUse while a session has it."""
    clock = Clock()
    with (
        only_session(config.state),
        open_database(config.state, clock) as database,
        config.connect(config.coordinator) as transport,
    ):
        if database.notice:
            Journal(database, clock).remark("state-replaced", database.notice)
        yield Held(config, name, backend, transport, database, clock)
