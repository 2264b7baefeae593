"""`muster ask` and `muster.ask`: from a question to a table, near, far and on a data set."""

import csv
import io
import json
import shlex
import signal
import subprocess

import numpy as np
import pytest

import muster
from coordinator.api import authentication
from coordinator.errors import InvalidTask
from coordinator.rules.entities import Role
from coordinator.rules.task_settings import TaskSettings
from coordinator.store.tasks import open_coordinator_store
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.release import decode_release
from fedcore.signing import SigningKey
from muster.asking import Terms, Unanswered, compiled, fields_in, fields_of, parse_field
from simulator import datasets
from simulator.fleet.fork_servers import HERE, fork_servers
from simulator.planned import ask_population
from tests.coordinator.bundles import make_bundle
from tests.coordinator.fork_server import wait_until
from tests.coordinator.questions import make_question_bundle
from tests.muster.asked import FIELDS, LABELS, answering, population
from tests.muster.test_cli import in_process
from tests.sampled import sampled
from tests.stores import without_rows

BY_LABEL = "SELECT y, COUNT(*) AS n, SUM(x), AVG(s), COUNT(DISTINCT DEVICE) FROM examples GROUP BY y"
BOUNDED = "SELECT y, COUNT(*) AS n, SUM(x), AVG(CLIP(s, 0, 4)) FROM examples GROUP BY y MAX 40 ROWS PER DEVICE"

EPSILON = 400.0
"""With 40, masked noise took a count of a hundred below one in a run of twenty, and then there is no mean."""
SILENCE_S = 60.0
"""How long a device may be silent where a round needs every device: one lost, and no other attempt has enough. On a
quiet machine all of them answer within a second; on a busy one some took more than the usual five."""


@pytest.fixture(scope="module")
def servers():
    with fork_servers({HERE: ["onnxruntime"]}) as opened:
        yield opened


@pytest.fixture
def files(tmp_path):
    """The options of a store without a coordinator."""
    where = ("--db", without_rows(tmp_path / "m.db"), "--blobs", tmp_path / "blobs")
    open_coordinator_store(where[1], where[3]).close()
    return where


def near(local):
    return "--db", local.database, "--blobs", local.blobs


def asked(*words):
    """The answer as JSON."""
    done = in_process("ask", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def in_engine(users, question, **terms):
    made = compiled([question], fields_in(users, "the users"), Terms(**terms))
    return ask_population(made, users)


def test_devices_answer_what_the_engine_does_near_and_far(tmp_path, coordinators, servers, monkeypatch):
    users = population(24)
    with coordinators.local(tmp_path) as local:
        monkeypatch.setenv("MUSTER_TOKEN", authentication.issue(local.store.database, "alice", Role.OPERATOR)[1])
        with answering(local, users, servers, tmp_path / "devices"):
            found = asked(BY_LABEL, "--population", "phones", "--goal", 24, *FIELDS, *near(local))
        far = ("--coordinator", local.admin_url)
        with answering(local, users, servers, tmp_path / "others"):
            labels = asked("labels", "y", "--population", "phones", "--goal", 24, *far)
        with muster.Coordinator(local.admin_url) as coordinator:
            again = coordinator.task(found["task"]).answer()
    engine = in_engine(users, BY_LABEL)
    assert found["rows"] == [list(row) for row in engine.rows]
    assert (again.rows, again.columns) == (engine.rows, engine.columns)
    assert sum(row[1] for row in found["rows"]) == len(users.fields["y"])
    assert (found["devices"], found["hidden_groups"], found["errors"]) == (24, 0, None)
    assert found["seconds"] > 0
    assert labels["rows"] == [list(row) for row in muster.ask("labels", "y", dataset=users).rows]
    assert labels["devices"] == 24


def test_a_secure_answer_is_exact_in_whole_numbers(tmp_path, coordinators, servers):
    users, key = population(24), SigningKey.new(tmp_path / "release.pem")
    with coordinators.local(tmp_path, secure=True, silence_s=SILENCE_S) as local:
        words = (BOUNDED, "--population", "phones", "--goal", 24, *FIELDS, *near(local))
        with answering(local, users, servers, tmp_path / "devices", key.signer):
            found = asked(*words, "--secagg", "--release-key", tmp_path / "release.pem")
        assert local.store.task(found["task"]).settings.secagg is not None
    engine = in_engine(users, BOUNDED, secure=True)
    assert [row[:3] for row in found["rows"]] == [list(row[:3]) for row in engine.rows]
    assert [row[3] for row in found["rows"]] == pytest.approx([row[3] for row in engine.rows], abs=1e-3)
    assert found["devices"] == 24


@pytest.mark.parametrize("secure", sampled([False, True], [True]), ids=["plain", "masked"])
def test_a_private_answer_says_how_far_noise_may_move_it(secure, tmp_path, coordinators, servers):
    users, key = population(24), SigningKey.new(tmp_path / "release.pem")
    privacy = {"epsilon": EPSILON, "users": 24, "minimum_devices": 8}
    masks = {"secagg": {}, "release_key": key} if secure else {}
    with coordinators.local(tmp_path, secure=secure, silence_s=SILENCE_S) as local:
        token = authentication.issue(local.store.database, "alice", Role.OPERATOR)[1]
        with (
            muster.Coordinator(local.admin_url, token) as coordinator,
            answering(local, users, servers, tmp_path / "devices", key.signer if secure else None),
        ):
            whom = {"coordinator": coordinator, "population": "phones", "field": FIELDS[1::2]}
            found = muster.ask(BOUNDED, **whom, **privacy, **masks, goal=24)
        (task,) = local.store.tasks()
        budget = task.settings.privacy
    assert (budget.epsilon, budget.users, budget.delta) == (EPSILON, 24, 1 / 240)
    assert budget.mechanism == ("distributed" if secure else "gaussian")
    exact = {row[0]: row for row in in_engine(users, BOUNDED, minimum_devices=1).rows}
    assert len(found.rows) == LABELS
    for row, errors in zip(found.rows, found.errors, strict=True):
        assert errors[0] is None
        for value, error, true in list(zip(row, errors, exact[row[0]], strict=True))[1:]:
            assert error > 0
            assert abs(value - true) < 3 * error
    assert "n ±" in found.dataframe().columns


def test_devices_that_cannot_answer_say_why_in_time(tmp_path, coordinators, servers):
    fields = ("--field", "x:int64:3")
    with (
        coordinators.local(tmp_path) as local,
        answering(local, population(8), servers, tmp_path / "devices"),
    ):
        question = ("SELECT SUM(x) FROM examples", *fields, "--minimum-devices", 4, "--goal", 8)
        done = in_process("ask", *question, "--population", "phones", "--timeout", 20, *near(local))
    assert isinstance(done.exception, Unanswered)
    assert "devices gave up: " in str(done.exception)
    assert "invalid-examples" in str(done.exception)


def test_a_question_that_nobody_answers_stays_open_and_is_read_later(files, typed):
    question = ("labels", "y", "--population", "phones", *FIELDS, *files)
    code, out, err = typed("ask", *question, "--timeout", 1)
    assert (code, out) == (1, "")
    (task,) = json.loads(in_process("task", "list", "--json", *files).stdout)
    assert (task["state"], task["rounds"], task["goal"]) == ("active", 1, 100)
    assert task["name"] == "question: How many examples have each value of y, 0 to 4, an"
    assert "no answer within 1 s: no coordinator drives population phones yet" in err
    assert f"the question stays open as task {task['task']}" in err
    assert f"muster ask --task {task['task']} --db" in err
    code, out, err = typed("ask", "--task", task["task"], *files)
    assert (code, out) == (1, "")
    assert f"task {task['task']} has no answer yet: no coordinator drives" in err


def test_ctrl_c_leaves_the_question_open(files, commands):
    words = ["ask", "labels", "y", "--population", "phones", *FIELDS, *map(str, files)]
    process = subprocess.Popen([commands / "muster", *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with open_coordinator_store(files[1], files[3]) as store:
        wait_until(lambda: store.tasks() or process.poll() is not None)
        for line in process.stderr:
            if "no coordinator drives" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        (task,) = store.tasks()
    assert (process.returncode, out) == (130, "")
    assert task.state == "active"
    assert f"the question stays open as task {task.id}" in err
    assert f"muster ask --task {task.id} --db" in err
    assert f"muster task cancel {task.id} --db" in err


def test_a_question_for_the_key_holder_is_asked_by_printed_commands(tmp_path, coordinators, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SigningKey.new(tmp_path / "release.pem")
    words = ("labels", "y", "MAX", "9", "ROWS", "PER", "DEVICE", "--population", "phones", *FIELDS[4:])
    words = (*words, "--where", "region = eu and app_version >= 3.2")
    with coordinators.local(tmp_path, secure=True) as local:
        written = in_process("ask", *words, "--goal", 30, "--secagg", "--bits", 12, "--write", "question", *near(local))
        assert written.exit_code == 0, written.output
        commands = [shlex.split(line) for line in written.stderr.splitlines() if line.startswith("  muster ")]
        sign, ask, read = commands
        for command in (sign, ask):
            done = in_process(*command[1:])
            assert done.exit_code == 0, done.output
        (task,) = local.store.tasks()
        assert read[1:4] == ["ask", "--task", "TASK"]
        done = in_process("ask", "--task", task.id, *read[4:])
    assert isinstance(done.exception, Unanswered)
    assert (task.settings.goal, task.settings.minimum, task.settings.secagg.bits) == (30, 20, 12)
    assert task.release.signer == SigningKey.load(tmp_path / "release.pem").signer
    assert decode_release(task.release.text).bounds.target == task.settings.where == words[-1]
    assert task.name.startswith("question: How many examples have each value of y")


def test_fields_are_those_of_trainings_before_those_of_questions(tmp_path):
    settings = {"goal": 2, "rounds": 1}
    with open_coordinator_store(f"sqlite:///{tmp_path / 'm.db'}", tmp_path / "blobs") as store:
        with pytest.raises(QuestionError, match="no task of population 'phones' says which fields"):
            fields_of(store, "phones")
        trained = make_bundle(tmp_path / "trained")
        store.register_task(trained, TaskSettings(population="phones", **settings))
        asks = make_question_bundle(tmp_path / "asks")
        last = store.register_task(asks, TaskSettings(population="phones", **settings)).id
        store.register_task(trained, TaskSettings(population="others", **settings))
        (read,) = store.plan(store.task(last).plan_sha256).examples.fields[:1]
        found = fields_of(store, "phones")
        assert set(trained.plan.examples.fields) <= set(found.fields)
        assert found.source == "of the last tasks of population phones; --field names others"
        assert read in fields_of(store, "phones", last).fields
        assert fields_of(store, "phones", last).source == f"of task {last}"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("x:float32", Field("x", "float32")),
        ("v:float32:3x2", Field("v", "float32", (3, 2))),
        ("y:uint8:10", Field("y", "uint8", (), 10)),
        ("word:uint8:8:128", Field("word", "uint8", (8,), 128)),
        ("t:int32", Field("t", "int32")),
    ],
)
def test_a_field_is_named_in_words(text, field):
    assert parse_field(text) == field


@pytest.mark.parametrize("text", ["x", "x:float64", "1x:float32", "x:float32:3y", "y:uint8:ten", "y:uint8:1:2:3", ""])
def test_a_field_that_is_none_is_refused(text):
    with pytest.raises(QuestionError, match="a field is name:type"):
        parse_field(text)


def test_a_wrong_query_shows_its_place_and_whose_fields_there_are(typed):
    code, out, err = typed("ask", "SELECT COUNT(*) FROM examples WHERE z > 3", "--population", "p", *FIELDS)
    assert (code, out) == (2, "")
    assert err.splitlines()[-4:] == [
        "error: no field is called 'z'; there are x, s, y (line 1, column 37)",
        "  SELECT COUNT(*) FROM examples WHERE z > 3",
        "                                      ^",
        "  the fields are those that --field names",
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "ask something, or read an answer with --task"),
        (("labels", "y"), 2, "name the population, or a data set with --dataset"),
        (("labels", "y", "--task", "t"), 2, "the task has its question"),
        (
            ("labels", "y", "--population", "p", *FIELDS, "--secagg"),
            2,
            "name the key, or write the plan with --write FOLDER",
        ),
        ((BY_LABEL, "--population", "p", *FIELDS, "--secagg"), 2, "MAX n ROWS PER DEVICE"),
        ((BOUNDED, "--population", "p", *FIELDS, "--epsilon", 1), 2, "--epsilon needs --users"),
        ((BY_LABEL, "--population", "p", *FIELDS, "--epsilon", 1, "--users", 9), 2, "MAX n ROWS PER DEVICE"),
        ((BY_LABEL, "--population", "p", *FIELDS, "--minimum-devices", 0), 2, "it must be at least 1"),
        (("SELECT", "y", "--population", "p", *FIELDS), 2, "one text in quotes, or one of labels, histogram"),
        (("labels", "y", "--population", "p", *FIELDS, "--goal", "many"), 2, "goal must be"),
        (("labels", "y", "--dataset", "digits", "--goal", 5), 2, "--goal is for a task, and clients of a data set"),
        (("labels", "y", "--dataset", "digit"), 2, "no data set is called 'digit'; did you mean digits"),
        (("labels", "y", "--dataset", "digits", "--plot", "a.jpg"), 1, "a picture ends in .svg or .png"),
        (
            ("labels", "y", "--dataset", "digits", "--csv", "none/a.csv"),
            1,
            "none/a.csv cannot be written: there is no such folder",
        ),
        (("labels", "y", "--dataset", "digits", "--csv", "-", "--json"), 2, "one of --json and --csv -"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_sentence(words, code, said, typed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found, out, err = typed("ask", *words)
    assert (found, out) == (code, ""), err
    assert said in " ".join(err.replace("│", " ").split())


def test_clients_of_a_data_set_answer_as_table_csv_json_and_picture(tmp_path, typed):
    y, question = datasets.load("digits").fields["y"], "SELECT y, COUNT(*) AS n FROM examples GROUP BY y"
    counts = [[label, int(count)] for label, count in enumerate(np.bincount(y))]
    found = asked(question, "--dataset", "digits", "--plot", tmp_path / "n.svg", "--csv", tmp_path / "n.csv")
    assert (found["columns"], found["rows"], found["task"]) == (["y", "n"], counts, None)
    assert (tmp_path / "n.svg").read_text().count("<rect ") == 10
    assert list(csv.reader(io.StringIO((tmp_path / "n.csv").read_text()))) == [
        ["y", "n"],
        *([str(label), str(count)] for label, count in counts),
    ]
    code, out, err = typed("ask", question, "--dataset", "digits", "--minimum-devices", 33)
    assert code == 0
    shown = [line.split() for line in out.splitlines()]
    assert shown[0] == ["y", "n"]
    assert 0 < len(shown) - 2 < 10
    assert f"75 devices answered; {12 - len(shown)} groups of too few devices are not shown" in err
    code, out, err = typed("ask", question, "--dataset", "digits", "--csv", "-")
    assert out == (tmp_path / "n.csv").read_text()


def test_a_question_is_explained_before_it_is_asked():
    words = (BOUNDED, "--population", "phones", *FIELDS, "--epsilon", 2, "--users", 1000, "--explain")
    facts = asked(*words)
    assert facts["owners_read"] == BOUNDED
    assert (facts["fields"], facts["fields_from"]) == (["x int64", "s float32", "y uint8"], "that --field names")
    assert (facts["rows_of_a_device"], facts["groups"], facts["minimum_devices"]) == (40, LABELS, 20)
    assert facts["operators"]["ReduceSum"] >= 1
    assert facts["graph_bytes"]["onnx"] > facts["plan_bytes"] > 500
    assert facts["not_hidden"] is None
    assert facts["sensitivity"] == pytest.approx(len(facts["blocks"]) ** 0.5)
    noise = facts["noise_multiplier"] * facts["sensitivity"]
    assert facts["noise_of_a_number"] == pytest.approx(noise)
    for block in facts["blocks"]:
        assert block["error"] == pytest.approx(2.1 * noise * block["norm"])
        assert block["low"] <= 0 < block["high"]
    shown = in_process("ask", *words).stdout
    assert "owners_read" in shown
    assert "devices_0" in shown or facts["blocks"][0]["block"] in shown


def test_python_asks_clients_and_says_what_is_wrong():
    users = population(30)
    found = muster.ask(BY_LABEL, dataset=users)
    frame = found.dataframe()
    assert list(frame.columns) == list(found.columns)
    assert frame["n"].tolist() == np.bincount(users.fields["y"]).tolist()
    assert "<table" in found._repr_html_()
    named = muster.ask("sizes", dataset="digits")
    assert named.devices == 75
    noisy = muster.ask(BOUNDED, dataset=users, epsilon=20, minimum_devices=8)
    assert noisy.errors is not None
    for arguments, error, words in (
        ({"question": 3}, TypeError, "question is of type int; expected a text"),
        ({"dataset": 3}, TypeError, "dataset is of type int; expected the name of a data set"),
        ({}, TypeError, "name who is asked"),
        ({"dataset": users, "population": "phones"}, TypeError, "leave coordinator and population out"),
        ({"dataset": users, "goal": 3}, InvalidTask, "goal= is for a task"),
        ({"dataset": users, "question": "SELECT z FROM examples"}, QuestionError, "the fields are those of the popul"),
        ({"dataset": users, "epsilon": 1}, QuestionError, "MAX n ROWS PER DEVICE"),
    ):
        with pytest.raises(error, match=words):
            muster.ask(**{"question": BY_LABEL} | arguments)
