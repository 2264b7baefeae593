"""Models on the command line: what is held out, normalised, exported and read."""

import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch

import muster
from coordinator.store.tasks import open_coordinator_store
from export.build import verify_bundle
from export.errors import ExportError
from export.model import Model
from export.models import load
from fedcore.batching import HoldOut
from fedcore.bundle import Bundle
from fedcore.errors import PlanError, SchemaError
from tests.coordinator.bundles import make_bundle
from tests.muster.test_cli import in_process
from tests.muster.test_remote import served

__all__ = ["served"]

OURS = "{'muster', 'export', 'fedcore', 'device_runtime', 'secagg', 'coordinator'}"
# By form, how an app loads and runs its file, and what it must not need.
LOADERS = {
    "onnx": """
import onnxruntime; others = {'torch', 'onnx'}
session = onnxruntime.InferenceSession(file)
run = lambda x: session.run(None, {'x': x})[0]
""",
    "torch": """
import torch; others = {'onnxruntime', 'onnx'}
module = torch.export.load(file).module()
run = lambda x: module(torch.from_numpy(x)).detach().numpy()
""",
    "executorch": """
import torch; from executorch.runtime import Runtime; others = {'onnxruntime', 'onnx'}
method = Runtime.get().load_program(file).load_method('forward')
run = lambda x: np.concatenate([method.execute([torch.from_numpy(row[None])])[0] for row in x])
""",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a bundle, a checkpoint, examples, and what torch makes of them."""
    folder = tmp_path_factory.mktemp("model")
    muster.export("digits_cnn", out=folder / "plan")
    model = Model(load("digits_cnn"))
    params = model.initial + np.random.default_rng(0).normal(0, 0.05, model.initial.shape).astype(np.float32)
    (folder / "m.safetensors").write_bytes(safetensors.numpy.save(model.schema.unflatten(params)))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(params), model.module.parameters())
    x = np.random.default_rng(1).normal(size=(17, 1, 8, 8)).astype(np.float32)
    with torch.no_grad():
        outputs = model.module.eval()(torch.from_numpy(x)).numpy()
    np.savez(folder / "labelled.npz", x=x, y=outputs.argmax(-1))
    np.savez(folder / "expected.npz", x=x, outputs=outputs)
    return folder


def command(made, *more):
    return ["model", "export", made / "plan", "--checkpoint", made / "m.safetensors", *more]


@pytest.mark.parametrize("to", LOADERS)
def test_the_file_runs_where_nothing_of_muster_is_loaded(to, made, typed, tmp_path, executorch):
    file = tmp_path / "app"
    code, out, _ = typed(*command(made, "--to", to, "--out", file, "--json"))
    facts = json.loads(out)
    assert (code, facts["bytes"]) == (0, file.stat().st_size)
    assert (facts["inputs"], facts["outputs"]) == ({"x": "float32:1x8x8"}, {"output": "float32:10"})
    program = f"""
import sys, numpy as np; file = {str(file)!r}
{LOADERS[to]}
held = np.load({str(made / "expected.npz")!r})
for count in (1, 3, 17):
    wanted, found = held["outputs"][:count], run(held["x"][:count])
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
print(sorted(({OURS} | others) & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_int8_says_what_it_costs(made, typed, tmp_path):
    file = tmp_path / "small.onnx"
    code, out, _ = typed(*command(made, "--int8", "--data", made / "labelled.npz", "--out", file, "--json"))
    facts = json.loads(out)
    assert (code, facts["examples"], facts["accuracy_float"]) == (0, 17, 1)
    assert 0 < facts["largest_difference"] < 0.1 * facts["largest_output"]
    assert facts["accuracy_int8"] >= 0.8
    assert facts["bytes"] < 10_000
    code, out, err = typed(*command(made, "--int8", "--out", file, "--force"))
    assert (code, "largest_difference" in out, "accuracy" in out) == (0, True, False)
    assert "accuracy needs --data" in err


def test_a_task_of_a_store_is_exported_by_round(made, typed, tmp_path):
    database, blobs = f"sqlite:///{tmp_path / 'muster.db'}", tmp_path / "blobs"
    open_coordinator_store(database, blobs).close()
    where = ["--db", database, "--blobs", blobs]
    settings = ["--population", "p", "--goal", "3", "--rounds", "2", "--json"]
    task = json.loads(typed("task", "create", "--plan", made / "plan", *settings, *where)[1])["task"]
    code, _, err = typed("model", "export", task, "--round", "0", "--out", tmp_path / "m.onnx", *where)
    assert code == 0, err
    code, _, err = typed("model", "export", task, "--round", "1", "--out", tmp_path / "n.onnx", *where)
    assert (code, "round 1" in err) == (2, True)
    code, _, err = typed("model", "export", task, "--to", "torch", "--out", tmp_path / "m.pt2", *where)
    assert (code, "name it with --model" in err) == (2, True)
    named = ["--to", "torch", "--model", "digits_cnn", "--out", tmp_path / "m.pt2"]
    assert typed("model", "export", task, *named, *where)[0] == 0


def test_over_http_a_task_is_exported_as_on_the_store(made, served, typed, tmp_path):
    here, remote, *_ = served
    settings = ["--population", "p", "--goal", "3", "--rounds", "2", "--json"]
    task = json.loads(typed("task", "create", "--plan", made / "plan", *settings, *remote)[1])["task"]
    for name, where in (("near", here), ("far", remote)):
        code, _, err = typed("model", "export", task, "--out", tmp_path / name, *where)
        assert code == 0, err
    assert (tmp_path / "near").read_bytes() == (tmp_path / "far").read_bytes()
    assert (tmp_path / "far").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--to", "tflite"], 2, "there are onnx, executorch, torch"),
        (["--to", "torch", "--int8"], 2, "so for onnx and not for torch"),
        (["--data", "{made}/labelled.npz"], 2, "examples are for measuring what --int8 costs"),
        (["--out", "{made}/m.safetensors"], 2, "exists; name another file, or replace it with --force"),
        (["--checkpoint", "{made}/labelled.npz"], 1, "is not a file of `muster task checkpoint`"),
        (["--checkpoint", "{made}/other.safetensors"], 1, "is of another model than the plan in"),
        (["--checkpoint", "{made}/none"], 1, "No such file or directory"),
        (["--int8", "--data", "{made}/none.npz"], 1, "the examples cannot be read"),
        (["--int8", "--data", "{made}/expected.npz"], 0, "accuracy needs --data with labels of classes"),
        (["--to", "torch", "--model", "mlp"], 1, "is of another model than mlp"),
    ],
)
def test_wrong_options_are_named(more, code, words, made, typed, tmp_path):
    (made / "other.safetensors").write_bytes(safetensors.numpy.save({"w": np.ones(2, np.float32)}))
    found, _, err = typed(*command(made, "--out", tmp_path / "m", *(word.format(made=made) for word in more)))
    assert (found, words in err) == (code, True), err


def test_a_source_that_is_no_model_is_named(made, typed, tmp_path):
    code, _, err = typed("model", "export", made / "plan", "--out", tmp_path / "m")
    assert (code, "a bundle has no trained model" in err) == (2, True)
    code, _, err = typed("model", "export", tmp_path, "--checkpoint", made / "m.safetensors", "--out", tmp_path / "m")
    assert (code, "is not a plan bundle" in err) == (2, True)
    older = make_bundle(tmp_path / "older")
    (tmp_path / "w").write_bytes(
        safetensors.numpy.save(older.plan.schema.unflatten(np.zeros(older.plan.schema.size, "f4")))
    )
    code, _, err = typed("model", "export", older.folder, "--checkpoint", tmp_path / "w", "--out", tmp_path / "m")
    assert (code, "has no predict graph: it was exported by a version of Muster that wrote none" in err) == (1, True)


def test_onnx_needs_no_torch_and_names_what_it_needs(made, tmp_path):
    for blocked, code, words in (
        ("torch", 0, ""),
        ("onnx", 1, "this command needs onnx: pip install 'muster-fl[export]'"),
    ):
        program = f"import sys; sys.modules[{blocked!r}] = None; from muster.cli import main; main()"
        words_typed = [*map(str, command(made, "--out", tmp_path / blocked))]
        done = subprocess.run(
            [sys.executable, "-c", program, *words_typed], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert words in done.stderr


def test_python_writes_the_same_file(made, typed, tmp_path):
    bundle = Bundle(made / "plan")
    tensors = safetensors.numpy.load_file(made / "m.safetensors")
    result = muster.export_model(bundle, tensors, tmp_path / "a.onnx")
    typed(*command(made, "--out", tmp_path / "b.onnx"))
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes() == result.data
    small = muster.export_model(bundle, made / "m.safetensors", tmp_path / "c.onnx", int8=True)
    assert small.cost.largest > 0
    with pytest.raises(ExportError, match="replace it with force=True"):
        muster.export_model(bundle, tensors, tmp_path / "a.onnx")
    with pytest.raises(SchemaError, match="is missing"):
        muster.export_model(bundle, {}, tmp_path / "d.onnx")
    with pytest.raises(TypeError, match="bundle is of type str; expected a Bundle"):
        muster.export_model("plan", tensors)


@pytest.mark.parametrize("side", ["train", "held-out"])
def test_command_and_python_export_the_same_hold_out(tmp_path, side):
    words = ["--hold-out-examples", 0.2, *(["--on-held-out-examples"] if side == "held-out" else [])]
    made = in_process("export", "logreg", *words, "--out", tmp_path / "command")
    assert made.exit_code == 0, made.output
    bundle = muster.export(
        "logreg", out=tmp_path / "python", hold_out_examples=0.2, on_held_out_examples=side == "held-out"
    )
    assert bundle.plan.examples.hold_out == HoldOut(0.2, side)
    assert Bundle(tmp_path / "command").plan == bundle.plan
    assert verify_bundle(bundle)
    shown = in_process("plan", "show", bundle.folder).stdout
    assert f"0.2 of each device's examples; runs on {side}" in shown
    told = json.loads(in_process("plan", "show", bundle.folder, "--json").stdout)
    assert told["hold_out"] == {"share": 0.2, "side": side}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hold_out_examples": 1.0}, "hold_out_examples must be a number, at least 0 and below 1, not 1.0"),
        ({"hold_out_examples": -0.1}, "hold_out_examples must be a number, at least 0 and below 1, not -0.1"),
        ({"on_held_out_examples": True}, "on_held_out_examples must be left out without hold_out_examples"),
    ],
)
def test_a_hold_out_that_cannot_be_is_refused_before_any_trace(tmp_path, given, words):
    options = [f"--{name.replace('_', '-')}" for name in given] + [
        str(one) for one in given.values() if one is not True
    ]
    made = in_process("export", "logreg", *options, "--out", tmp_path / "plan")
    assert made.exit_code != 0
    assert words in " ".join(f"{made.output}{made.exception}".split())
    with pytest.raises(PlanError, match=words):
        muster.export("logreg", out=tmp_path / "plan", **given)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("command", [["export", "logreg"], ["task", "create", "--plan", "plan"]])
def test_a_percentage_is_no_share(command):
    option = "--hold-out-examples" if command[0] == "export" else "--hold-out-devices"
    needed = [] if command[0] == "export" else ["--population", "p", "--goal", "1", "--rounds", "1"]
    made = in_process(*command, *needed, option, "120%")
    assert made.exit_code != 0
    assert "120%" in f"{made.output}{made.exception}" or option in made.output


def test_a_share_of_another_type_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="hold_out_examples"):
        muster.export("logreg", out=tmp_path / "plan", hold_out_examples="0.2")


COLUMNS = ("field", "element", "mean", "deviation", "values")


@pytest.fixture
def answer(tmp_path):
    """A file of `muster ask normaliser x --json`."""
    path = tmp_path / "answer.json"
    path.write_text(json.dumps({"columns": COLUMNS, "rows": [["x", None, 0.3, 0.2, 640]], "devices": 20}))
    return path


def test_bundles_say_which_input_they_normalise(typed, answer, tmp_path):
    plan = tmp_path / "plan"
    code, out, _ = typed("export", "logreg", "--normalise", answer, "--out", plan, "--json")
    assert (code, json.loads(out)["normalised"]) == (0, ["x"])
    assert json.loads(typed("plan", "show", plan, "--json")[1])["normalised"] == ["x"]
    assert typed("plan", "verify", plan)[0] == 0
    assert "normalised" not in json.loads(typed("export", "logreg", "--out", tmp_path / "other", "--json")[1])


def test_answers_that_do_not_fit_are_one_line(typed, answer, tmp_path):
    answer.write_text(answer.read_text().replace('"x"', '"pixels"'))
    code, _, err = typed("export", "logreg", "--normalise", answer, "--out", tmp_path / "plan")
    assert code != 0
    assert err.splitlines()[-1].startswith("error: logreg has no input 'pixels' to normalise; there are x")
    code, _, err = typed("export", "--all", "--normalise", answer, "--out", tmp_path / "plan")
    assert code == 2
    assert "name the one model whose input it is" in err
