"""A trained model: a plan with its predict graph, its parameters, and the distance of two models' outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from device_runtime import backends
from device_runtime.capabilities import random_field
from export.errors import ParityFailed
from fedcore.bundle import Bundle
from fedcore.checkpoint import decode_frozen
from fedcore.errors import PlanError
from fedcore.params import Float32, Frozen
from fedcore.plan import EXAMPLE, FROZEN, PARAMS, PREDICT, BlobRef, Plan, PredictPlan, prefixed

OutputsByName = Mapping[str, NDArray[np.generic]]
SIZES = (17, 3, 1)
"""The batches on which models are compared, where they take any."""
ALIKE = 1e-5
"""The largest distance of two models that are meant to be the same."""
TINY = 1e-30


def apart(actual: OutputsByName, expected: OutputsByName) -> float:
    """The worst relative l2 difference of any output; infinite where values that are not finite differ."""
    worst = 0.0
    for name, values in expected.items():
        wanted, ours = values.astype(np.float64), actual[name].astype(np.float64)
        finite = np.isfinite(wanted)
        if not np.array_equal(ours[~finite], wanted[~finite], equal_nan=True):
            return np.inf
        distance = float(np.linalg.norm((ours - wanted)[finite])) / max(float(np.linalg.norm(wanted[finite])), TINY)
        if not distance <= worst:  # also where it is not a number
            worst = distance
    return worst


Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Trained:
    """A model after some round. params: its parameters, float32 (D,). read: the bytes of a blob of the plan."""

    plan: Plan
    params: Float32
    read: Callable[[BlobRef], bytes]
    no_predict: str = ""

    @classmethod
    def of_bundle(cls, bundle: Bundle, tensors: Mapping[str, NDArray[np.generic]]) -> Trained:
        """With a bundle's plan. tensors: by name, as a checkpoint's file has them. Raises SchemaError."""
        plan = bundle.plan
        return cls(plan, plan.schema.flatten(tensors), bundle.read, bundle.manifest.no_predict)

    @property
    def predict(self) -> PredictPlan:
        """What its predict graph takes and gives. Raises PlanError where the plan has none."""
        if self.plan.predict is None:
            why = self.no_predict or "it was exported by a version of Muster that wrote none; export it again"
            raise PlanError(f"plan {self.plan.name} has no predict graph: {why}")
        return self.plan.predict

    @property
    def frozen(self) -> dict[str, Frozen]:
        """The tensors that no round changed, flat."""
        if self.plan.frozen is None:
            return {}
        return decode_frozen(self.read(self.plan.frozen.blob), self.plan.frozen.vectors)

    def graph(self, form: str) -> bytes:
        """The predict graph in a format. Raises PlanError when the plan is without."""
        if form not in self.predict.graphs:
            raise PlanError(
                f"plan {self.plan.name} has graphs in {', '.join(sorted(self.predict.graphs))} only; export it again "
                f"with {form} among --format"
            )
        return self.read(self.predict.graphs[form])

    def drawn(self, count: int, seed: int = 0) -> Arrays:
        """Random examples of the inputs (count, *shape)."""
        random, fields = np.random.default_rng(seed), {item.name: item for item in self.plan.examples.fields}
        return {name: np.asarray(random_field(fields[name], count, random)) for name in self.predict.inputs}

    def outputs(self, examples: Arrays) -> Arrays:
        """What the ONNX predict graph gives for examples, on the runtime of devices."""
        loaded = backends.BACKENDS[backends.FORMATS["onnx"]]().load(self.graph("onnx"), PREDICT)
        count = len(next(iter(examples.values())))
        outputs = {item.name: np.empty((count, *item.shape), item.dtype) for item in self.predict.outputs}
        frozen = prefixed(FROZEN, self.frozen)
        loaded.run({PARAMS: self.params} | frozen | prefixed(EXAMPLE, examples), outputs)
        return outputs


def check_alike(name: str, actual: Arrays, expected: Arrays) -> None:
    """Raise ParityFailed when outputs are further apart than round-off."""
    distance = apart(actual, expected)
    if not distance <= ALIKE:
        raise ParityFailed(f"the {name} model is {distance:.1e} (relative l2) from the model that it is made of")
