"""Tasks that ask a question: what they may be, and their answers on the store."""

import dataclasses
import json
from collections import Counter

import msgspec
import numpy as np
import pytest

from coordinator.commands import CountReport
from coordinator.errors import BudgetExceeded, InvalidModel, InvalidTask, WrongKind
from coordinator.rules.entities import Regularly
from coordinator.rules.kinds import TaskAnswer
from coordinator.rules.private_sums import deviation_of
from coordinator.rules.roll_outs import check_model
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered, ClearReports, PrivacyBudget
from coordinator.store.tasks import TaskSettings
from fedcore.questions.functions import FUNCTIONS
from fedcore.questions.question import Block, Call, Cell, Column, Group, Key, Number, Question, Rows
from tests.coordinator.bundles import make_evaluation_bundle
from tests.coordinator.questions import answer_values, make_question_bundle
from tests.muster.test_cli import in_process
from tests.questions.labels import labels

BUDGET = PrivacyBudget(epsilon=8, delta=1e-6, users=1000)


def answer_round(desk, question, answers, first=0):
    """A round in which devices answer, each with its blocks by name."""
    drawn = desk.assign(*(f"device-{first + number}" for number in range(len(answers))))
    for given, blocks in zip(drawn, answers, strict=True):
        vector = answer_values(question, **blocks)
        desk.ask(CountReport(given.assignment, vector.tobytes().hex()[:64], vector))
    desk.pass_time(1)


@pytest.fixture
def asking(register, tmp_path):
    """Register a task that asks, by default about labels; answers its id."""

    def ask(question=None, **settings):
        bundle = make_question_bundle(tmp_path / f"asks-{len(list(tmp_path.iterdir()))}", question)
        return register(bundle, "labels", **{"rounds": 1} | settings)

    return ask


@pytest.mark.security("Groups of fewer than minimum_devices devices are left out")
@pytest.mark.every_engine
def test_an_answer_is_the_table_of_all_rounds_so_far(store, desk, asking):
    question = labels(minimum_devices=2)
    task = asking(question, rounds=2)
    empty = store.answer(task)
    assert (empty.rows, empty.devices, empty.round, empty.over) == ((), 0, 0, False)
    first = {"voters": [1, 1, 0], "n": [4, 2, 0], "steps_low": [5, 0, 0], "steps_high": [2, 0, 0]}
    first |= {"known": [4, 2, 0], "speed": [8, 1, 0]}
    answer_round(desk, question, [first, {"voters": [0, 1, 0], "n": [0, 1, 0], "known": [0, 1, 0], "speed": [0, 3, 0]}])
    found = store.answer(task)
    assert (found.columns, found.rows) == (("y", "devices", "n", "steps", "speed"), ((1, 2, 3, 0, 4 / 3),))
    assert (found.devices, found.hidden_groups, found.round, found.over, found.errors) == (2, 2, 1, False, None)
    answer_round(desk, question, [first, first], first=2)
    found = store.answer(task)
    assert found.rows == ((0, 3, 12, 3 * (5 + 2 * 4096), 2.0), (1, 4, 7, 0, 6 / 7))
    assert (found.devices, found.hidden_groups, found.over, found.question) == (4, 1, True, question.text)
    assert store.task(task).state is TaskState.COMPLETED


def test_a_question_has_no_model_and_a_training_no_answer(store, register, asking):
    trains, asks = register(), asking()
    with pytest.raises(WrongKind, match=f"{trains} trains a model and asks no question"):
        store.answer(trains)
    with pytest.raises(WrongKind, match="asks a question and has no model"):
        store.model(asks)
    with pytest.raises(InvalidModel, match="asks a question"):
        check_model(store.plan(store.task(asks).plan_sha256), b"")


@pytest.mark.security("A threshold does not hold against differences and weights")
def test_without_noise_two_answers_tell_what_one_device_said(store, desk, asking):
    question = labels(minimum_devices=3)
    task = asking(question, goal=3, rounds=2, minimum=1)
    answer_round(desk, question, [{"voters": [1, 0, 0], "n": [5, 0, 0]}] * 3)
    before = store.answer(task).rows[0]
    alone = {"voters": [1, 0, 0], "n": [42, 0, 0]}
    answer_round(desk, question, [alone, {}, {}], first=3)
    assert store.answer(task).rows[0][2] - before[2] == 42


@pytest.mark.security("A device can lie within its bounds")
def test_a_device_that_lies_moves_an_answer_by_its_bounds_at_most(store, desk, asking):
    task = asking(labels(), goal=2)
    answer_round(desk, labels(), [{"voters": 1.0, "n": 10.0}, {"voters": 1e6, "n": 1e6, "speed": -1e6}])
    assert store.answer(task).rows[0][1:3] == (2, 10 + 127)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (Call("item", (Number((1,)), Number(3))), "IndexError"),
        (Call("quantile", (Number((1.0,)), Number(2.0), Number((0.0, 1.0)))), "StopIteration"),
        (Call("mean", (Cell("n"),)), "TypeError"),
    ],
)
def test_columns_without_an_answer_are_refused_with_the_task(columns, words, store, asking):
    with pytest.raises(InvalidTask, match=f"no answer: its columns cannot be computed: {words}"):
        asking(labels(columns=(Column("n", columns),)))
    assert store.tasks() == []


def test_a_table_that_takes_too_long_is_refused_with_the_task(store, asking):
    many = tuple(Column(f"c{number}", Call("mean", (Cell("speed"), Cell("known")))) for number in range(30_000))
    with pytest.raises(InvalidTask, match="look at 270,000 numbers in 3 groups; there may be 262,144"):
        asking(labels(columns=many))
    assert store.tasks() == []


@pytest.fixture
def calls(monkeypatch):
    """How often functions of columns are called."""
    counted = Counter()

    def counting(name, function):
        def call(*arguments):
            counted[name] += 1
            return function(*arguments)

        return call

    for name, function in FUNCTIONS.items():
        monkeypatch.setitem(FUNCTIONS, name, counting(name, function))
    return counted


def test_a_private_answer_is_computed_once_whoever_looks(store, desk, asking, calls):
    groups = 1300
    question = Question(
        text="SELECT key, AVG(x) FROM examples GROUP BY key",
        rows=(Rows("n", groups), Rows("x", groups)),
        blocks=(Block("voters", "n", "any", 0, 1), Block("n", "n"), Block("x", "x", whole=False)),
        columns=(Column("key", Group(0)), Column("mean", Call("mean", (Cell("x"), Cell("n"))))),
        voters="voters",
        keys=(Key("key", tuple(range(groups))),),
        most_rows=5,
        private=True,
    )
    task = asking(question, goal=1, privacy=dataclasses.replace(BUDGET, epsilon=9000, noise_multiplier=0.01))
    answer_round(desk, question, [{"voters": 1, "n": 1, "x": 1}])
    calls.clear()
    first = store.answer(task)
    assert len(first.rows) > groups / 4
    assert 0 < calls.total() < 2**19
    calls.clear()
    assert store.answer(task) == first
    assert calls.total() == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"buffered": Buffered()}, "comes back counts twice: create the task without buffered"),
        ({"clear": ClearReports(estimator="median")}, "estimator must be mean with a question"),
        ({"privacy": PrivacyBudget(epsilon=8, delta=1e-6, users=1000, mechanism="tree")}, "mechanism must be gaussian"),
        ({"starts_from": "TASK"}, "asks and trains no model, so it begins at none"),
    ],
)
def test_settings_under_which_answers_do_not_add_up_are_refused(settings, words, desk, register, asking, tmp_path):
    if "starts_from" in settings:
        before = register(goal=1, rounds=1)
        (given,) = desk.assign("a")
        desk.report(given)
        desk.pass_time(1)
        settings = {"starts_from": before}
    question = labels(private="privacy" in settings)
    with pytest.raises(InvalidTask, match=words):
        asking(question, **settings)


def test_a_question_is_not_evaluated_while_it_runs(store, tmp_path):
    bundle, evaluation = make_question_bundle(tmp_path / "asks"), make_evaluation_bundle(tmp_path / "evaluation")
    settings = TaskSettings(population="phones", goal=1, rounds=2, hold_out_devices=0.5)
    with pytest.raises(InvalidTask, match="is for tasks that train, and question asks"):
        store.register_task(bundle, settings, evaluation=Regularly(1, evaluation))


def test_a_question_never_counts_as_diverged(store, desk, asking):
    task = asking(labels(), rounds=12, goal=1, max_loss_growth=2)
    for number in range(11):
        answer_round(desk, labels(), [{"n": 10.0**number % 64}], first=number)
    assert store.task(task).state is TaskState.ACTIVE


@pytest.mark.security("How many devices answered is exact, also under noise")
def test_a_private_answer_is_a_sum_also_if_fewer_than_the_goal_report(store, desk, asking):
    question = labels(private=True, most_rows=8, minimum_devices=1)
    privacy = PrivacyBudget(epsilon=1e6, delta=1e-6, users=1000, noise_multiplier=0.01)
    task = asking(question, goal=8, minimum=4, privacy=privacy, reporting_deadline_s=5, selection_timeout_s=5)
    drawn = desk.assign(*(f"device-{number}" for number in range(8)))
    for given in drawn[:4]:
        vector = answer_values(question, voters=[1, 1, 1], speed=[100, 0, 0])
        desk.ask(CountReport(given.assignment, vector.tobytes().hex()[:64], vector))
    desk.pass_time(6)
    found = store.answer(task)
    assert found.devices == 4
    assert [row[1] for row in found.rows] == [4, 4, 4]
    assert found.errors[0][1] == pytest.approx(2.1 * 0.01 * question.clip)


def test_stated_errors_hold_what_noise_did(store, desk, asking):
    question = labels(private=True, most_rows=8)
    task = asking(question, goal=2, rounds=3, privacy=BUDGET)
    for number in range(3):
        answer_round(desk, question, [{"voters": [1, 1, 1]}] * 2, first=2 * number)
    noise = store.task(task).settings.privacy.noise_multiplier * question.clip
    with store.database.reading() as records:
        entries = records.ledger.entries(task)
    layout = store.plan(store.task(task).plan_sha256).report
    assert deviation_of(entries, store.task(task).settings, layout) == pytest.approx(np.sqrt(3) * noise)
    assert deviation_of((), store.task(task).settings, layout) == 0


def test_whole_numbers_beyond_64_bits_are_answered_as_real_ones(store, desk, asking):
    large = Call("*", (Cell("n"), Number(2**62)))
    question = labels(columns=(Column("n", large), Column("text", Number("a"))))
    task = asking(question, goal=1)
    answer_round(desk, question, [{"voters": [1, 0, 0], "n": [8, 0, 0]}])
    found = store.answer(task)
    assert found.rows == ((8.0 * 2**62, "a"),)
    assert msgspec.json.decode(msgspec.json.encode(found), type=TaskAnswer) == found


def test_commands_say_what_kind_of_task_it_is(store, register, asking, desk, tmp_path):
    where = ("--db", f"sqlite:///{tmp_path}/state.db", "--blobs", tmp_path / "blobs")
    task, training = asking(labels(), goal=1), register()
    answer_round(desk, labels(), [{"voters": [1, 0, 0]}])
    listed = json.loads(in_process("task", "list", "--json", *where).stdout)
    assert {one["task"]: one["kind"] for one in listed} == {task: "question", training: "training"}
    assert "question" in in_process("task", "list", *where).stdout
    shown = json.loads(in_process("task", "show", task, "--json", *where).stdout)
    assert (shown["kind"], shown["question"]) == ("question", labels().text)
    watched = in_process("task", "watch", task, *where)
    assert f"asks: {labels().text}" in watched.stdout
    assert "round 1: question.devices 1" in watched.stdout
    assert f"muster ask --task {task}" in watched.stderr


def test_the_command_reads_what_is_there_and_says_how_much_is_to_come(desk, asking, tmp_path):
    where = ("--db", f"sqlite:///{tmp_path}/state.db", "--blobs", tmp_path / "blobs")
    task = asking(labels(), goal=1, rounds=2)
    for so_far in (", in 1 of 2 rounds so far", ""):
        answer_round(desk, labels(), [{"voters": [1, 0, 0], "n": [5, 0, 0]}])
        read = in_process("ask", "--task", task, *where)
        devices = 1 if so_far else 2
        assert read.stdout.splitlines()[2].split()[:3] == ["0", str(devices), str(5 * devices)]
        assert read.stderr == f"{devices} device{'s' * (devices - 1)} answered{so_far}\n"


def test_bins_are_answered_as_several_numbers(store, desk, asking):
    question = labels(
        rows=(Rows("n"),), keys=(), columns=(Column("sizes", Cell("sizes")),),
        blocks=(Block("voters", "n", "any", 0, 1), Block("sizes", "n", "bins", edges=(2.0, 4.0))),
    )  # fmt: skip
    task = asking(question, goal=2)
    answer_round(desk, question, [{"voters": 1, "sizes": [1, 0, 0]}, {"voters": 1, "sizes": [0, 0, 1]}])
    assert store.answer(task).rows == (((1, 0, 1),),)


def test_a_population_may_refuse_questions_that_show_small_groups(store, asking):
    private = labels(private=True, most_rows=8, minimum_devices=5)
    store.set_budget("phones", 100.0, 1e-6, minimum_devices=20)
    assert store.budget("phones").budget.minimum_devices == 20
    with pytest.raises(BudgetExceeded, match=r"of fewer than 20 devices, .*shows groups of 5"):
        asking(private, goal=2, privacy=BUDGET)
    assert store.tasks() == []
    asking(labels(private=True, most_rows=8, minimum_devices=20), goal=2, privacy=BUDGET)
