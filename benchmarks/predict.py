"""The cost of a prediction in an app: a model's `predict` against the bare call of ONNX Runtime on the same graph.

The model is `logreg` with one example, so that nearly all of the time is overhead: the check of the inputs, copies into
and out of buffers, the lock. The bare call binds nothing and copies nothing. Both run in turns in one process, in CPU
time of one thread, and the least of each counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.runner import PredictOptions
from benchmarks.usage import in_turns, times
from device_runtime.backends.onnxruntime import OnnxRuntime, module_of
from device_runtime.models.version import Parts, load
from export.build import build_plan
from export.model import Model
from export.models import load as load_model
from export.predict import build_predict
from export.trial_examples import draw_examples
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.plan import EXAMPLE, PARAMS, prefixed
from fedcore.release import Signed
from muster.output import Say

CALLS = 1000


def run(options: PredictOptions, say: Say) -> dict[str, Any]:
    """CPU microseconds of a prediction and of the bare call, their difference, and their ratio."""
    say("exporting")
    ours, bare = _both(Model(load_model(options.model)))
    spent = in_turns({"ours": times(CALLS, ours), "bare": times(CALLS, bare)}, options.blocks)
    predict_us, bare_us = (min(seconds) / CALLS * 1e6 for seconds in spent.values())
    return {
        "model": options.model,
        "predict_us": predict_us,
        "bare_us": bare_us,
        "overhead_us": predict_us - bare_us,
        "predict_to_bare": predict_us / bare_us,
    }


def _both(model: Model) -> tuple[Callable[[], object], Callable[[], object]]:
    """A prediction for one example, and the bare call, which give the same."""
    predict, graphs = build_predict(model, ("onnx",))
    graph = graphs[predict.graphs["onnx"]]
    plan = msgspec.structs.replace(build_plan(model, create("fedavg"), ("onnx",))[0], predict=predict)
    parts = Parts(Signed("", "", ""), 1, plan, graph, checkpoint.encode({PARAMS: model.initial}))
    version = load(parts, OnnxRuntime())
    drawn = draw_examples(model.spec, 1, np.random.default_rng(0))
    given = {name: np.asarray(drawn[name]) for name in predict.inputs}
    onnxruntime = module_of("onnxruntime")
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])
    fed = {PARAMS: model.initial, **prefixed(EXAMPLE, given)}
    fed = {node.name: fed[node.name] for node in session.get_inputs()}
    np.testing.assert_allclose(version.predict(given)[predict.outputs[0].name], session.run(None, fed)[0], rtol=1e-4)
    return lambda: version.predict(given), lambda: session.run(None, fed)
