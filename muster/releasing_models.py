"""Releasing a model: makes and signs its next version, and refuses what devices would refuse."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from coordinator.errors import InvalidModel, UnknownRound
from coordinator.rules.roll_outs import PREFIX, Gate, ModelVersion, predicting
from coordinator.rules.states import RoundState
from coordinator.store.starting import round_of
from device_runtime.permission.policy import Policy
from fedcore.params import FLOAT_BYTES, Float32
from fedcore.plan import BlobRef, Plan

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from export.inference.trained import Trained
    from fedcore.bundle import Bundle
    from fedcore.signing import ModelRelease, SigningKey


def refused_by_default(plan: Plan) -> str:
    """Why such devices refuse a plan: they could not keep it, and would fetch it again in every round. Else empty."""
    most, checkpoint = Policy().cache_bytes, FLOAT_BYTES * sum(vector.size for vector in plan.broadcast)
    kept = checkpoint + max(sum(ref.size for ref in plan.kept_refs(form)) for form in plan.graphs)
    if kept <= most:
        return ""
    return (
        f"Devices keep {kept / 1e6:,.0f} MB of this plan between rounds. Those whose policy has cache_bytes of "
        f"{most / 1e6:,.0f} MB, as by default, refuse it: take weights in fewer bits, or raise cache_bytes."
    )


FIRST_COUNTER = 1


class Source(NamedTuple):
    """The model to release: the round of a task."""

    task: str
    round: int

    @classmethod
    def of(cls, store: TaskStore, text: str) -> Source:
        """That of `TASK@ROUND`; of `TASK`, its last committed round. Raises InvalidTask, UnknownTask, UnknownRound."""
        task, number = round_of(store, text)
        if number == 0 and "@" not in text:
            raise UnknownRound(f"task {task} has committed no round yet: there is no trained model to release")
        return cls(task, number)


def trained_in(store: TaskStore, task_id: str, number: int | None) -> Trained:
    """The model after a round of a task, by default the last."""
    import safetensors.numpy

    from export.inference.trained import Trained

    plan = Plan.decode(store.plan_part(task_id))
    tensors = safetensors.numpy.load(store.model(task_id, number))
    read = {ref: ref.check(store.plan_part(task_id, ref.sha256)) for ref in predicting(plan)}
    return Trained(plan, plan.schema.flatten(tensors), read.__getitem__)


def next_release(  # noqa: PLR0913  # a release says so much
    store: TaskStore,
    source: Source,
    name: str,
    plan: BlobRef,
    params_D: Float32,
    key: SigningKey,
    *,
    evaluation: Mapping[str, float],
    forbid_older: bool,
) -> tuple[ModelRelease, bytes]:
    """The next version of a model, to be signed with `key`, and its parameters as a checkpoint.

    forbid_older: raise the counter, so that devices that saw the version take no earlier one of the key.
    """
    from fedcore import checkpoint
    from fedcore.signing import ModelOrigin, ModelRelease, check_model_name

    check_model_name(name)
    population = store.task(source.task).settings.population
    before = versions_of(store, population, name)
    counters = [one.statement.counter for one in before if one.release.signer == key.signer]
    parameters = checkpoint.encode({"params": params_D})
    release = ModelRelease(
        population=population,
        name=name,
        number=len(before) + 1,
        plan=plan,
        parameters=BlobRef.of(parameters),
        counter=max(counters, default=FIRST_COUNTER - forbid_older) + forbid_older,
        evaluation=dict(evaluation),
        origin=ModelOrigin(*source),
    )
    return release, parameters


def versions_of(store: TaskStore, population: str, name: str) -> list[ModelVersion]:
    """The versions of a model that were released; none of one that was not."""
    known = any((model.population, model.name) == (population, name) for model in store.models())
    return store.model_versions(population, name) if known else []


def evaluation_of(store: TaskStore, text: str, source: Source) -> dict[str, float]:
    """The figures of `TASK@ROUND`, or of the last committed round of `TASK`, which evaluated this very model.

    Raises InvalidModel where the task evaluated another model or none, and UnknownRound.
    """
    task_id, number = round_of(store, text)
    evaluates = store.task(task_id).evaluates
    model = evaluates.model if evaluates else None
    if model is None or (model.file is None and (model.task, model.round) != source):
        found = "no model" if model is None else f"the model of {model.words}"
        raise InvalidModel(f"task {task_id} evaluates {found}, not that of task {source.task}, round {source.round}")
    if model.file is not None and model.file != hashlib.sha256(store.model(*source)).hexdigest():
        raise InvalidModel(f"task {task_id} evaluates another file than the model after round {source.round}")
    done = [one for one in store.rounds(task_id) if (one.number, one.state) == (number, RoundState.COMMITTED)]
    if not done:
        raise UnknownRound(f"task {task_id} has not committed a round {number}: there are no figures of it")
    return {name: value for name, value in done[-1].metrics.items() if name.startswith(PREFIX)}


def pass_gate(store: TaskStore, gate: Gate, release: ModelRelease) -> str:
    """What the gate compared, in words. Raises InvalidModel when it refuses the release."""
    versions = versions_of(store, release.population, release.name)
    history = store.model_history(release.population, release.name) if versions else []
    return gate.compare(release.evaluation, versions, history)


def plan_of(store: TaskStore, task_id: str, bundle: Bundle | None) -> BlobRef:
    """The plan of a task. Raises InvalidModel unless it is that of the bundle, where one is given."""
    plan = BlobRef.of(store.plan_part(task_id))
    if bundle is not None and bundle.manifest.plan != plan:
        raise InvalidModel(f"task {task_id} runs another plan than the bundle {bundle.folder}")
    return plan


def keep(store: TaskStore, data: bytes) -> None:
    """Store the bytes of a blob, unless they are there already."""
    from coordinator.store.tasks import CoordinatorStore
    from muster.remote import RemoteStore

    ref = BlobRef.of(data)
    if isinstance(store, CoordinatorStore):
        store.blobs.put(data)
    elif isinstance(store, RemoteStore) and not store.present(ref.sha256):
        store.upload(ref.sha256, data)
