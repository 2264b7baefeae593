"""The admin API over HTTP: who may do what, and what is left behind."""

import hashlib
import json
import re
from contextlib import contextmanager

import httpx2
import msgspec
import pytest
import sqlalchemy

from coordinator.api.authentication import authenticate, issue, revoke, tokens
from coordinator.api.http import ADMIN_PROBLEMS
from coordinator.errors import BadToken, InvalidToken, StoreConflict, UnknownToken
from coordinator.rules.entities import Role, Task
from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from coordinator.store.tables import TOKENS
from coordinator.store.tasks import open_coordinator_store
from fedcore.wire.messages import PROBLEM_FIELD, PROBLEM_TYPE, Problem
from tests.coordinator.bundles import START, make_bundle
from tests.coordinator.questions import make_question_bundle
from tests.questions.labels import labels
from tests.servers import serving_both

SETTINGS = {"population": "phones", "goal": 2, "rounds": 1}


@pytest.fixture
def admin(store, tmp_path):
    """Serve; gives a client of the admin port that sends the text of a token of its role, if any."""

    @contextmanager
    def run(role=None, **settings):
        fixed = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0, "admin_port": 0}
        token = issue(store.database, "alice", role)[1] if role else None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with (
            serving_both(Settings(**fixed, **settings)) as urls,
            httpx2.Client(base_url=urls.admin, headers=headers, timeout=10) as client,
        ):
            client.devices = urls.devices
            yield client

    return run


def refused(response, slug):
    """The response is the problem document `slug`, whole; answers its detail."""
    assert response.headers["content-type"] == PROBLEM_TYPE
    document = msgspec.json.decode(response.content, type=Problem)
    assert (document.slug, document.status) == (slug, response.status_code)
    assert response.headers[PROBLEM_FIELD] == slug
    assert document.title == ADMIN_PROBLEMS[slug].title
    assert document.status == ADMIN_PROBLEMS[slug].status
    return document.detail


def digest(data):
    return hashlib.sha256(data).hexdigest()


def upload(client, bundle):
    for ref, data in bundle.blobs():
        assert client.put(f"/admin/v1/blobs/{ref.sha256}", content=data).status_code == 204


def create(client, bundle, name=None, **settings):
    new = {"manifest": bundle.manifest, "settings": SETTINGS | settings, "name": name}
    return client.post("/admin/v1/tasks", content=msgspec.json.encode(new))


def every_route(client, task):
    """Method and address of everything at the admin port that is not open to all."""
    document = client.get("/openapi.json").json()
    names = {"task": task, "sha256": digest(b"x"), "device": "d", "population": "p", "name": "m"}
    for path, methods in document["paths"].items():
        for method in methods:
            if path not in ("/healthz", "/readyz"):
                yield method.upper(), path.format(**names)


@pytest.mark.promise("Operators need a token of the right role, on another port")
@pytest.mark.security("The admin API has a port of its own, asks for a token with a role")
def test_nobody_is_served_without_a_good_token(store, register, admin):
    task = register()
    stolen, text = issue(store.database, "mallory", Role.OPERATOR)
    revoke(store.database, stolen.id)
    other = issue(store.database, "bob", Role.OPERATOR)[1]
    forged = text[:20] + other[20:]
    wrong = [None, "Bearer", f"Bearer {text}", f"Bearer {forged}", "Bearer ü", f"Basic {other}", f"Bearer {other}x"]
    with admin() as client:
        routes = list(every_route(client, task))
        assert len(routes) >= 12
        for method, path in routes:
            for header in wrong if path == "/admin/v1/tasks" else wrong[:3]:
                headers = {} if header is None else {"Authorization": header.encode()}
                response = client.request(method, path, headers=headers)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), (path, header)
                if method != "HEAD":
                    assert not {text, other} & set(refused(response, "bad-token").split())
    assert store.task(task).state is TaskState.ACTIVE


@pytest.mark.security("Questions without noise can be refused")
def test_a_coordinator_may_refuse_questions_without_noise(store, tmp_path, admin):
    clear, noisy = (labels(private=private, most_rows=8) for private in (False, True))
    asks = [make_question_bundle(tmp_path / str(question.private), question) for question in (clear, noisy)]
    trains = make_bundle(tmp_path / "trains")
    privacy = {"epsilon": 8, "delta": 1e-6, "users": 1000}
    with admin(Role.OPERATOR, questions_need_noise=True) as client:
        for bundle in (*asks, trains):
            upload(client, bundle)
        said = refused(create(client, asks[0]), "invalid-task")
        assert "refuses questions without noise (questions_need_noise)" in said
        assert store.tasks() == []
        assert create(client, asks[1], privacy=privacy).status_code == 201
        assert create(client, trains).status_code == 201
    with admin(Role.OPERATOR) as client:
        assert create(client, asks[0]).status_code == 201


@pytest.mark.security("a task's history names the token behind every change")
def test_operator_creates_and_moves_a_task_and_the_history_names_whom(store, tmp_path, admin):
    bundle = make_bundle(tmp_path / "new")
    with admin(Role.OPERATOR) as client:
        refused(create(client, bundle), "unknown-blob")
        upload(client, bundle)
        assert "the name of a task must be" in refused(create(client, bundle, "a\n"), "invalid-task")
        made = create(client, bundle, "spring", minimum=1)
        assert made.status_code == 201
        task = msgspec.json.decode(made.content, type=Task)
        assert task == store.task(task.id)
        assert (task.settings.minimum, task.name, task.bundle) == (1, "spring", "hand-made")
        assert client.get("/admin/v1/tasks").json() == [made.json()]
        for verb, state in (("pause", "paused"), ("resume", "active"), ("cancel", "cancelled")):
            assert client.post(f"/admin/v1/tasks/{task.id}:{verb}").json()["state"] == state
            if verb == "pause":
                rollback = f"/admin/v1/tasks/{task.id}:rollback"
                refused(client.post(rollback, params={"round": 1}), "unknown-round")
                refused(client.post(rollback, params={"round": -1}), "malformed-message")
                assert refused(client.post(rollback), "malformed-message") == "query round: Field required"
                assert client.post(rollback, params={"round": 0}).json()["settings"]["rounds"] == 2
        refused(client.post(f"/admin/v1/tasks/{task.id}:cancel"), "task-ended")
        counted = 'muster_problems_total{problem="task-ended",route="/admin/v1/tasks/{task}:cancel"} 1.0'
        assert counted in client.get("/metrics").text
        history = client.get(f"/admin/v1/tasks/{task.id}/history").json()
    (token,) = tokens(store.database)
    who = f"operator alice, token {token.id}"
    assert [(row["after"], row["cause"]) for row in history] == [
        ("active", f"created by {who}"),
        ("paused", who),
        ("paused", f"rolled back to the model after round 0 by {who}"),
        ("active", who),
        ("cancelled", who),
    ]


def test_only_a_blob_that_a_row_knows_need_not_be_uploaded(store, tmp_path, admin):
    bundle = make_bundle(tmp_path / "new")
    address = f"/admin/v1/blobs/{bundle.manifest.plan.sha256}"
    with admin(Role.OPERATOR) as client:
        assert client.head(address).status_code == 404
        upload(client, bundle)
        assert client.head(address).status_code == 404
        assert create(client, bundle).status_code == 201
        assert client.head(address).status_code == 204
        store.blobs.delete([bundle.manifest.plan.sha256])
        assert client.head(address).status_code == 404


def test_blobs_collected_time_and_again_are_answered_try_later(tmp_path, admin, monkeypatch):
    def gone(*_):
        raise StoreConflict("a blob was collected before a row knew it; try again")

    bundle = make_bundle(tmp_path / "new")
    monkeypatch.setattr("coordinator.store.tasks.CoordinatorStore.add_blobs", gone)
    with admin(Role.OPERATOR) as client:
        upload(client, bundle)
        answer = create(client, bundle)
        refused(answer, "unavailable")
        assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.security("Bad input is answered with a problem and changes nothing")
def test_unusable_uploads_bundles_and_settings_leave_no_task(store, tmp_path, admin):
    bundle, damaged = (
        make_bundle(tmp_path / "good"),
        make_bundle(tmp_path / "damaged", settings={"no_such": 1}, state={"params": START}),
    )
    with admin(Role.OPERATOR, upload_limit_bytes=4096, message_limit_bytes=4096) as client:
        refused(client.put(f"/admin/v1/blobs/{digest(b'a')}", content=b"b"), "digest-mismatch")
        for name in ("..%2F..%2Fetc%2Fpasswd", digest(b"a").upper(), "a"):
            answer = client.put(f"/admin/v1/blobs/{name}", content=b"a")
            assert answer.status_code in (404, 422), name
        large = b"x" * 5000
        for body in (large, iter([large])):
            refused(client.put(f"/admin/v1/blobs/{digest(large)}", content=body), "too-large")
        upload(client, bundle)
        upload(client, damaged)
        assert "goal must be a whole number from 1" in refused(create(client, bundle, goal=0), "invalid-task")
        assert "goals" in refused(create(client, bundle, goals=3), "invalid-task")
        assert "'max_nom'" in refused(create(client, bundle, clear={"max_nom": 5}), "invalid-task")
        assert "goal must be a whole number" in refused(create(client, bundle, goal="two"), "invalid-task")
        for name, value in (("rounds", 10**20), ("goal", 10**30), ("seed", 10**30)):
            assert name in refused(create(client, bundle, **{name: value}), "invalid-task")
        assert "'coreml'" in refused(create(client, bundle, formats=["coreml"]), "invalid-task")
        refused(client.post("/admin/v1/tasks", content=b"{"), "malformed-message")
        refused(client.post("/admin/v1/tasks", content=large), "too-large")
        assert "no_such" in refused(create(client, damaged), "invalid-bundle")
        refused(client.get("/admin/v1/tasks/nope"), "unknown-task")
        refused(client.post("/admin/v1/tasks/nope:pause"), "unknown-task")
        for number in ("x", "-1", 2**31, 10**20):
            refused(client.get("/admin/v1/tasks/nope/model", params={"round": number}), "malformed-message")
        refused(client.get("/admin/v1/tasks/nope/model", params={"round": 2**31 - 1}), "unknown-task")
    assert store.tasks() == []


@pytest.mark.security("The admin API has a port of its own, asks for a token with a role")
def test_each_port_has_its_own_addresses_alone(register, admin):
    task = register()
    with admin(Role.OPERATOR) as client, httpx2.Client(base_url=client.devices) as devices:
        for method, path in every_route(client, task):
            assert devices.request(method, path, headers=client.headers).status_code == 404
        for method, path in (("POST", "/v1/devices"), ("POST", "/v1/populations/phones/checkins"), ("GET", "/v1/x")):
            detail = refused(client.request(method, path), "unknown-resource")
            assert f"port for operators; devices use {client.devices}" in detail


def test_openapi_describes_every_route_with_its_lock_and_every_message(admin):
    with admin() as client:
        document = client.get("/openapi.json").json()
    operations = {
        (method, path): found for path, methods in document["paths"].items() for method, found in methods.items()
    }
    for (_, path), found in operations.items():
        assert found["description"], path
        assert ("security" in found) is not (path in ("/healthz", "/readyz")), path
        assert "503" in found["responses"] or path == "/metrics", path
    contents = [answer.get("content", {}) for found in operations.values() for answer in found["responses"].values()]
    examples = {slug for content in contents for slug in content.get(PROBLEM_TYPE, {}).get("examples", ())}
    nowhere = {"unknown-resource", "method-not-allowed"}
    assert examples - {"too-many-requests"} == ADMIN_PROBLEMS.keys() - nowhere
    schemas = document["components"]["schemas"]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named <= set(schemas)
    assert {"NewTask", "Task", "TaskSettings", "RoundRecord", "Transition", "Problem", "Manifest"} <= set(schemas)


def test_loopback_needs_no_token_where_set_and_for_its_own_pages(register, admin):
    task = register()
    with admin(loopback_viewer=True) as client:
        assert client.get("/admin/v1/tasks").status_code == 200
        for host in ("rebound.example", "rebound.example:8081", "127.0.0.1.rebound.example"):
            refused(client.get("/admin/v1/tasks", headers={"Host": host}), "bad-token")
        assert [client.get("/admin/v1/tasks", headers={"Host": host}).status_code for host in ("", "[")] == [400, 400]
        refused(client.post(f"/admin/v1/tasks/{task}:cancel"), "role-lacking")
        refused(client.get("/admin/v1/tasks", headers={"Authorization": "Bearer muster_0"}), "bad-token")


@pytest.mark.every_engine
def test_token_is_kept_as_a_hash_found_by_its_text_and_revoked_once(store):
    token, text = issue(store.database, "carol", Role.VIEWER)
    assert authenticate(store.database, text) == token
    with store.database.engine.connect() as connection:
        (kept,) = connection.execute(sqlalchemy.select(TOKENS)).all()
    assert kept.sha256 == digest(text[16:].encode())
    assert text[16:] not in map(str, kept)
    ended = revoke(store.database, token.id)
    assert revoke(store.database, token.id) == ended
    with pytest.raises(BadToken):
        authenticate(store.database, text)
    with pytest.raises(UnknownToken, match="nope"):
        revoke(store.database, "nope")
    with pytest.raises(InvalidToken, match="name"):
        issue(store.database, "two words", Role.VIEWER)


@pytest.mark.parametrize("days", [0, -1, 3651, float("inf"), float("nan")])
def test_token_that_would_never_expire_is_refused(store, days):
    with pytest.raises(InvalidToken, match="days must be above 0 and at most 3650"):
        issue(store.database, "carol", Role.VIEWER, days)
    assert tokens(store.database) == []


@pytest.mark.every_engine
def test_token_is_worthless_after_its_days_ninety_if_not_said(database, tmp_path):
    now = [1e9]
    with open_coordinator_store(database, tmp_path / "blobs", clock=lambda: now[0]) as store:
        usual, short = (issue(store.database, "carol", Role.OPERATOR, *days)[1] for days in ((), (0.5,)))
        now[0] += 86_400 / 2 - 1
        assert authenticate(store.database, short).state(now[0]) == "good"
        now[0] += 1
        with pytest.raises(BadToken, match="expired on 2001-09-09"):
            authenticate(store.database, short)
        now[0] = 1e9 + 90 * 86_400 - 1
        authenticate(store.database, usual)
        now[0] += 1
        with pytest.raises(BadToken, match="expired"):
            authenticate(store.database, usual)
        assert [one.state(now[0]) for one in tokens(store.database)] == ["expired"] * 2
