"""The device runtime in TypeScript trains as this one does: the same plan and examples give the same bytes."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import safetensors.numpy
import torch
from msgspec.structs import replace

from device_runtime import errors as device_errors
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from export.build import build_plan
from export.model import Model
from export.models import MODELS, load
from export.predict import build_predict
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.batching import StreamKey
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef
from secagg import errors as secagg_errors
from tests.device_runtime.node import FOLDER, IS_NEW, command
from tests.questions.hand_made import asked
from tests.questions.labels import LABELS

EXAMPLES, BATCH = 23, 10
KEY = StreamKey(seed=2**53 + 3, round=1, slot=7)
LONG = pytest.mark.long
# Graphs that a plan must name, and nobody reads.
HAND = {name: BlobRef.of(b"") for name in ("train.begin", "train.step", "report")}
# Convolutions, and dense layers with what is frozen, also in few bits: the sample that runs always.
ADAPTED = [f"tests.export.models:digits_{kind}" for kind in ("adapted", "in_8_bits", "in_4_bits")]


def drawn(fields):
    """Random examples for the fields of a plan."""
    rng = np.random.default_rng(1)
    return {
        one.name: rng.integers(one.high or 2, size=(EXAMPLES, *one.shape)).astype(one.dtype)
        if one.dtype != "float32"
        else rng.random((EXAMPLES, *one.shape), np.float32)
        for one in fields
    }


def reports(model, algorithm, examples, folder):
    """The report of a plan that Node makes, and the one that Python does, as bytes."""
    plan, graphs = build_plan(model, algorithm, ("onnx",), lambda form, doing: None)
    blobs = {graph: graphs[ref] for graph, ref in plan.graphs["onnx"].items()}
    (trip,) = trips_of(algorithm)
    broadcast = {key: np.asarray(vector) for key, vector in trip.broadcast(algorithm.init(model.initial)).items()}
    (folder / "graphs").mkdir()
    for graph, blob in blobs.items():
        (folder / "graphs" / graph).write_bytes(blob)
    (folder / "plan.json").write_bytes(plan.encode())
    (folder / "checkpoint.safetensors").write_bytes(checkpoint.encode(broadcast))
    frozen = model.frozen_vectors
    (folder / "frozen.safetensors").write_bytes(checkpoint.encode_frozen(frozen))
    (folder / "key.json").write_text(json.dumps({"seed": str(KEY.seed), "round": str(KEY.round), "slot": "7"}))
    np.savez(folder / "examples.npz", **examples)
    subprocess.run(command("tests/train.ts", folder), check=True)
    executables = {graph: OnnxRuntime().load(blob, graph) for graph, blob in blobs.items()}
    expected = execute(plan, executables, broadcast, examples, KEY, frozen=frozen)
    body = checkpoint.encode({"report": plan.report.weigh(expected.values, expected.weight)})
    return (folder / "report.safetensors").read_bytes(), body


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=LONG) for name in MODELS), *ADAPTED])
def test_node_trains_to_the_same_report_bit_for_bit(name, tmp_path):
    model = Model(load(name))
    found, expected = reports(model, create("mimelite", {"batch_size": BATCH}), drawn(model.spec.fields), tmp_path)
    assert found == expected


@pytest.mark.parametrize("bounds", [{}, {"most_rows": 16, "private": True}])
def test_node_answers_a_question_bit_for_bit(bounds, tmp_path):
    question = asked(**bounds)
    source = np.random.default_rng(2)
    examples = {
        "steps": source.integers(2**31, size=EXAMPLES),
        "speed": source.choice([-1, 0.1, 2, 3.7, 9], EXAMPLES).astype(np.float32),
        "y": source.integers(LABELS, size=EXAMPLES).astype(np.uint8),
    }
    found, expected = reports(Model(question.spec()), question.algorithm(), examples, tmp_path)
    assert found == expected
    assert np.count_nonzero(checkpoint.decode(found, (VectorSpec("report", 19),))["report"]) > 15


@pytest.mark.parametrize("name", ["digits_cnn", "char_lstm"])
def test_node_predicts_what_torch_does(name, tmp_path):
    model = Model(load(name))
    predict, graphs = build_predict(model, ("onnx",))
    plan = replace(build_plan(model, create("fedavg"), ())[0], graphs={"onnx": HAND}, predict=predict)
    params = model.initial + np.float32(0.01)
    examples = drawn(model.spec.inputs)
    (tmp_path / "plan.json").write_bytes(plan.encode())
    (tmp_path / "predict.onnx").write_bytes(graphs[predict.graphs["onnx"]])
    (tmp_path / "params.safetensors").write_bytes(checkpoint.encode({"params": params}))
    np.savez(tmp_path / "examples.npz", **examples)
    subprocess.run(command("tests/predict.ts", tmp_path), check=True)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(params), model.module.parameters())
    with torch.no_grad():
        expected = model.module.eval()(torch.from_numpy(examples["x"])).numpy()
    found = safetensors.numpy.load_file(tmp_path / "output.safetensors")["output"].reshape(expected.shape)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(("module", "file"), [(device_errors, "errors.ts"), (secagg_errors, "secagg/errors.ts")])
def test_errors_have_the_names_and_reasons_of_python(module, file):
    source = (FOLDER / "src" / "core" / file).read_text()
    found = re.findall(r"class (\w+) extends \w+ (\{\}|\{.*?\n\})", source, re.DOTALL)
    assert len(found) > 15
    for name, body in found:
        if name != "FormatError":  # in Python that of fedcore, for messages of all kinds
            ours, reason = getattr(module, name), re.search(r'reason[^=;]*= "([a-z-]+)"', body)
            assert reason is None or reason[1] == ours.reason, name


@pytest.mark.parametrize(("version", "status"), [("20.19.0", 1), ("22.17.1", 1), ("22.18.0", 0), ("24.0.0", 0)])
def test_node_is_new_from_the_version_of_the_package(version, status):
    if (program := shutil.which("node")) is None:
        pytest.skip("no Node")
    given = f"Object.defineProperty(process, 'versions', {{value: {{node: '{version}'}}}}); require('{IS_NEW}')"
    assert subprocess.run([program, "-e", given], check=False).returncode == status
