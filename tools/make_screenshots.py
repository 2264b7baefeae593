"""Screenshots of the dashboard's pages for the documents: `python -m tools.make_screenshots` writes docs/screens/*.png.

It needs chromium and chromedriver. A coordinator is started on a store of its own, and rounds are run by hand.
"""

import base64
import logging
import math
import tempfile
import time
from pathlib import Path

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from coordinator.api.tokens import issue
from coordinator.rules.entities import Role
from coordinator.settings import Settings
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.model_release import ModelOrigin
from tests.coordinator.browser import chromium, look_as, shows
from tests.coordinator.pages import play
from tests.coordinator.released import predicting_bundle, version
from tests.servers import serving_both
from tools.screenshot_questions import asked

SCREENS = Path(__file__).parents[1] / "docs" / "screens"
MOST_BYTES = 150_000
_DESK, _PHONE = 1280, 390
_TASKS = 30
_ROUNDS = 14
MODEL = "/populations/phones/models/keyboard"


def pages(task, lost):
    """Every page: the name of its picture, its address, and words that it shows. lost: the task that diverged."""
    here = f"/tasks/{task}"
    return {
        "task": (here, "Learning curve"),
        "rounds": (f"{here}/rounds", "attempts that ended"),
        "round": (f"{here}/rounds/1/1", "Phases"),
        "settings": (f"{here}/settings", "Algorithm"),
        "log": (f"/tasks/{lost}/log", "committed 3 reports"),
        "rollback": (f"{here}/rollback", "Roll back"),
        "cancel": (f"{here}/cancel", "cannot be undone"),
        "population": ("/populations/phones", "Devices"),
        "compare": (f"/compare?task={task}&task={lost}&scale=log", "Compare"),
        "new-task": ("/new", "More settings"),
        "models": ("/models", "keyboard"),
        "model": (MODEL, "Devices are given"),
        "promote": (f"{MODEL}/promote", "Share of the devices"),
        "api": ("/docs", "administration"),
    }


def answers(question, bins, grid):
    """The pages of questions, as `pages` has others."""
    return {
        "question": (f"/tasks/{question}", "Answer"),
        "question-of-bins": (f"/tasks/{bins}", "Answer"),
        "question-of-two-keys": (f"/tasks/{grid}", "Answer"),
    }


def to(selector):
    """What scrolls a page to an element."""
    return lambda browser: browser.execute_script(f"document.querySelector('{selector}').scrollIntoView()")


def main():
    """Write every picture anew."""
    SCREENS.mkdir(exist_ok=True)
    logging.getLogger("coordinator").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        where = {"database": f"sqlite:///{folder}/state.db", "blobs": folder / "blobs"}
        (folder / "index.html").touch()
        page = {"page": folder, "page_url": "https://fl.example/page/"}
        with open_coordinator_store(*where.values()) as store:
            settings = TaskSettings(population="phones", goal=3, rounds=_ROUNDS + 6, over_selection=1.3)
            bundle = predicting_bundle(folder / "bundle")
            token = issue(store.database, "erin", Role.OPERATOR)[1]
            with serving_both(Settings(**where, **page, port=0, admin_port=0, accept_unattested=True)) as urls:
                question, bins, grid = asked(store, urls, folder)
                lost = store.register_task(bundle, settings, name="keyboard, large steps").id
                time.sleep(3)  # until the driver has taken it up
                play(urls, [2.3, 2.2, 2.4, 2.1, 2.3, 25.0, 26.0, 27.0], devices=4)  # too large, so it is paused
                task = store.register_task(bundle, settings, name="keyboard, spring").id
                time.sleep(3)  # until the driver has taken it up
                play(urls, [2.3 * math.exp(-number / 6) + 0.05 * (number % 3) for number in range(_ROUNDS)], devices=4)
                release(store, task)
                look_as(browser, _DESK)
                take(browser, urls.admin, "login", "/", "Log in")
                browser.find_element(By.NAME, "token").send_keys(token, Keys.ENTER)
                shows(browser, "Log out")
                for page, (path, words) in (pages(task, lost) | answers(question, bins, grid)).items():
                    take(browser, urls.admin, page, path, words)
                take(browser, urls.admin, "wrong-task", "/new", "No task was created", send_wrong)
                look_as(browser, _PHONE, "dark")
                take(browser, urls.admin, "task-on-a-phone", f"/tasks/{task}", "Learning curve")
                look_as(browser, _PHONE)
                take(browser, urls.admin, "question-on-a-phone", f"/tasks/{question}", "Answer", to(".curves"))
                register_more(store, bundle)
                time.sleep(12)  # until they wait for devices in vain
                play(urls, [0.31, 0.3, 0.29], devices=4)
                look_as(browser, _DESK)
                take(browser, urls.admin, "overview", "/?by=name", f"of {_TASKS}")
                look_as(browser, _PHONE)
                take(browser, urls.admin, "overview-on-a-phone", "/?by=name", "old", to(".tasks"))


def register_more(store, bundle):
    """Tasks of other populations, some paused and some cancelled, until there are _TASKS."""
    kinds = (("tablets", "wake word"), ("watches", "pulse"))
    for number in range(_TASKS - len(store.tasks())):
        population, name = kinds[number % 2]
        settings = TaskSettings(population=population, goal=10 + number, rounds=50 + 10 * number)
        task = store.register_task(bundle, settings, name=f"{name}, trial {number + 1}").id
        if number % 5 in (1, 3):
            (store.pause if number % 5 == 1 else store.cancel)(task)


def send_wrong(browser):
    """Send the form of a new task with some fields that cannot be."""
    for name, value in (("name", "keyboard, summer"), ("population", "phones"), ("goal", "many"), ("rounds", "0")):
        browser.find_element(By.NAME, name).send_keys(value)
    browser.execute_script("document.querySelector('[name=over_selection]').value = '0.5'")
    browser.find_element(By.NAME, "rounds").submit()


def release(store, task):
    """Two versions of a model, of which the second is for a share."""
    for number, mean in ((1, 0.87), (2, 0.91)):
        figures = {"evaluate.devices": 200.0, "evaluate.examples": 4120.0}
        for name, half in (("evaluate.accuracy", 0.01), ("evaluate.accuracy.devices", 0.015)):
            figures |= {name: mean, f"{name}.low": mean - half, f"{name}.high": mean + half}
        store.release_model(version(store, number, evaluation=figures, origin=ModelOrigin(task, 7 * number)))
        store.promote_model("phones", "keyboard", number, 1.0 if number == 1 else 0.2, "accuracy >= previous")


def take(browser, origin, name, path, words, act=lambda browser: None):
    """Write the picture of a page, from its top. act: what is done on it before."""
    browser.get(f"{origin}{path}")
    act(browser)
    shows(browser, words)
    data = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    assert len(data) < MOST_BYTES, (name, len(data))
    (SCREENS / f"{name}.png").write_bytes(data)
    print(f"wrote {name}.png, {len(data):,} bytes")


if __name__ == "__main__":
    main()
