"""The dashboard's form of new tasks, its populations, log lines and API page."""

import html
import logging
import re
import socket
from dataclasses import replace

import httpx2
import msgspec
import pytest

from coordinator.api.authentication import issue
from coordinator.api.service import OTHER, SPAN_S, CheckInCounts
from coordinator.dashboard.new_task import field_of, from_form, groups, values
from coordinator.monitoring import RecentLines
from coordinator.rules.entities import Regularly, Role
from coordinator.rules.states import Requires
from coordinator.rules.task_settings import Buffered, TaskSettings
from coordinator.settings import Settings
from tests.coordinator.bundles import make_bundle, make_evaluation_bundle
from tests.coordinator.devices import CAPABILITIES, speaking_to
from tests.coordinator.pages import csrf, log_in
from tests.coordinator.test_api import check_in

GIVEN = {"population": "phones", "goal": "2", "rounds": "3"}
CLONED = {"population": "phones", "goal": 2, "rounds": 3}


def filled_in(page):
    """What a browser sends of the form of a new task as it is."""
    texts = re.findall(r'<input (?!type="checkbox")[^>]*name="([^"]+)" value="([^"]*)"', page)
    texts += re.findall(r'<input type="checkbox"[^>]* name="([^"]+)" value="(yes)" checked>', page)
    texts += re.findall(r'<select id="([^"]+)".*?<option selected>([^<]*)<', page, re.DOTALL)
    texts += re.findall(r'<textarea[^>]* name="([^"]+)"[^>]*>([^<]*)<', page)
    return {name: html.unescape(value) for name, value in texts}


@pytest.fixture
def operating(store, locked):
    """A client of the pages, logged in as an operator, and the CSRF token of its session."""
    log_in(locked, issue(store.database, "erin", Role.OPERATOR)[1])
    return locked, csrf(locked.get("/new"))


def test_form_creates_a_task_of_an_uploaded_bundle(store, bundle, operating):
    client, token = operating
    for ref, data in bundle.blobs():
        put = client.put(f"/new/blobs/{ref.sha256}", content=data, headers={"X-CSRF-Token": token})
        assert put.status_code == 204
    manifest = (bundle.folder / "manifest.json").read_text()
    given = GIVEN | {"csrf": token, "manifest": manifest, "over_selection": "1.5", "requires.charging": "yes"}
    given |= {"name": "spring <keyboard>"}
    refused = client.post("/new", data=given | {"name": "<" * 101})
    assert (refused.status_code, f'name="name" value="{"&lt;" * 101}"' in refused.text) == (422, True)
    created = client.post("/new", data=given | {"buffered.concurrency": "7"})
    assert created.status_code == 303
    (task,) = store.tasks()
    assert created.headers["location"] == f"/tasks/{task.id}"
    assert (task.name, task.bundle) == ("spring <keyboard>", "hand-made")
    settings = task.settings
    assert (settings.goal, settings.over_selection, settings.requires.charging, settings.buffered) == (
        2,
        1.5,
        True,
        None,
    )
    assert "operator erin" in store.history(task.id)[0].cause


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        ({"goal": "many"}, 422, "goal must be a whole number from 1 to 2^31 - 1, not many"),
        ({"goal": "0"}, 422, "goal must be a whole number from 1"),
        ({"manifest": ""}, 422, "choose the folder of a bundle"),
        ({"manifest": "{}"}, 422, "this is not a bundle"),
        ({}, 404, "there is no blob"),
        ({"csrf": "forged"}, 403, "not from a page of your session"),
    ],
)
def test_form_that_is_wrong_comes_back_as_it_was_filled_in(store, bundle, operating, wrong, status, words):
    client, token = operating
    manifest = (bundle.folder / "manifest.json").read_text()
    page = client.post("/new", data=GIVEN | {"csrf": token, "manifest": manifest, "seed": "77"} | wrong)
    assert page.status_code == status
    assert re.search(f'role="alert">[^<]*{re.escape(words)}', page.text)
    assert 'value="77"' in page.text
    assert store.tasks() == []


def test_the_form_is_filled_in_with_what_a_task_has(store, tmp_path, operating):
    client, _ = operating
    regular = Regularly(2, make_evaluation_bundle(tmp_path / "evaluation"))
    given = TaskSettings(**CLONED, hold_out_devices=0.25, requires=Requires(charging=True), buffered=Buffered())
    task = store.register_task(make_bundle(tmp_path / "plan"), given, name="spring", evaluation=regular)
    assert f'href="/new?clone={task.id}"' in client.get(f"/tasks/{task.id}").text
    page = client.get(f"/new?clone={task.id}").text
    assert '<input id="minimum" name="minimum" value=""' in page  # which follows from the goal
    made = client.post("/new", data=filled_in(page) | {"goal": "5"})
    assert made.status_code == 303, made.text
    clone = store.task(made.headers["location"].rpartition("/")[2])
    assert (clone.name, clone.settings, clone.evaluation) == (
        "spring",
        replace(given, goal=5, minimum=5),
        task.evaluation,
    )
    assert store.manifest(clone.id) == store.manifest(task.id)
    unknown = client.get("/new?clone=nope")
    assert (unknown.status_code, "no task" in unknown.text) == (404, True)


def test_only_an_operators_page_uploads_and_creates(store, bundle, locked):
    ref, data = next(iter(bundle.blobs()))
    assert locked.get("/new").status_code == 401
    assert locked.put(f"/new/blobs/{ref.sha256}", content=data).status_code == 401
    log_in(locked, issue(store.database, "finn", Role.VIEWER)[1])
    token = csrf(locked.get("/"))
    assert locked.get("/new").status_code == 403
    assert locked.post("/new", data=GIVEN | {"csrf": token}).status_code == 403
    assert locked.put(f"/new/blobs/{ref.sha256}", content=data, headers={"X-CSRF-Token": token}).status_code == 403
    log_in(locked, issue(store.database, "erin", Role.OPERATOR)[1])
    assert locked.put(f"/new/blobs/{ref.sha256}", content=data).status_code == 403
    headers = {"X-CSRF-Token": csrf(locked.get("/new"))}
    assert locked.put(f"/new/blobs/{'0' * 64}", content=data, headers=headers).status_code == 422
    assert not store.blobs.has(ref.sha256)


def test_a_form_is_read_for_an_operator_alone_and_to_its_limit(locked, store):
    address = locked.base_url.host, locked.base_url.port
    with socket.create_connection(address, timeout=20) as stranger:  # who never sends the form that it announces
        stranger.sendall(b"POST /new HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        assert b" 401 " in stranger.makefile("rb").readline()
    log_in(locked, issue(store.database, "erin", Role.OPERATOR)[1])
    limit = Settings().message_limit_bytes
    refused = locked.post("/new", data={"csrf": csrf(locked.get("/new")), "manifest": "x" * limit})
    assert refused.status_code == 413
    assert f"this form is too long: at most {limit:,} bytes are read" in refused.text


def test_form_explains_every_setting_and_folds_all_but_five_fields(operating):
    client, _ = operating
    page = client.get("/new").text
    for group in groups():
        for one in group.settings:
            assert f'name="{one.name}"' in page
            assert one.about
    first = re.findall(r'<label for="(\w+)"', page.split("More settings")[0])
    assert first == ["name", "population", "folder", "goal", "rounds"]
    assert "sampling_probability" not in page  # which a task refuses to change
    drawn = "Devices drawn per report wanted. [1 to 100; default: 1.3]"
    for explained in (drawn, "Size of the population. [≥ 1] Required with privacy."):
        assert explained in page


def test_every_wrong_field_says_so_at_once_in_an_open_fold(bundle, operating):
    client, token = operating
    wrong = {"goal": "many", "rounds": "", "over_selection": "0", "name": "<" * 101, "release": "[", "secagg": "yes"}
    page = client.post("/new", data=GIVEN | {"csrf": token, "requires.min_battery": "2", "seed": "77"} | wrong).text
    told = {"goal", "rounds", "over_selection", "name", "release", "manifest", "requires.min_battery"}
    assert set(re.findall(r'id="wrong-([\w.]+)" role="alert"', page)) == told
    assert set(re.findall(r'<a href="#([\w.]+)"', page)) == told - {"manifest"} | {"folder"}
    assert len(re.findall(r'aria-invalid="true"', page)) == len(told)
    folds = {name: bool(opened) for opened, name in re.findall(r"<details( open)?>\s*<summary>(\w+) ", page)}
    assert folds | {"rounds": True, "secagg": True, "requires": True, "devices": False, "privacy": False} == folds
    assert ('value="many"' in page, 'value="77"' in page) == (True, True)


@pytest.mark.parametrize(
    ("sentence", "field"),
    [
        ("minimum must be from 1 to the goal, 2, not 3", "minimum"),
        ("secagg: bits must be at most 20", "secagg.bits"),
        ("estimator must be mean with secagg", "clear.estimator"),
        ("secagg must be absent in mode buffered", "secagg"),
        ("mode must be synchronous with privacy", ""),
        ("…", ""),
    ],
)
def test_error_stands_at_the_field_that_it_begins_with(sentence, field):
    assert field_of(sentence) == field


def test_settings_from_text_have_the_defaults_and_the_parts_asked_for():
    settings, _ = from_form(GIVEN | {"formats": "onnx, executorch", "secagg.bits": "9", "buffered": "yes"})
    assert (settings.formats, settings.secagg) == (("onnx", "executorch"), None)
    assert (settings.over_selection, settings.buffered.concurrency) == (1.3, 100)
    shown = values(settings)
    assert (shown["formats"], shown["buffered.concurrency"]) == ("onnx, executorch", "100")
    assert not any(name.startswith("secagg") for name in shown)
    assert from_form(GIVEN | {name: shown.get(name, "") for name in shown}) == (settings, {})
    none, wrong = from_form(GIVEN | {"privacy": "yes"})
    assert (none, set(wrong)) == (None, {"privacy.epsilon", "privacy.delta", "privacy.users"})
    assert wrong["privacy.epsilon"] == "privacy: epsilon is missing: it must be a number above 0"
    assert from_form(GIVEN | {"minimum": "3"})[1] == {"minimum": "minimum must be from 1 to the goal, 2, not 3"}


def test_population_shows_its_devices_versions_and_check_ins(register, served):
    register()
    with speaking_to(served.devices) as devices:
        check_in(devices, runtime="cedar")
    page = " ".join(re.sub("<[^>]*>", " ", httpx2.get(f"{served.admin}/populations/phones").text).split())
    assert "known 1 awake, in the last ten minutes 1" in page
    assert "cedar, " in page
    assert f"cedar {CAPABILITIES.version} 1" in page
    assert httpx2.get(f"{served.admin}/populations/none").status_code == 404


def able(runtime):
    return msgspec.structs.replace(CAPABILITIES, runtime=runtime, version="1")


def test_counts_of_check_ins_are_bounded_and_forget_after_a_day():
    counts = CheckInCounts()
    for number in range(1000):
        counts.add("phones", f"device {number}", able(f"{number:03}" * 100), 0.0)
    counts.add("phones", "device 0", able("0" * 100), 2 * SPAN_S)
    found = counts.of("phones", 2 * SPAN_S)
    assert (found.devices, found.awake) == (1000, 1)
    assert (len(found.runtimes), max(map(len, found.runtimes)), sum(found.runtimes.values())) == (31, 60, 1001)
    assert found.runtimes[OTHER] == 970
    assert found.over_time == ((0.0, 1000), (SPAN_S, 0), (2 * SPAN_S, 1))
    assert counts.of("phones", 145 * SPAN_S).devices == 1
    assert counts.of("nobody", 0.0).devices == 0


def test_devices_are_bounded_in_all_populations_together(monkeypatch):
    monkeypatch.setattr("coordinator.api.service._MOST_DEVICES", 10)
    counts = CheckInCounts()
    for number in range(8):
        for population in ("phones", "tablets"):
            counts.add(population, f"device {number}", able("cedar"), float(number))
    counts.add("phones", "device 3", able("cedar"), 1000.0)
    phones, tablets = (counts.of(name, 1000.0) for name in ("phones", "tablets"))
    assert (phones.devices, phones.awake, tablets.devices, tablets.awake) == (5, 1, 5, 0)
    assert (counts.of("phones", 1e9).devices, counts.of("tablets", 1e9).devices) == (0, 0)


def test_only_populations_that_exist_are_counted(register, served):
    register()
    with speaking_to(served.devices) as devices:
        assert check_in(devices, population="invented").status_code == 404
        register(population="invented")
    found = " ".join(re.sub("<[^>]*>", " ", httpx2.get(f"{served.admin}/populations/invented").text).split())
    assert "known 0 awake" in found


def test_log_of_a_task_has_its_own_lines_bounded_and_without_tracebacks():
    lines, log = RecentLines(), logging.getLogger("coordinator.somewhere")
    lines.begin()
    try:
        log.warning("task %s is paused", "abc")
        log.error("of task def", exc_info=ValueError("secret"))
        log.warning("task abc %s", "x" * 9999)
        for number in range(1999):
            log.warning("more %d", number)
    finally:
        lines.end()
    log.warning("task abc again")
    assert [(line.level, len(line.words)) for line in lines.about("abc")] == [("warning", 500)]
    assert lines.about("def") == []


def test_log_page_shows_lines_of_its_task_as_text(register, served):
    task = register()
    logging.getLogger("coordinator").warning("task %s <b>is</b> paused", task)
    page = httpx2.get(f"{served.admin}/tasks/{task}/log").text
    assert f"task {task} &lt;b&gt;is&lt;/b&gt; paused" in page
    other = register()
    assert (
        f"The coordinator at {served.devices} has logged nothing"
        in httpx2.get(f"{served.admin}/tasks/{other}/log").text
    )


def test_api_page_has_all_operations_with_curl_and_asks_no_other_site(served):
    document = httpx2.get(f"{served.admin}/openapi.json", timeout=60).json()
    page = httpx2.get(f"{served.admin}/docs", timeout=60).text
    for path in document["paths"]:
        assert path in page
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page
    assert page.count("<pre>curl ") == sum(map(len, document["paths"].values()))
    nouns = re.findall(r"<summary><h2>([^<]+)", page)
    assert (len(nouns), {"tasks", "devices", "models", "messages"} - set(nouns)) == (len(set(nouns)), set())
    assert [page.count(f"</strong> {common}") for common in ("bad-token", "internal", "unavailable")] == [1, 1, 1]
    asked = 'curl -H "Authorization: Bearer $TOKEN"'
    assert f'<pre>{asked} "$MUSTER/admin/v1/tasks/${{TASK}}/rounds"</pre>' in html.unescape(page)
    rollback = f'<pre>{asked} -X POST "$MUSTER/admin/v1/tasks/${{TASK}}:rollback?round=$ROUND"</pre>'
    assert rollback in html.unescape(page)
    assert re.findall(r'(?:src|href)="(?:https?:)?//', page) == []
    assert "{'" not in page


def test_all_settings_that_do_not_fit_others_say_so_at_once(bundle, operating):
    wrong = {"minimum": "3", "clients": "1", "on_held_out": "true", "secagg": "yes", "buffered": "yes"}
    _, told = from_form(GIVEN | wrong)
    assert set(told) == {"minimum", "clients", "on_held_out", "goal", "secagg"}
    assert told["minimum"] == "minimum must be from 1 to the goal, 2, not 3"
    _, told = from_form(GIVEN | {"clear.estimator": "krum", "schedule.scaling": "sqrt"})
    assert set(told) == {"clear.tolerate", "schedule.scaling"}
    client, token = operating
    page = client.post("/new", data=GIVEN | {"csrf": token} | wrong).text
    assert set(re.findall(r'id="wrong-([\w.]+)" role="alert"', page)) >= {"minimum", "clients", "on_held_out", "secagg"}


def test_a_cloned_form_says_that_its_plan_is_filled_in(register, operating):
    client, _ = operating
    page = client.get(f"/new?clone={register()}").text
    assert "A plan is filled in already; choose a folder only to take another." in page
    assert "filled in already" not in client.get("/new").text
