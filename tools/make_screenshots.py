"""Screenshots of the dashboard's pages for the documents: `python -m tools.make_screenshots`.

It needs chromium and chromedriver. A coordinator is started on a store of its own, and rounds are run by hand.
"""

from __future__ import annotations

import base64
import logging
import math
import tempfile
import time
from pathlib import Path

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from coordinator.api.authentication import issue
from coordinator.rules.entities import Role
from coordinator.rules.task_settings import PrivacyBudget
from coordinator.settings import Settings
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.questions.question import Block, Call, Cell, Column, Group, Key, Number, Order, Question, Rows
from fedcore.signing import ModelOrigin
from tests.coordinator.browser import chromium, look_as, shows
from tests.coordinator.pages import play
from tests.coordinator.questions import ask, make_question_bundle
from tests.coordinator.released import predicting_bundle, version
from tests.servers import serving_both

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
BINS = 30
_DEVICES = 40


def asked(store, urls, folder):
    """Let devices answer three questions; answers the ids of their tasks, of one key, of bins and of two keys."""
    budget = PrivacyBudget(epsilon=8.0, delta=1e-6, users=100_000)
    privacies = {"minutes by day": budget, "lengths of words": None, "days and languages": None}
    made = {}
    for (name, privacy), (question, answers) in zip(privacies.items(), (days(), lengths(), pairs()), strict=True):
        bundle = make_question_bundle(folder / name.replace(" ", "-"), question)
        settings = TaskSettings(population="phones", goal=_DEVICES, rounds=1, over_selection=1.0, privacy=privacy)
        made[name] = store.register_task(bundle, settings, name=name).id
        time.sleep(3)  # until the driver has taken it up
        ask(urls, question, [answers(number) for number in range(_DEVICES)], start=_DEVICES * len(made))
        while not store.task(made[name]).state.ended:
            time.sleep(0.1)
    return tuple(made.values())


def days():
    """Counts and means by a key of seven texts, with noise, and what a device answers by its number."""
    size = len(DAYS)
    question = Question(
        text="SELECT weekday, COUNT(*) AS examples, AVG(CLIP(minutes, 0, 60)) AS minutes FROM examples "
        "GROUP BY weekday MAX 20 ROWS PER DEVICE",
        rows=(Rows("n", size), Rows("minutes", size)),
        blocks=(
            Block("voters", "n", "any", 0, 1, norm=math.sqrt(size)),
            Block("n", "n", low=0, high=20, norm=20),
            Block("minutes", "minutes", low=0, high=1200, whole=False, norm=1200),
        ),
        keys=(Key("weekday", DAYS),),
        columns=(
            Column("weekday", Group(0)),
            Column("examples", Cell("n")),
            Column("minutes", Call("mean", (Cell("minutes"), Cell("n")))),
        ),
        voters="voters",
        minimum_devices=20,
        most_rows=20,
        private=True,
    )

    def answer(number):
        counts = [3 + (number + day) % 2 - 2 * (day > 4) - 1 * (day == 0) for day in range(size)]
        minutes = [count * (14.0 + 3 * day + number % 5) for day, count in enumerate(counts)]
        return {"voters": [1.0] * size, "n": counts, "minutes": minutes}

    return question, answer


def lengths():
    """Counts of ordered bins."""
    question = _counts("SELECT WIDTH_BUCKET(length, 0, 30, 30) AS length, COUNT(*) AS words FROM examples GROUP BY 1",
                       (Key("length", tuple(range(1, BINS + 1))),))  # fmt: skip
    return question, lambda number: _one_hot(
        [40 * math.exp(-((one - 5 - number % 3) ** 2) / 20) for one in range(BINS)]
    )


def pairs():
    """Counts of two keys, of which a few are in too few devices."""
    keys = (Key("weekday", DAYS), Key("language", ("de", "en", "fr", "it", "nl")))
    question = _counts("SELECT weekday, language, COUNT(*) AS words FROM examples GROUP BY weekday, language", keys)

    def answer(number):
        counts = [max(0, (day + 2 * language + number) % 9 - language) for day in range(7) for language in range(5)]
        return _one_hot(
            [count if number % 9 < 7 - index % 5 or index < 20 else 0 for index, count in enumerate(counts)]
        )

    return question, answer


def _one_hot(counts):
    counts = [float(round(count)) for count in counts]
    return {"voters": [float(count > 0) for count in counts], "n": counts}


def _counts(text, keys):
    size = math.prod(len(key.values) for key in keys)
    return Question(
        text=text,
        rows=(Rows("n", size),),
        blocks=(Block("voters", "n", "any", 0, 1), Block("n", "n", low=0, high=1000)),
        keys=keys,
        columns=(
            *(Column(key.name, Group(place)) for place, key in enumerate(keys)),
            Column("words", Cell("n")),
            Column("a device", Call("/", (Call("real", (Cell("n"),)), Call("max", (Cell("voters"), Number(1)))))),
        ),
        voters="voters",
        minimum_devices=20,
        order=(Order(0),),
    )


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
