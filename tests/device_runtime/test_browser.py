"""Devices in a real browser: the page of a coordinator, whose rounds count what a person drew there."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from selenium.webdriver import ActionChains, Keys

from coordinator.rules.aggregation import aggregate
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.signing import SigningKey
from muster.local.browser_demo import SCREEN, Person, phone
from simulator.errors import BrowserMissing
from tests.coordinator.browser import assert_sound, look_as, violations
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.pages import DIGITS, build, database, kept_examples
from tests.device_runtime.proxy import Hold, road_to
from tests.device_runtime.test_typescript import ALGORITHM, values_in

pytestmark = pytest.mark.promise("A page of devices says what ended its work, and loses nothing")

PURPOSE = "This task teaches a model to read <b>digits</b>."
WORK_WHILE_CLOSED = """
const form = document.getElementById("owner");
form.elements.namedItem("whileClosed").checked = true;
form.dispatchEvent(new Event("change"));"""
KEEP_FOR_60_DAYS = """
const form = document.getElementById("owner");
form.elements.namedItem("days").value = "60";
form.dispatchEvent(new Event("change"));"""
# Chromium allots space for half a minute. What is larger than that has it ask again: for the quota of now.
KEEP_BYTES = """
const [name, size, done] = arguments;
const opening = indexedDB.open(name);
opening.onsuccess = () => {
  const transaction = opening.result.transaction("texts", "readwrite");
  transaction.onabort = () => { opening.result.close(); done(transaction.error.name); };
  transaction.oncomplete = () => { opening.result.close(); done("kept"); };
  transaction.objectStore("texts").put(new Blob([new Uint8Array(size)]), "much");
};"""
KEPT_BLOBS = """
const [name, done] = arguments;
caches.open(name).then((cache) => cache.keys()).then(({ length }) => done(length));"""
CRASH_WHEN_TOLD = """
new BroadcastChannel("crash").onmessage = () => { Promise.reject(new Error("no memory")); };"""
AGE_BY_40_DAYS = """
const [name, done] = arguments;
const opening = indexedDB.open(name);
opening.onsuccess = () => {
  const transaction = opening.result.transaction("examples", "readwrite");
  transaction.oncomplete = () => { opening.result.close(); done(); };
  transaction.objectStore("examples").openCursor().onsuccess = ({ target: { result: cursor } }) => {
    cursor?.update({ ...cursor.value, at: cursor.value.at - 40 * 86400 });
    cursor?.continue();
  };
};"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return build(tmp_path_factory.mktemp("page") / "built")


@pytest.fixture(scope="module")
def opened():
    try:
        with phone() as browser:
            yield browser
    except BrowserMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def browser(opened):
    opened.get("about:blank")
    opened.get_log("browser")
    yield opened
    assert [one for one in opened.get_log("browser") if "Uncaught" in one["message"]] == []


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return export_bundle(Model(load("logreg", (1, 8, 8), 10), 3), ALGORITHM, tmp_path_factory.mktemp("plan") / "plan")


@pytest.fixture
def task(bundle, tmp_path):
    """Makes tasks of one round for one device, in population `p`."""
    key = SigningKey.new(tmp_path / "release.pem")
    settings = TaskSettings(population="p", goal=1, rounds=1, over_selection=1.0, seed=2**53 + 3, purpose=PURPOSE)
    return lambda local, **more: local.create_task(bundle, replace(settings, **more), key).id


def await_commit(local, task):
    """Wait for the round: a device has its receipt before that."""
    wait_until(lambda: [one.state for one in local.store.rounds(task)][-1:] == ["committed"])


def test_a_round_counts_what_a_person_drew_in_a_browser(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        made = task(local)
        person = Person(browser, local.url, "p")
        for digit, inked in DIGITS.items():
            person.draw(inked, digit)
        person.press("take-part")
        person.waits_for("state", "Done: round 1, 2 examples, in the clear")
        person.waits_for("plan", "650 numbers")
        assert person.text("purpose") == PURPOSE
        person.waits_for("entries", "A report on 2 examples")
        await_commit(local, made)
        (row,) = local.store.cohort(made, 1)
        plan, before, result = values_in(local.store, made, 1, row.slot, kept_examples(browser))
        report = plan.report.weigh(result.values, result.weight).astype(np.float64)
        expected = aggregate(plan.report, ALGORITHM, before, report).state["params"]
        after = local.store.checkpoint(made, 1)["params"]
        person.press("leave")
        person.waits_for("state", "You left")
        assert (kept(browser, "keys"), person.text("count")) == ([], "2")
        # What its guards go by stays: a device that comes back is not a new one to them.
        assert {name.partition(":")[0] for name in kept(browser, "texts")} == {"due", "journal", "owner", "spent"}
        assert_sound(browser, local.url)
        for scheme in ("dark", "light"):
            look_as(browser, SCREEN["width"], scheme)
            assert violations(browser) == {}
    np.testing.assert_allclose(after, expected, atol=1e-5)
    assert np.abs(after - before["params"]).max() > 1e-3


def test_a_report_survives_the_page_that_made_it(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        made, hold = task(local), Hold()
        road.before["report"].append(hold)
        person = Person(browser, road.url, "p")
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        assert hold.reached.wait(60)
        person.open()
        person.press("take-part")
        person.waits_for("state", "Done: round 1, 1 example, in the clear")
        await_commit(local, made)
        # The page that was left never saw an answer. Both reports are the same: it did not train twice.
        assert len({body for _, body in road.reports}) == 1
        assert road.calls.count("check-in") == 1


def test_work_that_a_pause_ended_is_given_up_and_said(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        made, hold = task(local), Hold()
        road.before["blob"].append(hold)
        person = Person(browser, road.url, "p")
        person.draw(DIGITS[1], 1)
        person.press("take-part")
        assert hold.reached.wait(60)
        person.press("pause")
        person.waits_for("state", "Paused")
        person.press("take-part")
        person.waits_for("state", "The training stopped on this device: the device was stopped while it worked")
        assert "abort" in road.calls
        assert local.store.cohort(made, 1)


def test_examples_are_collected_without_a_network(tmp_path, coordinators, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        person = Person(browser, local.url, "p")
        browser.execute_async_script("navigator.serviceWorker.ready.then(arguments[0])")
    person.open()
    person.draw(DIGITS[1], 1)
    person.press("take-part")
    person.waits_for("state", "The coordinator cannot be reached")
    assert person.text("count") == "1"


def test_keys_draw_and_a_full_storage_is_said_in_a_sentence(tmp_path, coordinators, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        person = Person(browser, local.url, "p")
        allot(browser, local.url, 1)
        browser.execute_script("document.querySelector('[role=gridcell]').focus()")
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.SPACE).perform()
        cell = browser.switch_to.active_element
        assert [cell.get_attribute(f"aria-{name}") for name in ("label", "selected")] == ["row 2, column 2", "true"]
        person.press("keep-1")
        person.waits_for("state", "this browser's storage is full: delete examples here, or data of other sites")


def test_storage_that_fills_up_in_mid_round_is_said_and_leaves_nothing(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        made, hold, some_bytes = task(local), Hold(), 8_000_000
        road.before["blob"].append(hold)
        person = Person(browser, road.url, "p")
        allot(browser, road.url, some_bytes)
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        assert hold.reached.wait(60)
        allot(browser, road.url, 1)
        assert browser.execute_async_script(KEEP_BYTES, database(browser), some_bytes) == "QuotaExceededError"
        hold.end()
        person.waits_for("state", "cannot keep what this page needs: this browser's storage is full: delete examples")
        # It had trained, without a copy of the engine or of any blob.
        last = [call for call in road.calls if call not in {"model", "page"}][-1]
        assert (last, [one.reason for one in local.store.cohort(made, 1)]) == ("abort", ["runtime-failed"])
        assert {name.partition(":")[0] for name in kept(browser, "texts")} == {"enrolment", "owner", "spent"}
        assert (kept(browser, "blobs"), browser.execute_async_script(KEPT_BLOBS, database(browser))) == ([], 0)
        allot(browser, road.url)
        person.press("take-part")
        person.waits_for("state", "Done: round 1, 1 example, in the clear")
        await_commit(local, made)


def test_a_page_that_is_opened_without_a_query_goes_by_its_last_link(tmp_path, coordinators, task, page, browser):
    one, other = (SigningKey.new(tmp_path / name).signer for name in ("one.pem", "other.pem"))
    with coordinators.local(tmp_path, page=str(page)) as local:
        task(local)
        person = Person(browser, local.url, "p", one)
        person.draw(DIGITS[1], 1)
        person.press("take-part")
        person.waits_for("state", "against require_secure_aggregation of this device's policy")
        reopen(person, browser, f"{local.url}/page/")
        assert (person.text("population"), person.text("signers")) == ("p", one)
        Person(browser, local.url, "p", other)
        assert not is_hidden(browser, "other-signers")
        person.press("take-signers")
        wait_until(lambda: is_hidden(browser, "other-signers"))
        assert person.text("signers") == other


def test_a_page_that_deletes_everything_stops_the_one_that_trains(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        task(local)
        hold = Hold()
        road.before["report"].append(hold)
        person = Person(browser, road.url, "p")
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        assert hold.reached.wait(60)
        with another_tab(browser):
            other = Person(browser, road.url, "p")
            browser.execute_script("window.confirm = () => true")
            other.press("erase")
            other.waits_for("state", "Everything is deleted")
        person.waits_for("state", "Another page of this site left, or deleted what was kept here")
        assert browser.execute_script("return document.getElementById('pause').disabled")
        assert [kept(browser, part) for part in ("texts", "keys", "examples")] == [[], [], []]


def test_a_page_that_trains_goes_by_rules_that_another_changed(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        task(local)
        hold = Hold()
        road.before["blob"].append(hold)
        person = Person(browser, road.url, "p")
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        assert hold.reached.wait(60)
        with another_tab(browser):
            other = Person(browser, road.url, "p")
            browser.execute_script(KEEP_FOR_60_DAYS)
            other.waits_for("rules-state", "Kept")
        person.waits_for("state", "The training stopped on this device: the device was stopped while it worked")
        browser.execute_async_script(AGE_BY_40_DAYS, database(browser))
        person.draw(DIGITS[1], 1)
        assert person.text("count") == "2"


def test_a_browser_whose_clock_is_an_hour_off_takes_part(tmp_path, coordinators, task, page, browser):
    late = with_worker(page, tmp_path / "late", "const ours = Date.now; Date.now = () => ours() - 3_600_000;")
    with coordinators.local(tmp_path, page=str(late)) as local:
        made, person = task(local), Person(browser, local.url, "p")
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        person.waits_for("state", "Done: round 1, 1 example, in the clear")
        await_commit(local, made)


def test_a_text_that_stood_for_a_moment_is_seen(tmp_path, coordinators, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        person = Person(browser, local.url, "p")
        browser.execute_async_script(
            "const [done] = arguments, state = document.getElementById('state');"
            "state.innerText = 'Done: round 1';"
            "setTimeout(() => { state.innerText = 'There is nothing to train now'; done(); }, 20);"
        )
        assert person.waits_for("state", "Done") == "Done: round 1"
        assert person.waits_for("state", "nothing to train") == "There is nothing to train now"


def test_a_worker_that_crashes_is_said_and_followed_by_another(tmp_path, coordinators, task, page, browser):
    crashing = with_worker(page, tmp_path / "crashing", CRASH_WHEN_TOLD)
    with coordinators.local(tmp_path, page=str(crashing)) as local, road_to(local.url) as road:
        made, hold = task(local), Hold()
        road.before["report"].append(hold)
        person = Person(browser, road.url, "p")
        browser.execute_script("window.setTimeout = (work) => { window.anew = work; }")
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        assert hold.reached.wait(60)
        browser.execute_script("new BroadcastChannel('crash').postMessage('')")
        person.waits_for("state", "stopped on this device: Uncaught Error: no memory. It tries again by itself.")
        browser.execute_script("anew()")
        person.waits_for("state", "Done: round 1, 1 example, in the clear")
        await_commit(local, made)
        assert len({body for _, body in road.reports}) == 1
        assert road.calls.count("check-in") == 1


def test_a_browser_that_may_forget_says_so(tmp_path, coordinators, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        for setting, promised in (("denied", False), ("granted", True)):
            permission = {"permission": {"name": "persistent-storage"}, "setting": setting, "origin": local.url}
            browser.execute_cdp_cmd("Browser.setPermission", permission)
            Person(browser, local.url, "p")
            assert is_hidden(browser, "may-vanish") is promised


def test_a_device_works_while_no_page_is_open(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        made, person = task(local), begun_and_closed(browser, road)
        wake(browser, road)
        await_commit(local, made)
        person.open()
        person.waits_for("entries", "A report on 1 example")
        person.waits_for("when", "Pause ends both")
        person.press("pause")
        person.waits_for("when", "only while this page is open, unless your rules say otherwise")


@pytest.mark.long
def test_work_while_no_page_was_open_ends_when_one_takes_part(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        made, person, hold = task(local), begun_and_closed(browser, road), Hold()
        road.before["blob"].append(hold)
        wake(browser, road)
        assert hold.reached.wait(60)
        person.open()
        person.press("take-part")
        person.waits_for("state", "Taking part")
        wait_until(lambda: [one.reason for one in local.store.cohort(made, 1)] == ["conditions"])


def allot(browser, url, size_bytes=None):
    """Let an origin keep so many bytes; by default as many as without this."""
    quota = {} if size_bytes is None else {"quotaSize": size_bytes}
    browser.execute_cdp_cmd("Storage.overrideQuotaForOrigin", {"origin": url, **quota})


def begun_and_closed(browser, road):
    """A person whose browser may wake the page, and who took part, and then closed it."""
    permission = {"permissions": ["periodicBackgroundSync"], "origin": road.url}
    browser.execute_cdp_cmd("Browser.grantPermissions", permission)
    person, hold = Person(browser, road.url, "p"), Hold()
    road.before["check-in"].append(hold)
    wait_until(lambda: not is_hidden(browser, "while-closed"))
    browser.execute_script(WORK_WHILE_CLOSED)
    person.waits_for("rules-state", "Kept")
    person.draw(DIGITS[7], 7)
    person.press("take-part")
    assert hold.reached.wait(60)
    person.waits_for("when", "Pause ends both")
    browser.get("about:blank")
    return person


def wake(browser, road):
    """Wake the page's service worker, as the browser does by itself twice a day, whatever its number."""
    browser.execute_cdp_cmd("ServiceWorker.enable", {})
    tag = json.dumps({"coordinator": f"{road.url}/", "population": "p"}, separators=(",", ":"))
    for number in range(50):
        event = {"origin": road.url, "registrationId": str(number), "tag": tag}
        browser.execute_cdp_cmd("ServiceWorker.dispatchPeriodicSyncEvent", event)


@contextmanager
def another_tab(browser):
    """Another tab of the browser for as long as the block runs."""
    here = browser.current_window_handle
    browser.switch_to.new_window("tab")
    try:
        yield
    finally:
        browser.close()
        browser.switch_to.window(here)


def with_worker(page, folder, script):
    """The page with a worker that runs a script before its own."""
    worker = shutil.copytree(page, folder) / "worker.js"
    worker.with_name("worker.js.gz").unlink()
    worker.write_text(script + worker.read_text())
    return folder


def reopen(person, browser, url):
    browser.get(url)
    person.waits_for("state", "Ready")


def is_hidden(browser, name):
    return browser.execute_script("return document.getElementById(arguments[0]).hidden", name)


def kept(browser, part):
    """The keys of a part of the page's database."""
    script = """
    const [name, part, done] = arguments;
    const opening = indexedDB.open(name);
    opening.onsuccess = () => {
      const found = opening.result.transaction(part).objectStore(part).getAllKeys();
      found.onsuccess = () => {
        opening.result.close();
        done(found.result);
      };
    };"""
    return browser.execute_async_script(script, database(browser), part)
