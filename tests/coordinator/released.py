"""Model releases that tests make: a plan with a predict graph, its blobs in a store, and signed versions."""

from __future__ import annotations

import msgspec
import numpy as np

from fedcore import checkpoint
from fedcore.plan import BlobRef, Field, PredictPlan
from fedcore.signing import ModelRelease
from tests.coordinator.bundles import START, make_bundle, make_plan
from tests.coordinator.conftest import RELEASE

PREDICT = b"a predict graph"


def predicting_plan():
    """The hand-made plan with a predict graph."""
    outputs = (Field("output", "float32", (1,)),)
    return msgspec.structs.replace(
        make_plan(),
        predict=PredictPlan(inputs=("x",), outputs=outputs, batch_size=1, graphs={"onnx": BlobRef.of(PREDICT)}),
    )


def predicting_bundle(folder):
    return make_bundle(folder, predicting_plan(), graphs=(PREDICT,))


def version(store, number=1, params=START, key=RELEASE, counter=1, **more):
    """The signed statement of a version, whose parameters are stored."""
    parameters = checkpoint.encode({"params": np.asarray(params, np.float32)})
    statement = {"population": "phones", "name": "keyboard", "number": number, "counter": counter}
    statement |= {"plan": BlobRef.of(predicting_plan().encode()), "parameters": store.blobs.put(parameters)}
    return key.sign_statement(ModelRelease(**(statement | more)))
