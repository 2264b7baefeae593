"""Every operation with every role: what each may do, and that nothing of other populations is there for a limited one.

The routes are those that the application has. One that is added without saying what it asks for fails here.
"""

import hashlib
import json
import re
from typing import NamedTuple

import httpx2
import msgspec
import pytest

from coordinator.api.admin import Access
from coordinator.api.authentication import issue, tokens
from coordinator.api.service import Service
from coordinator.dashboard.pages import dashboard_router
from coordinator.operations import OPERATIONS, PREFIX, NewTask
from coordinator.rules.alerts import Finding, verify
from coordinator.rules.entities import Evaluates, ModelSource, RegularEvaluation, Regularly, Role
from coordinator.rules.task_settings import TaskSettings
from coordinator.settings import Settings
from fedcore.signing import ModelOrigin, ModelRelease, verified
from fedcore.wire.messages import PROBLEM_FIELD
from tests.coordinator.bundles import make_bundle, make_evaluation_bundle, make_private_bundle
from tests.coordinator.conftest import PEM
from tests.coordinator.devices import Devices
from tests.coordinator.pages import csrf, log_in
from tests.coordinator.questions import make_question_bundle
from tests.coordinator.released import PREDICT, predicting_plan, version
from tests.coordinator.test_evaluated import evaluate
from tests.coordinator.test_privacy import promise, train
from tests.muster.test_cli import in_process
from tests.servers import serving_both

WHO = {
    "nobody": None,
    "metrics": (Role.METRICS, ()),
    "viewer": (Role.VIEWER, ()),
    "operator": (Role.OPERATOR, ()),
    "viewer of another population": (Role.VIEWER, ("watches",)),
    "operator of another population": (Role.OPERATOR, ("watches",)),
    "viewer of this population": (Role.VIEWER, ("phones",)),
    "operator of this population": (Role.OPERATOR, ("phones",)),
}
NOWHERE = {"task": "0" * 16, "population": "nobodys", "name": "nothing", "sha256": "0" * 64}


class Asks(NamedTuple):
    """What a route asks for: a role, None for none, and what it is about.

    about: `whole`, the coordinator; `one`, a thing of one population; `all`, what there is, without what is not for the
    asker. outside: the refusal of a token that is limited to another population, by slug or status.
    """

    role: Role | None
    about: str = "all"
    outside: object = None


LOOK, RUN = Role.VIEWER, Role.OPERATOR
ROUTES = {
    ("GET", "/healthz"): Asks(None),
    ("GET", "/readyz"): Asks(None),
    ("GET", "/metrics"): Asks(Role.METRICS, "whole"),
}
OUTSIDE = {"create": "role-lacking", "set_budget": "role-lacking", "release_model": "unknown-blob"}
OUTSIDE |= {"present": "unknown-blob", "matching": None}  # a population that is not there has no devices that match
UNKNOWN = {"{task}": "unknown-task", "{name}": "unknown-model", "{population}": "unknown-population"}


def asked_by(operation):
    """What an operation of the admin API asks for."""
    named = [slug for part, slug in UNKNOWN.items() if part in operation.path]
    outside = OUTSIDE[operation.name] if operation.name in OUTSIDE else [*named, None][0]
    return Asks(operation.role, "whole" if operation.whole else "one" if outside else "all", outside)


API = ROUTES | {(one.method, PREFIX + one.path): asked_by(one) for one in OPERATIONS}
ONE = Asks(LOOK, "one", 404)
PAGES = {
    ("GET", "/"): Asks(LOOK),
    ("GET", "/compare"): Asks(LOOK),
    ("GET", "/docs"): Asks(LOOK),
    ("GET", "/models"): Asks(LOOK),
    ("GET", "/new"): Asks(RUN),
    ("GET", "/new/matching"): Asks(RUN),
    ("GET", "/login"): Asks(None),
    ("GET", "/static/{name}"): Asks(None),
    ("GET", "/events"): Asks(LOOK),
    ("GET", "/populations/{population}"): ONE,
    ("GET", "/populations/{population}/models/{name}"): ONE,
    ("GET", "/populations/{population}/models/{name}/{verb}"): ONE,
    ("GET", "/tasks/{task}"): ONE,
    ("GET", "/tasks/{task}/rounds"): ONE,
    ("GET", "/tasks/{task}/rounds/{number}/{attempt}"): ONE,
    ("GET", "/tasks/{task}/settings"): ONE,
    ("GET", "/tasks/{task}/log"): ONE,
    ("GET", "/tasks/{task}/model"): ONE,
    ("GET", "/tasks/{task}/answer"): ONE,
    ("GET", "/tasks/{task}/plan"): ONE,
    ("GET", "/tasks/{task}/certificate"): ONE,
    ("GET", "/tasks/{task}/privacy-certificate"): ONE,
    ("GET", "/tasks/{task}/{verb}"): ONE,
    ("GET", "/tasks/{task}/events"): Asks(LOOK),  # a stream of nothing, as of a task that is not there
    ("POST", "/populations/{population}/models/{name}/{verb}"): Asks(RUN, "one", 404),
    ("POST", "/tasks/{task}/{verb}"): Asks(RUN, "one", 404),
    ("POST", "/new"): Asks(RUN, "one", 403),
    ("PUT", "/new/blobs/{sha256}"): Asks(RUN),
}
SESSIONS = {("POST", "/login"), ("POST", "/logout")}
"""How everybody below begins and ends."""


def refusal(asks, who):
    """Why somebody is refused: a slug, or what the route says to those outside; None if allowed."""
    if asks.role is None:
        return None
    if WHO[who] is None:
        return "bad-token"
    role, populations = WHO[who]
    if not role.includes(asks.role) or (asks.about == "whole" and populations):
        return "role-lacking"
    return asks.outside if populations == ("watches",) else None


class World:
    """A coordinator that drives nothing, with much in the population `phones` and a task in `watches`."""

    def __init__(self, store, register, tmp_path):
        self.store = store
        self.asking = register(make_question_bundle(tmp_path / "question"), name="of-phones")
        self.other = register(make_bundle(tmp_path / "other"), name="of-watches", population="watches")
        self.new = make_bundle(tmp_path / "new", predicting_plan(), graphs=(PREDICT,))
        for _, data in self.new.blobs():
            store.limited(["phones"]).upload(data)
        store.release_model(version(store))
        store.promote_model("phones", "keyboard", 1, 0.5)
        with store.database.writing() as records:
            records.alerts.add(Finding("stuck", "it is stuck", store.task(self.asking)), due=False)

    def token(self, who):
        """The text of a token; None for nobody."""
        if WHO[who] is None:
            return None
        role, populations = WHO[who]
        return issue(self.store.database, re.sub(r"\W", "-", who), role, populations=populations)[1]

    def hidden(self, who):
        """What nobody with the rights of `who` is to see a trace of."""
        _, populations = WHO[who] or (None, ())
        of_phones = ["phones", self.trained, self.asking, "keyboard", self.device]
        return {("watches",): of_phones, ("phones",): ["watches", self.other, self.device]}.get(populations, [])

    def at(self, path):
        """What an address names of `phones`: only a task that asks has an answer."""
        return self.found | ({"task": self.asking} if path.endswith("/answer") else {})

    def everything(self):
        """All that operators can change."""
        store = self.store
        models = [store.model_history("phones", "keyboard"), store.model_versions("phones", "keyboard")]
        return store.tasks(), store.devices(), store.budget("phones"), models, len(store.audit(0, 1000))


@pytest.fixture
def world(store, register, database, desk, tmp_path):
    (tmp_path / "keys.lineage").write_bytes(PEM)
    trained = register(make_private_bundle(tmp_path / "private"), name="of-phones", rounds=9, privacy=promise())
    train(desk)
    made = World(store, register, tmp_path)
    made.trained = trained
    fixed = {"database": database, "blobs": tmp_path / "blobs", "keys": tmp_path / "keys", "port": 0, "admin_port": 0}
    with serving_both(Settings(**fixed, role="api", accept_unattested=True)) as made.urls:
        with httpx2.Client(base_url=made.urls.devices, timeout=10) as client:
            made.device = Devices(client).id("a")
        made.found = {"task": trained, "device": made.device, "population": "phones", "name": "keyboard"}
        made.found |= {"number": 1, "attempt": 1, "sha256": made.new.manifest.plan.sha256}
        yield made


@pytest.fixture
def admin(world):
    """Clients of the operators' port by who asks, each with its token."""
    clients = {}
    for who in WHO:
        text = world.token(who)
        headers = {"Authorization": f"Bearer {text}"} if text else {}
        clients[who] = httpx2.Client(base_url=world.urls.admin, headers=headers, timeout=20)
    yield clients
    for client in clients.values():
        client.close()


def routes_of(tmp_path):
    """Every route of the pages, as the application has them."""
    folder = tmp_path / "empty"
    folder.mkdir()
    service = Service.open(Settings(database=f"sqlite:///{folder}/s.db", blobs=folder / "blobs", port=0, admin_port=0))
    try:
        router = dashboard_router(service, Access(service))
        return {(method, route.path) for route in router.routes for method in route.methods}
    finally:
        service.store.close()


def test_every_route_says_what_it_asks_for(admin, tmp_path):
    document = admin["nobody"].get("/openapi.json").json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == API.keys()
    assert routes_of(tmp_path) == PAGES.keys() | SESSIONS


def calls(world):
    """For every route of the admin API a function that asks it for something, of a client."""
    new = NewTask(world.new.manifest, TaskSettings(population="phones", goal=2, rounds=1, privacy=promise()))
    bodies = {"create": msgspec.json.encode(new), "release_model": msgspec.json.encode(version(world.store, 2))}
    bodies |= {"upload": b"uploaded"}
    query = {"round": "0", "version": "1", "share": "1", "epsilon": "99", "delta": "1e-5"}
    names = {(one.method, PREFIX + one.path): one.name for one in OPERATIONS}

    def call(client, method, path, found):
        name = names.get((method, path))
        found = found | {"upload": {"sha256": hashlib.sha256(b"uploaded").hexdigest()}}.get(name, {})
        return client.request(method, path.format(**found), content=bodies.get(name), params=query)

    return call


@pytest.mark.promise("Operators need a token of the right role, on another port")
@pytest.mark.security("A token limited to populations reaches nothing of others")
def test_every_operation_with_every_role(world, admin):
    call, before = calls(world), world.everything()
    cases = [(who, *route, refusal(asks, who)) for route, asks in API.items() for who in WHO]
    refused = [case for case in cases if case[-1]]
    assert {who for who, *_ in refused} == WHO.keys() - {"operator"}
    for who, method, path, slug in refused:
        answer = call(admin[who], method, path, world.at(path))
        assert answer.headers.get(PROBLEM_FIELD) == slug, (who, method, path, answer.status_code, answer.text)
        if str(slug).startswith("unknown-") and "{" in path:
            nowhere = call(admin[who], method, path, world.at(path) | NOWHERE)
            assert alike(answer, world.at(path)) == alike(nowhere, NOWHERE), (who, method, path)
    assert world.everything() == before
    for who, method, path, _ in (case for case in cases if not case[-1]):
        answer = call(admin[who], method, path, world.at(path))
        assert answer.status_code not in (401, 403, 404), (who, method, path, answer.text)
        if method == "GET":
            assert answer.status_code == 200, (who, method, path, answer.text)
        assert [trace for trace in world.hidden(who) if trace in answer.text] == [], (who, method, path)


def alike(answer, named):
    """An answer without what it was asked for."""
    text = re.sub(r'value="[0-9a-f]{64}"|in [0-9a-f]{64}', "", answer.text)
    for name in NOWHERE:
        text = re.sub(rf"{named[name][:12]}\w*", "ASKED", text)
    return answer.status_code, text


def asked(client, call, *arguments, **settings):
    """What the admin API answers to the wish for a task of `watches`: its problem, or "" for a task."""
    new = NewTask(*arguments[:1], TaskSettings(population="watches", goal=2, rounds=1, **settings), **call)
    return client.post(f"{PREFIX}/tasks", content=msgspec.json.encode(new)).headers.get(PROBLEM_FIELD, "")


def upload(client, blobs):
    for data in blobs:
        sha256 = hashlib.sha256(data).hexdigest()
        assert client.put(f"{PREFIX}/blobs/{sha256}", content=data).status_code == 204


@pytest.mark.every_engine
@pytest.mark.security("A token limited to populations reaches nothing of others")
def test_no_bytes_of_another_population_are_had_by_their_digest(world, admin, tmp_path):
    far, near = (admin[f"operator of {which} population"] for which in ("another", "this"))
    blobs = [data for _, data in world.new.blobs()]
    for _ in blobs:  # the plan, the state, the certificate and each graph: every one must have been sent
        assert asked(far, {}, world.new.manifest) == "unknown-blob"
        upload(far, [blobs.pop()] if len(blobs) > 1 else [])
    assert asked(far, {}, world.new.manifest) == "unknown-blob"
    upload(far, blobs)
    assert asked(far, {}, world.new.manifest) == ""
    evaluation = make_evaluation_bundle(tmp_path / "evaluation")
    regular = RegularEvaluation(1, evaluation.manifest)
    upload(near, [data for _, data in evaluation.blobs()])
    assert asked(far, {"evaluation": regular}, world.new.manifest, hold_out_devices=0.1) == "unknown-blob"
    settings = TaskSettings(population="watches", goal=2, rounds=3, hold_out_devices=0.1)
    like = world.store.register_task(world.new, settings, evaluation=Regularly(1, evaluation)).id
    assert asked(far, {"evaluation": regular}, world.store.manifest(like), hold_out_devices=0.1) == ""
    released = version(world.store, 1, (9, 9, 9, 9), population="watches")
    answer = far.post(f"{PREFIX}/models", content=msgspec.json.encode(released))
    assert answer.headers[PROBLEM_FIELD] == "unknown-blob"


@pytest.mark.security("A token limited to populations reaches nothing of others")
def test_no_model_of_another_population_is_begun_at_evaluated_or_released(world, admin, tmp_path):
    far, store = admin["operator of another population"], world.store
    new, parameters = world.new, version(store, 1, (9, 9, 9, 9), population="watches")
    upload(far, [data for _, data in new.blobs()])
    for source in (world.trained, f"{world.trained}@1", "0" * 16):
        assert asked(far, {}, new.manifest, starts_from=source) == "unknown-task"
    evaluation = make_evaluation_bundle(tmp_path / "evaluation")
    upload(far, [data for _, data in evaluation.blobs()])
    for origin in (ModelSource(task=world.trained, round=1), ModelSource(task="0" * 16, round=1)):
        assert asked(far, {"evaluates": Evaluates(origin)}, evaluation.manifest) == "unknown-task"
    upload(far, [store.blobs.get(verified(parameters, ModelRelease).parameters.sha256)])
    for task, slug in ((world.trained, "unknown-task"), ("0" * 16, "unknown-task"), (None, None)):
        more = {} if task is None else {"origin": ModelOrigin(task, 1)}
        signed = version(store, 1, (9, 9, 9, 9), population="watches", **more)
        answer = far.post(f"{PREFIX}/models", content=msgspec.json.encode(signed))
        assert answer.headers.get(PROBLEM_FIELD) == slug, answer.text
    elsewhere = far.post(f"{PREFIX}/models", content=msgspec.json.encode(version(store, 2, (9, 9, 9, 9))))
    assert elsewhere.headers[PROBLEM_FIELD] == "invalid-model"


def test_what_crosses_populations_is_left_out_of_lists(world, admin, tmp_path, monkeypatch):
    store, path = world.store, f"{PREFIX}/tasks/{world.trained}"
    across = TaskSettings(population="watches", goal=2, rounds=1, privacy=promise())
    evaluate(store, make_evaluation_bundle(tmp_path / "evaluation", clip_norm=4.0), world.trained, settings=across)
    begun = TaskSettings(population="watches", goal=2, rounds=1, privacy=promise(), starts_from=world.trained)
    child = store.register_task(make_private_bundle(tmp_path / "child"), begun).id
    near, whole = admin["viewer of this population"], admin["viewer"]
    assert [len(one.get(f"{path}/evaluations").json()) for one in (near, whole)] == [0, 1]
    far = admin["viewer of another population"]
    certificates = [one.get(f"{PREFIX}/tasks/{child}/certificate").status_code for one in (far, whole)]
    assert certificates == [404, 200]  # one without what its ancestor spent would be false
    monkeypatch.setenv("MUSTER_TOKEN", world.token("viewer of another population"))
    shown = in_process("task", "show", child, "--coordinator", world.urls.admin)
    assert "of a population that this token may not see" in " ".join(shown.stdout.split())
    store.set_budget("tablets", 1.0, 1e-9)  # a population of which nothing else is there yet
    budgets = [one.get(f"{PREFIX}/populations/tablets/budget").status_code for one in (far, near, whole)]
    assert budgets == [404, 404, 200]
    pages = [{one["number"] for one in who.get(f"{PREFIX}/audit?after=0").json()} for who in (far, near, whole)]
    entries = store.audit(0, 1000)
    of = [{one.number for one in entries if one.population == name} for name in ("watches", "phones")]
    assert pages[:2] == of
    assert pages[2] > of[0] | of[1]
    assert verify(entries).number == len(entries)
    assert [len(one.get(f"{PREFIX}/alerts").json()) > 0 for one in (far, near)] == [False, True]


def test_pages_have_no_side_door(world, browsers):
    far, near = browsers["operator of another population"], browsers["operator of this population"]
    link = f'href="/tasks/{world.trained}"'
    for address, trace in (
        (f"/compare?task={world.trained}", "of-phones"),
        ("/?search=of-phones", link),
        ("/?population=phones", link),
    ):
        assert [trace in one.get(address).text for one in (far, near)] == [False, True], address
    assert [one.get(f"/new?clone={world.trained}").status_code for one in (far, near)] == [404, 200]


@pytest.fixture
def browsers(world):
    """Sessions of the dashboard by who asks. Nobody logs in with a token for metrics, nor without one."""
    clients = {who: httpx2.Client(base_url=world.urls.admin, timeout=20) for who in WHO}
    for who, client in clients.items():
        if WHO[who] is not None:
            assert log_in(client, world.token(who)).status_code == (401 if who == "metrics" else 303), who
    yield clients
    for client in clients.values():
        client.close()


def browse(world, client, method, path, found):
    """What a browser is answered at an address, or by the form that leads there; of a stream, its start."""
    verb = "promote" if "models" in path else "cancel" if method == "GET" else "pause"
    asked = path.format(**found | {"verb": verb} | ({"name": "style.css"} if "static" in path else {}))
    if path.endswith("/events"):
        with client.stream(method, asked) as answer:
            answer.began = next(answer.iter_text(), "")
            return answer
    if method == "GET":
        return client.get(asked)
    form = {"csrf": csrf(client.get("/login")), "population": "phones", "goal": "2", "rounds": "1", "version": "1"}
    form |= {"manifest": msgspec.json.encode(world.new.manifest).decode(), "share": "1"}
    form |= {"privacy": "yes"} | {f"privacy.{name}": str(value) for name, value in PRIVACY.items()}
    if method == "PUT":
        data = b"uploaded"
        asked = f"/new/blobs/{hashlib.sha256(data).hexdigest()}"
        return client.put(asked, content=data, headers={"X-CSRF-Token": form["csrf"]})
    return client.post(asked, data=form)


PRIVACY = {"epsilon": 4.0, "delta": 1e-6, "users": 1000}


@pytest.mark.security("A token limited to populations reaches nothing of others")
def test_every_page_with_every_role(world, browsers):
    statuses, before = {"bad-token": 401, "role-lacking": 403}, world.everything()
    cases = [
        (who, *route, refusal(asks, "nobody" if who == "metrics" else who))
        for route, asks in PAGES.items()
        for who in WHO
    ]
    for who, method, path, why in (case for case in cases if case[-1]):
        answer = browse(world, browsers[who], method, path, world.at(path))
        assert answer.status_code == statuses.get(why, why), (who, method, path)
        if why == 404:
            nowhere = browse(world, browsers[who], method, path, world.at(path) | NOWHERE)
            assert alike(answer, world.at(path)) == alike(nowhere, NOWHERE), (who, method, path)
    assert world.everything() == before
    for who, method, path, _ in (case for case in cases if not case[-1]):
        answer = browse(world, browsers[who], method, path, world.at(path))
        assert answer.status_code in (200, 204, 303, 409, 422), (who, method, path, answer.text)
        assert method != "GET" or answer.status_code == 200, (who, method, path)
        shown = answer.began if path.endswith("/events") else answer.text
        assert [trace for trace in world.hidden(who) if trace in shown] == [], (who, method, path)
        if path in ("/", "/events", "/tasks/{task}/events"):
            assert ("of-phones" in shown) is ("another" not in who), (who, path)
    for client in browsers.values():
        client.post("/logout", data={"csrf": csrf(client.get("/login"))})
        assert client.get("/").status_code == 401


def test_the_command_limits_a_token_and_names_what_is_not_there_yet(store, database, register):
    register()
    make = ("coordinator", "token", "--name", "bob", "--role", "operator", "--db", database)
    both = in_process(*make, "--population", "watches", "--population", "phones", "--json")
    assert json.loads(both.stdout)["populations"] == ["phones", "watches"]
    assert both.stderr == "note: there is no population watches yet; its first task makes it\n"
    (token,) = tokens(store.database)
    assert (token.populations, token.role, token.proxy) == (("phones", "watches"), "operator", False)
    assert "of phones, watches, until" in store.audit()[-1].detail
    assert "phones, watches" in in_process("coordinator", "tokens", "--db", database).stdout
    (told,) = json.loads(in_process("coordinator", "tokens", "--db", database, "--json").stdout)
    assert (told["populations"], "person" in told) == (["phones", "watches"], False)
    for wrong, why in (
        (("--population", ""), "can be no population"),
        (("--role", "metrics", "--population", "a"), "leave out"),
    ):
        assert why in str(in_process(*make, *wrong).exception)
    assert len(tokens(store.database)) == 1


def test_that_nobody_looks_for_alerts_is_of_no_population(store, register):
    register()
    assert [one.kind for one in store.alerts()] == ["unwatched"]
    assert store.limited(["phones"]).alerts() == []
