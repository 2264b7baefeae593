"""Data and trackers."""

import json
import os
import signal
import struct
import sys
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from fedcore.bundle import Bundle
from simulator.configuration import SimulationConfig
from simulator.datasets import DATASETS, facts_of, folder_of, label_counts
from simulator.datasets.bundled import SOURCES
from simulator.engines.processes import ended_each
from simulator.errors import RunError
from simulator.population import Population
from simulator.runs.reading import flat_of, read_run
from simulator.runs.running import resume_run, start_run
from simulator.runs.trackers import MLflow, TensorBoard

DOCUMENT = Path(__file__).parents[2] / "docs" / "datasets.md"


def test_list_names_every_data_set(typed):
    code, output, words = typed("data", "list")
    assert code == 0, words
    assert [line.split()[0] for line in output.splitlines()[2:]] == list(DATASETS)
    listed = json.loads(typed("data", "list", "--json")[1])
    assert [one["name"] for one in listed] == list(DATASETS)
    assert listed[0]["clients"] == 75


def test_a_table_of_ones_own_leads_from_a_file_to_a_plan(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [(f"u{row % 9}", 100 + row % 3, 1e-3 * (row % 5), ("sit", "run", "walk")[row % 3]) for row in range(270)]
    Path("t.csv").write_text("who,heart,speed,did\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    table = ["--dataset", "t.csv", "--user", "who", "--inputs", "heart,speed", "--target", "did"]
    assert typed("data", "show", table[1], *table[2:])[1].rstrip().endswith("walk")
    trained = ["--rounds", 20, "--cohort", 4, "--set", "client_lr=0.5", "--evaluate-every", 20]
    code, output, words = typed("simulate", *table, *trained, "--hold-out-examples", 0.1, "--out", "run", "--json")
    assert code == 0, words
    result = json.loads(output)
    assert (result["model"], result["standardised"], result["class_names"]) == ("mlp", True, ["run", "sit", "walk"])
    assert result["test_accuracy"] == 1  # which takes the standardised heart rate: 100, 101 or 102
    raw = json.loads(typed("simulate", "mlp", *table, *trained, "--json")[1])
    assert raw["test_accuracy"] < 0.7
    code, _, words = typed("export", "--run", "run", "--out", "plan", "--json")
    assert code == 0, words
    bundle = Bundle(Path("plan"))
    assert bundle.manifest.class_names == ("run", "sit", "walk")
    assert bundle.plan.normalised == {"x": 2}
    assert bundle.plan.examples.hold_out.share == 0.1
    assert bundle.plan.examples.fields[1].high == 3
    code, output, words = typed(
        "ask", "SELECT y, COUNT(*) AS n FROM examples GROUP BY y", *table, "--minimum-devices", 1, "--json"
    )
    assert (code, json.loads(output)["rows"]) == (0, [[0, 90], [1, 90], [2, 90]]), words


def test_a_table_without_its_columns_is_told_which_to_name(typed, tmp_path):
    (tmp_path / "t.csv").write_text("user,a,y\nu,1,2\n")
    code, _, words = typed("simulate", "--dataset", tmp_path / "t.csv")
    assert (code, "the columns of a table, with --inputs and --target" in words) == (2, True)
    code, _, words = typed("simulate", "--dataset", tmp_path / "nix.csv", "--inputs", "a", "--target", "y")
    assert (code, "nix.csv does not exist" in words) == (2, True)
    code, _, words = typed("export", "mlp", "--run", tmp_path)
    assert (code, "the run says what is exported" in words) == (2, True)
    assert typed("export", "--run", tmp_path, "--algorithm", "fedadam") == (2, "", words)
    code, _, words = typed("ask", "SELECT COUNT(*) FROM examples", "--population", "p", "--user", "who")
    assert (code, "columns are of a table, which --dataset names" in words) == (2, True)


def test_show_tells_users_sizes_and_classes(typed):
    code, output, words = typed("data", "show", "digits")
    assert code == 0, words
    assert "75" in output
    assert "1797" in output
    assert "█" * 40 in output
    facts = json.loads(typed("data", "show", "digits", "--partition", "shards:2", "--clients", 30, "--json")[1])
    assert (facts["users"], facts["classes"], sum(facts["labels"])) == (30, 10, 1797)
    assert facts["per_user"]["p0"] >= 58
    assert facts["classes_per_user"] < 4
    assert facts["fields"] == {"x": "float32[1, 8, 8]", "y": "int64[]"}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_show_draws_the_mix_of_classes(typed, tmp_path, ending):
    picture = tmp_path / f"mix.{ending}"
    code, _, words = typed("data", "show", "digits", "--out", picture)
    assert code == 0, words
    if ending == "svg":
        assert "user, by largest class" in "".join(ElementTree.parse(picture).getroot().itertext())
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "no data set is called 'nowhere'"),
        (
            ("wisdm", "--data", "."),
            "name the folder that holds wisdm/ with --data; `muster data show wisdm` says where it comes from",
        ),
        (("digits", "--out", "mix.pdf"), "must end in .svg or .png"),
        (("quadratics", "--out", "mix.png"), "quadratics has no classes to draw"),
        (("digits", "--out", "none/mix.png"), "error: none/mix.png cannot be written: No such file or directory"),
    ],
)
def test_show_says_what_is_wrong(typed, arguments, message):
    code, _, words = typed("data", "show", *arguments)
    assert code == (1 if "written" in message else 2)
    assert message in " ".join(words.split())


def test_tokens_are_counted_without_padding():
    users = Population.of(
        ["a", "b"],
        [{"x": np.array([[1, 2]]), "y": np.array([[2, 0]])}, {"x": np.array([[3, 3]]), "y": np.array([[3, 3]])}],
    )
    np.testing.assert_array_equal(label_counts(users), [[0, 0, 1, 0], [0, 0, 0, 2]])
    assert facts_of(users).labels == [0, 0, 1, 2]
    assert facts_of(Population.of(["a"], [{"x": np.zeros(3, np.float32)}])).labels == []


@pytest.mark.parametrize("classes", [7, 5000])
def test_labels_are_those_of_every_users_own_count(classes):
    source = np.random.default_rng(0)
    shards = [{"x": np.zeros(9, np.float32), "y": source.integers(0, classes, 9)} for _ in range(12)]
    users = Population.of([str(user) for user in range(12)], shards, classes)
    counts = label_counts(users)
    facts = facts_of(users)
    assert facts.labels == counts.sum(0).tolist()
    assert facts.classes_per_user == (counts > 0).sum(1).mean()


def test_each_data_set_on_disk_says_its_source_and_its_files(typed):
    on_disk = [folder_of(name) for name, dataset in DATASETS.items() if dataset.on_disk]
    assert list(SOURCES) == list(dict.fromkeys(on_disk))
    page = DOCUMENT.read_text()
    for source in SOURCES.values():
        for file in (file for names in source.files for file in names if "*" not in file):
            assert file in page, file
    code, output, words = typed("data", "show", "stackoverflow")
    assert code == 0, words
    for says in (
        "https://storage.googleapis.com",
        "ask its publisher",
        "stackoverflow.word_count or stackoverflow_train.h5 and",
        "DIR/stackoverflow/",
    ):
        assert says in output
    assert json.loads(typed("data", "list", "--json")[1])[2]["licence"].startswith("MIT")


def test_check_has_a_line_for_each_finding(typed, tmp_path):
    for folder in ("mnist_10k", "shakespeare", "svmlight", "wisdn"):
        (tmp_path / folder).mkdir()
    np.savez(tmp_path / "mnist_10k" / "mnist_10k.npz", x=np.zeros((4, 28, 28), np.uint8), y=np.zeros(4, np.int64))
    (tmp_path / "svmlight" / "ann.svm").write_text("1 1:0.5\n0 1:2\n")
    code, output, words = typed("data", "check", tmp_path)
    assert code == 1, words
    lines = [" ".join(line.split()) for line in output.splitlines()[2:]]
    assert [line.split()[:2] for line in lines] == [
        *(["shakespeare", "wrong"], ["mnist_10k", "note"], ["mnist_10k", "wrong"]),
        *(["svmlight", "ok"], ["wisdn", "note"]),
    ]
    assert "shakespeare lacks clients.jsonl; `muster data show shakespeare` says its source" in lines[0]
    assert "it holds 4 examples, not 10,000" in lines[2]
    assert "1 users, 2 examples, x float32[2], y int64[], 2 classes" in lines[3]
    assert "did you mean wisdm?" in lines[4]
    assert typed("data", "check", tmp_path / "svmlight")[0] == 0
    (tmp_path / "svmlight" / "ann.svm").write_text("2 1:0.5\n")
    code, output, _ = typed("data", "check", tmp_path / "svmlight", "--json")
    assert (code, json.loads(output)[0]["status"], "ann.svm:1: the label is '2'" in output) == (1, "wrong", True)
    assert typed("data", "check", tmp_path / "none")[0] == 2


def test_check_looks_at_your_own_users(typed, tmp_path):
    np.savez(tmp_path / "ann.npz", x=np.ones((3, 2), np.float32), y=np.arange(3))
    assert "ok" in typed("data", "check", tmp_path)[1]
    np.savez(tmp_path / "bob.npz", x=np.ones((3, 4), np.float32), y=np.arange(3))
    code, output, _ = typed("data", "check", tmp_path)
    assert (code, "all need the same fields" in output) == (1, True)


CONFIG = SimulationConfig(model="logreg", rounds=4, cohort=3, evaluate_every=2, engine="torch", processes=1)


class Stop(Exception):
    """An end in the middle of a run."""


def killed_and_resumed(folder, make):
    """A run that ends after its third round, of which two have a checkpoint's worth of work lost, and is resumed."""

    def run(act):
        with closing(make()) as tracker:

            def on_round(number, point):
                tracker(number, point)
                if act is start_run and number == 3:
                    raise Stop

            act(folder, CONFIG, on_round)

    with pytest.raises(Stop):
        run(start_run)
    run(resume_run)
    return read_run(folder)


def scalars(folder):
    """The scalars that TensorBoard shows, by name and step: a new start takes away the steps from its own on."""
    from tensorboardX.proto.event_pb2 import Event  # only some tests need it

    shown = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log"):
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in shown
                shown[value.tag, event.step] = value.simple_value
    return shown


def test_tensorboard_shows_every_figure_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboardX")
    folder = tmp_path / "run"
    run = killed_and_resumed(folder, lambda: TensorBoard(folder))
    expected = {
        (name.replace(".", "/"), point["round"]): pytest.approx(value)
        for point in run.points
        for name, value in point.items()
        if name not in {"round", "seconds"}
    }
    assert scalars(folder / "tensorboard") == expected
    assert ("test/accuracy", 4) in expected


def test_tensorboard_has_the_rounds_of_a_killed_process(tmp_path):
    pytest.importorskip("tensorboardX")
    folder = tmp_path / "run"

    def run_and_die():
        tracker = TensorBoard(folder)

        def on_round(number, point):
            tracker(number, point)
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        start_run(folder, CONFIG, on_round, checkpoint_after_s=0)

    ((_, end),) = ended_each([run_and_die], msgspec.json.Decoder(None), 1)
    assert "exit code -9" in str(end)
    with closing(TensorBoard(folder)) as tracker:
        resume_run(folder, CONFIG, tracker)
    assert {step for name, step in scalars(folder / "tensorboard") if name == "train/loss"} == {1, 2, 3, 4}


@pytest.mark.filterwarnings("default")  # MLflow's own
def test_mlflow_has_a_resumed_run_as_one_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store that needs no server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    folder = tmp_path / "run"
    run = killed_and_resumed(folder, lambda: MLflow(folder, flat_of(CONFIG), "go on with --resume"))
    client = mlflow.MlflowClient()
    kept = client.get_run((folder / "mlflow-run-id").read_text())
    assert (kept.data.params["model"], kept.info.status, kept.info.run_name) == ("logreg", "FINISHED", "run")
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(kept.info.run_id, "test.loss")]
    assert sorted(losses) == [(point["round"], point["test.loss"]) for point in run.curve]


@pytest.mark.filterwarnings("default")  # MLflow's own
def test_an_mlflow_that_does_not_take_a_run_is_named(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mlflow-run-id").write_text("0" * 32)  # of another place
    with (
        closing(MLflow(tmp_path / "run", {}, "go on with --resume")) as tracker,
        pytest.raises(RunError, match=r"mlruns.*--resume"),
    ):
        tracker(1, {"round": 1, "train.loss": 1.0})


@pytest.mark.parametrize(("option", "module"), [("--tensorboard", "tensorboardX"), ("--mlflow", "mlflow")])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(typed, tmp_path, monkeypatch, option, module):
    monkeypatch.setitem(sys.modules, module, None)
    status, _, err = typed("simulate", "--model", "logreg", "--out", tmp_path / "run", option)
    assert (status, f"{module} is not installed: pip install 'muster-fl[{option[2:]}]'" in err) == (2, True), err
    assert list(tmp_path.iterdir()) == []
    status, _, err = typed("simulate", "--model", "logreg", option)
    assert (status, "only a run in a folder is logged" in err) == (2, True), err
