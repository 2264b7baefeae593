"""Creation of tasks, bundles that start from a model there, and signed releases for secure aggregation."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import TaskSettings
from fedcore.errors import BadRelease, SchemaError
from fedcore.release import Signed, decode_release
from fedcore.validation import UNDECODABLE, build, decoder, offered, settings_of

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.entities import Evaluates, ModelSource, Regularly, Task
    from fedcore.bundle import Bundle
    from fedcore.params import Float32, ParamSchema
    from fedcore.signing import SigningKey


ROUNDS = 1
"""The rounds of a task that evaluates, by default."""


class Evaluated(NamedTuple):
    """The models to evaluate, as `TASK`, `TASK@ROUND` or a file of `muster task checkpoint`; none of a training.

    every, bundle: of a training, after how many rounds its model is evaluated, and by what.
    """

    model: str | None
    against: str | None
    every: int | None = None
    bundle: Bundle | None = None

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a task: an evaluation has one round unless others are asked for."""
        return {**({} if self.model is None else {"rounds": ROUNDS}), **given}

    @property
    def regularly(self) -> Regularly | None:
        """The regular evaluation that was asked for, if any. Raises InvalidTask for a half of one."""
        from coordinator.rules.entities import Regularly

        return Regularly.asked(self.every, self.bundle)


@contextmanager
def starting_from(
    store: TaskStore, bundle: Bundle, evaluated: Evaluated
) -> Iterator[tuple[Bundle, Evaluates | Regularly | None]]:
    """The bundle with the evaluated models as its initial state, while the block lasts, and their origin.

    A bundle that trains stays as it is, and comes with its regular evaluation, if any.

    Raises InvalidTask when a model does not fit the plan, UnknownTask, UnknownRound, and fedcore's errors.
    """
    from coordinator.rules.entities import NOT_BOTH, Evaluates

    regular = evaluated.regularly
    if evaluated.model is None:
        if evaluated.against is not None:
            raise InvalidTask("--against goes with --evaluate, which names the model that is compared with it")
        yield bundle, regular
        return
    if regular is not None:
        raise InvalidTask(NOT_BOTH)
    import msgspec
    import safetensors.numpy

    from fedcore.bundle import Bundle
    from fedcore.checkpoint import encode
    from fedcore.plan import BlobRef

    schema, manifest = bundle.plan.schema, bundle.manifest
    state = safetensors.numpy.load(bundle.read(manifest.state))
    model, state["params"] = _model(store, evaluated.model, schema)
    against = None
    if evaluated.against is not None:
        against, other = _model(store, evaluated.against, schema)
        state |= {"other": other} if "other" in state else {}
    first = encode(state)
    others = [data for ref, data in bundle.blobs() if ref != manifest.state]
    with tempfile.TemporaryDirectory(prefix="muster-evaluation-") as folder:
        made = msgspec.structs.replace(manifest, state=BlobRef.of(first))
        yield Bundle.write(Path(folder), made, [first, *others]), Evaluates(model, against)


def _model(store: TaskStore, source: str, schema: ParamSchema) -> tuple[ModelSource, Float32]:
    """A model, (D,), with its origin."""
    import safetensors.numpy

    from coordinator.rules.entities import ModelSource
    from coordinator.store.starting import round_of

    if Path(source).is_file():
        data = Path(source).read_bytes()
        origin = ModelSource(file=hashlib.sha256(data).hexdigest())
    else:
        task, number = round_of(store, source, "TASK, TASK@ROUND or a file")
        origin = ModelSource(task=task, round=number)
        data = store.model(task, number)
    try:
        return origin, schema.flatten(safetensors.numpy.load(data))
    except (safetensors.SafetensorError, KeyError, ValueError) as error:  # KeyError: a type that NumPy lacks
        raise InvalidTask(f"{source} is no model as `muster task checkpoint` writes it: {error}") from error
    except SchemaError as error:
        raise InvalidTask(f"the model of {source} is not one of the bundle's plan: {error}") from error


Signs: TypeAlias = "Callable[[Bundle, TaskSettings, Evaluates | Regularly | None], Signed]"


class Creation(NamedTuple):
    """What a task is made of: a bundle, or that of the task which it is like; of that one also what is not given.

    unset: settings of that task which are as by default again. name: for people. release: signed already; or `sign`
    makes it, of the bundle as the task begins with it, the settings, and the evaluation.
    """

    bundle: Bundle | None
    like: str | None = None
    unset: Collection[str] = ()
    evaluated: Evaluated = Evaluated(None, None)
    name: str | None = None
    release: Signed | None = None
    sign: Signs | None = None

    def register(self, store: TaskStore, given: Mapping[str, Any], *, text: bool = False) -> Task:
        """The new task, with the settings that are given. text: they may be text. Raises as `register_task`."""
        from coordinator.store.starting import trained_round

        given = self.evaluated.settings(given)
        if self.like is None:
            if self.bundle is None:
                raise InvalidTask("a task needs a bundle (--plan), or another task to be like (--like)")
            if self.unset:
                raise InvalidTask("--unset goes with --like, and leaves settings of that task out")
            settings = build(TaskSettings, given, text=text)
        else:
            original = store.task(self.like)
            settings = build(TaskSettings, settings_like(original, given, self.unset), text=text)
            if self.bundle is None:
                return self._begun_anew(store, original, settings)
        if self.sign is not None and settings.starts_from is not None:
            # The release is of this round's model, and the store takes no later one.
            task, number = trained_round(store, settings.starts_from)
            settings = replace(settings, starts_from=f"{task}@{number}")
        with starting_from(store, self.bundle, self.evaluated) as (bundle, evaluation):
            release = self.release if self.sign is None else self.sign(bundle, settings, evaluation)
            return store.register_task(bundle, settings, release, name=self.name, evaluation=evaluation)

    def _begun_anew(self, store: TaskStore, original: Task, settings: TaskSettings) -> Task:
        """A task on the bundle of another, as the coordinator has it."""
        if self.evaluated.model is not None or self.sign is not None:
            raise InvalidTask("a model to evaluate, and a key to sign with, need the bundle here: name it with --plan")
        evaluation = self.evaluated.regularly or original.evaluates or original.evaluation
        release = self.release or (original.release if settings.secagg else None)
        name = self.name or original.name
        return store.register_task(store.manifest(original.id), settings, release, name=name, evaluation=evaluation)


def matching(store: TaskStore, settings: TaskSettings) -> list[str]:
    """How many devices match the target of a task, then what should worry its creator; nothing without a target."""
    from muster.remote import RemoteStore

    if not settings.where:
        return []
    if not isinstance(store, RemoteStore):
        return ["how many devices match, a running coordinator knows: name it with --coordinator"]
    found = store.matching(settings.population, settings.where)
    return [found.sentence, *found.concerns(settings.goal)]


def settings_like(task: Task, given: Mapping[str, Any], unset: Collection[str] = ()) -> dict[str, Any]:
    """The settings of a task as they were asked for, with those that are given in their place; of a part, some of it.

    unset: settings that are as by default again. Raises InvalidTask.
    """
    from coordinator.rules.private_sums import as_asked

    known = {one.name: one for one in settings_of(TaskSettings)}
    for name in unset:
        if name not in known:
            raise InvalidTask(f"there is no {name!r} to unset; {offered(name, known)}")
        if known[name].required:
            raise InvalidTask(f"{name} has no default and cannot be unset: give another value")
    kept: dict[str, Any] = msgspec.to_builtins(as_asked(task.settings))
    whole = {name: value for name, value in kept.items() if name not in unset}
    for name, value in given.items():
        before = whole.get(name)
        whole[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value
    return whole


# Releasing: signs the release of a task with secure aggregation, on the machine that has the release key.


FIRST_COUNTER, VALID_DAYS = 1, 90
_SIGNED = decoder(Signed)


def released(  # noqa: PLR0913  # a release says so much
    bundle: Bundle,
    settings: TaskSettings,
    key: SigningKey,
    lineage: str,
    *,
    evaluation: Evaluates | Regularly | None = None,
    counter: int = FIRST_COUNTER,
    days: int = VALID_DAYS,
    algorithm_modules: Sequence[str] = (),
) -> Signed:
    """The signed release of a bundle for a task with these settings, valid for so many days. Raises InvalidTask.

    lineage: the public key with which the coordinator signs checkpoints. evaluation: what is evaluated; the plan that
    regularly evaluates the task's own models is released too. counter: devices that have seen a greater one of this key
    for the population refuse the release. algorithm_modules: as of `open_coordinator_store`.
    """
    from coordinator.rules.entities import Regularly
    from coordinator.store.starting import release_of

    release = release_of(
        bundle,
        settings,
        lineage,
        counter=counter,
        expires_at=int(time.time()) + days * 24 * 3600,
        algorithm_modules=algorithm_modules,
        evaluation=evaluation.bundle if isinstance(evaluation, Regularly) else None,
    )
    return key.sign_statement(release)


def released_for(
    store: TaskStore,
    bundle: Bundle,
    settings: TaskSettings,
    key: SigningKey,
    algorithm_modules: Sequence[str],
    **more: Any,
) -> Signed:
    """The same for a store, whose lineage key it names, and for the model at which the task begins, if at any."""
    from coordinator.store.starting import started
    from fedcore import algorithms

    named = bundle.manifest.algorithm
    algorithm = algorithms.create(named.name, named.settings, algorithm_modules)
    with tempfile.TemporaryDirectory(prefix="muster-release-") as folder:
        bundle, settings = started(store, bundle, settings, algorithm, store.model, Path(folder))
        lineage = store.lineage().lineage
        return released(bundle, settings, key, lineage, algorithm_modules=algorithm_modules, **more)


def read_release(file: Path) -> Signed:
    """The release that `muster task release` wrote to a file. Its signature is not checked. Raises BadRelease."""
    try:
        return _SIGNED.decode(file.read_bytes())
    except (OSError, *UNDECODABLE) as error:
        raise BadRelease(f"{file} holds no release: write it with `muster task release --out` ({error})") from error


def release_facts(release: Signed) -> dict[str, object]:
    """What an operator wants to know of a release."""
    decoded = decode_release(release.text)
    until = datetime.fromtimestamp(decoded.expires_at, UTC).isoformat(sep=" ", timespec="seconds")
    evaluation = {} if decoded.evaluation is UNSET else {"evaluation": decoded.evaluation.plan}
    facts = {"signer": release.signer, "counter": decoded.counter, "expires": until, "lineage": decoded.lineage}
    target = {} if decoded.bounds.target is UNSET else {"where": decoded.bounds.target}
    return facts | target | evaluation
