import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from device_runtime import monitor
from device_runtime.clock import Clock
from device_runtime.conditions import Conditions, Requirements
from device_runtime.errors import StateError
from device_runtime.session import run_session
from device_runtime.state import journal
from device_runtime.state.database import open_database
from device_runtime.state.folder import only_session
from device_runtime.state.journal import Journal, read_journal
from fedcore.wire.messages import Abort, Rejected, encode
from muster.app import app
from tests.device_runtime.coordinator import WINDOW, answer, refusal


def reject(coordinator, reason="no-task", times=1):
    coordinator.faults["check-in"] += [answer(encode(Rejected(reason, WINDOW)))] * times


def test_entry_says_what_was_trained_for_whom_and_what_was_sent(coordinator, config):
    outcome = run_session(config)
    (entry,) = read_journal(config.state)
    assert (entry.coordinator, entry.population) == (coordinator.url, "phones")
    assert (entry.task, entry.round, entry.attempt, entry.assignment) == ("t-1", 2, 1, "a-1")
    assert (entry.plan, entry.plan_sha256) == ("linear", coordinator.plan.sha256)
    assert (entry.outcome, entry.reason, entry.examples, entry.steps) == ("reported", "", 10, 9)
    assert (entry.bytes_up, entry.bytes_down) == (outcome.bytes_up, outcome.bytes_down)
    assert len(entry.receipt) == 64
    assert entry.compute_s > 0
    assert entry.opened <= entry.closed


def test_sessions_without_work_and_refusals_are_in_the_journal(coordinator, config):
    coordinator.faults["check-in"] = [refusal("malformed-message", "no such thing")]
    run_session(config)
    reject(coordinator)
    run_session(config)
    first, second = read_journal(config.state)
    assert (first.outcome, first.reason, first.detail) == ("failed", "malformed-message", "no such thing")
    assert (second.outcome, second.reason) == ("rejected", "no-task")


def test_consecutive_sessions_without_work_are_one_entry(coordinator, config):
    reject(coordinator, times=3)
    sent = sum(run_session(config).bytes_up for _ in range(3))
    run_session(config)
    run_session(config)
    reject(coordinator)
    run_session(config)
    entries = read_journal(config.state)
    assert [(entry.outcome, entry.times) for entry in entries] == [
        ("rejected", 3),
        ("reported", 1),
        ("reported", 1),
        ("rejected", 1),
    ]
    assert entries[0].bytes_up == sent


def test_why_the_device_gave_up_is_there_without_what_may_quote_data(coordinator, config, examples):
    np.savez(config.examples, x=np.array([["secret"] * 3] * 10), y=examples["y"])
    outcome = run_session(config)
    (entry,) = read_journal(config.state)
    assert (entry.outcome, entry.reason) == (outcome.outcome, outcome.reason) == ("aborted", "invalid-examples")
    assert "'x'" in entry.detail
    written = b"".join(path.read_bytes() for path in config.state.rglob("*") if path.is_file())
    assert b"secret" not in written
    assert str(config.examples).encode() not in written


def test_the_journal_is_bounded_and_work_is_not_pushed_out_by_idleness(config, monkeypatch):
    monkeypatch.setattr(journal, "MOST_WITH_WORK", 3)
    monkeypatch.setattr(journal, "MOST_WITHOUT", 2)
    with only_session(config.state), open_database(config.state, Clock()) as database:
        made = Journal(database, Clock())
        for number in range(20):
            index, entry = made.open("c", "p")
            work = {"task": "t"} if number % 4 == 0 else {}
            made.close(index, replace_entry(entry, outcome=f"o{number}", **work))
    kept = [(entry.outcome, entry.task) for entry in read_journal(config.state)]
    assert kept == [("o8", "t"), ("o12", "t"), ("o16", "t"), ("o18", ""), ("o19", "")]


def replace_entry(entry, **changes):
    return type(entry)(**{name: getattr(entry, name) for name in entry.__struct_fields__} | changes)


def test_open_entry_is_running_with_its_session_and_interrupted_after(config):
    with only_session(config.state), open_database(config.state, Clock()) as database:
        Journal(database, Clock()).open("c", "p")
        assert [entry.outcome for entry in read_journal(config.state)] == ["running"]
    assert [entry.outcome for entry in read_journal(config.state)] == ["interrupted"]


def test_a_folder_without_a_journal_is_named_and_left_alone(tmp_path):
    with pytest.raises(StateError, match="no device has run"):
        read_journal(tmp_path)
    assert list(tmp_path.iterdir()) == []


def show(config, *options):
    result = CliRunner().invoke(app, ["device", "log", "--state", str(config.state), *options], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_people_read_the_journal_as_a_table_and_programs_as_json(coordinator, config):
    coordinator.lies = {"purpose": "It teaches\x1b[2J a model."}
    run_session(config)
    reject(coordinator, times=2)
    run_session(config)
    run_session(config)
    table = show(config)
    for word in (
        r"It teaches\u001b[2J a model.",
        "reported",
        "receipt",
        "t-1 round 2",
        "linear",
        "phones",
        "10 examples",
        "rejected ×2",
        "(no-task)",
    ):
        assert word in table
    entries = json.loads(show(config, "--json"))
    assert [entry["outcome"] for entry in entries] == ["reported", "rejected"]
    assert [entry["outcome"] for entry in json.loads(show(config, "--json", "--last", "1"))] == ["rejected"]


def test_failed_condition_is_told_to_the_owner_not_the_coordinator(coordinator, config, monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_EVERY_S", 0.0)
    levels = iter([0.9, 0.9, 0.9])
    source = lambda: Conditions(battery=next(levels, 0.07))  # noqa: E731
    outcome = run_session(replace(config, conditions=source, requirements=Requirements(min_battery=0.2)))
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("aborted", "conditions", "transient")
    assert "battery 7 %" in read_journal(config.state)[0].detail
    assert coordinator.aborts == [Abort("conditions")]
