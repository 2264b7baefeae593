"""The device runtime in TypeScript: its tests, its package, and rounds with a coordinator."""

import json
import re
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
import safetensors.numpy
import torch
from msgspec.structs import replace

from coordinator.rules.aggregation import aggregate
from coordinator.store.tasks import TaskSettings
from device_runtime import errors as device_errors
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.config import DeviceConfig
from device_runtime.runner import execute
from device_runtime.session import run_session
from export.build import build_plan, export_bundle
from export.model import Model
from export.models import MODELS, load
from export.predict import build_predict
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.batching import StreamKey
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef
from fedcore.signing import SigningKey
from secagg import errors as secagg_errors
from simulator import datasets
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.local_work import BATCH, EXAMPLES, LocalWork, drawn
from tests.device_runtime.node import IS_NEW, JS_FOLDER, command, device_words, node
from tests.questions.hand_made import asked
from tests.questions.labels import LABELS

LONG = pytest.mark.long
# Graphs that a plan must name, and nobody reads.
HAND = {name: BlobRef.of(b"") for name in ("train.begin", "train.step", "report")}
# Convolutions, and dense layers with what is frozen, also in few bits: the sample that runs always.
ADAPTED = [f"tests.export.models:digits_{kind}" for kind in ("adapted", "in_8_bits", "in_4_bits")]


def reports(model, algorithm, examples, folder):
    """The report of a plan that Node makes, and the one that Python does, as bytes."""
    work = LocalWork.of(model, algorithm, examples)
    work.write(folder)
    subprocess.run(command("tests/train.ts", folder), check=True)
    return (folder / "report.safetensors").read_bytes(), work.body(work.train())


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
    source = (JS_FOLDER / "src" / "core" / file).read_text()
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


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with the package, packed and unpacked, and the packages that it depends on."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    node()
    folder = tmp_path_factory.mktemp("packed")
    subprocess.run(
        [npm, "run", "--silent", "package", "--", "--pack-destination", folder],
        cwd=JS_FOLDER,
        check=True,
        capture_output=True,
    )
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    package = folder / "node_modules" / "@muster-fl" / "device"
    package.parent.mkdir(parents=True)
    (folder / "package").rename(package)
    for other in (JS_FOLDER / "node_modules").iterdir():
        (folder / "node_modules" / other.name).symlink_to(other)
    return folder


def test_the_package_names_its_sources_and_all_packages_that_they_import():
    package = json.loads((JS_FOLDER / "package.json").read_text())
    entries = [*package["exports"].values(), *package["bin"].values()]
    sources = [JS_FOLDER / entry.replace("dist/", "src/").replace(".js", ".ts") for entry in entries]
    assert [source for source in sources if not source.is_file()] == []
    text = "".join(source.read_text() for source in (JS_FOLDER / "src").rglob("*.ts"))
    imported = set(re.findall(r' from "((?:@[^/"]+/)?[^./":]+)[^":]*";', text))
    assert imported <= {*package["dependencies"], *package["peerDependencies"]}


@pytest.mark.long
def test_the_package_holds_javascript_with_types_readme_and_licence(packed):
    package = packed / "node_modules" / "@muster-fl" / "device"
    found = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert found >= {"README.md", "LICENSE", "package.json", "dist/node/main.js", "dist/core/index.d.ts"}
    assert {name.partition(".")[2] for name in found if name.startswith("dist/")} == {"js", "d.ts"}


@pytest.mark.long
def test_the_reference_is_made_and_no_exported_name_lacks_a_comment():
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    subprocess.run([npm, "run", "--silent", "docs"], cwd=JS_FOLDER, check=True)
    assert (JS_FOLDER / "dist" / "reference" / "classes" / "web.BrowserDevice.html").is_file()


@pytest.mark.long
def test_hermes_gives_the_answers_of_python():
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm")
    node()
    ran = subprocess.run([npm, "run", "--silent", "hermes"], cwd=JS_FOLDER, check=True, capture_output=True, text=True)
    assert len(re.findall(r"^.+: [1-9]\d* equal, \d+ ms$", ran.stdout, re.MULTILINE)) == 10


@pytest.mark.long
def test_a_device_of_the_package_takes_part_without_the_sources(packed, coordinator, examples):
    assert coordinator.reports == []
    program = packed / "node_modules" / "@muster-fl" / "device" / "dist" / "node" / "main.js"
    words = device_words(packed / "device", coordinator.url, "phones", examples)
    ended = subprocess.run([node(), program, *words], cwd=packed, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["outcome"] == "reported"
    (packed / "node_modules" / "onnxruntime-node").unlink()
    lacking = subprocess.run([node(), program, *words], cwd=packed, capture_output=True, text=True, check=False)
    assert (lacking.returncode, "npm install onnxruntime-node" in lacking.stderr) == (2, True)


ALGORITHM = create("fedavg", {"batch_size": 8})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return export_bundle(Model(load("logreg", (1, 8, 8), 10), 3), ALGORITHM, tmp_path_factory.mktemp("plan") / "plan")


def start(words):
    return subprocess.Popen(command("src/node/main.ts", *words), stdout=subprocess.PIPE, text=True)


def outcome_of(process):
    return json.loads(process.communicate(timeout=120)[0])


def values_in(store, task, number, slot, examples):
    """The plan, and the unweighted values and weight that Python's runner gives for a slot of a round."""
    record = store.task(task)
    plan = store.plan(record.plan_sha256)
    graphs = {name: OnnxRuntime().load(store.blobs.get(ref.sha256), name) for name, ref in plan.graphs["onnx"].items()}
    before = {"params": store.checkpoint(task, number - 1)["params"]}
    key = StreamKey(record.settings.seed, number, slot)
    result = execute(plan, graphs, before, examples, key)
    return plan, before, result


def test_a_round_in_clear_commits_the_bits_that_python_would_report(tmp_path, coordinators, bundle):
    users, _ = datasets.users("digits", None, 1)
    with coordinators.local(tmp_path) as local:
        settings = TaskSettings(population="p", goal=1, rounds=1, over_selection=1.0, seed=2**53 + 3)
        task = local.create_task(bundle, settings, SigningKey.new(tmp_path / "release.pem")).id
        words = device_words(tmp_path / "device", local.url, "p", users.shard(0))
        outcome = outcome_of(start(words))
        wait_until(lambda: [one.state for one in local.store.rounds(task)] == ["committed"])
        (row,) = local.store.cohort(task, 1)
        plan, before, result = values_in(local.store, task, 1, row.slot, users.shard(0))
        report = plan.report.weigh(result.values, result.weight).astype(np.float64)
        after = local.store.checkpoint(task, 1)["params"]
    assert (outcome["outcome"], outcome["task"], outcome["steps"]) == ("reported", task, result.steps)
    np.testing.assert_array_equal(after, aggregate(plan.report, ALGORITHM, before, report).state["params"])


def test_a_question_is_answered_by_devices_of_both_kinds(tmp_path, coordinators):
    question = asked(minimum_devices=2)
    bundle = export_bundle(Model(question.spec()), question.algorithm(), tmp_path / "plan")
    examples = {
        "steps": np.array([2**30 + 1, 5, 7]), "speed": np.array([1, 3, 9], np.float32),
        "y": np.array([0, 0, 2], np.uint8),
    }  # fmt: skip
    with coordinators.local(tmp_path) as local:
        settings = TaskSettings(population="p", goal=2, rounds=1, over_selection=1.0)
        task = local.create_task(bundle, settings, SigningKey.new(tmp_path / "release.pem")).id
        node = start(device_words(tmp_path / "node", local.url, "p", examples))
        np.savez(tmp_path / "examples.npz", **examples)
        ours = {"coordinator": local.url, "population": "p", "examples": tmp_path / "examples.npz"}
        ours |= {"state": tmp_path / "python"}
        python = run_session(DeviceConfig(**ours))
        assert (python.outcome, outcome_of(node)["outcome"]) == ("reported", "reported")
        wait_until(lambda: local.store.answer(task).over)
        found = local.store.answer(task)
    assert found.rows == ((0, 2, 4, 2 * (2**30 + 6), 2.0), (2, 2, 2, 14, 4.0))
    assert found.devices == 2
