"""Tables fit: in a pipe nothing is cut or broken, on a terminal nothing is wider than it."""

import json
import re
import sys

import pytest

from coordinator.rules.entities import AssignedDevice
from coordinator.rules.rounds import open_round
from coordinator.store.tasks import open_coordinator_store
from muster.tables import latex, plain_markdown
from tests.coordinator.bundles import make_bundle
from tests.forked import COMMAND, forked
from tests.muster.terminal import on_terminal
from tests.muster.test_cli import in_process, muster
from tests.stores import without_rows

TABLE = "from muster.plain import show_table; show_table(['name', 'what it says'], [['a', %r], ['b', None]])"
DIGEST = re.compile("[0-9a-f]{64}")
LONG = " ".join(f"word{number}" for number in range(40))


def printed(program):
    return forked(COMMAND).run([sys.executable, "-c", program]).stdout


def test_in_a_pipe_a_row_is_one_line_however_long():
    lines = printed(TABLE % LONG).splitlines()
    assert [line.split() for line in lines[2:]] == [["a", *LONG.split()], ["b", "–"]]
    assert lines[0].index("what") == lines[2].index("word0")


@pytest.mark.parametrize("columns", [30, 80])
def test_on_a_terminal_long_cells_go_on_in_the_next_line(columns):
    status, out = on_terminal(columns, program=("-c", TABLE % LONG))
    assert status == 0
    assert max(map(len, out.splitlines())) <= columns
    assert [word for word in out.split() if word.startswith("word")] == LONG.split()
    assert out.splitlines()[0].split() == ["name", "what", "it", "says"]


def test_a_table_that_cannot_fit_becomes_one_field_a_line():
    program = "from muster.plain import show_table; show_table(list('abc'), [[n * 30 for n in 'xyz']] * 2)"
    _, out = on_terminal(80, program=("-c", program))
    assert out == 2 * f"a  {30 * 'x'}\nb  {30 * 'y'}\nc  {30 * 'z'}\n\n"


@pytest.fixture
def task(tmp_path):
    """A task with a round of two passes that has metrics, and one in which devices gave up; where it is kept."""
    where = ["--db", without_rows(tmp_path / "muster.db"), "--blobs", tmp_path / "blobs"]
    open_coordinator_store(where[1], where[3]).close()
    words = ["--plan", make_bundle(tmp_path / "plan").folder, "--population", "p", "--goal", 3, "--rounds", 2]
    task = json.loads(in_process("task", "create", *words, *where, "--json").stdout)["task"]
    metrics = {f"{one}.{what}": 0.123456789 for one in ("train", "sweep") for what in ("loss", "accuracy")}
    with open_coordinator_store(where[1], where[3]) as store, store.database.writing() as records:
        for number, reasons in ((1, ()), (2, ("plan-refused", "invalid-examples"))):
            row_id, _ = records.add_round(task, number, open_round(records.task(task).settings.policy, 0.0))
            drawn = [AssignedDevice(f"{number}-{slot}", slot, f"d{slot}") for slot in range(26)]
            records.add_assignments(row_id, drawn)
            for slot, reason in enumerate(reasons):
                records.move_assignment(records.assignment(f"{number}-{slot}"), "aborted", "device", reason)
            records.finish_round(row_id, records.task(task).initial, {} if reasons else metrics)
    return task, where


@pytest.mark.parametrize("command", ["list", "show", "metrics", "history"])
def test_tables_of_tasks_fit_eighty_columns_and_are_whole_in_a_pipe(task, command):
    name, where = task
    words = ["task", command, *([] if command == "list" else [name]), *where]
    status, narrow = on_terminal(80, *words)
    assert status == 0
    assert max(len(line) for line in narrow.splitlines() if not DIGEST.search(line)) <= 80
    status, piped, _ = muster(*words, COLUMNS="80")
    assert status == 0
    parts = [sorted(re.findall(r"\w[\w.:-]*", out)) for out in (narrow, piped)]
    assert parts[0] == parts[1]


def test_metrics_are_one_line_a_round_in_a_pipe(task):
    _, out, _ = muster("task", "metrics", task[0], *task[1], COLUMNS="80")
    rounds, wrong = ([re.split(r"\s{2,}", line) for line in part.splitlines()] for part in out.split("\n\n"))
    names = ["train loss", "train accuracy", "sweep loss", "sweep accuracy"]
    assert rounds[0] == ["round", "attempt", "state", "reported", "seconds", *names]
    assert rounds[2:] == [
        ["1", "1", "selecting", "0 of 0", "–", *4 * ["0.1235"]],
        ["2", "1", "selecting", "0 of 0", *5 * "–"],
    ]
    assert wrong[2:] == [["2", "1", *4 * ["0"], "–", "invalid-examples=1, plan-refused=1"]]


@pytest.mark.parametrize("command", [["doctor"], ["coordinator", "config"], ["task", "create", "--help"]])
def test_no_table_is_wider_than_the_terminal(command):
    _, out = on_terminal(80, *command)
    assert [line for line in out.splitlines() if len(line) > 80 and len(line.split()) > 2] == []
    assert len(out.splitlines()) < 120


def test_no_character_of_a_cell_is_markup_in_markdown_or_latex():
    column, cell = "client_lr", "a|b*c<d>\\e\n50% & $2 #{~^}–"
    assert plain_markdown([column], [[cell]]) == ("| client\\_lr |\n|---|\n| a\\|b\\*c\\<d\\>\\\\e 50% & $2 #{~^}– |\n")
    row = r"a|b*c<d>\textbackslash{}e 50\% \& \$2 \#\{\textasciitilde{}\textasciicircum{}\}--"
    assert latex([column], [[cell]]).splitlines() == [
        *(r"\begin{tabular}{l}", r"\hline", r"client\_lr \\", r"\hline"),
        *(rf"{row} \\", r"\hline", r"\end{tabular}"),
    ]
