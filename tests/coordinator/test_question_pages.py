"""Pages of questions: the answer as a table and pictures, what marks them among tasks, and downloads."""

import csv
import io

import httpx2
import pytest

from coordinator.dashboard.curves import BOTTOM, TOP, Labels, pictures
from coordinator.rules.kinds import TaskAnswer
from coordinator.rules.task_settings import PrivacyBudget
from fedcore.questions.answer import as_csv
from fedcore.questions.question import Block, Call, Cell, Column, Group, Key, Number, Rows
from tests.coordinator.questions import ask
from tests.coordinator.replicas import until
from tests.coordinator.test_questions import asking
from tests.questions.labels import labels

__all__ = ["asking"]  # a fixture

FIRST = {"voters": [1, 1, 0], "n": [4, 2, 0], "known": [4, 2, 0], "speed": [8, 1, 0]}
ONE, BOTH, NONE = (Labels(tuple(keys), frozenset(keys)) for keys in ([0], [0, 1], []))
SECOND = {"voters": [1, 0, 1], "n": [3, 0, 60], "known": [3, 0, 60], "speed": [1, 0, 240]}


def answered(columns, rows, errors=None):
    facts = {"devices": 9, "hidden_groups": 0, "minimum_devices": 1, "round": 1, "over": True}
    return TaskAnswer(task="t", question="q", columns=columns, rows=rows, errors=errors, **facts)


@pytest.mark.security("Groups of fewer than minimum_devices devices are left out")
def test_the_page_of_a_question_shows_its_answer_and_no_training(store, served, asking):
    question = labels(minimum_devices=2)
    task, other = asking(question, goal=2), asking(labels(text="SELECT 1 FROM examples"), population="tablets")
    address = f"{served.admin}/tasks/{task}"
    page = httpx2.get(address).text
    assert "0 devices have answered so far; a round ends with 2." in page
    assert ("<h2>Answer</h2>" in page, question.text in page) == (False, True)
    ask(served, question, [FIRST, SECOND])
    until(lambda: store.answer(task).over)
    page = httpx2.get(address).text
    assert "2 devices have answered." in page
    assert "2 groups are hidden: each has fewer than 2 devices." in page
    assert "<tr><td>0</td><td>2</td><td>7</td><td>0</td><td>1.28571</td></tr>" in page
    assert page.count('<rect class="line-0"') == 4  # a bar of each column
    for words in ("Learning curve", "Download the model", "Roll back", "Compare with"):
        assert words not in page, words
    assert f"muster ask --task {task} --csv -" in page
    assert "--population phones --goal 2 --minimum-devices 2" in page
    assert other not in page  # of another population


def test_the_audit_log_says_who_read_an_answer_wherever(store, served, asking):
    task = asking(labels())
    for path in (f"/tasks/{task}", f"/tasks/{task}/answer", f"/admin/v1/tasks/{task}/answer"):
        assert httpx2.get(served.admin + path).status_code == 200
    read = [(one.actor, one.subject) for one in store.audit(0) if one.action == "answer-read"]
    assert read == [("viewer loopback, token loopback", task)] * 3


def test_a_page_that_is_opened_again_and_again_leaves_one_entry(store, served, asking):
    tasks = [asking(labels()), asking(labels())]
    for task in tasks * 3:
        assert httpx2.get(f"{served.admin}/tasks/{task}").status_code == 200
    assert [one.subject for one in store.audit(0) if one.action == "answer-read"] == tasks


def test_answers_are_downloaded_as_csv_and_json(store, served, asking):
    question = labels()
    task = asking(question, goal=2)
    ask(served, question, [FIRST, SECOND])
    until(lambda: store.answer(task).over)
    address = f"{served.admin}/tasks/{task}/answer"
    found = httpx2.get(address, params={"form": "json"}).json()
    assert found["rows"] == [list(row) for row in store.answer(task).rows]
    told = httpx2.get(address, params={"form": "csv"})
    assert told.headers["content-type"] == "text/csv; charset=utf-8"
    first, *rows = csv.reader(io.StringIO(told.text))
    assert (first, rows[2]) == (["y", "devices", "n", "steps", "speed"], ["2", "1", "60", "0", "4.0"])
    assert httpx2.get(address, params={"form": "xlsx"}).status_code == 400
    assert httpx2.get(f"{served.admin}/admin/v1/tasks/{task}/answer").json() == found


def test_answers_are_for_those_who_may_view(locked, asking):
    task = asking()
    for path in (f"/tasks/{task}/answer", f"/admin/v1/tasks/{task}/answer"):
        assert locked.get(path).status_code == 401


def test_lists_mark_what_asks_and_comparisons_leave_it_out(served, register, asking):
    task, training = asking(), register(name="keyboard")
    for path in ("/", "/populations/phones"):
        page = httpx2.get(f"{served.admin}{path}").text
        assert f'{task[:4]}</code> <span class="quiet">question</span>' in page
        assert f'{training[:4]}</code> <span class="quiet">' not in page
    compared = httpx2.get(f"{served.admin}/compare").text
    assert (training in compared, task in compared) == (True, False)


def test_other_questions_of_the_population_are_listed_with_their_devices(store, served, asking):
    first = asking(labels(text="SELECT COUNT(*) FROM examples"), goal=2)
    ask(served, labels(), [FIRST, SECOND])
    until(lambda: store.answer(first).over)
    page = httpx2.get(f"{served.admin}/tasks/{asking()}").text
    listed = page.partition("Other questions of this population")[2]
    assert f'<a href="/tasks/{first}">SELECT COUNT(*) FROM examples</a>' in listed
    assert "completed</span></td><td>2</td>" in listed


def test_a_private_answer_states_its_errors_on_page_and_in_csv(store, served, asking):
    question = labels(private=True, most_rows=8)
    budget = PrivacyBudget(epsilon=9000, delta=1e-6, users=1000, noise_multiplier=0.01)
    task = asking(question, goal=2, privacy=budget)
    ask(served, question, [FIRST | SECOND, SECOND])
    until(lambda: store.answer(task).over)
    page = httpx2.get(f"{served.admin}/tasks/{task}").text
    assert ("± 0.047" in page, "in 95 of 100 answers" in page) == (True, True)
    assert "--epsilon 9000 --delta 1e-06 --users 1000" in page
    header = httpx2.get(f"{served.admin}/tasks/{task}/answer?form=csv").text.splitlines()[0]
    assert header == "y,devices,devices ±,n,n ±,steps,steps ±,speed,speed ±"


def test_names_of_groups_are_text_on_pages_and_no_formula_in_csv(store, served, asking):
    names = ("<b>&", "=1+1\u202e", None)
    question = labels(keys=(Key("y", names),))
    task = asking(question, goal=2)
    ask(served, question, [FIRST, SECOND])
    until(lambda: store.answer(task).over)
    page = httpx2.get(f"{served.admin}/tasks/{task}").text
    assert ("<b>&" in page, "&lt;b&gt;&amp;" in page, "\u202e" in page) == (False, True, False)
    rows = list(csv.reader(io.StringIO(httpx2.get(f"{served.admin}/tasks/{task}/answer?form=csv").text)))
    assert [row[0] for row in rows[1:]] == ["<b>&", "'=1+1\\u202e", ""]


DAMAGED = {
    "IndexError": Call("item", (Number((1, 2)), Cell("voters"))),
    "StopIteration": Call("quantile", (Number((1.0, 1.0)), Cell("voters"), Number((0.0, 1.0, 2.0)))),
    "OverflowError": Call("case", (Call("<", (Cell("voters"), Number(2))), Number(0), Number(10**400))),
}
"""Columns that fail once two devices answer, and not before."""


@pytest.mark.parametrize("error", DAMAGED)
def test_an_answer_that_cannot_be_computed_is_said_and_not_a_fault(error, store, served, asking):
    question = labels(
        rows=(Rows("n"),), blocks=(Block("voters", "n", "any", 0, 1),), keys=(), columns=(Column("n", DAMAGED[error]),)
    )  # fmt: skip
    task = asking(question, goal=2)
    ask(served, question, [{"voters": 1}, {"voters": 1}])
    until(lambda: store.task(task).state.ended)
    for _ in range(2):
        page = httpx2.get(f"{served.admin}/tasks/{task}")
        assert (page.status_code, f"columns cannot be computed: {error}" in page.text) == (200, True)
        for path in (f"/tasks/{task}/answer?form=csv", f"/admin/v1/tasks/{task}/answer"):
            assert httpx2.get(f"{served.admin}{path}").status_code == 422


def test_numbers_beyond_all_measure_are_in_the_table_and_in_no_picture():
    rows = tuple((number, (-1) ** number * 1e308) for number in range(4))
    assert pictures(answered(("y", "n"), rows), ONE) == []


@pytest.mark.parametrize("count", [3, 24])
def test_one_key_is_drawn_as_bars_from_zero_with_errors(count):
    rows = tuple((number, number - 1) for number in range(count))
    errors = ((None, 0.5),) * count
    (bars,) = pictures(answered(("y", "n"), rows, errors), ONE)
    assert (bars.name, bars.horizontal, len(bars.marks)) == ("n", "y", count)
    down, _, up = bars.marks[:3]
    assert down.y == pytest.approx(bars.zero)
    assert up.y + up.height == pytest.approx(bars.zero)
    assert down.height == pytest.approx(up.height)
    assert up.words == "y 2: 1 ± 0.5"
    assert up.error[0] - up.error[1] == pytest.approx(up.height)
    assert len(bars.across) <= 8


def test_bins_are_drawn_over_the_first_of_the_columns_that_name_them(store, served, asking):
    edges = Number((0.0, 0.5, 2.0, 8.0))
    ends = [Call("item", (edges, Call("+", (Group(0), Number(more))))) for more in (0, 1)]
    columns = (Column("from", ends[0]), Column("to", ends[1]), Column("n", Cell("n")))
    question = labels(text="How many examples are in which bin?", columns=columns)
    task = asking(question, goal=2)
    ask(served, question, [FIRST, SECOND])
    until(lambda: store.answer(task).over)
    page = httpx2.get(f"{served.admin}/tasks/{task}").text
    assert "<title>from 0.5: 2</title>" in page
    assert page.count("<figcaption>") == 1
    assert "Ask again, of" not in page  # its text is for owners, and no SQL


def test_errors_larger_than_all_numbers_leave_bars_to_be_seen():
    (bars,) = pictures(
        answered(("y", "n"), (("a", 10), ("b", 8), ("c", None)), ((None, 1.0), (None, 900.0), (None, None))), ONE
    )
    first, second = bars.marks
    assert first.height > (BOTTOM - TOP) / 3
    assert (second.error[1], second.error[0] > bars.zero) == (TOP, True)


def test_many_ordered_bins_are_drawn_as_a_line():
    rows = tuple((number / 8, number) for number in reversed(range(40)))
    (line,) = pictures(answered(("x", "n"), rows), ONE)
    assert [point.at for point in line.lines[0].points] == [number / 8 for number in range(40)]
    assert line.horizontal == "x"


def test_two_keys_are_drawn_as_a_grid_whose_cells_are_dark_where_much_is():
    rows = (("a", 0, 4), ("a", 1, 2), ("b", 1, 0), ("c", None, None))
    (grid,) = pictures(answered(("y", "z", "n"), rows), BOTH)
    assert [(mark.shade, mark.words) for mark in grid.marks] == [
        (1.0, "y a, z 0: 4"),
        (0.5, "y a, z 1: 2"),
        (0.0, "y b, z 1: 0"),
    ]
    assert ([tick.label for tick in grid.up], [tick.label for tick in grid.across]) == (
        ["a", "b", "c"],
        ["0", "1", "NULL"],
    )
    assert len({mark.x for mark in grid.marks}) == 2


def test_nothing_is_drawn_of_one_row_of_text_or_of_no_row():
    assert pictures(answered(("n",), ((3,),)), NONE) == []
    assert pictures(answered(("y", "n"), ()), ONE) == []
    assert pictures(answered(("y", "word"), ((0, "a"),)), ONE) == []
    assert pictures(answered(("y", "n"), ((0, float("nan")),)), ONE) == []


def test_csv_has_errors_beside_numbers_and_null_as_nothing():
    found = as_csv(("y", "n"), (("a,b", 3), (None, (1, 2))), ((None, 0.25), (None, None)))
    assert found == 'y,n,n ±\n"a,b",3,0.25\n,1 2,\n'
    assert as_csv(("=y",), (("-x",), (-1,)), None) == "'=y\n'-x\n-1\n"
