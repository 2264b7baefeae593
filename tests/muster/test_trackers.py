"""Trackers: TensorBoard and MLflow get the figures of every round once, also when a run is resumed."""

import os
import signal
import struct
import sys
from contextlib import closing

import msgspec
import pytest

from simulator.configuration import SimulationConfig
from simulator.engines.workers.forked import ended_each
from simulator.errors import RunError
from simulator.runs.reading import flat_of, read_run
from simulator.runs.running import resume_run, start_run
from simulator.runs.trackers import MLflow, TensorBoard

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
