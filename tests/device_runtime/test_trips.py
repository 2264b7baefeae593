"""A device under a plan of two trips: the round decides which one runs, and later passes read earlier carries."""

import numpy as np
import pytest
from msgspec.structs import replace

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from device_runtime.state.folder import BlobCache
from device_runtime.work import plan_of
from fedcore.plan import BlobRef, TripPlan
from fedcore.wire.messages import Assignment
from tests.device_runtime import linear

ONE = linear.plan()
SECOND = TripPlan(
    broadcast=ONE.broadcast, passes=ONE.passes, report=replace(ONE.report, weighting="uniform"), graphs=ONE.graphs
)
TWO = replace(ONE, second=SECOND)


@pytest.mark.parametrize(("number", "weighting"), [(1, "examples"), (2, "uniform"), (3, "examples"), (4, "uniform")])
def test_the_rounds_number_decides_which_trip_runs(number, weighting, tmp_path):
    blob = TWO.encode()
    given = Assignment(
        assignment="a",
        task="t",
        round=number,
        attempt=1,
        slot=0,
        seed=0,
        plan=BlobRef.of(blob),
        checkpoint=BlobRef.of(b""),
        report_within_s=1.0,
    )
    plan = plan_of(given, BlobCache(tmp_path, lambda ref, part: part.append(blob)))
    assert (plan.report.weighting, plan.second) == (weighting, None)


class Overheard:
    """A graph, and a copy of what it was given first."""

    def __init__(self, graph):
        self.graph, self.given = graph, None

    def run(self, inputs, outputs):
        self.given = self.given or {name: value.copy() for name, value in inputs.items()}
        self.graph.run(inputs, outputs)


def test_a_pass_is_given_the_last_carry_of_an_earlier_one():
    graphs = {name: Overheard(OnnxRuntime().load(blob, name)) for name, blob in linear.graphs().items()}
    result = execute(ONE, dict(graphs), {"params": linear.PARAMS}, linear.examples(7), linear.KEY)
    trained = linear.PARAMS + result.values[: linear.D]
    for name in ("sweep.begin", "sweep.step"):
        np.testing.assert_allclose(graphs[name].given["train.carry.params"], trained, rtol=1e-6)
    for name in ("train.begin", "train.step"):
        assert not [given for given in graphs[name].given if given.startswith(("train.carry", "sweep.carry"))]
