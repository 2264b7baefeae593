"""Bundles that start from a model which is there already: the round of a task, or a file. For tasks that evaluate."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.errors import InvalidTask

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.entities import Evaluates, ModelSource, Regularly
    from fedcore.bundle import Bundle
    from fedcore.params import Float32, ParamSchema

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
    from fedcore.errors import SchemaError

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
