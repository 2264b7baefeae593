"""Twenty steps of every reference model on every backend end where torch's float64 ends: tests/vectors/golden.json."""

import json
from itertools import product

import numpy as np
import pytest

from device_runtime.backends import BACKENDS, FORMATS
from export.build import build_plan
from export.models import MODELS
from tests.export.golden import KINKED, KINKED_TOLERANCE, TOLERANCE, VECTORS, algorithm, sketch, travelled, trial
from tests.sampled import sampled

GOLDEN = json.loads(VECTORS.read_text())["models"]

CASES = sampled(product(MODELS, FORMATS), [*product(["logreg", "mlp", "digits_cnn"], FORMATS), ("char_lstm", "onnx")])
"""Others take long to export; attention in ExecuTorch is trained with less around it in test_promises.py."""


def distance(name, way, start):
    """Over the way travelled; for smooth models with the round-off of the model's own size allowed for."""
    floor = 0.0 if name in KINKED else np.finfo(np.float32).eps / TOLERANCE * np.linalg.norm(start)
    return np.linalg.norm(sketch(way) - GOLDEN[name]["sketch"]) / (GOLDEN[name]["moved"] + floor)


def allowed(name):
    return KINKED_TOLERANCE if name in KINKED else TOLERANCE


@pytest.mark.parametrize(("name", "form"), CASES)
def test_twenty_steps_end_at_the_golden_vector(name, form, executorch):
    """And not to train, or another step size, would be told from it."""
    work = trial(name)
    plan, graphs = build_plan(work.model, algorithm(name), (form,))
    backend = BACKENDS[FORMATS[form]]()
    found = work.exported(plan, {part: backend.load(graphs[ref], part) for part, ref in plan.graphs[form].items()})
    way, start = travelled(work, found), work.model.initial
    assert distance(name, way, start) <= allowed(name)
    assert distance(name, way * 0, start) > 5 * allowed(name)
    if name in ("logreg", "emnist_cnn"):
        assert distance(name, way * 1.01, start) > 100 * allowed(name)
