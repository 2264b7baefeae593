"""Start of a training's regular evaluation, in the transaction that commits the round whose model it evaluates."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from coordinator.errors import UnknownBlob, UnreadableBlob
from coordinator.rules.aggregation import Vectors, state_specs
from coordinator.rules.entities import Snapshot, Task
from coordinator.rules.evaluated import regular_task
from coordinator.store.records.records import Records
from coordinator.store.tasks import CoordinatorStore
from fedcore import checkpoint
from fedcore.algorithms.algorithm import trips_of
from fedcore.errors import FedcoreError
from fedcore.plan import BlobRef
from fedcore.release import Signed


class Start(NamedTuple):
    """The blobs with which a model is evaluated: server state and broadcast. params: the digest of the model."""

    state: BlobRef
    broadcast: BlobRef
    params: str


def store_start(store: CoordinatorStore, training: Task, number: int, model: Vectors) -> Start | None:
    """Store the server state and the broadcast with which the model after a round is evaluated; None if it is not due.

    model: what is broadcast after the round. Raises UnreadableBlob.
    """
    regular = training.evaluation
    if regular is None or not regular.due(number):
        return None
    algorithm = store.algorithm(regular.bundle.algorithm)
    try:
        specs = state_specs(store.plan(regular.bundle.plan.sha256), algorithm)
        state = checkpoint.decode(store.blobs.get(regular.bundle.state.sha256), specs)
    except (UnknownBlob, FedcoreError) as error:
        raise UnreadableBlob(f"what evaluates the model after round {number}: {error}") from error
    state["params"] = model["params"]
    broadcast = trips_of(algorithm)[0].broadcast(state)
    refs = [store.blobs.put(checkpoint.encode(vectors)) for vectors in (state, broadcast)]
    return Start(refs[0], refs[1], checkpoint.digest(model["params"]))


def begin(
    store: CoordinatorStore, records: Records, training: Task, number: int, start: Start | None, lineage: Signed | None
) -> None:
    """Write the task that evaluates the model after a round, if that is due.

    start: from `store_start`. lineage: the signed entry of the round.
    """
    regular = training.evaluation
    if regular is None or start is None:
        return
    store.add_blobs(records, {start.state: False})
    store.add_blobs(records, {start.broadcast: True})
    snapshot = Snapshot(0, start.state.sha256, start.broadcast.sha256, lineage)
    task = regular_task(training, regular, number, snapshot, secrets.token_hex(8), records.at)
    records.add_task(task, f"round {number} of task {training.id} was committed")
