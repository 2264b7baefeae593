"""The dashboard: who sees it, that it is live, and that a phone shows it."""

import hashlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest
from selenium.webdriver.common.by import By

from coordinator.api.authentication import issue, revoke
from coordinator.rules.entities import Role
from coordinator.rules.task_settings import PrivacyBudget
from coordinator.settings import Settings
from tests.coordinator.browser import assert_sound, shows
from tests.coordinator.bundles import make_bundle, make_private_bundle, report_body
from tests.coordinator.devices import speaking_to
from tests.coordinator.pages import change, csrf, log_in
from tests.coordinator.test_api import assign, check_in, put, wait
from tests.servers import serving_both

HOSTILE = "<img src=x onerror=document.title='owned'><b>bold & " + "very-long-name-" * 8


def test_page_of_a_task_follows_its_round_without_being_loaded_again(register, served, browser):
    task = register(goal=2, rounds=2, over_selection=1.5)
    browser.get(f"{served.admin}/tasks/{task}")
    browser.execute_script("window.loadedOnce = true")
    shows(browser, "hand-made active", "0 of 2 rounds committed")
    with speaking_to(served.devices, 70) as devices:
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(wait, devices, "a", 60)
            shows(browser, "Round 1 selecting", "of 3 devices wait")
            others = assign(devices, "b", "c")
            waiting.result()
        shows(browser, "Round 1 reporting", "0 of 2 reports · 3 assigned")
        put(devices, others[0].assignment, report_body([1, 0, 0, 0], 1, loss=0.5))
        shows(browser, "1 of 2 reports")
        put(devices, others[1].assignment, report_body([1, 0, 0, 0], 1, loss=0.25))
    shows(browser, "1 of 2 rounds committed", "train.loss 0.375 after round 1", "reported 2 67 %", "not needed 1")
    assert browser.execute_script("return window.loadedOnce") is True
    assert len(browser.find_elements(By.CSS_SELECTOR, "svg.chart circle")) == 1
    assert_sound(browser, served.admin)


def test_what_devices_and_operators_write_is_shown_as_text(register, served, browser, tmp_path):
    register(make_bundle(tmp_path / "hostile"), name=HOSTILE[:100], population=HOSTILE)
    register()
    with speaking_to(served.devices) as devices:
        check_in(devices, runtime=HOSTILE)
    browser.get(served.admin)
    shows(browser, HOSTILE[:60].strip())
    assert browser.title == "Muster"
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main b") == []
    assert_sound(browser, served.admin)


def test_login_in_a_browser_opens_the_pages_and_logout_shuts_them(store, register, locked, browser):
    register()
    browser.get(str(locked.base_url))
    shows(browser, "Log in", "muster coordinator token")
    browser.find_element(By.NAME, "token").send_keys(issue(store.database, "dana", Role.VIEWER)[1])
    browser.find_element(By.CSS_SELECTOR, "main button").click()
    shows(browser, "Tasks", "hand-made", "Log out dana")
    assert browser.execute_script("return document.cookie") == ""
    browser.find_element(By.CSS_SELECTOR, "header button").click()
    shows(browser, "Token of a viewer or an operator")


def test_stranger_sees_the_login_alone(register, locked):
    task = register()
    for path in ("/", f"/tasks/{task}", "/tasks/nope"):
        page = locked.get(path)
        assert page.status_code == 401
        assert "Token of a viewer or an operator" in page.text
        assert task not in page.text
    for path in ("/events", f"/tasks/{task}/events"):
        assert locked.get(path).status_code == 401
    assert log_in(locked, "muster_0").status_code == 401
    assert log_in(locked, "x" * 5000).status_code == 413
    assert log_in(locked, "").status_code == 401


def test_session_is_for_pages_alone_and_dies_with_its_token(store, register, locked):
    task = register()
    token, text = issue(store.database, "finn", Role.VIEWER)
    entered = log_in(locked, text)
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"} <= set(entered.headers["set-cookie"].split("; "))
    assert text not in entered.headers["set-cookie"]
    page = locked.get(f"/tasks/{task}")
    assert page.status_code == 200
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert locked.get("/tasks/nope").status_code == 404
    assert locked.get("/admin/v1/tasks").status_code == 401
    with locked.stream("GET", "/events") as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data:")
        revoke(store.database, token.id)
        for _ in lines:  # the stream ends, and the loop with it
            pass
    assert locked.get("/").status_code == 401


def test_operator_pauses_resumes_rolls_back_and_cancels_by_forms(store, register, locked):
    task = register(goal=1, rounds=3)
    token, text = issue(store.database, "erin", Role.OPERATOR)
    assert "Max-Age=3600" in log_in(locked, text).headers["set-cookie"]
    assert change(locked, task, "pause").headers["location"] == f"/tasks/{task}"
    refused = change(locked, task, "pause")
    assert (refused.status_code, "is paused" in refused.text) == (409, True)
    assert change(locked, task, "rollback", round="0").status_code == 303
    assert re.search('value="1">1<.*value="0">0, the start<', locked.get(f"/tasks/{task}/rollback").text)
    for wrong in ({"round": "one"}, {"round": "7"}, {}):
        assert change(locked, task, "rollback", **wrong).status_code == 404
    assert "cannot be undone" in locked.get(f"/tasks/{task}/cancel").text
    assert [change(locked, task, verb).status_code for verb in ("resume", "cancel")] == [303, 303]
    history = store.history(task)
    assert [one.after for one in history] == ["active", "paused", "paused", "active", "cancelled"]
    assert all(one.cause.endswith(f"operator erin, token {token.id}") for one in history[1:])
    assert change(locked, task, "explode").status_code == 404
    assert change(locked, "nope", "pause").status_code == 404


def test_only_an_operators_own_page_changes_a_task(store, register, locked):
    task = register()
    assert locked.post(f"/tasks/{task}/pause").status_code == 401
    log_in(locked, issue(store.database, "finn", Role.VIEWER)[1])
    assert "Pause" not in locked.get(f"/tasks/{task}").text
    assert change(locked, task, "pause").status_code == 403
    of_viewer = csrf(locked.get("/"))
    log_in(locked, issue(store.database, "erin", Role.OPERATOR)[1])
    assert "Pause" in locked.get(f"/tasks/{task}").text
    for forged in ({}, {"csrf": ""}, {"csrf": of_viewer}, {"csrf": "é"}):
        refused = locked.post(f"/tasks/{task}/pause", data=forged)
        assert (refused.status_code, "not from a page of your session" in refused.text) == (403, True)
        assert locked.post("/logout", data=forged).status_code == 403
    assert store.task(task).state.value == "active"


def test_numbers_that_no_round_has_are_refused(register, served):
    rounds = f"{served.admin}/tasks/{register()}/rounds"
    for wrong in (f"?before={10**30}", "?before=-1", f"/{10**30}/1", f"/1/{2**31}"):
        assert httpx2.get(rounds + wrong).status_code == 400
    assert httpx2.get(f"{rounds}?before={2**63 - 1}").status_code == 200
    assert httpx2.get(f"{rounds}/{2**31 - 1}/1").status_code == 404


def test_session_that_was_altered_or_is_over_opens_nothing(store, register, locked, monkeypatch):
    register()
    token, text = issue(store.database, "erin", Role.OPERATOR)
    log_in(locked, text)
    name, cookie = next(iter(locked.cookies.items()))
    _, expires_at, rest = cookie.split(".", 2)
    other = issue(store.database, "finn", Role.OPERATOR)[0]
    for altered in (
        f"{other.id}.{expires_at}.{rest}",
        f"{token.id}.{int(expires_at) + 9}.{rest}",
        cookie[:-1],
        "é",
        "",
    ):
        answer = httpx2.get(str(locked.base_url), headers={"Cookie": f"{name}={altered}".encode()})
        assert answer.status_code == 401
    assert locked.get("/").status_code == 200
    monkeypatch.setattr("coordinator.dashboard.rendering.time.time", lambda: int(expires_at))
    assert locked.get("/").status_code == 401


def test_logout_ends_every_copy_of_the_cookie_at_every_process(store, locked, tmp_path):
    text = issue(store.database, "erin", Role.OPERATOR)[1]
    log_in(locked, text)
    copy = {"Cookie": "; ".join(f"{name}={value}" for name, value in locked.cookies.items())}
    settings = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs"}
    with serving_both(Settings(**settings, port=0, admin_port=0)) as other:
        assert httpx2.get(other.admin, headers=copy).status_code == 200
        token = {"csrf": csrf(locked.get("/"))}
        log_in(locked, text)
        for _ in range(2):  # again is the same as once
            assert httpx2.post(f"{other.admin}/logout", data=token, headers=copy).status_code == 303
        assert httpx2.get(other.admin, headers=copy).status_code == 401
        assert httpx2.post(f"{other.admin}/new", data=token, headers=copy).status_code == 401
        assert httpx2.get(locked.base_url, headers=copy).status_code == 401
        assert locked.get("/").status_code == 200
    with store.database.writing() as records:
        records.tokens.end_session("another", records.at + 9)
        records.tokens.end_session("over", records.at)
        records.tokens.end_session("last", records.at + 9)
        assert [records.tokens.has_ended(one) for one in ("another", "over", "last")] == [True, False, True]


def test_viewer_downloads_model_plan_and_certificate(store, register, locked, tmp_path):
    privacy = PrivacyBudget(epsilon=4, delta=1e-6, users=1000, noise_multiplier=2)
    task = register(make_private_bundle(tmp_path / "private"), privacy=privacy)
    names = ("model", "plan", "privacy-certificate")
    assert [locked.get(f"/tasks/{task}/{name}").status_code for name in names] == [401, 401, 401]
    log_in(locked, issue(store.database, "finn", Role.VIEWER)[1])
    model, plan, certificate = (locked.get(f"/tasks/{task}/{name}") for name in names)
    assert model.content == store.model_file(task)
    assert model.headers["content-disposition"] == f'attachment; filename="{task}.safetensors"'
    assert hashlib.sha256(plan.content).hexdigest() == store.task(task).plan_sha256
    assert set(certificate.json()) == {"certificate", "ledger"}
    assert store.audit()[-1].actor.startswith("viewer finn")
    assert locked.get(f"/tasks/{task}/model?round=7").status_code == 404


def test_open_page_does_not_hold_up_a_stop(store, tmp_path):
    settings = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "drain_s": 3600}
    seen, lines = threading.Event(), []
    with ThreadPoolExecutor() as pool:
        with serving_both(Settings(**settings, port=0, admin_port=0, loopback_viewer=True)) as urls:

            def watch():
                with httpx2.stream("GET", f"{urls.admin}/events", timeout=20) as stream:
                    for line in stream.iter_lines():
                        lines.append(line)
                        seen.set()

            watching = pool.submit(watch)
            assert seen.wait(10)
        watching.result(5)
    assert "about to stop" in "".join(lines)


@pytest.fixture
def few_pages(monkeypatch):
    """Three pages may be open at a time."""
    monkeypatch.setattr("coordinator.dashboard.pages._MOST_STREAMS", 3)
    monkeypatch.setattr("coordinator.dashboard.pages._TICK_S", 0.01)


def test_open_pages_are_bounded_and_one_that_is_shut_makes_room(few_pages, served):
    with ExitStack() as opened, httpx2.Client(base_url=served.admin, timeout=10) as client:
        for _ in range(3):
            stream = opened.enter_context(httpx2.stream("GET", f"{served.admin}/events", timeout=10))
            assert stream.status_code == 200
        refused = client.get("/events")
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:muster:problem:unavailable")
        assert int(refused.headers["retry-after"]) > 0
        counted = 'muster_problems_total{problem="unavailable",route="/events"} 1.0'
        assert counted in client.get("/metrics").text
        opened.close()
        until = time.monotonic() + 10
        while True:
            with client.stream("GET", "/events") as again:
                if again.status_code == 200:
                    break
            assert time.monotonic() < until
            time.sleep(0.01)


def test_an_open_page_is_drawn_again_now_and_then(served, monkeypatch):
    monkeypatch.setattr("coordinator.dashboard.pages._TICK_S", 0.01)
    monkeypatch.setattr("coordinator.dashboard.pages._REDRAW_S", 0.02)
    with httpx2.stream("GET", f"{served.admin}/events", timeout=10) as stream:
        drawn = 0
        for line in stream.iter_lines():
            drawn += not line  # an event ends with an empty line
            if drawn == 3:
                break


def test_files_of_pages_are_those_listed_and_no_others(locked):
    for name, kind in (("style.css", "text/css"), ("htmx-4.0.1.min.js", "text/javascript")):
        assert locked.get(f"/static/{name}").headers["content-type"].startswith(kind)
    for name in ("..%2Fpages.py", "HTMX-LICENSE", "nope.js"):
        assert locked.get(f"/static/{name}").status_code == 404
