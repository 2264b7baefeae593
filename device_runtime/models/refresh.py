"""Taking a new version of a model: ask, check, fetch, try, and only then replace the one before.

Each durable step is one transaction of the state database: the release is pending before anything is fetched for it,
with the digests of its blobs before these are fetched; a trial is counted before it begins; the pending version becomes
the current one at once. So a device that is killed has the old version or the new one, and goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from device_runtime.backends.backend import Backend
from device_runtime.conditions import Clock
from device_runtime.config import DeviceConfig, enrolments, sealer_of
from device_runtime.errors import ModelRefused, PlanRefused
from device_runtime.models.version import Parts, Version, load, personal_store, policy_of, predict_of, with_personal
from device_runtime.permission.guard import Guard
from device_runtime.permission.policy import Releases, check_release, signed_release
from device_runtime.protocol.transport import Transport
from device_runtime.state import records
from device_runtime.state.database import StateDatabase, open_database
from device_runtime.state.folder import BLOBS, BlobCache, only_session, trim
from device_runtime.state.records import Journal
from device_runtime.trainer import Trainer
from fedcore.errors import FedcoreError
from fedcore.plan import Plan
from fedcore.release import Signed
from fedcore.signing import ModelRelease


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
        self.store = records.ModelStore(database, config.population, name)
        self.personal = personal_store(config, name)
        self.spending = records.Spending(database, clock)
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
        return BlobCache(self.config.state / BLOBS, transport.blob, transport.delta, records.kept_blobs(self.database))

    def trim(self) -> None:
        """Remove blobs that exceed the policy's bytes, except what models need."""
        trim(self.config.state / BLOBS, self.policy.cache_bytes, records.kept_blobs(self.database))

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


MOST_TRIALS = 2
"""A version whose trial ended this process so often is refused: it would end the app at every start."""


def newer_version(config: DeviceConfig, name: str, backend: Backend, loaded: Signed | None) -> Version | None:
    """The version that the coordinator names, checked and tried; None if it is `loaded`, or there is none.

    Raises ModelRefused, and as a session: PolicyForbids, StateError, KeyUnavailable, TransportError.
    """
    with held(config, name, backend) as holder:
        return _Refresh(holder).run(loaded)


class _Refresh:
    """One refresh of one model, by the holder of the state folder."""

    def __init__(self, holder: Held) -> None:
        self._held = holder
        self._config, self._name, self._backend = holder.config, holder.name, holder.backend
        self._transport, self._database, self._clock = holder.transport, holder.database, holder.clock
        self._policy, self._store, self._guard = holder.policy, holder.store, holder.guard

    def run(self, loaded: Signed | None) -> Version | None:
        """Everything from the owner's policy to the version."""
        config, transport = self._config, self._transport
        self._guard.check_address(config.coordinator)
        self._guard.check_model(config.population, self._backend.format)
        self._held.identify()
        try:
            signed = transport.model(config.population, self._name, self._guard.told(config.labels))
            return None if signed is None or signed == loaded else self._take(signed)
        finally:
            self._held.spending.add(records.Spent(bytes=transport.bytes_moved))
            self._held.trim()

    def _take(self, signed: Signed) -> Version:
        """Check a release, and what it names. A refusal is remembered, and told to the owner once."""
        admitted = False
        try:
            release, pending = self._admitted(signed)
            admitted = True
            return self._tried(release, pending)
        except ModelRefused as error:
            self._refused(signed, error, final=admitted and not isinstance(error, _AgainstLimits))
            raise

    def _admitted(self, signed: Signed) -> tuple[ModelRelease, records.KeptVersion]:
        """The release, whose version is pending from now on."""
        release = signed_release(self._policy, signed)
        with self._database.transaction():
            wanted = self._name, self._config.population
            check_release(release, signed.signer, *wanted, store=self._store, now=self._clock.wall())
            stored = self._store.get()
            if stored.refused is not None and stored.refused.final and stored.refused.key == self._key(signed):
                raise ModelRefused(stored.refused.detail)
            pending = records.KeptVersion(signed, (release.plan.sha256, release.parameters.sha256))
            self._store.put(replace(stored, pending=pending))
        return release, pending

    def _tried(self, release: ModelRelease, pending: records.KeptVersion) -> Version:
        """Fetch what a release names, try it, and put it in the place of the version before."""
        parts, blobs = self._parts(release, pending)
        what = f"{self._backend.runtime} {release.plan.sha256} {release.parameters.sha256}"
        stored = self._store.get()
        trials = stored.tried.get(what, 0)
        if trials >= MOST_TRIALS:
            raise ModelRefused(f"version {release.number} ended this process on trial, {trials} times")
        self._store.put(stored.counted(what, trials + 1))
        try:
            version = load(with_personal(self._config, self._name, parts), self._backend)
            version.try_out()
        except ModelRefused:
            self._store.put(stored)
            raise
        self._held.cache().settle(blobs.blobs)  # the blobs of the version before may go from now on
        self._store.put(records.StoredModel(current=blobs, tried=stored.counted(what, 0).tried))
        if stored.current is None or stored.current.release != blobs.release:
            self._held.forget(f"version {release.number} was taken")
        return version

    def _parts(self, release: ModelRelease, pending: records.KeptVersion) -> tuple[Parts, records.KeptVersion]:
        """The parts of a version, and the version with the digests of all its blobs, which is stored as pending."""
        cache, transport, form = self._held.cache(), self._transport, self._backend.format
        try:
            self._guard.check_released(release, transport.bytes_moved)
            plan = _decoded(cache.get(release.plan))
            predict = predict_of(plan, form)
            refs = {predict.graphs[form], *plan.model_refs}
            missing = sum(ref.size for ref in refs if not cache.holds(ref))
            to_move = transport.bytes_moved + missing + release.parameters.size
            self._guard.check_predict(release, plan, predict, form, to_move=to_move)
        except PlanRefused as error:
            raise _AgainstLimits(error.detail, error.private) from error
        stored = self._store.get()
        training = {ref.sha256 for ref in plan.kept_refs(form) if stored.current and ref.sha256 in stored.current.blobs}
        pending = replace(pending, blobs=(*pending.blobs, *sorted({ref.sha256 for ref in refs} | training)))
        self._store.put(replace(stored, pending=pending))
        graph, frozen = cache.get(predict.graphs[form]), cache.file(plan.frozen.blob) if plan.frozen else None
        tokenizers = {name: cache.get(ref) for name, ref in plan.tokenizers.items()}
        parameters = self._held.cache().newest(release.parameters, f"model-{self._name}")
        return Parts(pending.release, release.number, plan, graph, parameters, frozen, tokenizers), pending

    def _key(self, signed: Signed) -> str:
        """A name for a release on this engine: another one may run what this one cannot."""
        return hashlib.sha256(f"{self._backend.runtime}\n".encode() + msgspec.json.encode(signed)).hexdigest()

    def _refused(self, signed: Signed, error: ModelRefused, *, final: bool) -> None:
        """Remember a refusal, and give up what is pending. The journal has one entry, however often it comes."""
        key = self._key(signed)
        with self._database.transaction():
            stored = self._store.get()
            before = stored.refused
            again = before is not None and (before.key, before.detail) == (key, error.detail)
            refused = before if again else records.Refusal(key, error.detail, final, records.number_of(signed))
            self._store.put(replace(stored, pending=None, refused=refused))
            if not again:
                self._held.journal.remark("model-refused", f"model {self._name}: {error.detail}")


class _AgainstLimits(ModelRefused):
    """A refusal by limits of the policy, which its owner may change."""


def _decoded(data: bytes) -> Plan:
    try:
        return Plan.decode(data)
    except FedcoreError as error:
        raise ModelRefused(str(error)) from error
