"""`muster forecast` and `muster.forecast`: tables, JSON, pictures, comparisons, and what is refused."""

from __future__ import annotations

import json

import pytest

import muster
from simulator.errors import ForecastError
from simulator.forecast import twin as forecasting
from tests.coordinator.bundles import make_bundle
from tests.muster.test_cli import in_process

SMALL = ("--devices", 200, "--goal", 5, "--example-s", 20, "--reporting-deadline-s", 7200, "--step-s", 10)


@pytest.fixture(autouse=True)
def equal_twins_run_once(monkeypatch):
    """The doors of a test share what equal twins come to; another test says that a twin repeats itself."""
    made, opened = {}, forecasting.Twin

    def once(config, *, beside):
        key = repr((config, beside))
        if key not in made:
            made[key] = twin = opened(config, beside=beside)
            hours = []
            twin.run(hours.append)
            monkeypatch.setattr(twin, "run", lambda on_hour: [on_hour(hour) for hour in hours])
        return made[key]

    monkeypatch.setattr(forecasting, "Twin", once)


def test_forecast_says_the_same_as_a_table_json_and_python():
    found = json.loads(in_process("forecast", *SMALL, "--json").stdout)
    shown = in_process("forecast", *SMALL)
    given = muster.forecast(devices=200, goal=5, example_s=20.0, reporting_deadline_s=7200.0, step_s=10.0)
    assert found["rounds"] == given.rounds > 0
    assert found["check_ins"] == given.check_ins
    assert found["cpu_s"] > 0
    assert found["peak_mb"] > 0
    assert f"rounds                   {given.rounds}\n" in shown.stdout
    assert "100 rounds take longer" in shown.stderr


def test_values_of_a_setting_are_compared_in_a_table_and_a_picture(tmp_path):
    picture = tmp_path / "rounds.svg"
    shown = in_process("forecast", *SMALL, "--vary", "goal=5,10", "--plot", picture)
    assert "goal=5 " in shown.stdout
    assert "goal=10" in shown.stdout
    assert "goal=10" in picture.read_text()
    found = json.loads(in_process("forecast", *SMALL, "--vary", "goal=5,10", "--json").stdout)
    assert found["goal=5"]["rounds"] > found["goal=10"]["rounds"]


def test_tasks_of_a_population_are_forecast_together(tmp_path):
    task = tmp_path / "words.toml"
    task.write_text("goal = 5\nexample_s = 20.0\nreporting_deadline_s = 7200.0\n")
    shown = in_process("forecast", *SMALL, "--beside", task)
    assert "this task" in shown.stdout
    assert "words" in shown.stdout
    found = json.loads(in_process("forecast", *SMALL, "--beside", task, "--json").stdout)
    given = muster.forecast(
        devices=200,
        goal=5,
        example_s=20.0,
        reporting_deadline_s=7200.0,
        step_s=10.0,
        beside=[{"goal": 5, "example_s": 20.0, "reporting_deadline_s": 7200.0}],
    )
    assert [one["rounds"] for one in (found, *found["beside"])] == [given.rounds, given.beside[0].rounds]
    task.write_text("devices = 5\n")
    refused = in_process("forecast", *SMALL, "--beside", task)
    assert "words: devices is of the population" in refused.output + str(refused.exception)


def test_plan_gives_the_costs_that_are_not_given(tmp_path):
    bundle = make_bundle(tmp_path / "plan")
    found = json.loads(in_process("forecast", *SMALL, "--plan", bundle.folder, "--bytes-up", 7, "--json").stdout)
    given = muster.forecast(
        plan=bundle, bytes_up=7, devices=200, goal=5, example_s=20.0, reporting_deadline_s=7200.0, step_s=10.0
    )
    assert found["phone"]["bytes"] == given.phone.bytes
    assert given.phone.bytes < 1000


def test_drawn_cohorts_train_and_accuracy_has_its_hours(tmp_path):
    run, picture = tmp_path / "run.toml", tmp_path / "accuracy.svg"
    run.write_text('model = "logreg"\nrounds = 4\nevaluate_every = 2\n')
    shown = in_process("forecast", *SMALL, "--train", run, "--plot", picture, "--json")
    found = json.loads(shown.stdout)
    again = muster.forecast(
        train={"model": "logreg", "rounds": 4, "evaluate_every": 2},
        devices=200,
        goal=5,
        example_s=20.0,
        reporting_deadline_s=7200.0,
        step_s=10.0,
    )
    hours = [hour for hour, _ in found["accuracy"]]
    assert len(hours) == 2
    assert 0 < hours[0] < hours[1] < 24
    assert [list(one) for one in again.accuracy] == found["accuracy"]
    assert "accuracy, unseen users" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--vary", "goal"), "'goal' is not of the form goal=50,100,200"),
        (("--vary", "goals=1,2"), "goals"),
        (("--vary", "goal=5,0"), "goal must be"),
        (("--days", "0"), "days must be a whole number from 1 to 366"),
        (("--trace", "nowhere.csv"), "trace nowhere.csv"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, words):
    refused = in_process("forecast", *SMALL, *options)
    assert refused.exit_code != 0
    assert words in refused.output + str(refused.exception)


def test_population_that_fills_no_round_is_refused_in_python_too():
    with pytest.raises(ForecastError, match="devices=10 leaves 10 of 10 devices"):
        muster.forecast(devices=10)
