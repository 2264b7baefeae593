"""Every operation of the admin API, by walks over the table: what it gives, who may do it, where it is listed."""

import hashlib
import math
from dataclasses import replace
from functools import partial

import httpx2
import msgspec
import pytest

import muster
from coordinator import errors
from coordinator.api.authentication import issue
from coordinator.operations import OPERATIONS, PREFIX, AdminService, NewTask, TaskStore, TrainedTasks
from coordinator.rules.alerts import STORE, Finding
from coordinator.rules.entities import Evaluates, ModelSource, Regularly, Role
from coordinator.rules.task_settings import TaskSettings
from coordinator.security import of_running
from coordinator.settings import Settings
from coordinator.store.records.rows import DAY_S, Stated
from fedcore.wire.messages import PROBLEM_FIELD
from muster.remote import RemoteStore
from tests.coordinator.bundles import make_bundle, make_evaluation_bundle, make_private_bundle
from tests.coordinator.conftest import PEM
from tests.coordinator.devices import Devices
from tests.coordinator.pages import log_in
from tests.coordinator.questions import make_question_bundle
from tests.coordinator.released import PREDICT, predicting_plan, version
from tests.coordinator.test_evaluated import evaluate
from tests.coordinator.test_privacy import promise, train
from tests.servers import serving_both

NOT_ONE_OPERATION = {"register_task": "over HTTP it is `present`, `upload` and `create`, a body each"}
OF_STORE = [one for one in OPERATIONS if one.call is getattr(TaskStore, one.name, None)]
OF_MODELS = [one for one in OF_STORE if "model_" in f"{one.name}_" and one.method == "POST"]
PREPARED_BY = {"resume": "pause", "roll_back": "pause", "allow_device": "revoke_device"}
UNKNOWN = {"name": errors.UnknownModel, "population": errors.UnknownPopulation, "task_id": errors.UnknownTask}
MEASURED = {"id": "", "created_at": 0, "key": "", "enrolled_at": 0}


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def settings(database, tmp_path):
    """Those of a coordinator that drives nothing, so that a task stays where it was put."""
    (tmp_path / "keys.lineage").write_bytes(PEM)
    fixed = {"database": database, "blobs": tmp_path / "blobs", "keys": tmp_path / "keys", "port": 0, "admin_port": 0}
    return Settings(**fixed, role="api", accept_unattested=True)


@pytest.fixture
def trained(store, register, desk, tmp_path):
    """The id of a private task after a round. The blobs of another plan are stored, one that predicts."""
    task = register(make_private_bundle(tmp_path / "private"), rounds=9, privacy=promise())
    train(desk)
    for blob in (predicting_plan().encode(), PREDICT):
        store.blobs.put(blob)
    return task


@pytest.fixture
def urls(settings, trained):
    with serving_both(settings) as running:
        yield running


@pytest.fixture
def devices(urls):
    with httpx2.Client(base_url=urls.devices, timeout=10) as client:
        yield Devices(client)


@pytest.fixture
def operator(store, urls):
    """The coordinator through its API, for an operator; `by` is what the audit log calls that one."""
    token, text = issue(store.database, "alice", Role.OPERATOR)
    with RemoteStore(urls.admin, text) as remote:
        remote.by = token.signature
        yield remote


def needed(operation):
    """The names of the arguments that an operation must be given."""
    return [one.name for one in operation.parameters.values() if one.default is one.empty]


def outcome(call, *arguments):
    """What a call gives, or the error that it raises; without what was drawn or measured."""
    try:
        value = call(*arguments)
    except Exception as error:
        return type(error), str(error).replace(str(arguments[0]), "ID")
    if isinstance(value, bytes):
        return value
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict) and "id" in plain:
        plain |= {name: blank for name, blank in MEASURED.items() if name in plain}
        plain |= {"revoked_at": plain["revoked_at"] is not None} if "revoked_at" in plain else {}
    return plain


def test_what_operators_see_over_http_is_what_the_store_gives(store, trained, devices, operator, settings, tmp_path):
    noisy = TaskSettings(population="phones", goal=2, rounds=1, privacy=promise())
    evaluate(store, make_evaluation_bundle(tmp_path / "evaluation", clip_norm=4.0), trained, settings=noisy)
    store.release_model(version(store))
    store.promote_model("phones", "keyboard", 1, 0.5)
    with store.database.writing() as records:
        records.models.add_counts({Stated("phones", "keyboard", 1, int(records.at // DAY_S), refused=False): 3})
        records.alerts.add(Finding("stuck", "it is stuck", store.task(trained)), due=False)
    given = {"task_id": trained, "device_id": devices.id("a"), "number": 0, "population": "phones", "name": "keyboard"}
    for operation in (one for one in OF_STORE if one.method == "GET"):
        near, far = getattr(store, operation.name), getattr(operator, operation.name)
        arguments = [given[name] for name in needed(operation)]
        found = outcome(near, *arguments)
        assert found == outcome(far, *arguments), operation.name
        assert found or operation.name in ("releases", "sessions"), operation.name
        for unknown in ("nope", "ü?#%") if arguments else ():
            named = [unknown] * len(arguments)
            assert outcome(near, *named) == outcome(far, *named), operation.name
            assert outcome(near, *named)[0] is UNKNOWN[needed(operation)[-1]]
        if "round" in operation.parameters:
            models = [outcome(near, trained, number) for number in (0, 1, 99)]
            assert models == [outcome(far, trained, number) for number in (0, 1, 99)], operation.name
            assert (models[0] != models[1], models[2][0]) == (True, errors.UnknownRound), operation.name
    devices.id("b")
    store.revoke_device(given["device_id"])
    assert store.devices(1, revoked=False) == operator.devices(1) != store.devices() == operator.devices()
    assert store.devices(revoked=True) == operator.devices(revoked=True) != []
    for arguments in ((None, 2), (1, 1), (0,), (10**6,)):
        assert store.audit(*arguments) == operator.audit(*arguments), arguments
    assert [alert.task for alert in operator.alerts(1000) if alert.kind == "stuck"] == [trained]
    with pytest.raises(errors.WebhookFailed, match="no webhook is set"):
        operator.test_alerts()
    named = {one.name for one in of_running(settings, store)}
    assert {one.name for one in operator.security()} == named


def test_changes_over_http_are_those_of_the_store_in_the_operators_name(store, register, devices, operator):
    for number, operation in enumerate(one for one in OF_STORE if one.method == "POST" and one not in OF_MODELS):
        outcomes = []
        for side, by in ((store, STORE), (operator, operator.by)):
            of_task = "task_id" in needed(operation)
            subject = register() if of_task else devices.id(f"{number} {by}")
            if before := PREPARED_BY.get(operation.name):
                getattr(store, before)(subject)
            act, more, logged = getattr(side, operation.name), [0] * ("number" in needed(operation)), len(store.audit())
            outcomes.append([outcome(act, *one, *more) for one in ([subject], [subject], ["nope"])])
            assert {one.actor for one in store.audit()[logged:]} == {by}, operation.name
            assert not of_task or by in store.history(subject)[-1].cause, operation.name
            assert outcomes[-1][2][0] is (errors.UnknownTask if of_task else errors.UnknownDeviceId), operation.name
        assert outcomes[0] == outcomes[1], operation.name


def test_models_over_http_are_those_of_the_store_in_the_operators_name(store, trained, operator):
    altered = msgspec.structs.replace(version(store), text="{}")
    for side, by, first in ((store, STORE, 1), (operator, operator.by, 3)):
        logged = len(store.audit())
        for number in (first, first + 1):
            made = side.release_model(version(store, number))
            assert made == store.model_versions("phones", "keyboard")[-1]
            assert (
                side.promote_model("phones", "keyboard", number, 1.0) == store.model_history("phones", "keyboard")[-1]
            )
        assert side.roll_back_model("phones", "keyboard").number == first
        assert {one.actor for one in store.audit()[logged:]} == {by}
    for call, arguments in (
        ("release_model", (version(store, 9),)),
        ("release_model", (altered,)),
        ("promote_model", ("phones", "keyboard", 1, 5.0)),
        ("promote_model", ("phones", "keyboard", 9, 1.0)),
        ("promote_model", ("nope", "ü?#%", 1, 1.0)),
        ("roll_back_model", ("phones", "keyboard", 4)),
        ("roll_back_model", ("phones", "camera")),
    ):
        near, far = (outcome(getattr(side, call), *arguments) for side in (store, operator))
        assert near[1] == far[1], (call, arguments)
        assert issubclass(near[0], far[0]), (call, arguments)


def test_budgets_over_http_are_those_of_the_store_in_the_operators_name(store, trained, operator):
    outcomes = []
    for side, by in ((store, STORE), (operator, operator.by)):
        logged = len(store.audit())
        outcomes.append(
            [
                outcome(side.set_budget, "phones", 9.0, 1e-9),
                outcome(side.set_budget, "phones", 1.0, 1e-9),
                outcome(side.set_budget, "phones", math.nan, 1e-9),
                outcome(side.set_budget, "phones", 9.0, 1.0),
                outcome(side.set_budget, "\n", 9.0, 1e-9),
                outcome(side.remove_budget, "nope"),
                outcome(side.remove_budget, "phones"),
            ]
        )
        assert [(one.actor, one.action) for one in store.audit()[logged:]] == [
            (by, "budget-set"),
            (by, "budget-removed"),
        ]
    assert outcomes[0] == outcomes[1]
    assert [one[0] for one in outcomes[0][1:-1]] == [errors.InvalidBudget] * 4 + [errors.UnknownPopulation]


def test_a_task_that_a_budget_refuses_has_its_own_error_over_http(store, trained, operator, tmp_path):
    store.set_budget("phones", 9.0, 1e-9)
    refused = TaskSettings(population="phones", goal=2, rounds=3)
    with pytest.raises(errors.BudgetExceeded, match="promises no privacy"):
        operator.register_task(make_bundle(tmp_path / "plan"), refused)


def test_a_task_over_http_is_the_one_that_the_store_makes(store, operator, tmp_path):
    bundle, settings = make_bundle(tmp_path / "plan"), TaskSettings(population="phones", goal=2, rounds=3)
    for name in (None, "spring", "a\n"):
        near, far = (outcome(partial(side.register_task, name=name), bundle, settings) for side in (store, operator))
        assert near == far
    assert near[0] is errors.InvalidTask
    assert [one.actor for one in store.audit() if one.action == "task-created"][1:] == [STORE, operator.by] * 2
    assert operator.present(bundle.manifest.plan.sha256)
    assert not operator.present("0" * 64)


@pytest.mark.promise("Operators need a token of the right role, on another port")
@pytest.mark.security("The admin API has a port of its own, asks for a token with a role")
def test_viewer_looks_and_changes_nothing(store, register, trained, urls, devices, tmp_path):
    data, bundle = b"uploaded by a viewer", make_bundle(tmp_path / "plan")
    new = NewTask(bundle.manifest, TaskSettings(population="phones", goal=2, rounds=1))
    store.release_model(version(store))
    found = {"task": trained, "device": devices.id("a"), "sha256": hashlib.sha256(data).hexdigest()}
    found |= {"population": "phones", "name": "keyboard"}
    asking = register(make_question_bundle(tmp_path / "question"))
    bodies = {"upload": data, "create": msgspec.json.encode(new)}
    bodies["release_model"] = msgspec.json.encode(version(store, 2))
    viewer, prometheus = (issue(store.database, "victor", role)[1] for role in (Role.VIEWER, Role.METRICS))
    tasks, enrolled, logged = store.tasks(), store.devices(), len(store.audit())
    with httpx2.Client(
        base_url=urls.admin + PREFIX, params={"round": "0", "version": "1", "share": "1"}, timeout=10
    ) as client:
        for operation in OPERATIONS:
            of = found | ({"task": asking} if operation.name == "answer" else {})
            path, body = operation.path.format(**of), bodies.get(operation.name)
            nobody, scraping, looking = (
                client.request(operation.method, path, content=body, headers=headers)
                for headers in ({}, bearer(prometheus), bearer(viewer))
            )
            assert (nobody.status_code, nobody.headers[PROBLEM_FIELD]) == (401, "bad-token"), operation.name
            assert (scraping.status_code, scraping.headers[PROBLEM_FIELD]) == (403, "role-lacking"), operation.name
            if operation.role is Role.OPERATOR:
                assert (looking.status_code, looking.headers[PROBLEM_FIELD]) == (403, "role-lacking"), operation.name
            else:
                assert (operation.method, looking.status_code) == ("GET", 200), operation.name
    assert {one.name for one in OPERATIONS if one.role is Role.OPERATOR and one.method == "GET"} == {"security"}
    assert (store.tasks(), store.devices()) == (tasks, enrolled)
    assert [(one.versions, one.current) for one in store.models()] == [(1, None)]
    assert [one.action for one in store.audit()[logged:]] == ["model-read", "answer-read", "certificate-read"]
    assert httpx2.get(f"{urls.admin}/metrics", headers=bearer(prometheus)).status_code == 200
    with httpx2.Client(base_url=urls.admin) as browser:
        assert log_in(browser, prometheus).status_code == 401
    assert not store.blobs.has(found["sha256"])


def test_document_and_client_have_every_operation_and_no_other(urls):
    document = httpx2.get(f"{urls.admin}/openapi.json").json()
    listed = {
        (method.upper(), path.removeprefix(PREFIX)): about
        for path, methods in document["paths"].items()
        for method, about in methods.items()
        if path.startswith(PREFIX)
    }
    assert listed.keys() == {(one.method, one.path) for one in OPERATIONS}
    for operation in OPERATIONS:
        about = listed[operation.method, operation.path]
        assert about["description"] == operation.sentence
        assert "role-lacking" in str(about["responses"]), operation.name
        assert {one["name"] for one in about.get("parameters", ())} == {*operation.parameters}, operation.name
    parts = (TrainedTasks, TaskStore, AdminService)
    methods = {name: call for part in parts for name, call in vars(part).items() if name[0] != "_"}
    assert {one.name: one.call for one in OPERATIONS} == {
        name: call for name, call in methods.items() if name not in NOT_ONE_OPERATION
    }
    assert methods.keys() <= vars(RemoteStore).keys()


def test_a_regular_evaluation_is_asked_for_over_http_and_in_python(store, urls, operator, bundle, tmp_path):
    evaluation, given = (
        make_evaluation_bundle(tmp_path / "evaluation"),
        {"population": "phones", "goal": 2, "rounds": 3},
    )
    settings = TaskSettings(**given, hold_out_devices=0.1)
    regular = Regularly(2, evaluation)
    made = operator.register_task(bundle, settings, evaluation=regular)
    assert made.evaluation == store.task(made.id).evaluation == regular.stored
    origin = Evaluates(ModelSource(task=made.id, round=0))
    with pytest.raises(errors.InvalidTask, match="not both"):
        operator.create(NewTask(bundle.manifest, settings, evaluates=origin, evaluation=regular.stored))
    _, text = issue(store.database, "bob", Role.OPERATOR)
    with muster.Coordinator(urls.admin, text) as coordinator:
        task = coordinator.create(bundle, evaluate_every=2, evaluation=evaluation, hold_out_devices=0.1, **given)
        assert store.task(task.id).evaluation == regular.stored
        assert task.evaluations() == []
        like = coordinator.create(like=task.id, goal=1)
        assert store.task(like.id).evaluation == regular.stored
        assert store.task(like.id).settings == replace(store.task(task.id).settings, goal=1, minimum=1)
        with pytest.raises(errors.InvalidTask, match="evaluate_every must be a whole number from 1"):
            coordinator.create(bundle, evaluate_every=0, evaluation=evaluation, hold_out_devices=0.1, **given)
