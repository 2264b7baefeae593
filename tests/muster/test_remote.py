"""`muster task` through the admin API says and does what it does on the store."""

import hashlib
import json
import os
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2
import msgspec
import numpy as np
import pytest
import sqlalchemy
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.errors import KeysDiffer, KeysMissing
from coordinator.settings import Settings
from coordinator.store.tables import RELEASES
from coordinator.store.tasks import open_coordinator_store
from fedcore.errors import BadRelease, BadSignature
from fedcore.release import decode_release
from fedcore.signing import SigningKey, key_text
from muster.remote import RemoteError
from tests.coordinator.bundles import make_bundle, make_evaluation_bundle, report_body
from tests.coordinator.conftest import AUTHORITY_KEY, committed
from tests.coordinator.devices import speaking_to
from tests.coordinator.pages import csrf, log_in
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, check_in, put
from tests.muster.test_cli import in_process
from tests.servers import proxied, serving_both
from tests.stores import without_rows


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A coordinator with an operator's token in the environment; gives the options of both ways, and its store."""
    database, blobs = without_rows(tmp_path / "m.db"), tmp_path / "blobs"
    authority = {"authority": key_text(AUTHORITY_KEY), "authority_url": "https://authority.example.org"}
    with (
        open_coordinator_store(database, blobs) as store,
        serving_both(
            Settings(database=database, blobs=blobs, port=0, admin_port=0, no_devices_after_h=0, **authority)
        ) as urls,
        speaking_to(urls.devices) as devices,
    ):
        made = in_process("coordinator", "token", "--name", "alice", "--role", "operator", "--db", database)
        assert made.exit_code == 0, made.output
        monkeypatch.setenv("MUSTER_TOKEN", made.stdout.strip())
        yield ["--db", database, "--blobs", blobs], ["--coordinator", urls.admin], store, devices


def failure(result):
    """By what a command failed: it decides the message and the exit code."""
    assert result.exit_code == 1
    return type(result.exception), str(result.exception)


def create(folder, where, *more):
    arguments = ["--plan", folder, "--population", "phones", "--goal", 2, "--rounds", 2, *more]
    return in_process("task", "create", *arguments, *where)


def timeless(text):
    """What was printed, but for seconds that have passed since."""
    return re.sub(r"\d+ s\b", "… s", text)


def agree(ways, before):
    """A command prints the same both ways, each time after the command `before`, if any.

    Why a task is where it is changes by itself: what the driver sees is written a moment later, and ten seconds without
    a device are a stall. A command that was asked before and after such a change is asked again.
    """
    for _ in range(5):
        printed = []
        for words in ways:
            if before:
                in_process(*before)
            done = in_process(*words)
            assert done.exit_code == 0, done.output
            printed.append(timeless(done.output))
        if printed[0] == printed[1]:
            return
    assert printed[0] == printed[1]


def test_commands_say_the_same_through_the_api_as_on_the_store(served, tmp_path):
    here, there, store, devices = served
    bundle = make_bundle(tmp_path / "plan")
    for where in (there, here):
        made = create(bundle.folder, where, "--name", "spring keyboard", "--minimum", 1, "--peak-rss-mb", 60, "--json")
        assert made.exit_code == 0, made.output
    remote, local = json.loads(in_process("task", "list", *there, "--json").stdout)
    assert {**remote, "task": "", "progress": {}} == {**local, "task": "", "progress": {}}
    assert (remote["name"], remote["bundle"]) == ("spring keyboard", "hand-made")
    assert "spring keyboard" in in_process("task", "list", *there).stdout
    in_process("task", "cancel", local["task"], *here)
    task = remote["task"]
    for one in assign(devices, "a", "b", "c"):
        put(devices, one.assignment, report_body([1, 0, 0, 0], 1))
    committed(store, task, 1)
    for command in ("list", "show", "metrics", "history", "pause", "resume", "checkpoint"):
        for options in ([], ["--json"]):
            words = ["task", command, *([] if command == "list" else [task]), *options]
            words += ["--out", tmp_path / "model.safetensors", "--force"] if command == "checkpoint" else []
            opposite = {"pause": "resume", "resume": "pause"}.get(command)
            agree(([*words, *there], [*words, *here]), opposite and ["task", opposite, task, *here])
    assert failure(in_process("task", "resume", task, *there))[1] == f"task {task} is active already"
    in_process("task", "cancel", task, *there)
    for words in (["cancel", task], ["show", "nope"], ["checkpoint", task, "--round", 9, "--out", tmp_path / "x"]):
        assert failure(in_process("task", *words, *there)) == failure(in_process("task", *words, *here))
    refused = ["task", "create", "--plan", bundle.folder, "--population", "p", "--goal", 0, "--rounds", 1]
    assert failure(in_process(*refused, *there)) == failure(in_process(*refused, *here))


def test_a_model_is_evaluated_through_the_api_as_on_the_store(served, tmp_path):
    here, there, store, devices = served
    trained = json.loads(create(make_bundle(tmp_path / "plan").folder, there, "--json").stdout)["task"]
    for one in assign(devices, "a", "b", "c"):
        put(devices, one.assignment, report_body([1, 0, 0, 0], 1))
    committed(store, trained, 1)
    file = tmp_path / "model.safetensors"
    in_process("task", "checkpoint", trained, "--round", 1, "--out", file, *there)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    one, two = (make_evaluation_bundle(tmp_path / name, name).folder for name in ("evaluate", "compare"))
    asked = ["task", "create", "--population", "phones", "--goal", 2, "--json"]
    for where in (there, here):
        made = in_process(*asked, "--plan", one, "--evaluate", f"{trained}@1", *where)
        assert made.exit_code == 0, made.output
        facts = json.loads(made.stdout)
        assert (facts["evaluates"], facts["rounds"]) == (f"task {trained}, round 1", 1)
        task = store.task(facts["task"])
        np.testing.assert_array_equal(committed(store, task.id, 0), committed(store, trained, 1))
        made = in_process(*asked, "--plan", two, "--evaluate", file, "--against", trained, "--rounds", 3, *where)
        facts = json.loads(made.stdout)
        assert (facts["evaluates"], facts["rounds"]) == (f"file {digest}, against task {trained}, round 1", 3)
        assert f"file {digest}, against task {trained}" in in_process("task", "show", facts["task"], *where).stdout
    refused = [
        ["--plan", tmp_path / "plan", "--evaluate", trained],
        ["--plan", two, "--evaluate", trained],
        ["--plan", one, "--evaluate", f"{trained}@9"],
        ["--plan", one, "--evaluate", "nope"],
        ["--plan", one],
    ]
    for words in refused:
        kind, message = failure(in_process(*asked, *words, *there))
        assert (kind, message) == failure(in_process(*asked, *words, *here))
        assert "\n" not in message


def test_a_release_is_signed_on_the_operators_machine(served, tmp_path):
    here, there, store, _ = served
    key = tmp_path / "release.pem"
    signer = in_process("key", "new", "--out", key, "--json").stdout
    secure = ["--goal", 9, "--secagg", "--release-key", key, "--json"]
    remote, local = (
        json.loads(create(make_bundle(tmp_path / "plan").folder, where, *secure).stdout) for where in (there, here)
    )
    assert remote["release"]["signer"] == json.loads(signer)["signer"]
    assert remote["release"]["lineage"] == local["release"]["lineage"]
    logs = [json.loads(in_process("plan", "log", *where, "--json").stdout) for where in (there, here)]
    assert logs[0] == logs[1]
    assert [one["digest"] for one in logs[0]["releases"]] == [one.digest for one in store.releases()]


@pytest.mark.security("It takes part in secure rounds only under a release that a key … signed")
@pytest.mark.security("signs the population, the plan, the first checkpoint, and how sums are made")
@pytest.mark.security("A release holds until it expires (90 days if not set)")
def test_a_release_holds_for_ninety_days_and_its_key_stays_away(served, tmp_path):
    _, there, store, _ = served
    key, before = tmp_path / "release.pem", int(time.time())
    in_process("key", "new", "--out", key)
    assert (
        create(make_bundle(tmp_path / "plan").folder, there, "--goal", 9, "--secagg", "--release-key", key).exit_code
        == 0
    )
    (signed,) = store.releases()
    assert before <= decode_release(signed.text).expires_at - 90 * 86_400 <= time.time() + 1
    private = load_pem_private_key(key.read_bytes(), None).private_bytes_raw()
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != key]
    assert any(signed.signer.encode() in data for data in kept)
    for form in (private, private.hex().encode(), *key.read_bytes().splitlines()[1:-1]):
        assert not any(form in data for data in kept)


def test_a_release_in_a_file_is_for_the_form_of_a_new_task(served, tmp_path, monkeypatch):
    _, there, store, _ = served
    bundle, key, out = make_bundle(tmp_path / "plan"), tmp_path / "release.pem", tmp_path / "release.json"
    in_process("key", "new", "--out", key)
    wanted = ["--plan", bundle.folder, "--population", "phones", "--goal", 9, "--rounds", 2, "--release-key", key]
    refused = in_process("task", "release", *wanted, "--out", out, *there)
    assert (refused.exit_code, "needs no release" in refused.output, out.exists()) == (2, True, False)
    done = in_process("task", "release", *wanted, "--secagg", "--bits", 12, "--out", out, "--json", *there)
    assert (done.exit_code, store.tasks()) == (0, [])
    with httpx2.Client(base_url=there[1], timeout=10) as page:
        log_in(page, os.environ["MUSTER_TOKEN"])
        given = {"csrf": csrf(page.get("/new")), "manifest": (bundle.folder / "manifest.json").read_text()}
        for ref, data in bundle.blobs():
            page.put(f"/new/blobs/{ref.sha256}", content=data, headers={"X-CSRF-Token": given["csrf"]})
        given |= {"population": "phones", "goal": "9", "rounds": "2", "secagg": "yes", "secagg.bits": "12"}
        for wrong, words in (
            ({}, "a task with secagg needs a signed release"),
            ({"release": "{}"}, "this is not a release"),
            ({"release": out.read_text(), "secagg.bits": "13"}, "bounds of the release"),
            ({"release": out.read_text(), "secagg": ""}, "a release is for tasks with secagg"),
        ):
            refused = page.post("/new", data=given | wrong)
            assert (refused.status_code, words in refused.text) == (422, True), words
        assert page.post("/new", data=given | {"release": out.read_text()}).status_code == 303
    (task,) = store.tasks()
    assert (task.settings.secagg.bits, task.release.signer) == (12, json.loads(done.stdout)["signer"])


def test_commands_on_a_store_make_no_second_lineage_key(served, tmp_path, monkeypatch):
    here, there, store, _ = served
    key, bundle = tmp_path / "release.pem", make_bundle(tmp_path / "plan").folder
    in_process("key", "new", "--out", key)
    secure = ["--goal", 9, "--secagg", "--release-key", key, "--json"]
    task = json.loads(create(bundle, here, *secure).stdout)["task"]
    in_process("task", "pause", task, *here)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("MUSTER_KEYS", str(elsewhere / "keys"))
    for failed in (in_process("task", "rollback", task, "--round", 0, *here), create(bundle, here, *secure)):
        kind, words = failure(failed)
        assert kind is KeysMissing
        assert str(elsewhere / "keys.lineage") in words
    assert (list(elsewhere.iterdir()), len(store.tasks()), store.rounds(task)) == ([], 1, [])
    SigningKey.new(elsewhere / "keys.lineage")
    assert failure(in_process("task", "rollback", task, "--round", 0, *here))[0] is KeysDiffer
    assert in_process("task", "rollback", task, "--round", 0, *there).exit_code == 0


@pytest.mark.security("That everybody is shown one log … is for the holder of the release key to check")
def test_a_log_of_releases_that_lost_or_changed_one_is_found(served, tmp_path):
    here, _, store, _ = served
    head, key = tmp_path / "head.json", tmp_path / "release.pem"
    in_process("key", "new", "--out", key)
    bundle = make_bundle(tmp_path / "plan").folder
    for days in (10, 20):
        made = create(bundle, here, "--goal", 9, "--secagg", "--release-key", key, "--release-days", days)
        assert made.exit_code == 0, made.output
        verified = in_process("plan", "log", "--head-file", head, *here)
        assert verified.exit_code == 0, verified.output
    with store.database.engine.begin() as connection:
        connection.execute(sqlalchemy.delete(RELEASES).where(RELEASES.c.position == 0))
    kind, words = failure(in_process("plan", "log", "--head-file", head, *here))
    assert kind is BadRelease
    assert "the log has 1 releases, and its first 2" in words
    (left,) = store.releases()
    with store.database.engine.begin() as connection:
        forged = msgspec.to_builtins(msgspec.structs.replace(left, text=left.text.replace("phones", "others")))
        connection.execute(sqlalchemy.update(RELEASES).values(release=forged))
    assert failure(in_process("plan", "log", *here))[0] is BadSignature


def test_no_proxy_of_the_environment_stands_before_this_machine(served, monkeypatch):
    _, there, _, _ = served
    proxied(monkeypatch)
    listed = in_process("task", "list", *there)
    assert listed.exit_code == 0, listed.exception


def test_what_keeps_a_command_from_the_coordinator_is_named(served, monkeypatch):
    _, there, store, devices = served
    viewer = in_process("coordinator", "token", "--name", "bob", "--db", str(store.database.engine.url))
    for token, address, says in (
        ("", there[1], "MUSTER_TOKEN holds none: `muster coordinator token` makes one"),
        ("muster_0", there[1], "unknown or revoked token"),
        ("", str(devices.base_url), "(404); use the operators' port"),
        ("", "http://127.0.0.1:1", "Connection refused; start the coordinator there, or name its port for operators"),
        ("", "127.0.0.1:8081", "127.0.0.1:8081 is no coordinator's URL: it has http:// or https://"),
        ("", "localhost:8081", "as http://127.0.0.1:8081 does"),
        ("", "http://bob:hunter2@127.0.0.1:1", "http://127.0.0.1:1 cannot be reached"),
        ("", "bob:hunter2@127.0.0.1:1", "127.0.0.1:1 is no coordinator's URL"),
        ("", "http://bob:hunter2@127.0.0.1:http", "http://127.0.0.1:http is no coordinator's URL"),
        ("", "http://bob:hunter2/x@127.0.0.1:1", "http://127.0.0.1:1 is no coordinator's URL"),
        ("", "http://127.0.0.1:99999", "a port from 1 to 65535"),
        ("", str(devices.base_url).replace("://", "://bob:hunter2@"), "(404); use the operators' port"),
        (viewer.stdout.strip(), there[1], "asks for the role operator"),
    ):
        monkeypatch.setenv("MUSTER_TOKEN", token)
        failed = in_process("task", "cancel", "t", "--coordinator", address)
        assert failed.exit_code == 1
        assert says in str(failed.exception)
        assert "hunter2" not in str(failed.exception)


@contextmanager
def answering(status, body):
    """A server that answers everything so; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (502, b"<html>", "answered 502 Bad Gateway"),
        (404, b"<html>", "(404); use the operators' port"),
        (200, b"<html>", "gave an answer that this version does not expect"),
        (
            503,
            b'{"type":"urn:muster:problem:unavailable","title":"t","status":503,"detail":"try later"}',
            "503 unavail",
        ),
    ],
)
def test_what_another_server_answers_is_said_with_its_status(status, body, says):
    with answering(status, body) as url:
        failed = in_process("task", "list", "--coordinator", url)
    assert failed.exit_code == 1
    assert isinstance(failed.exception, RemoteError)
    assert says in str(failed.exception)


@pytest.mark.promise("A task without progress says why, the same everywhere, and writes nothing")
def test_page_command_api_and_metrics_say_alike_why_a_task_does_not_go_on(served, tmp_path):
    here, there, _, devices = served
    made = create(make_bundle(tmp_path / "plan").folder, here, "--json", "--min-examples", 1000)
    task = json.loads(made.stdout)["task"]
    headers = {"Authorization": f"Bearer {os.environ['MUSTER_TOKEN']}"}
    with httpx2.Client(base_url=there[1], headers=headers, timeout=10) as admin:

        def progress():
            return admin.get(f"/admin/v1/tasks/{task}/progress").json()

        until(lambda: progress()["reason"] == "no-devices")
        assert check_in(devices, "a").json()["reason"] == "not-eligible"
        for where in (here, there):
            facts = json.loads(in_process("task", "show", task, *where, "--json").stdout)
            assert (facts["progress"]["reason"], facts["progress"]["stalled"]) == ("no-devices", True)
            for words in (["show", task], ["list"]):
                text = " ".join(in_process("task", *words, *where).stdout.split())
                assert "round 1 needs 3 devices, 2 at least: no check-in was accepted since" in text
        assert [one["task"] for one in admin.get("/admin/v1/progress").json()] == [task]
        viewer = in_process("coordinator", "token", "--name", "bob", *here[:2]).stdout.strip()
        assert log_in(admin, viewer).status_code == 303
        assert '<span class="bad">no devices</span>' in admin.get("/").text
        assert "round 1 needs 3 devices, 2 at least: no check-in" in admin.get(f"/tasks/{task}").text
        metrics = admin.get("/metrics").text
        assert 'muster_tasks_stalled{reason="no-devices"} 1.0' in metrics
        assert 'muster_tasks_stalled{reason="no-driver"} 0.0' in metrics
        assert task not in metrics
