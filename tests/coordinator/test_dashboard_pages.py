"""Pages of the dashboard: what they show of tasks, rounds, settings and curves is what the rows say."""

import logging
import re

import httpx2
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from sqlalchemy import insert, select

from coordinator.api.authentication import issue
from coordinator.dashboard.curves import chart, charts
from coordinator.dashboard.new_task import groups
from coordinator.dashboard.views import ROUNDS_ON_A_PAGE, folded, of_task, overview_page, round_page, task_page
from coordinator.errors import UnknownRound
from coordinator.rules.alerts import Alert
from coordinator.rules.entities import Role
from coordinator.rules.private_sums import entry_of
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered, PrivacyBudget
from coordinator.store.records.overview import PAGE as TASKS_ON_A_PAGE, TaskQuery, Totals
from coordinator.store.tables import ROUNDS, TASKS
from tests.coordinator.browser import AXE, assert_sound, broken_words, look_as, shows, violations
from tests.coordinator.bundles import make_bundle, make_private_bundle
from tests.coordinator.conftest import committed
from tests.coordinator.pages import play


@pytest.mark.every_engine
def test_what_pages_show_is_what_the_rows_say(store, register, desk):
    task, idle = register(goal=1, rounds=3, over_selection=3), register(population="tablets")
    first, second, third = desk.assign("a", "b", "c")
    desk.give_up(second)
    with store.database.reading() as records:
        before = records.overview.version()
        (live,) = task_page(records, task).live
        assert (live.round.state.value, live.round.assigned, live.round.aborted, live.goal) == ("reporting", 3, 1, 1)
        assert live.until
        page = task_page(records, task)
        assert (page.funnel.steps[0].count, page.charts, page.attempts, page.funnel.left) == (0, (), (), ())
    desk.report(first, loss=0.5)
    desk.turn()
    with store.database.reading() as records:
        assert records.overview.version() > before
        page = task_page(records, task)
        lines = overview_page(records, TaskQuery())["lines"]
    assert [(line.task.id, line.committed, bool(line.left)) for line in lines] == [(idle, 0, False), (task, 1, True)]
    assert lines[1].metric == ("train.loss", 0.5)
    counts = {step.name: (step.count, round(step.percent)) for step in page.funnel.steps}
    assert counts == {"assigned": (3, 100), "fetched the model": (1, 33), "reported": (1, 33)}
    assert page.funnel.left == (("aborted: runtime-failed", 1), ("not needed", 1))
    assert (page.totals.committed, page.totals.abandoned, page.live) == (1, 0, ())
    assert [(one.number, one.state, one.reported) for one in page.attempts] == [(1, "committed", 1)]
    assert [(one.name, one.lines[0].last.value) for one in page.charts] == [("train.loss", 0.5)]
    assert [change.after for change in page.history] == ["active"]
    assert third


def test_funnel_of_a_task_counts_its_own_devices_alone(store, register):
    task, other = register(), register(population="tablets")
    shapes = {
        ("phones", task, "accepted > waited > assigned > fetched plan > fetched checkpoint > reported"): 3,
        ("phones", task, "accepted > waited > assigned > fetched checkpoint > aborted: conditions"): 1,
        ("phones", "", "accepted > waited > rejected: not-selected"): 2,
        ("tablets", other, "accepted > waited > assigned > fetched checkpoint > reported"): 50,
    }
    with store.database.writing() as records:
        records.sessions.add(shapes)
        sessions = [one for one in records.sessions.of(records.task(task)) if one.task]
    totals = Totals(8, 3, 2, 1, 0, 0, 0, 1, 0)
    found = of_task(totals, sessions, {"conditions": 1})
    assert [(step.name, step.count, step.percent) for step in found.steps] == [
        ("assigned", 8, 100),
        ("fetched the model", 4, 50),
        ("reported", 3, 37.5),
    ]
    assert found.left == (("aborted: conditions", 1), ("aborted", 1), ("lost", 1), ("not needed", 2))


@pytest.mark.every_engine
def test_round_opens_with_its_phases_outcomes_times_and_bytes(store, register, desk):
    task = register(goal=1, rounds=9, over_selection=2)
    first, second = desk.assign("a", "b")
    desk.give_up(second)
    desk.report(first, loss=0.5)
    desk.turn()
    with store.database.reading() as records:
        page = round_page(records, store.plan(store.task(task).plan_sha256), task, 1, 1)
        with pytest.raises(UnknownRound, match="no attempt 2 at a round 1"):
            records.overview.attempt(task, 1, 2)
    assert [phase.name for phase in page.phases] == ["selecting", "configuring", "reporting", "aggregating"]
    assert sum(phase.width for phase in page.phases) == pytest.approx(100)
    assert page.outcomes == (("aborted: runtime-failed", 1), ("reported", 1))
    assert [percent for percent, _ in page.percentiles] == [10, 50, 90, 100]
    assert (page.up, page.down) == (4 * 7, len(store.blobs.get(store.task(task).initial.checkpoint_sha256)))


def test_all_rounds_are_on_pages(store, register, served):
    task = register(rounds=99)
    store.pause(task)
    with store.database.writing() as records:
        for _ in range(ROUNDS_ON_A_PAGE + 5):
            found = records.task(task)
            records.roll_back(found, found.initial, None, "again")
    page = httpx2.get(f"{served.admin}/tasks/{task}/rounds").text
    assert f"/rounds/{ROUNDS_ON_A_PAGE + 5}/1" in page
    older = re.search(r'href="(/tasks/\w+/rounds\?before=\d+)"', page)[1]
    rest = httpx2.get(f"{served.admin}{older}").text
    assert re.findall(r"/rounds/(\d+)/1", rest) == ["5", "4", "3", "2", "1"]
    assert "before=" not in rest
    assert httpx2.get(f"{served.admin}/tasks/{task}/rounds/5/1").status_code == 200
    assert httpx2.get(f"{served.admin}/tasks/{task}/rounds/99/1").status_code == 404


def test_settings_page_explains_every_setting_those_first_that_were_set(register, served):
    task = register(goal=3, over_selection=2.5, buffered=Buffered())
    page = httpx2.get(f"{served.admin}/tasks/{task}/settings").text
    every = [one for group in groups() for one in group.settings]
    assert [one.name for one in every if not one.about] == []
    assert 'over_selection <strong>2.5</strong> <span class="quiet">default 1.3</span>' in page
    assert "Devices drawn per report wanted." in page
    first, others = page.split("others, at their defaults")
    assert re.findall(r"<dt>([\w.]+)", first) == ["population", "goal", "rounds", "over_selection", "buffered"]
    assert "buffered.concurrency <strong>100" in others
    assert "secagg.bits" not in page  # the task does without
    for words in ("FedAvg", "hand, 1", "3 kB", "mean of 4"):
        assert words in page


def test_tasks_are_filtered_sorted_and_compared(store, register, served, tmp_path):
    first, second = (
        register(name="Spring keyboard"),
        register(make_bundle(tmp_path / "prox", algorithm="fedprox", settings={"mu": 0.1, "weighting": "examples"})),
    )
    ids = lambda page: re.findall(r'class="name"><a href="/tasks/(\w+)"', page)  # noqa: E731
    assert ids(httpx2.get(served.admin).text) == [second, first]
    for search, found in (("FedProx", [second]), ("spring k", [first]), ("hand-made", [second, first])):
        assert ids(httpx2.get(f"{served.admin}/", params={"search": search}).text) == found
    assert ids(httpx2.get(f"{served.admin}/?by=name").text) == [second, first]
    store.pause(first)
    for narrow, found in (("state=paused", [first]), ("population=phones&state=active", [second]), ("search=%25", [])):
        assert ids(httpx2.get(f"{served.admin}/?{narrow}").text) == found
    for none in ("search=zebra", "population=tablets", "state=nope"):
        assert "No task matches" in httpx2.get(f"{served.admin}/?{none}").text
    assert "2 in all" in httpx2.get(f"{served.admin}/?page=2").text
    assert [httpx2.get(f"{served.admin}/?page={wrong}").status_code for wrong in ("0", "x", 10**30)] == [400] * 3
    compared = httpx2.get(f"{served.admin}/compare?task={first}&task={second}&task=nope&scale=log").text
    assert compared.count(" checked") == 3
    assert "no committed round" in compared


def test_overview_of_a_thousand_tasks_reads_the_rows_of_one_page(store, register):
    one = register()
    with store.database.writing() as records:
        task = records._connection.execute(select(TASKS).where(TASKS.c.id == one)).one()._asdict()
        again = [task | {"id": f"{number:032}", "created_at": float(number)} for number in range(1000)]
        records._connection.execute(insert(TASKS), again)
        rounds = {"state": "committed", "reason": "", "metrics": {"loss": 1.0}, "opened_at": 0.0, "ended_at": 9.0}
        rounds |= dict.fromkeys(("assigned", "aborted", "lost", "expired", "stale", "taken_over", "handed_on"), 0)
        rounds |= {"reported": 1, "attempt": 1, "staleness": []}
        made = [rounds | {"task": one["id"], "number": number} for one in again for number in (1, 2, 3)]
        records._connection.execute(insert(ROUNDS), made)
    read = []
    with store.database.reading() as records:
        counted = lambda cursor, row: read.append(row) or row  # noqa: E731
        records._connection.connection.dbapi_connection.row_factory = counted
        page = overview_page(records, TaskQuery(page=3))
    assert (len(page["lines"]), page["first"], page["last"], page["matching"]) == (50, 101, 150, 1001)
    assert (page["lines"][0].committed, page["earlier"], page["later"]) == (3, "page=2", "page=4")
    assert len(read) < 6 * TASKS_ON_A_PAGE


def test_alerts_with_the_same_thing_to_do_are_one_line():
    def alert(kind, text, remedy=""):
        return Alert(id="", kind=kind, text=text, remedy=remedy, raised_at=0.0)

    silent = [alert("no-devices", f"waits for {number}", "wait") for number in range(3)]
    disk = alert("disk-full", "the disk is full: make room")
    lines = folded([*silent[:2], disk, silent[2], disk, alert("diverged", "nan", "wait")])
    assert [(line.kind, line.remedy, len(line.alerts)) for line in lines] == [
        ("no-devices", "wait", 3),
        ("disk-full", "the disk is full: make room", 2),
        ("diverged", "wait", 1),
    ]


def test_curves_fill_the_axes_skip_nan_and_are_thinned():
    (loss,) = charts([(1, {"train.loss": 4.0}), (2, {"train.loss": float("nan")}), (4, {"train.loss": 1.0}), (5, {})])
    (line,) = loss.lines
    assert [(point.at, point.value) for point in line.points] == [(1, 4.0), (4, 1.0)]
    first, last = line.points
    assert (first.x, first.y, last.x, last.y) == (loss.left, loss.top, loss.right, loss.bottom)
    assert (loss.unit, [tick.label for tick in loss.across]) == ("mean per example", ["1", "2", "3", "4"])
    (flat,) = charts([(number, {"loss": 2.0}) for number in range(1, 1001)])
    assert len(flat.lines[0].points) <= 161
    assert (flat.lines[0].points[0].at, flat.lines[0].last.at) == (1, 1000)
    assert {point.y for point in flat.lines[0].points} == {(flat.top + flat.bottom) / 2}
    assert charts([]) == charts([(1, {})]) == ()


def test_logarithmic_axis_has_powers_of_ten_and_no_place_for_zero():
    drawn = chart("loss", {"a": [(1, 100.0), (2, 10.0), (3, 1.0), (4, 0.0)], "b": [(1, -1.0)]}, log=True)
    assert [tick.label for tick in drawn.up] == ["1", "10", "100"]
    (line,) = drawn.lines
    heights = [point.y for point in line.points]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1])


def test_page_of_a_private_task_shows_what_is_spent_of_its_budget(store, register, served, tmp_path):
    privacy = PrivacyBudget(epsilon=4, delta=1e-6, users=1000, noise_multiplier=2)
    task = register(make_private_bundle(tmp_path / "private"), privacy=privacy)
    page = httpx2.get(f"{served.admin}/tasks/{task}")
    assert "ε 0 of 4 spent" in page.text
    with store.database.writing() as records:
        for number, epsilon in ((1, 2.5), (2, 3.75)):
            records.ledger.append(task, entry_of(store.task(task).settings.promise, number, 1.0, 2), epsilon, None)
    page = httpx2.get(f"{served.admin}/tasks/{task}")
    assert "ε 3.75 of 4 spent" in page.text
    assert "round 1: 2.5" in page.text


def test_the_name_of_a_task_is_text_on_every_page(store, register, served, caplog):
    caplog.set_level(logging.INFO, "coordinator")
    task = register(name='<b>&"', goal=1, rounds=1)
    play(served, [0.5], devices=1)
    committed(store, task, 1)
    name, page = "&lt;b&gt;&amp;&#34;", f"/tasks/{task}"
    pages = [page, *(f"{page}/{one}" for one in ("rounds", "rounds/1/1", "settings", "log", "cancel", "rollback"))]
    for path in ("/", "/populations/phones", f"/compare?task={task}", *pages):
        text = httpx2.get(f"{served.admin}{path}").text
        assert (name in text, "<b>" in text) == (True, False), path
    log = httpx2.get(f"{served.admin}{page}/log").text
    assert "<td>round 1 committed 1 reports</td>" in log  # whose task the page names


def press(browser, words):
    """Press the button with these words."""
    browser.find_element(By.XPATH, f"//button[normalize-space()='{words}']").click()


def log_in(browser, origin, token):
    browser.get(f"{origin}/login")
    browser.find_element(By.NAME, "token").send_keys(token, Keys.ENTER)
    shows(browser, "Log out")


def test_operator_makes_a_task_of_a_folder_and_pauses_and_cancels_it(store, bundle, locked, browser, tmp_path):
    origin = str(locked.base_url).rstrip("/")
    log_in(browser, origin, issue(store.database, "erin", Role.OPERATOR)[1])
    browser.get(f"{origin}/new")
    browser.find_element(By.CSS_SELECTOR, "input[type=file]").send_keys(str(bundle.folder))
    shows(browser, "files are uploaded")
    (tmp_path / "release.json").write_text("a release")
    browser.find_element(By.CSS_SELECTOR, "input[data-fills]").send_keys(str(tmp_path / "release.json"))
    filled = "const release = document.forms[1].elements.release, was = release.value; release.value = ''; return was"
    WebDriverWait(browser, 20).until(lambda _: browser.execute_script(filled) == "a release")
    for name, value in (("population", "phones"), ("goal", "2"), ("rounds", "3")):
        browser.find_element(By.NAME, name).send_keys(value)
    press(browser, "Create the task")
    shows(browser, "hand-made active")
    press(browser, "Pause")
    shows(browser, "hand-made paused", "Roll back")
    browser.find_element(By.PARTIAL_LINK_TEXT, "Cancel").click()
    shows(browser, "This cannot be undone")
    press(browser, "Cancel the task")
    shows(browser, "hand-made cancelled")
    assert [task.state for task in store.tasks()] == [TaskState.CANCELLED]
    assert_sound(browser, origin)


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_every_page_is_within_reach_of_everybody(store, register, served, browser, width, scheme):
    if not AXE.is_file():
        pytest.skip("no axe-core: npm ci in device_runtime/js")
    task = register(goal=1, rounds=9, over_selection=2.0)
    play(served, (2.0, 1.0))
    look_as(browser, width, scheme)
    log_in(browser, served.admin, issue(store.database, "erin", Role.OPERATOR)[1])
    found = {}
    here = f"/tasks/{task}"
    for path in (
        "/", "/new", "/docs", f"/compare?task={task}", "/populations/phones", "/login",
        here, *(f"{here}/{one}" for one in ("rounds", "rounds/1/1", "settings", "log", "cancel", "rollback")),
    ):  # fmt: skip
        browser.get(f"{served.admin}{path}")
        browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
        found[path] = violations(browser)
        assert broken_words(browser) == [], path
        assert_sound(browser, served.admin, width)
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_point_under_the_pointer_is_read_out_and_stays_there(register, served, browser):
    task = register(goal=1, rounds=9)
    play(served, (2.0, 0.5), devices=1)
    browser.get(f"{served.admin}/tasks/{task}")
    shows(browser, "train.loss 0.5 after round 2")
    chart = browser.find_element(By.CSS_SELECTOR, "svg.chart")
    pointer = ActionChains(browser).scroll_to_element(chart)
    pointer.move_to_element_with_offset(chart, chart.size["width"] // 2 - 5, 0).perform()
    shows(browser, "round 2: 0.5")
    play(served, (0.25,), devices=1)
    shows(browser, "3 of 9 rounds committed", "round 2: 0.5")
    pointer.move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    shows(browser, "train.loss 0.25 after round 3")
