"""Personal models for tests: a device with examples of a line, the release of a model of it, and what they make."""

from dataclasses import replace

import numpy as np

from device_runtime.models.model import Model
from device_runtime.trainer import divided
from fedcore.batching import StreamKey
from fedcore.plan import BlobRef
from tests.device_runtime import linear
from tests.device_runtime.released import NAME, POLICY, ROWS, released

LINE = np.array([1.0, -2.0, 0.5], np.float32)
"""The parameters that the examples are made with."""


def owning(config, examples):
    """The device, with these examples, whose owner names the key of the releases."""
    np.savez(config.examples, **examples)
    return replace(config, policy=POLICY)


def away(config):
    """The device without a network."""
    return replace(config, coordinator="http://127.0.0.1:9")


def trainable(coordinator, number=1, *, plan=None, graphs=None, params=linear.PARAMS, **members):
    """Release a version whose plan has these graphs for training, at a coordinator that has them."""
    graphs = linear.graphs() if graphs is None else graphs
    plan = linear.predicting(linear.predict_graph(), plan or linear.plan(graphs))
    coordinator.blobs |= {BlobRef.of(blob).sha256: blob for blob in graphs.values()}
    return released(coordinator, number, params=params, plan=plan, **members)


def taken(config):
    """A model that has taken the version of its coordinator."""
    model = Model(config, NAME)
    model.refresh()
    return model


def answers(model):
    """The parameters that the model predicts with."""
    return model.predict({"x": ROWS})["output"].tolist()


def local_steps(params, examples, spec=None):
    """The parameters after the local steps of the plan from `params`, in float64."""
    train, _ = divided(spec or linear.plan().examples, examples)
    moved = linear.reference(params, train, StreamKey(0, 0, 0))[: linear.D] / len(train["y"])
    return params + moved


def loss(params, examples):
    """The mean loss of examples."""
    return float((0.5 * (examples["x"].astype(np.float64) @ params - examples["y"]) ** 2).mean())
