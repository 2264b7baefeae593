"""`muster doctor --security` names the assumptions of the threat model that a deployment does not meet."""

import json

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from coordinator.keys import Keys, open_lineage
from coordinator.store.tables import AUDIT
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.signing import SigningKey
from muster import security
from muster.app import app
from tests.coordinator.bundles import make_bundle

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
    assert len(verdicts) == 8


def test_a_deployment_that_meets_every_assumption_passes(database, tmp_path, monkeypatch):
    key = SigningKey.new(tmp_path / "some.key").signer
    (tmp_path / "policy.toml").write_text(POLICY.format(key=key))
    monkeypatch.setenv("MUSTER_AUTHORITY", key)
    monkeypatch.setenv("MUSTER_AUTHORITY_URL", "https://authority.example.org")
    monkeypatch.setattr(security, "lacking", tuple)
    assert set(doctor("--policy", tmp_path / "policy.toml", code=0).values()) == {True}


def test_every_assumption_that_fails_is_named_with_its_remedy(database, tmp_path, monkeypatch):
    task = database.register_task(make_bundle(tmp_path / "plan"), TaskSettings(population="p", goal=2, rounds=1)).id
    with database.database.writing() as records:
        records._connection.execute(update(AUDIT).values(actor="somebody else"))
    (tmp_path / "muster.db.keys").chmod(0o644)
    (tmp_path / "policy.toml").write_text("")
    monkeypatch.setenv("MUSTER_HOST", "0.0.0.0")
    monkeypatch.setenv("MUSTER_ACCEPT_UNATTESTED", "true")
    monkeypatch.setattr(security, "lacking", lambda: ("seccomp",))
    verdicts = doctor("--policy", tmp_path / "policy.toml", code=1)
    assert [name for name, holds in verdicts.items() if holds] == [
        "tokens are encrypted",
        "nobody else reads muster.db.keys.lineage",
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
