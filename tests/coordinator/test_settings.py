"""The coordinator's settings, and the column that keeps a task's."""

from __future__ import annotations

import dataclasses
import json
import sys

import pydantic
import pytest
from sqlalchemy import text

from coordinator.errors import InvalidSettings, UnusableStore
from coordinator.rules.task_settings import Secagg, TaskSettings
from coordinator.settings import Settings, effective, load_settings
from coordinator.store.database import Database
from fedcore.schedule import ServerSchedule
from tests.coordinator.conftest import states
from tests.coordinator.test_store import connected, dump
from tests.forked import COMMAND, forked
from tests.muster.test_cli import in_process, muster


@pytest.fixture
def toml(tmp_path, monkeypatch):
    """Writes the TOML file of settings that is in force; answers its path."""

    def write(text):
        path = tmp_path / "muster.toml"
        path.write_text(text)
        monkeypatch.setenv("MUSTER_CONFIG", str(path))
        return str(path)

    return write


def test_settings_come_from_arguments_then_environment_then_file(toml, monkeypatch):
    path = toml('port = 1\nhost = "0.0.0.0"\nmax_wait_s = 7\n')
    monkeypatch.setenv("MUSTER_PORT", "2")
    monkeypatch.setenv("MUSTER_HOST", "::1")
    given = {"host": "localhost"}
    settings = load_settings(given)
    assert (settings.host, settings.port, settings.max_wait_s, settings.queue_limit) == ("localhost", 2, 7, 4096)
    sources = {one.name: one.source for one in effective(settings, given)}
    assert set(sources) == set(Settings.model_fields)
    assert (sources["host"], sources["port"]) == ("argument", "MUSTER_PORT")
    assert (sources["max_wait_s"], sources["queue_limit"]) == (path, "default")


@pytest.mark.parametrize(
    ("text", "variables", "says"),
    [
        ("prot = 1", {}, "prot ({path}): there is no such setting; did you mean port?"),
        ("port = 70000", {}, "port ({path}): it must be at most 65535"),
        ("", {"MUSTER_PORT": "http"}, "port (MUSTER_PORT): it must be a whole number"),
        ("", {"MUSTER_PROT": "1"}, "MUSTER_PROT (environment): there is no such setting; did you mean MUSTER_PORT?"),
        ("", {"MUSTER_TRUSTED_PROXIES": "nginx"}, "trusted_proxies (MUSTER_TRUSTED_PROXIES): 'nginx' does not appear"),
        ("max_wait_s = inf", {}, "max_wait_s ({path}): it must be a finite number"),
        ("keep_assignments_days = 0", {}, "keep_assignments_days ({path}): it must be at least 1"),
        ("", {"MUSTER_ENROLMENT_SECRET_FILE": "no.secret"}, "enrolment_secret_file names 'no.secret', which is not a"),
        ("", {"MUSTER_TLS_CERT": __file__, "MUSTER_TLS_KEY": "no.pem"}, "tls_key names 'no.pem', which is not a file"),
        ("", {"MUSTER_TLS_CERT": "cert.pem"}, "tls_cert and tls_key go together"),
        (
            "loopback_viewer = true",
            {"MUSTER_ADMIN_HOST": "0.0.0.0"},
            "loopback_viewer needs an admin_host of 127.0.0.1",
        ),
        ('alert_webhook = "ftp://erin:s3cret@here/x"', {}, "alert_webhook ({path}): ftp://… is no address for alerts;"),
        (
            'alert_webhook = "alerts.example/s3cret"',
            {},
            "alert_webhook ({path}): it is no address for alerts; give one",
        ),
        (
            "",
            {"MUSTER_ALERT_WEBHOOK": "http://s3cret@alerts.example:81/s3cret?s3cret"},
            "alert_webhook (MUSTER_ALERT_WEBHOOK): http://alerts.example:81 is not this machine, and http protects",
        ),
        ('alert_webhook = "http://[::1]/x"', {}, "alert_webhook and alert_webhook_secret_file go together"),
        (
            'alert_webhook = "https://alerts.example"\nalert_webhook_secret_file = "no.secret"',
            {},
            "alert_webhook_secret_file names 'no.secret', which is not a file",
        ),
        ("port = = 1", {}, "{path}: Invalid value"),
    ],
)
def test_wrong_or_unknown_setting_is_one_line_with_its_source(toml, monkeypatch, text, variables, says):
    path = toml(text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidSettings) as caught:
        load_settings({})
    assert says.replace("{path}", path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"0123456789abcdef", 0o604, "everybody on this machine may read or change the webhook's secret: chmod 600 "),
        (b"0123456789abcde\n", 0o600, "holds 15 bytes; a webhook's secret has at least 16"),
        (b"0123456789abcdef", 0o640, None),
    ],
)
def test_a_webhooks_secret_is_long_and_not_for_everybody(tmp_path, content, mode, says):
    secret = tmp_path / "webhook.secret"
    secret.write_bytes(content)
    secret.chmod(mode)
    given = {"alert_webhook": "https://erin:s3cret@alerts.example/x?s3cret", "alert_webhook_secret_file": secret}
    if says is None:
        (shown,) = [one.value for one in effective(load_settings(given), given) if one.name == "alert_webhook"]
        assert shown == "https://alerts.example"
        return
    with pytest.raises(InvalidSettings, match=says) as caught:
        load_settings(given)
    assert "\n" not in str(caught.value)


def test_missing_file_of_settings_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_CONFIG", str(tmp_path / "missing.toml"))
    with pytest.raises(InvalidSettings, match=r"missing\.toml"):
        load_settings({})


def test_the_constructor_checks_too():
    with pytest.raises(pydantic.ValidationError, match="port"):
        Settings(port=70000)


def test_config_shows_settings_without_passwords_and_refuses_wrong(monkeypatch):
    for url, shows in (
        ("postgresql://muster:s3cret@db/muster", "muster:***@db/muster"),
        ("postgresql://muster:a/s3cret@db/muster", "muster:***@db/muster"),
        ("postgresql://muster:a:s3cret@db/muster", "muster:***@db/muster"),
        ("postgresql://db/muster?user=muster&password=s3cret", "postgresql://db/muster"),
        ("s3cret", "***"),
    ):
        monkeypatch.setenv("MUSTER_DATABASE", url)
        for options in ([], ["--json"]):
            shown = in_process("coordinator", "config", *options)
            assert shown.exit_code == 0, shown.output
            assert "s3cret" not in shown.output
        assert shows in shown.output
    status, out, err = muster("coordinator", "config", MUSTER_PORT="http")
    assert (status, out) == (2, "")
    assert err.startswith("error: port (MUSTER_PORT): ")
    assert err.count("\n") == 1


EXACT = {
    "over_selection": 1.0000000000000002,
    "selection_timeout_s": 0.1 + 0.2,
    "reporting_deadline_s": 600.0000000000001,
    "max_loss_growth": 1.7976931348623157e308,
    "min_separation_s": 5e-324,
}
"""Floats that are others where one digit is lost."""


def change(url, task, edit):
    """Change the stored settings of a task behind the coordinator's back."""
    with connected(url) as connection:
        stored = connection.scalar(text("SELECT CAST(settings AS TEXT) FROM tasks WHERE id = :id"), {"id": task})
        settings = json.loads(stored)
        edit(settings)
        connection.execute(
            text("UPDATE tasks SET settings = :new WHERE id = :id"), {"new": json.dumps(settings), "id": task}
        )
        connection.commit()
    return stored


# --- the column


@pytest.mark.every_engine
def test_settings_come_back_equal_to_the_bit(store, database, register):
    exact = {"seed": 2**63 - 1, "schedule": ServerSchedule(warmup_rounds=2**53 + 1)} | EXACT
    exact |= {"min_separation_s": -0.0}  # which no column of numbers of SQLite keeps
    given = TaskSettings(population="phones", goal=2, rounds=2, minimum=2, **exact)
    assert repr(store.task(register(**exact, minimum=2)).settings) == repr(given)


@pytest.mark.every_engine
def test_every_setting_is_stored_so_that_new_defaults_change_no_task(store, database, register):
    stored = json.loads(change(database, register(secagg=Secagg(), goal=40, minimum=40), lambda settings: None))
    fields = {one.name for one in dataclasses.fields(TaskSettings)}
    assert stored.keys() == fields - {"population"}
    assert stored["secagg"].keys() == {one.name for one in dataclasses.fields(Secagg)}


# --- settings of another version


@pytest.mark.every_engine
@pytest.mark.parametrize("part", ["", "requires", "on_device", "budget", "clear", "schedule", "secagg"])
def test_newer_setting_is_refused_by_name_at_the_start_and_at_each_load(store, database, register, part):
    task = register(secagg=Secagg(), goal=40, minimum=40)
    before = store.task(task)
    stored = change(database, task, lambda settings: (settings[part] if part else settings).update(brand_new=1))
    for attempt in (lambda: store.task(task), lambda: Database(database), store.tasks):
        with pytest.raises(UnusableStore, match=rf"task {task}.*brand_new.*upgrade this coordinator") as refused:
            attempt()
        assert part in str(refused.value)
    change(database, task, lambda settings: (settings[part] if part else settings).pop("brand_new"))
    assert store.task(task) == before
    assert json.loads(stored) == json.loads(change(database, task, lambda settings: None))


@pytest.mark.every_engine
@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda settings: settings["clear"].update(estimator="sieve"), "estimator.*sieve"),
        (lambda settings: settings.update(goal="adaptive"), "goal"),
        (lambda settings: settings.pop("goal"), "goal"),
    ],
)
def test_newer_value_is_refused_by_name(store, database, register, edit, named):
    task = register()
    change(database, task, edit)
    with pytest.raises(UnusableStore, match=rf"task {task}: .*{named}.*upgrade"):
        Database(database)


@pytest.mark.every_engine
def test_setting_that_is_not_stored_has_its_default(store, database, register):
    task = register(minimum=1)
    needed = ("goal", "rounds")
    change(database, task, lambda settings: [settings.pop(name) for name in set(settings) - set(needed)])
    assert store.task(task).settings == TaskSettings(population="phones", goal=2, rounds=2)


def test_service_that_does_not_start_says_which_setting_it_does_not_know(store, database, register, tmp_path):
    task = register()
    change(database, task, lambda settings: settings.update(brand_new=1))
    before = dump(database)
    command = [sys.executable, "-m", "muster", "coordinator", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--accept-unattested", "--db", database, "--blobs", str(tmp_path / "blobs")]
    done = forked(COMMAND).run(command)
    assert done.returncode not in (0, -9)
    assert f"settings of task {task}" in " ".join(done.stderr.split())
    assert "brand_new" in done.stderr
    assert "Traceback" not in done.stderr
    assert dump(database) == before


@pytest.mark.every_engine
def test_reports_outlive_a_newer_setting_that_comes_while_a_round_runs(store, database, register, desk):
    task = register(goal=2, rounds=1)
    desk.turn()
    given = desk.assign("a", "b")
    change(database, task, lambda settings: settings.update(brand_new=1))
    for one in given:
        desk.report(one, delta=(2, 2, 2, 2))
    desk.pass_time(1)
    change(database, task, lambda settings: settings.pop("brand_new"))
    assert states(store, task) == [(1, 1, "aggregating", "")]
    desk.pass_time(1)
    assert states(store, task) == [(1, 1, "committed", "")]
    assert [one.state.value for one in store.cohort(task, 1)] == ["reported"] * 2
