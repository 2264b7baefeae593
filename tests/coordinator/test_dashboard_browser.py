"""The dashboard in a real browser: an operator's way through it, on a phone and on a desk, for everybody."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from coordinator.api.tokens import issue
from coordinator.rules.entities import Role
from coordinator.rules.states import TaskState
from tests.coordinator.browser import AXE, assert_sound, broken_words, look_as, shows, violations
from tests.coordinator.pages import play


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
