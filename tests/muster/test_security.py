"""The audit command, and security of commands."""

import json
import resource
import time

import pytest
import sqlalchemy
from sqlalchemy import update
from typer.testing import CliRunner

from coordinator.api.authentication import issue
from coordinator.errors import BrokenAudit, RoleLacking
from coordinator.keys import Keys, open_lineage
from coordinator.rules.entities import Role
from coordinator.settings import Settings
from coordinator.store.tables import AUDIT
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.signing import SigningKey, SucceedingKey
from muster.app import app
from tests.coordinator.bundles import make_bundle
from tests.muster.test_cli import in_process
from tests.muster.test_remote import (
    create,
    failure,
    served as served,  # noqa: PLC0414 - a fixture
)
from tests.servers import serving_both
from tests.stores import without_rows

POLICY = """
signers = ["{key}"]
authority = "{key}"
require_secure_aggregation = true
require_release_log = true
require_https = true
min_cohort = 20
"""


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUSTER_ACCEPT_UNATTESTED", raising=False)
    without_rows(tmp_path / "muster.db")
    with open_coordinator_store("sqlite:///muster.db", "muster-blobs") as store:
        keys = tmp_path / "muster.db.keys"
        Keys.open(keys, store.database)
        open_lineage(keys, store.database)
        yield store


def doctor(*options, code):
    """The verdict on each assumption."""
    done = CliRunner().invoke(app, ["doctor", "--security", *map(str, options), "--json"])
    assert done.exit_code == code, done.output
    return {one["name"]: one["holds"] for one in json.loads(done.stdout)}


def test_a_fresh_coordinator_lacks_an_authority_only(database):
    verdicts = doctor(code=1)
    assert [name for name, holds in verdicts.items() if not holds] == ["the authority is apart"]
    assert len(verdicts) == 14


def test_a_deployment_that_meets_every_assumption_passes(database, tmp_path, monkeypatch):
    key = SigningKey.new(tmp_path / "some.key").signer
    (tmp_path / "policy.toml").write_text(POLICY.format(key=key))
    monkeypatch.setenv("MUSTER_AUTHORITY", key)
    monkeypatch.setenv("MUSTER_AUTHORITY_URL", "https://authority.example.org")
    monkeypatch.setattr("muster.doctor.lacking", tuple)
    assert set(doctor("--policy", tmp_path / "policy.toml", code=0).values()) == {True}


def test_every_assumption_that_fails_is_named_with_its_remedy(database, tmp_path, monkeypatch):
    task = database.register_task(make_bundle(tmp_path / "plan"), TaskSettings(population="p", goal=2, rounds=1)).id
    with database.database.writing() as records:
        records._connection.execute(update(AUDIT).values(actor="somebody else"))
    (tmp_path / "muster.db.keys").chmod(0o644)
    (tmp_path / "policy.toml").write_text("")
    monkeypatch.setenv("MUSTER_HOST", "0.0.0.0")
    monkeypatch.setenv("MUSTER_ACCEPT_UNATTESTED", "true")
    monkeypatch.setattr("muster.doctor.lacking", lambda: ("seccomp",))
    verdicts = doctor("--policy", tmp_path / "policy.toml", code=1)
    assert [name for name, holds in verdicts.items() if holds] == [
        "tokens are encrypted",
        "nobody else reads muster.db.keys.lineage",
        "nobody else reads muster.db",
        "nobody else reads muster.db-wal",
        "nobody else reads muster.db-shm",
        "nobody else reads muster-blobs",
        "reports of all devices find room",
        "the keys are those of the store",
        "programs have a signer",
    ]
    said = CliRunner().invoke(app, ["doctor", "--security"]).stdout
    assert task in said
    assert f"chmod 600 {tmp_path / 'muster.db.keys'}" in said or "chmod 600 muster.db.keys" in said


def test_a_proxy_in_front_cannot_be_judged_from_here(database, monkeypatch):
    monkeypatch.setenv("MUSTER_TRUSTED_PROXIES", "10.0.0.0/8")
    assert doctor(code=1)["devices' requests are encrypted"] is None


def test_a_store_that_is_not_there_fails(tmp_path):
    assert doctor("--db", f"sqlite:///{tmp_path}/misspelt.db", code=1)["the store can be read"] is False


def test_a_policy_without_the_security_it_is_for_is_refused():
    done = CliRunner().invoke(app, ["doctor", "--policy", "policy.toml"])
    assert done.exit_code == 2
    assert "goes with --security" in done.output


@pytest.mark.parametrize("name", ["muster.db.keys", "muster.db.keys.lineage"])
@pytest.mark.parametrize("damage", ["missing", "of another store", "damaged"])
def test_keys_with_which_no_coordinator_would_start_are_named(database, tmp_path, name, damage):
    path = tmp_path / name
    path.unlink()
    if damage == "damaged":
        path.write_text("key")
    elif damage == "of another store":
        SigningKey.new(path) if name.endswith("lineage") else SucceedingKey.new("server").save(path)
    assert doctor(code=1)["the keys are those of the store"] is False


@pytest.fixture
def running(database, monkeypatch):
    """A coordinator that runs with settings which the doctor's environment does not have, and its address."""

    def run(**settings):
        monkeypatch.setenv("MUSTER_TOKEN", issue(database.database, "doctor", Role.OPERATOR)[1])
        return serving_both(Settings(port=0, admin_port=0, **settings))

    return run


def test_a_running_coordinator_is_judged_by_its_own_settings(running):
    with running(accept_unattested=True) as urls:
        assert doctor(code=1)["the running coordinator was asked"] is False
        verdicts = doctor("--coordinator", urls.admin, code=1)
        assert verdicts["strangers cannot enrol"] is False
        assert verdicts["memory suffices for the limits"] is True
        assert "the running coordinator was asked" not in verdicts


def test_a_viewer_hears_nothing_of_weak_spots(running, database, monkeypatch):
    with running() as urls:
        monkeypatch.setenv("MUSTER_TOKEN", issue(database.database, "viewer", Role.VIEWER)[1])
        done = CliRunner().invoke(app, ["doctor", "--security", "--coordinator", urls.admin])
    assert isinstance(done.exception, RoleLacking)
    assert done.output == ""


@pytest.mark.parametrize(
    "name", ["muster.db", "muster.db-wal", "muster-blobs", "tls.key", "enrolment.secret", "muster.db.keys.lineage"]
)
def test_a_file_that_others_may_read_is_named(database, tmp_path, monkeypatch, name):
    for setting in ("tls_cert", "tls_key", "enrolment_secret_file"):
        file = tmp_path / setting.replace("enrolment_secret_file", "enrolment.secret").replace("_", ".")
        file.touch(0o600)
        monkeypatch.setenv(f"MUSTER_{setting.upper()}", str(file))
    assert doctor(code=1)[f"nobody else reads {name}"] is True
    (tmp_path / name).chmod(0o750)
    assert doctor(code=1)[f"nobody else reads {name}"] is False


@pytest.mark.parametrize("off", ["keepalives", "tcp_user_timeout", "connect_timeout"])
def test_an_address_that_lets_a_silent_database_hang_fails(tmp_path, monkeypatch, off):
    monkeypatch.setenv("MUSTER_KEYS", str(tmp_path / "keys"))
    assert doctor("--db", "postgresql://muster@127.0.0.1:1/muster", code=1)["a silent database is given up"] is True
    hanging = f"postgresql://muster@127.0.0.1:1/muster?{off}=0"
    assert doctor("--db", hanging, code=1)["a silent database is given up"] is False


def test_too_little_room_for_the_reports_of_all_devices_at_work_fails(database, tmp_path, monkeypatch):
    task = TaskSettings(population="p", goal=1000, rounds=1)
    database.register_task(make_bundle(tmp_path / "plan"), task)
    assert doctor(code=1)["reports of all devices find room"] is True
    monkeypatch.setenv("MUSTER_REPORTS_BYTES", "10000")
    assert doctor(code=1)["reports of all devices find room"] is False


def test_limits_beyond_the_machine_fail(running):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(answers_bytes=1 << 50, connection_limit=most) as urls:
        verdicts = doctor("--coordinator", urls.admin, code=1)
    assert verdicts["memory suffices for the limits"] is False
    assert verdicts["open files suffice for the limits"] is False


def say_alike(here, there, *words):
    """What a command prints on the store, which is what it prints over HTTP."""
    found = [in_process(*words, *where) for where in (here, there)]
    assert [one.exit_code for one in found] == [0, 0], found[0].output + found[1].output
    assert found[0].output == found[1].output
    return found[0].stdout


def test_log_is_shown_and_verified_from_both_sides(served, tmp_path):
    here, there, store, _ = served
    task = json.loads(create(make_bundle(tmp_path / "plan").folder, there, "--json").stdout)["task"]
    in_process("task", "checkpoint", task, "--out", tmp_path / "m", *there)
    entries = json.loads(say_alike(here, there, "audit", "show", "--json"))
    actions = [one["action"] for one in entries]
    assert actions == ["keys-changed", "keys-changed", "token-made", "task-created", "model-read"]
    assert entries[-1]["actor"].startswith("operator alice, token ")
    assert "model-read" in say_alike(here, there, "audit", "show", "--last", 1)
    head = tmp_path / "head"
    for where in (here, there):
        verified = json.loads(in_process("audit", "verify", "--head-file", head, *where, "--json").stdout)
        assert verified == {"entries": 5, "head": head.read_text().strip()}
    with store.database._engines.writer.begin() as connection:
        connection.execute(sqlalchemy.delete(AUDIT).where(AUDIT.c.number == 5))
    assert json.loads(say_alike(here, there, "audit", "verify", "--json"))["entries"] == 4
    for where in (here, there):
        kind, words = failure(in_process("audit", "verify", "--head-file", head, *where))
        assert (kind, words[:35]) == (BrokenAudit, "entry 5 of the audit log is missing")
    assert head.read_text().startswith("5:")


@pytest.mark.security("muster coordinator devices revoke sends a device away")
def test_devices_are_listed_revoked_and_allowed(served):
    here, there, store, _ = served
    with store.database.writing() as records:
        records.devices.add("d1", "ed25519:AA", "none")
    assert json.loads(say_alike(here, there, "coordinator", "devices", "list", "--json"))[0]["id"] == "d1"
    say_alike(here, there, "coordinator", "devices", "revoke", "d1")
    (listed,) = json.loads(say_alike(here, there, "coordinator", "devices", "list", "--revoked", "--json"))
    assert (listed["id"], listed["revoked_at"] <= time.time()) == ("d1", True)
    assert "revoked" in say_alike(here, there, "coordinator", "devices", "list")
    say_alike(here, there, "coordinator", "devices", "allow", "d1", "--json")
    assert json.loads(say_alike(here, there, "coordinator", "devices", "list", "--revoked", "--json")) == []
    refused = [failure(in_process("coordinator", "devices", "revoke", "nope", *where)) for where in (here, there)]
    assert refused[0] == refused[1]


def test_tokens_are_listed_with_the_end_of_their_time(served):
    here, *_ = served
    made = in_process("coordinator", "token", "--name", "bob", "--days", 2, *here[:2], "--json")
    assert 1.9 * 86_400 < json.loads(made.stdout)["expires_at"] - time.time() < 2 * 86_400 + 1
    assert "good" in in_process("coordinator", "tokens", *here[:2]).stdout
    refused = in_process("coordinator", "token", "--name", "bob", "--days", 0, *here[:2])
    assert "every token expires" in str(refused.exception)
