"""Questions that devices have answered, for the pictures of the dashboard's pages."""

import math
import time

from coordinator.rules.task_settings import PrivacyBudget
from coordinator.store.tasks import TaskSettings
from fedcore.questions.question import Block, Call, Cell, Column, Group, Key, Number, Order, Question, Rows
from tests.coordinator.questions import ask, make_question_bundle

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
