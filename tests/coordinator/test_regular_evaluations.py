"""Tasks whose models are evaluated after every N rounds, on the held-out devices, while they train."""

import json
from dataclasses import replace

import httpx2
import msgspec
import numpy as np
import pytest

from coordinator.driver.writing import commit_round
from coordinator.errors import InvalidTask
from coordinator.rules.entities import Evaluates, ModelSource, Regularly
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered, ClearReports
from coordinator.store.tasks import TaskSettings
from fedcore.params import ParamSchema, TensorSpec
from muster.creating import Evaluated, starting_from
from tests.coordinator.bundles import make_evaluation_bundle, make_plan, make_private_bundle
from tests.coordinator.conftest import states
from tests.coordinator.test_evaluated import measure
from tests.coordinator.test_hold import IN, OUT, SHARE
from tests.coordinator.test_privacy import fail, promise
from tests.muster.test_cli import in_process

SETTINGS = {"population": "phones", "goal": 1, "rounds": 3, "over_selection": 1.0, "hold_out_devices": SHARE}
EVALUATED = ("evaluate.devices", "evaluate.examples", "evaluate.loss")
WORDS = ["--population", "phones", "--goal", 1, "--over-selection", 1, "--rounds", 3, "--hold-out-devices", SHARE]


@pytest.fixture
def evaluation(tmp_path):
    return make_evaluation_bundle(tmp_path / "evaluation")


@pytest.fixture
def begin(store, bundle, evaluation):
    """Start a task that trains and is evaluated after every so many rounds."""

    def begun(every=1, bundle=bundle, evaluation=evaluation, name=None, **settings):
        given = TaskSettings(**SETTINGS | settings)
        return store.register_task(bundle, given, name=name, evaluation=Regularly(every, evaluation))

    return begun


def train(desk, rounds=1):
    """Rounds in which a device that trains reports an update."""
    for _ in range(rounds):
        (given,) = desk.assign(IN)
        desk.report(given, (1, 2, 3, 4))
        desk.pass_time(1)


def started(store, task):
    """The tasks that evaluate a task's models, by round."""
    return [store.task(one.task) for one in store.evaluations(task.id)]


@pytest.mark.every_engine
def test_every_nth_round_starts_an_evaluation_of_its_model(store, desk, begin):
    task = begin(every=2, rounds=5)
    train(desk, 5)
    made = started(store, task)
    assert [one.evaluates for one in made] == [Evaluates(ModelSource(task=task.id, round=n)) for n in (2, 4)]
    assert [one.name for one in made] == ["hand-made, round 2", "hand-made, round 4"]
    for one, number in zip(made, (2, 4), strict=True):
        model = store.checkpoint(task.id, number)["params"]
        np.testing.assert_array_equal(store.checkpoint(one.id, 0)["params"], model)
        assert (one.state, one.settings.rounds, one.settings.on_held_out) == (TaskState.ACTIVE, 1, True)
    assert not np.array_equal(store.checkpoint(made[0].id, 0)["params"], store.checkpoint(made[1].id, 0)["params"])
    assert len(store.tasks()) == 3


def test_held_out_devices_evaluate_while_others_train(store, desk, begin):
    task = begin()
    train(desk)
    (measuring,) = desk.assign(OUT)
    (training,) = desk.assign(IN)
    [made] = started(store, task)
    assert (measuring.task, training.task) == (made.id, task.id)
    desk.report(training, (1, 1, 1, 1))
    desk.pass_time(1)
    train(desk)  # no round waits for the evaluation
    assert store.task(task.id).state is TaskState.COMPLETED
    measure(desk, measuring, 0.25)
    assert store.task(made.id).state is TaskState.COMPLETED
    first, *others = store.evaluations(task.id)
    assert first.metrics["evaluate.loss"] == pytest.approx(2.5)
    assert first.means == {name: first.metrics[name] for name in EVALUATED}
    assert [(one.round, one.metrics) for one in others] == [(2, {}), (3, {})]


def test_an_evaluation_has_the_settings_of_its_training_but_for_updates(store, desk, begin):
    task = begin(
        goal=2,
        minimum=1,
        reporting_deadline_s=77.0,
        selection_timeout_s=5.0,
        seed=4,
        clear=ClearReports(max_norm=0.5),
    )
    waiting = desk.wait(IN)
    desk.pass_time(6)
    desk.report(waiting.result(timeout=0), (1, 0, 0, 0))
    desk.pass_time(80)
    [made] = started(store, task)
    expected = replace(task.settings, rounds=1, on_held_out=True, clear=ClearReports())
    assert made.settings == expected


def test_a_buffered_training_is_evaluated_in_rounds(store, desk, begin):
    task = begin(buffered=Buffered(concurrency=2))
    train(desk)
    [made] = started(store, task)
    assert made.settings.mode == "synchronous"
    (given,) = desk.assign(OUT)
    assert given.task == made.id


def test_a_long_name_leaves_room_for_the_round(store, desk, begin):
    task = begin(name="n" * 100)
    train(desk)
    [made] = started(store, task)
    assert made.name == "n" * 91 + ", round 1"


def test_a_commit_that_failed_starts_its_evaluation_once(store, desk, begin, monkeypatch):
    task = begin()
    with monkeypatch.context() as patch:
        patch.setattr(commit_round, "reach", fail)
        (given,) = desk.assign(IN)
        desk.report(given, (1, 2, 3, 4))
        assert started(store, task) == []
    desk.pass_time(2)
    assert states(store, task.id) == [(1, 1, "committed", "")]
    assert [one.evaluates.model.round for one in started(store, task)] == [1]


def test_a_rollback_starts_no_evaluation(store, desk, begin):
    task = begin()
    train(desk)
    store.pause(task.id)
    store.roll_back(task.id, 0)
    assert [one.evaluates.model.round for one in started(store, task)] == [1]


def test_a_training_whose_evaluation_cannot_be_read_says_so(store, desk, begin, evaluation):
    task = begin()
    train(desk)
    store.blobs.delete([evaluation.manifest.state.sha256])
    (given,) = desk.assign(IN)
    desk.report(given, (1, 2, 3, 4))
    desk.pass_time(1)
    paused = store.task(task.id)
    assert paused.state is TaskState.PAUSED
    assert "what evaluates the model after round 2" in paused.reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hold_out_devices": 0.0}, "runs on held-out devices, .*: set hold_out_devices above 0"),
        ({"on_held_out": True}, "leave on_held_out out"),
    ],
)
def test_regular_evaluations_are_refused_where_they_cannot_be(begin, settings, words):
    with pytest.raises(InvalidTask, match=f"^evaluation after every N rounds .*{words}"):
        begin(**settings)


def test_a_private_training_is_evaluated_by_hand_or_not_at_all(begin, tmp_path):
    private = make_private_bundle(tmp_path / "private")
    with pytest.raises(InvalidTask, match="refused with privacy: each would need noise and a budget"):
        begin(bundle=private, privacy=promise())


def test_a_bundle_that_does_not_evaluate_such_models_is_refused(begin, bundle, evaluation, tmp_path):
    with pytest.raises(InvalidTask, match="fedavg trains a model and does not evaluate one"):
        begin(evaluation=bundle)
    with pytest.raises(InvalidTask, match="compare compares two: export with evaluate"):
        begin(evaluation=make_evaluation_bundle(tmp_path / "compare", "compare"))
    with pytest.raises(InvalidTask, match="is for tasks that train, and evaluate evaluates"):
        begin(bundle=evaluation)
    schema = ParamSchema((TensorSpec("v", (2,)), TensorSpec("b", (2,))))
    other = make_evaluation_bundle(tmp_path / "other", plan=msgspec.structs.replace(make_plan(), schema=schema))
    with pytest.raises(
        InvalidTask, match=r"another model than the bundle.s plan: it has the tensor w \[4\], the plan v"
    ):
        begin(evaluation=other)


def test_half_of_a_regular_evaluation_and_two_kinds_are_refused(store, bundle, evaluation, begin):
    with pytest.raises(InvalidTask, match="evaluate_every, a number of rounds, goes with evaluation"):
        Regularly.asked(3, None)
    with pytest.raises(InvalidTask, match="evaluate_every must be a whole number from 1 to 2147483647, not 0"):
        Regularly.asked(0, evaluation)
    task = begin()
    both = Evaluated(task.id, None, 1, evaluation)
    with pytest.raises(InvalidTask, match="not both"), starting_from(store, evaluation, both):
        pass


def test_a_command_starts_it_and_shows_the_curve_of_evaluations(store, database, desk, tmp_path, bundle, evaluation):
    where = ["--db", database, "--blobs", tmp_path / "blobs"]
    regular = ["--evaluate-every", 1, "--evaluation", evaluation.folder]
    made = in_process("task", "create", "--plan", bundle.folder, *WORDS, *regular, *where, "--json")
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    assert (facts["evaluate_every"], facts["evaluation"]) == (1, "hand-made")
    train(desk)
    (given,) = desk.assign(OUT)
    measure(desk, given, 0.25)
    [found] = json.loads(in_process("task", "metrics", facts["task"], *where, "--json").stdout)["evaluations"]
    assert (found["round"], found["task"], found["metrics"]["evaluate.devices"]) == (1, given.task, 1)
    shown = in_process("task", "metrics", facts["task"], *where).stdout
    assert [line.split()[:4] for line in shown.splitlines() if given.task in line] == [
        ["1", given.task, "completed", "1"]
    ]
    refused = in_process("task", "create", "--plan", bundle.folder, *WORDS, *regular[:2], *where)
    assert "goes with evaluation" in f"{refused.output}{refused.exception}"


def test_the_page_of_a_task_has_the_curve_of_its_evaluations(desk, begin, request):
    task = begin(every=2)
    train(desk, 2)
    (given,) = desk.assign(OUT)
    measure(desk, given, 0.25)
    page = httpx2.get(f"{request.getfixturevalue('served').admin}/tasks/{task.id}").text
    assert "evaluated after every 2 rounds on held-out devices, by hand-made" in page
    assert "evaluate.loss" in page
    assert "evaluate.loss.p50" not in page
