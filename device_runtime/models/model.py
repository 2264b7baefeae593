"""A model for the app: predictions in the app's own process, and its personal version."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import msgspec
from numpy.typing import NDArray

from device_runtime import errors
from device_runtime.backends import open_backend
from device_runtime.backends.backend import Backend
from device_runtime.config import DeviceConfig
from device_runtime.examples import open_examples
from device_runtime.models.refresh import Held, held, newer_version
from device_runtime.models.version import Inputs, Parts, Version, kept_parts, kept_version, load
from device_runtime.monitor import Monitor, SessionRecord
from device_runtime.state.records import KeptVersion
from device_runtime.trainer import Job, Limits, Measured, Texts, divided, local_graphs
from fedcore import checkpoint
from fedcore.batching import StreamKey
from fedcore.errors import BadRelease, FedcoreError
from fedcore.params import VectorSpec
from fedcore.plan import PARAMS, BlobRef
from fedcore.signing import check_model_name, decode_model_release

# Making a released model personal: local steps in a trainer's process, and one sealed file if they help.
#
# The only durable steps are the digests of the graphs to keep, and the file of the parameters, which replaces the one
# before as a whole. So a device that is killed has the released parameters, or those of one finished training.

KEY = StreamKey(0, 0, 0)
"""Of the order of examples: the same examples give the same model, so nobody tries until chance says that one helps."""


@dataclass(frozen=True, slots=True)
class Personalised:
    """What became of a personal model.

    version: the released one that it was made from. before, after: the mean loss on the `left_out` examples, at the
    released and at the personal parameters, which were trained on `examples`. kept: whether the personal ones are used
    from now on; else the released ones are.
    """

    version: int
    before: float
    after: float
    examples: int
    left_out: int
    kept: bool


def personalised(config: DeviceConfig, name: str, backend: Backend) -> tuple[Version, Personalised]:
    """Train the kept version on this device's examples: the version to use from now on, and how it came out."""
    with held(config, name, backend) as holder:
        return _Personalising(holder).run()


def released(config: DeviceConfig, name: str, backend: Backend) -> tuple[Version | None, bool]:
    """Delete personal parameters: the version as it was released, if it can be had, and whether there were any."""
    with held(config, name, backend) as holder:
        dropped = holder.forget("the app asked for it")
    return kept_version(config, name, backend), dropped


class _Personalising:
    """One training of one model, by the holder of the state folder. In the journal it is an entry of its own."""

    def __init__(self, holder: Held) -> None:
        self._held, self._config = holder, holder.config
        holder.trainer = self._trainer = self._config.trainer(self._config.backend)
        where = self._config.coordinator, self._config.population
        self._record = SessionRecord(holder.journal, holder.spending, holder.transport, *where)
        self._monitor = Monitor(self._config, holder.clock, holder.guard, self._record)

    def run(self) -> tuple[Version, Personalised]:
        """Everything from the owner's policy to the version."""
        self._record.note(task=f"model {self._held.name}")
        try:
            version, outcome = self._made()
        except errors.DeviceError as error:
            self._record.fail(error)
            self._record.close(
                outcome="not-now" if isinstance(error, errors.PolicyForbids | errors.NotAllowedNow) else "failed"
            )
            raise
        except errors.STOPS:
            self._record.close(outcome="stopped")
            raise
        finally:
            self._held.trim()
        used = "kept" if outcome.kept else "not kept"
        losses = f"loss {outcome.before:.6g} before and {outcome.after:.6g} after"
        self._record.close(
            outcome="personalised",
            detail=f"version {outcome.version}, {losses}, on {outcome.left_out} examples left out: {used}",
        )
        return version, outcome

    def _made(self) -> tuple[Version, Personalised]:
        holder, backend = self._held, self._held.backend
        holder.guard.check_address(self._config.coordinator)
        holder.guard.check_in(self._config.population, self._trainer.format)
        self._monitor.keep_going()
        current = holder.store.get().current
        if current is None:
            raise errors.NoModel(f"no version of model {holder.name!r} is here yet: refresh() fetches one")
        parts = kept_parts(self._config, current, backend)
        release = decode_model_release(current.release.text)
        self._record.write(plan=errors.plain(parts.plan.name), plan_sha256=release.plan.sha256)
        try:
            job, limits = self._job(parts, current, release.plan.size + release.parameters.size)
            result = self._trainer.train(job, limits, self._monitor.keep_going)
        finally:
            self._record.know(compute_s=holder.guard.seconds)
        self._record.note(examples=result.examples, steps=result.steps)
        return self._judged(parts, job, Measured.of(job.plan, result))

    def _job(self, parts: Parts, current: KeptVersion, received_bytes: int) -> tuple[Job, Limits]:
        """The work, after the policy's limits, with graphs that are fetched if they are not here; what it may use."""
        holder, plan, form = self._held, parts.plan, self._trainer.format
        refs = {name: plan.graphs[form][name] for name in local_graphs(plan, form)}
        missing = sum(ref.size for ref in refs.values() if not holder.cache().holds(ref))
        source = open_examples(self._config.examples, self._config.keystore)
        to_move = holder.transport.bytes_moved + missing
        holder.guard.check_plan(plan, form, source.count, received_bytes=received_bytes, to_move=to_move)
        whole = msgspec.structs.replace(plan.examples, hold_out=None)
        texts = Texts(holder.cache().get, self._trainer, holder.guard.limits(), self._monitor.keep_going)
        train, left_out = divided(plan.examples, source.load(whole, tokenize=texts.tokenize))
        try:
            job = Job(
                plan=plan,
                graphs=self._graphs(refs, current),
                broadcast=checkpoint.decode(parts.parameters, (VectorSpec(PARAMS, plan.schema.size),)),
                examples=train,
                left_out=left_out,
                key=KEY,
                frozen=parts.frozen,
            )
        except FedcoreError as error:
            raise errors.ModelRefused(str(error)) from error
        return job, texts.left

    def _graphs(self, refs: Mapping[str, BlobRef], current: KeptVersion) -> dict[str, bytes]:
        """The graphs of local steps, which stay from now on, so that this needs no network again."""
        holder, cache = self._held, self._held.cache()
        holder.identify()
        graphs = {name: cache.get(ref) for name, ref in refs.items()}
        more = {ref.sha256 for ref in refs.values()} - set(current.blobs)
        if more:
            cache.settle(more)
            current = msgspec.structs.replace(current, blobs=(*current.blobs, *sorted(more)))
            holder.store.put(msgspec.structs.replace(holder.store.get(), current=current))
        return graphs

    def _judged(self, parts: Parts, job: Job, measured: Measured) -> tuple[Version, Personalised]:
        """The version to use from now on: personal, and stored so, if it is better."""
        own = checkpoint.encode({PARAMS: measured.params})
        if measured.is_better:
            version = load(replace(parts, parameters=own, personal=True), self._held.backend)
            version.try_out()
            self._held.personal.put(parts.release, own)
        else:
            version = load(parts, self._held.backend)
            self._held.personal.drop()
        count = len(next(iter(job.left_out.values())))
        before, after = measured.means(job.plan, count)
        return version, Personalised(parts.number, before, after, job.count, count, measured.is_better)


class Model:
    """A model by its name: `Device.model` makes it. Any thread may call any method.

    Raises ConfigError for a name that no model may have, or a backend that is missing.
    """

    def __init__(self, config: DeviceConfig, name: str) -> None:
        try:
            check_model_name(name)
        except BadRelease as error:
            raise errors.ConfigError(str(error)) from error
        self._config, self._name = config, name
        self._backend = open_backend(config.backend)
        self._swapping, self._refreshing = threading.Lock(), threading.Lock()
        self._closed = False
        self._version: Version | None = kept_version(config, name, self._backend)

    @property
    def version(self) -> int | None:
        """The number of the version that predicts now; None before the first, and after `close`."""
        version = self._version
        return None if version is None else version.number

    @property
    def personal(self) -> bool:
        """Whether the parameters that predict now are this device's own, by `personalise`."""
        version = self._version
        return version is not None and version.personal

    def predict(self, examples: Inputs) -> dict[str, NDArray[Any]]:
        """The model's outputs (n, …), by their names in the plan, for n examples, at least 1.

        examples: an array (n, …) for each input, by the name of its field, of the field's type; where the plan names a
        tokenizer, n texts will do, of which long ones are cut. A call that began before a swap ends on the version it
        began with. Raises NoModel before the first version, InputRefused, ModelClosed, and RuntimeFailed when an
        operator fails.
        """
        with self._swapping:
            self._check_open()
            version = self._version
        if version is None:
            raise errors.NoModel(f"no version of model {self._name!r} is here yet: refresh() fetches one")
        return version.predict(examples)

    def refresh(self) -> bool:
        """Ask the coordinator for the version to use, now; whether it replaced the one before.

        It may download, so it blocks. Whatever goes wrong, the version before stays. Raises ModelRefused for one that
        cannot be used, StateInUse while a session or another refresh holds the state folder, TransportError, and any
        other DeviceError as a session's outcome would name it.
        """
        with self._refreshing:
            self._check_open()
            loaded = self._version
            newer = newer_version(self._config, self._name, self._backend, None if loaded is None else loaded.release)
            if newer is not None:
                self._swap(newer)
            return newer is not None

    def personalise(self) -> Personalised:
        """Train the version that is here on this device's examples, and use the result if it is better; else do not.

        The plan of the version says the steps. A part of the examples is left out, and decides: docs/device.md. It
        blocks, and runs in a process of its own, under the policy and the conditions of a session. The first call of a
        plan downloads its graphs. The result is kept, sealed, until another version comes; nothing of it leaves. Raises
        NoModel, ExamplesError where there are too few, PlanRefused for a plan whose devices make no model of their own,
        StateInUse, and any other DeviceError as a session's outcome would name it; then all stays as it was.
        """

        with self._refreshing:
            self._check_open()
            version, outcome = personalised(self._config, self._name, self._backend)
            self._swap(version)
            return outcome

    def forget(self) -> bool:
        """Delete what `personalise` kept, and use the released version; whether anything was kept.

        Raises StateInUse while a session, a refresh or a training holds the state folder.
        """

        with self._refreshing:
            self._check_open()
            version, dropped = released(self._config, self._name, self._backend)
            self._swap(version)
            return dropped

    def close(self) -> None:
        """Give the memory back, after the last call that is under way. What is stored stays."""
        with self._swapping:
            self._closed = True
            self._version = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _swap(self, version: Version | None) -> None:
        with self._swapping:
            self._check_open()
            self._version = version

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ModelClosed(f"model {self._name!r} is closed")
