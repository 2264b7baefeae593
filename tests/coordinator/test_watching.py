"""`muster task watch`: the figures of a task's rounds and evaluations, for people, TensorBoard and MLflow."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from coordinator.dashboard import views
from muster.commands.task import figures
from tests.coordinator.bundles import make_evaluation_bundle
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import check_in
from tests.coordinator.test_evaluated import (
    evaluate,
    measure,
    trained as trained,  # noqa: PLC0414 - a fixture
)
from tests.muster.test_cli import in_process
from tests.muster.test_data import scalars


@pytest.fixture
def evaluated(store, trained, desk, tmp_path):
    """The same task, whose first model was evaluated since."""
    task = evaluate(store, make_evaluation_bundle(tmp_path / "evaluation"), f"{trained}@1")
    desk.pass_time(2)
    for given in desk.assign("c", "d"):
        measure(desk, given, 0.5)
    desk.pass_time(1)
    assert store.task(task.id).state.ended
    return trained


def test_every_round_and_evaluation_is_told_once(store, evaluated):
    told = list(figures(store, evaluated))
    assert [(number, "evaluate.loss" in point) for number, point in told] == [(1, False), (1, True), (2, False)]
    assert told[0][1].keys() == {*store.rounds(evaluated)[0].metrics, "seconds"}


def test_a_task_is_watched_into_tensorboard_twice_and_is_there_once(evaluated, database, tmp_path):
    pytest.importorskip("tensorboardX")
    where = ["--db", database, "--blobs", tmp_path / "blobs"]
    for _ in range(2):
        done = in_process("task", "watch", evaluated, "--out", tmp_path / "watch", "--tensorboard", *where)
        assert done.exit_code == 0, done.output
        assert "round 2: " in done.output
    shown = scalars(tmp_path / "watch" / "tensorboard")
    assert {step for name, step in shown if name == "seconds"} == {1, 2}
    assert ("evaluate/loss", 1) in shown
    refused = in_process("task", "watch", evaluated, "--mlflow", *where)
    assert (refused.exit_code, "give --out DIR" in refused.output) == (2, True)


@pytest.mark.filterwarnings("default")  # MLflow's own
def test_a_task_is_one_run_in_mlflow_however_often_it_is_watched(evaluated, database, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store that needs no server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    for _ in range(2):
        words = ["task", "watch", evaluated, "--out", tmp_path / "watch", "--mlflow", "--db", database]
        assert in_process(*words, "--blobs", tmp_path / "blobs").exit_code == 0
    client, run = mlflow.MlflowClient(), (tmp_path / "watch" / "mlflow-run-id").read_text()
    assert sorted(metric.step for metric in client.get_metric_history(run, "seconds")) == [1, 2]
    assert client.get_run(run).data.params["task"] == evaluated


VIEWERS = 60
"""More than there are threads."""


@pytest.fixture
def slow_pages(monkeypatch):
    """The page of a task is not drawn before the event is set, and holds its connection to the database until then."""
    draw, go_on = views.task_page, threading.Event()

    def wait(*args, **kwargs):
        go_on.wait(30)
        return draw(*args, **kwargs)

    monkeypatch.setattr(views, "task_page", wait)
    yield go_on
    go_on.set()


@pytest.mark.security("However much viewers look at, devices are served")
@pytest.mark.parametrize("page", ["", "/events"])
def test_viewers_of_slow_pages_keep_no_device_out(register, served, slow_pages, page):
    address = f"{served.admin}/tasks/{register()}{page}"

    def view(_):
        with httpx2.stream("GET", address, timeout=40) as answer:
            next(answer.iter_raw())
            return answer.status_code

    with ThreadPoolExecutor(VIEWERS) as pool, speaking_to(served.devices, timeout=5) as devices:
        viewing = [pool.submit(view, number) for number in range(VIEWERS)]
        time.sleep(1)
        try:
            assert not any(one.done() for one in viewing)
            for device in "abc":
                assert check_in(devices, device).json()["outcome"] == "accepted"
            assert devices.get("/readyz").status_code == 200
        finally:
            slow_pages.set()
        assert [one.result() for one in viewing] == [200] * VIEWERS
