"""`muster audit` and `muster coordinator devices`: the same on the store as through the admin API."""

import json
import time

import pytest
import sqlalchemy

from coordinator.errors import BrokenAudit
from coordinator.store.tables import AUDIT
from tests.coordinator.bundles import make_bundle
from tests.muster.test_cli import in_process
from tests.muster.test_remote import create, failure, served  # noqa: F401 - a fixture


def say_alike(here, there, *words):
    """What a command prints on the store, which is what it prints over HTTP."""
    found = [in_process(*words, *where) for where in (here, there)]
    assert [one.exit_code for one in found] == [0, 0], found[0].output + found[1].output
    assert found[0].output == found[1].output
    return found[0].stdout


def test_log_is_shown_and_verified_from_both_sides(served, tmp_path):  # noqa: F811 - the fixture
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
def test_devices_are_listed_revoked_and_allowed(served):  # noqa: F811 - the fixture
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


def test_tokens_are_listed_with_the_end_of_their_time(served):  # noqa: F811 - the fixture
    here, *_ = served
    made = in_process("coordinator", "token", "--name", "bob", "--days", 2, *here[:2], "--json")
    assert 1.9 * 86_400 < json.loads(made.stdout)["expires_at"] - time.time() < 2 * 86_400 + 1
    assert "good" in in_process("coordinator", "tokens", *here[:2]).stdout
    refused = in_process("coordinator", "token", "--name", "bob", "--days", 0, *here[:2])
    assert "every token expires" in str(refused.exception)
