"""What an analyst or a device may try: groups of one, differences, names of devices, no threshold, and lies."""

import numpy as np
import pytest

from coordinator.commands import CountReport
from coordinator.errors import BudgetExceeded, InvalidTask
from coordinator.rules.task_settings import PrivacyBudget, TaskSettings
from coordinator.store.tasks import open_coordinator_store
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.validation import build
from muster.asking import Fields, Terms, begin, compiled, settings_of_question
from simulator.population import Population
from simulator.questions import ask_population
from tests.coordinator.conftest import LINEAGE, Desk
from tests.coordinator.questions import answer_values

CLIENTS, VICTIM, SECRET = 40, 7, 11
BY_LABEL = "SELECT y, COUNT(*) FROM examples GROUP BY y"
BOUNDED = "SELECT COUNT(*), SUM(CLIP(y, 0, 3)) FROM examples{} MAX 20 ROWS PER DEVICE"
FIELDS = Fields((Field("y", "uint8", (), 4), Field("id", "int64", (), CLIENTS)), "that tests have")


@pytest.fixture(scope="module")
def users():
    """Users of whom one alone has the label 3, on SECRET examples."""
    labels = [np.arange(6 + user % 5) % 3 for user in range(CLIENTS)]
    labels[VICTIM] = np.concatenate([labels[VICTIM], np.full(SECRET, 3)])
    shards = [{"y": y.astype(np.uint8), "id": np.full(len(y), user, np.int64)} for user, y in enumerate(labels)]
    return Population.of([f"user-{user}" for user in range(CLIENTS)], shards)


@pytest.fixture
def store(tmp_path):
    with open_coordinator_store(f"sqlite:///{tmp_path / 'm.db'}", tmp_path / "blobs") as opened:
        opened.lineage_key = lambda: LINEAGE
        yield opened


def made(question, minimum_devices=20, **terms):
    return compiled([question], FIELDS, Terms(minimum_devices, **terms))


def asked(users, question, minimum_devices=20):
    return ask_population(made(question, minimum_devices), users)


def task(store, question, privacy=None, **settings):
    """A task of a question, which `begin` makes as the command does."""
    given = settings_of_question(question, {"population": "phones", **settings}, privacy)
    return begin(store, question, given, lambda note: None)


def test_a_group_of_one_device_is_hidden_whatever_the_query_says(users):
    found = asked(users, BY_LABEL)
    assert [row[0] for row in found.rows] == [0, 1, 2]
    assert found.hidden == 1
    for trick in ("HAVING COUNT(DISTINCT DEVICE) >= 1", "ORDER BY 2", "LIMIT 1"):
        assert all(row[0] != 3 for row in asked(users, f"{BY_LABEL} {trick}").rows)
    # In one group for all it is not hidden, and there it is among the others.
    assert asked(users, "SELECT SUM(y) FROM examples").rows == ((int(users.fields["y"].sum()),),)


def test_a_threshold_hides_a_group_from_readers_and_not_from_the_sum(users):
    # Who runs the coordinator sees what it sums, and so does who asks for no threshold.
    assert asked(users, BY_LABEL, minimum_devices=1).rows[3] == (3, SECRET)


def test_two_questions_that_differ_by_one_device_tell_what_it_has(users):
    everybody = asked(users, "SELECT COUNT(*) FROM examples WHERE y = 3 OR y = 0")
    others = asked(users, f"SELECT COUNT(*) FROM examples WHERE (y = 3 OR y = 0) AND id <> {VICTIM}")
    own = users.fields["y"][users.fields["id"] == VICTIM]
    assert others.devices == everybody.devices == CLIENTS
    assert everybody.rows[0][0] - others.rows[0][0] == ((own == 3) | (own == 0)).sum()


def test_under_noise_their_difference_is_within_what_noise_does(users):
    questions = [made(BOUNDED.format(where), private=True) for where in ("", f" WHERE id <> {VICTIM}")]
    differences = []
    for seed in range(10):
        first, second = (
            ask_population(question, users, seed=2 * seed + place, epsilon=1.0)
            for place, question in enumerate(questions)
        )
        differences.append(first.rows[0][0] - second.rows[0][0])
        assert first.errors[0][0] > 17  # the rows of the one device
    assert np.std(differences) > 17
    assert min(differences) < 0 < max(differences)


@pytest.mark.security("Questions without noise can be refused")
def test_a_budget_refuses_questions_without_noise_and_one_too_many(store):
    store.set_budget("phones", 1.1, 1e-4)
    with pytest.raises(BudgetExceeded, match="privacy"):
        task(store, made(BY_LABEL))
    private = made(BOUNDED.format(""), private=True)
    promise = {"epsilon": 1.0, "delta": 1e-4, "users": 100}
    task(store, private, promise)
    with pytest.raises(BudgetExceeded):
        task(store, made(BOUNDED.format(f" WHERE id <> {VICTIM}"), private=True), promise)
    assert len(store.tasks()) == 1


def test_a_question_about_one_id_has_no_answer(users):
    alone = asked(users, f"SELECT COUNT(*), SUM(y) FROM examples WHERE id = {VICTIM}")
    assert (alone.rows, alone.hidden) == ((), 1)
    everybody = asked(users, "SELECT id, COUNT(*) FROM examples GROUP BY id")
    assert (everybody.rows, everybody.hidden) == ((), CLIENTS)
    unbounded = Fields((Field("id", "int64"),), "that tests have")
    with pytest.raises(QuestionError, match="GROUP BY"):
        compiled(["SELECT id, COUNT(*) FROM examples GROUP BY id"], unbounded, Terms())


def test_a_threshold_of_one_is_refused_where_a_population_says_more(store):
    assert made(BY_LABEL, minimum_devices=0).question.minimum_devices == 1
    store.set_budget("phones", 100.0, 1e-3, minimum_devices=20)
    promise = {"epsilon": 1.0, "delta": 1e-4, "users": 100}
    for least in (1, 19):
        with pytest.raises(BudgetExceeded, match=f"shows groups of {least}"):
            task(store, made(BOUNDED.format(""), least, private=True), promise)
    task(store, made(BOUNDED.format(""), 20, private=True), promise)


def test_a_masked_sum_is_over_several_devices_whatever_the_threshold():
    question = made(BOUNDED.format(""), minimum_devices=1, secure=True)
    given = settings_of_question(question, {"population": "phones", "secagg": {}}, None)
    assert build(TaskSettings, given, text=True).minimum == 8
    with pytest.raises(InvalidTask, match="a sum over fewer says too much about each"):
        settings_of_question(question, {"population": "phones", "secagg": {}, "goal": 2}, None)


@pytest.mark.security("A device can lie within its bounds")
@pytest.mark.parametrize("lie", [1e6, -1e6])
@pytest.mark.parametrize("private", [False, True], ids=["bounds", "clip"])
def test_a_device_that_lies_counts_as_much_as_its_bounds_say(private, lie, store):
    question = made(BOUNDED.format(""), minimum_devices=1, private=private)
    blocks = question.question.blocks
    promise = PrivacyBudget(epsilon=1e6, delta=1e-6, users=1000, noise_multiplier=0.01) if private else None
    begun = task(store, question, promise and {name: getattr(promise, name) for name in promise.__slots__}, goal=7)
    desk = Desk(store)
    given = desk.assign(*"abcdef", "liar")
    honest = {block.name: 1.0 for block in blocks}
    for assignment, blocks_of in zip(given, [honest] * 6 + [dict.fromkeys(honest, lie)], strict=True):
        vector = answer_values(question.question, **blocks_of)
        desk.ask(CountReport(assignment.assignment, vector.tobytes().hex()[:64], vector))
    desk.pass_time(1)
    found = store.answer(begun.id)
    assert found.devices == 7
    for column, name in enumerate(("count", "sum")):
        (block,) = (one for one in blocks if one.name.startswith(name))
        moved = found.rows[0][column] - 6
        # A bound of whole numbers is that of a range of so many bits.
        most = block.norm * question.question.clip + 2 * found.errors[0][column] if private else 2 * block.high
        assert abs(moved) <= most < 1e3
        assert moved > 0 if lie > 0 else moved <= 0
