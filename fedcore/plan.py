"""A plan: the loops, graphs by digest, examples and report of a device, as data.

Spec: docs/spec/plan.md. A plan names no algorithm, so a device runs new algorithms without new code.

The names of graphs, and of their inputs and outputs, are defined here (§2). All vectors are float32 (size,):

    <pass>.begin   broadcast.<name>, <earlier pass>.carry.<name>               → next.<name>
    <pass>.step    carry.<name>, broadcast.<name>, <earlier pass>.carry.<name>,
                   frozen.<name>, example.<field> (B, …), mask float32 (B,)[, noise int32 (B,)]
                                                                             → next.<name>, metrics float32 (M,)
    <pass>.steps   the same, with an axis of S steps first in examples, mask, noise and metrics
    report         broadcast.<name>, <pass>.carry.<name>                       → one output per mean segment, its name
    kept.first     broadcast.<name>                                            → next.<name>
    kept.next      broadcast.<name>, <pass>.carry.<name>                       → next.<name>
    predict        params (D,), frozen.<name>, example.<input> (B, …)          → output (B, …), or output.<name>s

Where devices keep vectors between rounds, the two graphs `kept` are there, and all but `kept.first` may read
`kept.<name>` too. `metrics` are sums over the batch under its mask, in the order of the pass's `metrics`.
`<pass>.carry` is the last carry of a pass. A pass has either `step` or `steps`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from fedcore.batching import HoldOut
from fedcore.errors import DigestMismatch, PlanError, ReportError, SchemaError, facts_of
from fedcore.params import FrozenVector, ParamSchema, Size, VectorSpec
from fedcore.questions.question import LONGEST_QUESTION
from fedcore.report import ReportLayout
from fedcore.schedule import Loop, first_of_pair
from fedcore.validation import UNDECODABLE, Digest, decoder

PLAN_VERSION = 1
MOST_PLAN_BYTES = 4 * 2**20  # of JSON
IGNORED = -100  # the label of what does not count, as torch's cross-entropy has it
T = TypeVar("T")
Dtype = Literal["float32", "int64", "int32", "uint8"]

REPORT, PREDICT = "report", "predict"
FIRST_KEPT, NEXT_KEPT = "kept.first", "kept.next"
BROADCAST, CARRY, EXAMPLE, NEXT = "broadcast", "carry", "example", "next"
MASK, NOISE, METRICS, FROZEN, KEPT = "mask", "noise", "metrics", "frozen", "kept"
PARAMS, OUTPUT = "params", "output"
MEAN_OF, DEVIATION_OF = "mean_of_{}", "deviation_of_{}"
"""The frozen vectors of an input that is normalised in front of the model, by the input's name."""


def begin_graph(pass_name: str) -> str:
    """The name of the graph that makes a pass's first carry."""
    return f"{pass_name}.begin"


def step_graph(pass_name: str) -> str:
    """The name of the graph that runs one batch of a pass."""
    return f"{pass_name}.step"


def steps_graph(pass_name: str) -> str:
    """The name of the graph that runs any number of batches of a pass, one after the other."""
    return f"{pass_name}.steps"


def loop_graph(graphs: Container[str], pass_name: str) -> str:
    """The name of the pass's loop graph that is in `graphs`: `step`, for one batch, or `steps`, for many."""
    many = steps_graph(pass_name)
    return many if many in graphs else step_graph(pass_name)


def final_carry(pass_name: str) -> str:
    """The prefix of a pass's last carry among the inputs of the report graph."""
    return f"{pass_name}.{CARRY}"


def prefixed(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """The values under their names at the edge of a graph: `<prefix>.<name>`."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def unprefixed(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """The values whose names have the prefix, without it: the inverse of `prefixed`."""
    return {name.removeprefix(f"{prefix}."): value for name, value in values.items() if name.startswith(f"{prefix}.")}


def in_turn(trips: Sequence[T], number: int) -> T:
    """The trip that round `number` runs, counted from 1: rounds take an algorithm's trips in turn."""
    return trips[(number - 1) % len(trips)]


def is_second(number: int) -> bool:
    """Whether round `number` runs the second of two trips."""
    return number != first_of_pair(number)


class BlobRef(msgspec.Struct, frozen=True):
    """Immutable bytes, named by their SHA-256 in hex."""

    sha256: Digest
    size: Size

    @classmethod
    def of(cls, data: bytes | memoryview) -> BlobRef:
        """The reference that `data` satisfies."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    def check(self, data: bytes) -> bytes:
        """Return `data`. Raises DigestMismatch when this reference names other bytes."""
        self._check(BlobRef.of(data))
        return data

    def check_file(self, path: Path) -> None:
        """Check a file, piece by piece. Raises OSError, and DigestMismatch when this reference names other bytes."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            self._check(BlobRef(digest, file.tell()))

    def _check(self, actual: BlobRef) -> None:
        if actual != self:
            raise DigestMismatch(
                f"blob {self.sha256[:12]}… ({self.size} bytes) arrived as {actual.sha256[:12]}… ({actual.size} bytes)"
            )


class PlanSignature(msgspec.Struct, frozen=True):
    """A signature of a plan: the signer's public key and the signature, both as text. `fedcore.signing` checks it."""

    signer: str
    value: str


class Tokenizer(msgspec.Struct, frozen=True):
    """How devices turn texts into tokens (spec §1.3): a `tokenizer.json`, and what fills short texts, no token.

    trial: texts, and the tokens that a device must have for them before it takes any other.
    """

    blob: BlobRef
    padding: Annotated[int, msgspec.Meta(ge=0)] = 0
    trial: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Field(msgspec.Struct, frozen=True):
    """One array of an example; `shape` is without the batch axis.

    `high` bounds integers: they lie in 0 … high − 1 (classes of a label, words of a vocabulary), or are `ignored`, a
    label that does not count. `tokenizer`: of an int32 field (T,) that devices may hold as text instead.
    """

    name: str
    dtype: Dtype
    shape: tuple[Size, ...] = ()
    high: int | None = None
    tokenizer: Tokenizer | UnsetType = UNSET
    ignored: Annotated[int, msgspec.Meta(ge=-(2**31), lt=0)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.ignored is not UNSET and (self.dtype not in ("int32", "int64") or self.high is None):
            raise PlanError(f"field {self.name!r} ignores {self.ignored}: it must be int32 or int64, and have a high")

    @property
    def absent(self) -> int | None:
        """The number that is no data: of a label that does not count, or behind a text's last token; None without."""
        if self.tokenizer is not UNSET:
            return self.tokenizer.padding
        return None if self.ignored is UNSET else self.ignored

    def holds(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of some integers a field with a `high` may hold."""
        inside: NDArray[np.bool_] = (values >= 0) & (values < self.high)
        return inside if self.ignored is UNSET else inside | (values == self.ignored)


class ExampleSpec(msgspec.Struct, frozen=True):
    """The examples that a plan runs on: a collection in the device's store, and the arrays of each example.

    With `hold_out` they are those on one side of it, not the whole collection.
    """

    fields: tuple[Field, ...]
    collection: str = "default"
    hold_out: HoldOut | None = None

    def kept(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Which examples (n,) of the collection the plan runs on. columns: by field name, (n, …) each."""
        ordered = [columns[field.name] for field in self.fields]
        return np.ones(len(ordered[0]), bool) if self.hold_out is None else self.hold_out.kept(self.collection, ordered)


class FrozenVectors(msgspec.Struct, frozen=True):
    """The tensors of a model that no round changes, row-major each: one blob in the form of a checkpoint."""

    blob: BlobRef
    vectors: tuple[FrozenVector, ...]


class PassPlan(msgspec.Struct, frozen=True):
    """One pass: its begin graph, then its step for every batch of `loop`.

    `metrics` names the sums that each step emits; the device adds them up over the pass. `noise` says that the step
    reads random integers.
    """

    name: str
    loop: Loop
    carry: tuple[VectorSpec, ...]
    metrics: tuple[str, ...]
    noise: bool = False


class PredictPlan(msgspec.Struct, frozen=True):
    """The model's outputs for examples, in eval mode: one graph per format.

    inputs: names of fields of the plan's examples, those that the model takes. outputs: their names at the edge, types
    and shapes, without the batch axis. batch_size: of the formats whose graphs fix it; others take any.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Field, ...]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    graphs: dict[str, BlobRef]


class TripPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A device's work in one trip: what it receives, runs and reports.

    `graphs` maps a format ("onnx", "executorch") to graph names to blobs. `kept`: the vectors that a device keeps from
    one of its rounds to the next; only in a plan of one trip.
    """

    broadcast: tuple[VectorSpec, ...]
    passes: tuple[PassPlan, ...]
    report: ReportLayout
    graphs: dict[str, dict[str, BlobRef]]
    kept: tuple[VectorSpec, ...] = ()

    def __post_init__(self) -> None:
        for fmt, graphs in self.graphs.items():
            loops = {loop_graph(graphs, pass_plan.name) for pass_plan in self.passes}
            wanted = {begin_graph(pass_plan.name) for pass_plan in self.passes} | loops | {REPORT}
            wanted |= {FIRST_KEPT, NEXT_KEPT} if self.kept else set()
            if set(graphs) != wanted:
                raise PlanError(f"format {fmt!r} has graphs {sorted(graphs)}, the passes need {sorted(wanted)}")


class Plan(TripPlan, frozen=True, kw_only=True):
    """Everything a device needs to take part in a round, by value or by digest.

    Its own members are those of the first trip. `second` is there for an algorithm of two trips: rounds 1, 3, 5, … run
    the first, rounds 2, 4, 6, … the second. All graphs share `frozen`, which is None where nothing is frozen. `predict`
    is for apps that use the model; devices that train do not fetch it. `question` is what the plan asks of devices, as
    a person typed it; absent in plans that train.
    """

    version: int = PLAN_VERSION
    name: str
    schema: ParamSchema
    examples: ExampleSpec
    frozen: FrozenVectors | None = None
    second: TripPlan | None = None
    predict: PredictPlan | None = None
    question: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_QUESTION)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in self.examples.fields:
            _check_text(item)
        if self.predict is not None:
            _check_predict(self.predict, self)
        names = [spec.name for spec in (*self.broadcast, *self.kept)]
        if self.kept and (self.second is not None or len(set(names)) < len(names)):
            raise PlanError(
                f"plan {self.name!r} has {names} as vectors that devices receive and keep; it needs one trip, and each "
                "vector a name of its own"
            )
        if self.second is not None and set(self.second.graphs) != set(self.graphs):
            formats = f"{sorted(self.graphs)}, its second trip in {sorted(self.second.graphs)}"
            raise PlanError(f"plan {self.name!r} has graphs in {formats}; both need the same formats")

    @property
    def normalised(self) -> dict[str, int]:
        """The fields that are normalised in front of the model, each with the size of its frozen mean."""
        sizes = {spec.name: spec.size for spec in (self.frozen.vectors if self.frozen else ())}
        fields = [item.name for item in self.examples.fields]
        return {name: sizes[MEAN_OF.format(name)] for name in fields if MEAN_OF.format(name) in sizes}

    @property
    def facts(self) -> dict[str, object]:
        """What people ask of a plan first."""
        read = ", ".join(f"{item.name} {item.dtype}{list(item.shape)}" for item in self.examples.fields)
        return {"plan": self.name, "parameters": self.schema.size, "examples": read, "formats": ", ".join(self.graphs)}

    def __repr__(self) -> str:
        return (
            f"Plan({self.name!r}, {self.schema.size:,} parameters, {self.facts['examples']}; {', '.join(self.graphs)})"
        )

    def _repr_html_(self) -> str:
        return facts_of("Plan", self.facts)

    @property
    def trips(self) -> tuple[Plan, ...]:
        """Every trip as a plan of its own, in order; `(self,)` where there is one."""
        if self.second is None:
            return (self,)
        members = msgspec.structs.asdict(self.second)
        return msgspec.structs.replace(self, second=None), msgspec.structs.replace(self, second=None, **members)

    def of_round(self, number: int) -> Plan:
        """The trip that round `number` runs, from 1, as a plan of its own."""
        return in_turn(self.trips, number)

    @property
    def graph_refs(self) -> frozenset[BlobRef]:
        """Every graph, of all trips and formats, and those that predict."""
        trained = frozenset(ref for trip in self.trips for graphs in trip.graphs.values() for ref in graphs.values())
        return trained | (frozenset(self.predict.graphs.values()) if self.predict else frozenset())

    @property
    def blob_refs(self) -> frozenset[BlobRef]:
        """Every blob that the plan names: the graphs, the frozen vectors, and the tokenizers."""
        return self.graph_refs | self.model_refs

    def kept_refs(self, form: str) -> frozenset[BlobRef]:
        """The blobs that a device with format `form` keeps: its graphs, frozen vectors and tokenizers."""
        return frozenset(self.graphs.get(form, {}).values()) | self.model_refs

    @property
    def tokenizers(self) -> dict[str, BlobRef]:
        """The tokenizers, by the names of their fields."""
        return {item.name: item.tokenizer.blob for item in self.examples.fields if item.tokenizer is not UNSET}

    @property
    def model_refs(self) -> frozenset[BlobRef]:
        """What belongs to the model in every format: the frozen vectors, and the tokenizers."""
        return frozenset((*self.tokenizers.values(), *((self.frozen.blob,) if self.frozen else ())))

    def encode(self) -> bytes:
        """Canonical JSON: equal plans give equal bytes."""
        return msgspec.json.encode(self, order="sorted")

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """A plan from JSON. Raises PlanError when it is too long (MOST_PLAN_BYTES), malformed or of another version."""
        if len(data) > MOST_PLAN_BYTES:
            raise PlanError(f"a plan of {len(data):,} bytes, at most {MOST_PLAN_BYTES:,} are read")
        return decode_versioned(data, _PLAN, PLAN_VERSION, "plan")


def _check_text(item: Field) -> None:
    if item.tokenizer is UNSET:
        return
    if item.dtype != "int32" or len(item.shape) != 1 or not item.shape[0] or item.high is None:
        raise PlanError(
            f"field {item.name!r} has a tokenizer and is {item.dtype}{list(item.shape)}; tokens are int32[length], "
            "with the size of the vocabulary as high"
        )
    if item.tokenizer.padding >= item.high:
        raise PlanError(
            f"field {item.name!r} is padded with {item.tokenizer.padding}; tokens are below {item.high}, its high"
        )


def _check_predict(predict: PredictPlan, plan: Plan) -> None:
    unknown = set(predict.inputs) - {item.name for item in plan.examples.fields}
    names = [output.name for output in predict.outputs]
    if unknown or not predict.inputs or not names or len(set(names)) < len(names):
        raise PlanError(
            f"the predict graph of plan {plan.name!r} reads {sorted(predict.inputs)} and gives {names}; it must read "
            "fields of the examples, and give outputs with names of their own"
        )
    if set(predict.graphs) != set(plan.graphs):
        raise PlanError(
            f"plan {plan.name!r} predicts in formats {sorted(predict.graphs)}, its other graphs are in "
            f"{sorted(plan.graphs)}; both need the same formats"
        )


class _Versioned(msgspec.Struct):
    version: int


_VERSION = decoder(_Versioned)
_PLAN = decoder(Plan)


def decode_versioned(data: bytes, whole: msgspec.json.Decoder[T], version: int, noun: str) -> T:
    """Decode JSON of a known version: an unknown version is refused, an unknown field ignored.

    Raises PlanError.
    """
    try:
        data_version = _VERSION.decode(data).version
        if data_version != version:
            raise PlanError(
                f"{noun} of version {data_version}, this installation knows {version}; update the older side"
            )
        return whole.decode(data)
    except (*UNDECODABLE, SchemaError, ReportError) as error:
        raise PlanError(f"malformed {noun}: {error}") from error
