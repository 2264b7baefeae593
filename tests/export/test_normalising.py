"""Normalisers in front of models: their constants are frozen, certified, verified again, and those of predictions."""

import numpy as np
import pytest
import torch
from torch import nn

import muster
from export.build import planned_model, verify_bundle
from export.errors import InvalidModel
from export.model import Model, ModelSpec, accuracy, cross_entropy
from export.normalising import Normaliser, normalised
from fedcore.algorithms import create
from fedcore.plan import Field
from fedcore.questions.answer import Answer
from simulator.engine import Engine
from simulator.population import Population

COLUMNS = ("field", "element", "mean", "deviation", "values")
EACH = Answer(COLUMNS, (("x", 0, 100.0, 10.0, 9), ("x", 1, -5.0, 0.0, 9), ("x", 2, 2.0, 0.5, 9)), 9, 0)
ALL = Answer(COLUMNS, (("x", None, 50.0, 25.0, 27),), 9, 0)


def spec(module=None, dtype="float32", high=None):
    make = module or (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    field = Field("x", dtype, (3,), high)
    return ModelSpec("net", make, cross_entropy, (field,), Field("y", "int64", (), 2), {"accuracy": accuracy})


def model():
    """The source of a test's bundle, by name."""
    return spec()


def test_a_normaliser_computes_what_it_says_and_renames_nothing():
    plain, before = Model(spec()), Model(normalised(spec(), [EACH]))
    assert before.schema == plain.schema
    assert before.frozen_vectors.keys() == {"mean_of_x", "deviation_of_x"}
    x = np.array([[110, -4, 1], [90, -6, 3]], np.float32)
    expected = (x - np.array([100, -5, 2], np.float32)) / np.array([10, 1, 0.5], np.float32)
    tensors = before.tensors(torch.from_numpy(before.initial))
    np.testing.assert_array_equal(
        before.predict(tensors, {"x": torch.from_numpy(x)})["output"].detach(),
        plain.predict(tensors, {"x": torch.from_numpy(expected)})["output"].detach(),
    )


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_bundles_of_normalised_models_are_certified_and_verified(target, tmp_path, request):
    if target == "executorch":
        request.getfixturevalue("executorch")
    name = "tests.export.test_normalising:model"
    bundle = muster.export(name, out=tmp_path / "plan", normalise=EACH, formats=[target])
    assert bundle.plan.normalised == {"x": 3}
    assert bundle.plan.predict is not None
    assert verify_bundle(bundle, name).worst < 1e-5
    again = planned_model(bundle, name)
    np.testing.assert_array_equal(again.frozen_vectors["mean_of_x"], np.array([100, -5, 2], np.float32))
    assert planned_model(bundle, normalised(spec(), [EACH])).frozen_vectors.keys() == again.frozen_vectors.keys()


@pytest.mark.parametrize("form", ["onnx", "torch"])
def test_trained_models_in_files_normalise_too(form, tmp_path):
    bundle = muster.export(spec(), out=tmp_path / "plan", normalise=ALL)
    made = Model(normalised(spec(), [ALL]))
    tensors = made.schema.unflatten(made.initial)
    found = muster.export_model(bundle, tensors, tmp_path / f"model.{form}", to=form, model=spec())
    x = np.array([[60.0, 40.0, 75.0]], np.float32)
    expected = made.predict(made.tensors(torch.from_numpy(made.initial)), {"x": torch.from_numpy(x)})["output"]
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(found.data)
        got = session.run(None, {session.get_inputs()[0].name: x})[0]
    else:
        (tmp_path / "again.pt2").write_bytes(found.data)
        got = torch.export.load(tmp_path / "again.pt2").module()(torch.from_numpy(x))
        got = got["output"] if isinstance(got, dict) else got
        got = got.detach().numpy()
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5)


def test_the_engine_trains_normalised_models_as_it_does_normalised_data():
    source = np.random.default_rng(0)
    x = source.normal(50, 25, (40, 3)).astype(np.float32)
    y = (x.sum(1) > 150).astype(np.int64)
    starts, names = np.array([0, 15, 40]), ("a", "b")
    raw = Population(names, {"x": x, "y": y}, starts)
    done = Population(names, {"x": (x - np.float32(50)) / np.float32(25), "y": y}, starts)
    algorithm = create("fedavg", {"batch_size": 5})
    ends = [
        Engine(one, algorithm, users, seed=1)
        for one, users in ((Model(normalised(spec(), [ALL])), raw), (Model(spec()), done))
    ]
    for engine in ends:
        engine.run_round(1, [0, 1])
    np.testing.assert_allclose(ends[0].state["params"], ends[1].state["params"], rtol=1e-5, atol=1e-7)


def test_whole_numbers_are_normalised_as_real_ones():
    made = Model(normalised(spec(dtype="uint8", high=256), [ALL]))
    x = torch.tensor([[75, 25, 50]], dtype=torch.uint8)
    plain = Model(spec()).predict(made.tensors(torch.from_numpy(made.initial)), {"x": torch.tensor([[1.0, -1.0, 0.0]])})
    torch.testing.assert_close(made.predict({}, {"x": x})["output"], plain["output"])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (EACH._replace(columns=("y", "n")), "is no answer to `muster ask normaliser`"),
        (EACH._replace(rows=()), "is no answer to `muster ask normaliser`"),
        ({}, "is no answer to `muster ask normaliser`"),
        (EACH._replace(rows=EACH.rows[1:]), "the normaliser of x lacks elements"),
        (EACH._replace(rows=(("x", None, None, None, 0),)), "the normaliser of x lacks elements"),
        (EACH._replace(rows=(("x", None, 1.0, float("nan"), 0),)), "the normaliser of x lacks elements"),
        (EACH._replace(rows=EACH.rows[:2]), r"of 2 elements of x, of which net reads \[3\]"),
        (ALL._replace(rows=(("pixels", None, 1.0, 1.0, 1),)), "net has no input 'pixels' to normalise; there are x"),
    ],
)
def test_answers_of_other_fields_shapes_and_questions_are_refused(answer, message):
    with pytest.raises(InvalidModel, match=message):
        Model(normalised(spec(), [answer]))


def test_an_input_is_normalised_once():
    with pytest.raises(InvalidModel, match="net normalises x already"):
        Model(normalised(spec(), [ALL, EACH]))


def test_files_that_hold_no_answer_are_named(tmp_path):
    with pytest.raises(InvalidModel, match=r"nothing\.json cannot be read"):
        Normaliser.of(tmp_path / "nothing.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(InvalidModel, match=r"text\.json cannot be read"):
        Normaliser.of(tmp_path / "text.json")
