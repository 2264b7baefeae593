"""Divergence: losses that explode pause a task, once, and an operator may let it go on."""

import itertools
import math

import numpy as np
import pytest

from coordinator.rules.progress import FIRST_ROUNDS, MOST_ROUNDS, START, divergence
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered, ClearReports
from fedcore.report import LEVELS
from tests.coordinator.bundles import counting_plan, make_bundle, report_vector


def losses(*values, name="train.loss"):
    return [{name: value, "train.accuracy": 0.1} for value in values]


@pytest.mark.parametrize(
    ("first", "latest", "growth"),
    [
        ([2.0] * 5, (2.0, 1.0, 19.9, 21.0, 19.0), 10),  # one of three is below
        ([2.0] * 5, (21.0, 21.0), 10),  # too few rounds
        ([2.0] * 4, (50.0, 60.0, 70.0), 10),  # too few first values
        ([2.0] * 5, (50.0, 60.0, 70.0), 0),  # looked at by nobody
        ([0.0] * 5, (1.0, 2.0, 3.0), 10),  # times zero is no measure
        ([-3.0, 3.0, -3.0, 3.0, -3.0], (-5.0, 2.0, 29.0), 10),
        ([2.0] * 5, (), 10),
    ],
)
def test_loss_within_bounds_is_no_divergence(first, latest, growth):
    assert divergence(losses(*first), losses(*latest), growth) == ""


@pytest.mark.parametrize("lies", [(1e-9, 1e-9), (1e30, 1e30), (-1e-9, 1e30)])
def test_two_false_rounds_pause_no_task(lies):
    for places in itertools.combinations(range(8), 2):
        told = [2.0, 1.8, 1.5, 1.2, 1.1, 1.0, 1.4, 1.0]
        for place, lie in zip(places, lies, strict=True):
            told[place] = lie
        for number in range(1, len(told) + 1):
            done = losses(*told[:number])
            assert divergence(done[:-1][:FIRST_ROUNDS], done[-MOST_ROUNDS:], 10) == ""


@pytest.mark.parametrize(("places", "lie"), [((5, 6, 7), 1e30), ((0, 1, 2), 1e-9)])
def test_three_false_rounds_pause_a_task(places, lie):
    told = [2.0, 1.8, 1.5, 1.2, 1.1, 1.0, 1.4, 1.0]
    assert divergence(losses(*told)[:FIRST_ROUNDS], losses(*told)[-MOST_ROUNDS:], 10) == ""
    for place in places:
        told[place] = lie
    assert divergence(losses(*told)[:FIRST_ROUNDS], losses(*told)[-MOST_ROUNDS:], 10)


def test_loss_that_explodes_is_named_with_its_bound():
    first = losses(9.0, 2.0, 1e-9, 3.0, 1.0, 99.0)
    words = divergence(first, losses(1.0, 20.5, 30.0, 1e9), 10)
    assert words == "train.loss was above 20, 10 times the median of its first 5 values, in 3 rounds in a row"
    assert divergence([], losses(math.nan), 10) == "train.loss is nan"
    assert divergence(first, [{"train.accuracy": 9.0}] * 3, 10) == ""


@pytest.mark.parametrize(("told", "paused"), [((2.0, 1.9, 1.8, 40, 50, 60), 6), ((2.0, 1.9, 900, 990, 900, 950), 0)])
def test_a_loss_must_have_been_small_three_times_to_count_as_exploded(told, paused):
    # Two small values are what two false rounds may say of a task whose loss is large.
    def says(number):
        return divergence(losses(*told[: number - 1])[:FIRST_ROUNDS], losses(*told[:number])[-MOST_ROUNDS:], 10)

    assert [number for number in range(1, len(told) + 1) if says(number)] == [paused] * bool(paused)


def test_losses_of_two_trips_are_looked_at_apart():
    def in_turns(a, b, rounds):
        return [*losses(a, name="a.loss"), *losses(b, name="b.loss")] * (rounds // 2)

    words = divergence(in_turns(0.5, 1, FIRST_ROUNDS), in_turns(9, 1, MOST_ROUNDS), 10)
    assert words.startswith("a.loss was above 5,")


def play(desk, *values):
    for value in values:
        desk.report(*desk.assign(f"{value}"), loss=value)
        desk.turn()


@pytest.mark.every_engine
def test_task_that_diverges_is_paused_and_measured_anew_when_resumed(store, register, desk):
    task = register(goal=1, rounds=30)
    play(desk, 1e-9, 2.0, 1.0, 2.0, 1.0, 30.0, 31.0)
    assert store.task(task).state is TaskState.ACTIVE
    play(desk, 32.0)
    paused = store.task(task)
    assert (paused.state, paused.reason[:20]) == (TaskState.PAUSED, "diverged in round 8:")
    assert [one.state.value for one in store.rounds(task)] == ["committed"] * 8
    progress = store.progress_of(task)
    assert (progress.reason, progress.stalled) == ("diverged", True)
    assert paused.reason in progress.sentence
    assert store.history(task)[-1].cause == "diverged"
    store.resume(task)
    desk.pass_time(1)
    play(desk, 33.0, 34.0, 33.0, 34.0, 33.0, 400.0, 400.0)
    assert store.task(task).state is TaskState.ACTIVE
    play(desk, 400.0)
    assert store.task(task).state is TaskState.PAUSED


def test_last_round_and_a_task_that_asks_for_it_are_never_paused(store, register, desk):
    last, asked = register(goal=1, rounds=8), register(goal=1, rounds=9, max_loss_growth=0.0, population="tablets")
    play(desk, *[1.0] * 5, 50.0, 60.0, 70.0)
    assert store.task(last).state is TaskState.COMPLETED
    for device, loss in zip("abcdefgh", [1.0] * 5 + [99.0] * 3, strict=True):
        desk.report(*[desk.wait(device, population="tablets").result(timeout=0)], loss=loss)
        desk.turn()
    assert store.task(asked).state is TaskState.ACTIVE


def test_task_in_mode_buffered_that_diverges_hands_nothing_on(store, register, desk):
    task = register(goal=1, rounds=9, buffered=Buffered(concurrency=1))
    play(desk, *[1.0] * 5, 50.0, 60.0, 70.0)
    assert store.task(task).state is TaskState.PAUSED
    assert [one.state.value for one in store.rounds(task)] == ["committed"] * 8


COUNTING = counting_plan()
HONEST = (2.2, 2.26, 2.27, 2.27, 2.3, 2.3, 2.31, 2.33, 2.34, 2.35)


@pytest.fixture
def counting(register, tmp_path):
    """Register a task of ten devices a round whose plan counts losses."""
    return lambda **settings: register(
        make_bundle(tmp_path / "counting", COUNTING), **{"goal": 10, "rounds": 30} | settings
    )


def says(before, training, weight=1.0):
    """The report of a device with these mean losses."""
    return report_vector((0, 0, 0, 0), weight, weight * training, COUNTING, weight * before)


def lies(low, high, weight=1.0):
    """The report of one that lies: it reaches no level that it need not, or all and many times."""
    vector = says(0, 1e8, weight)
    vector[-2 * LEVELS :] = [low] * LEVELS + [high] * LEVELS
    return vector


def play_counted(desk, *rounds):
    """Rounds by the reports of their devices."""
    for number, reports in enumerate(rounds):
        assignments = desk.assign(*(f"{number}-{place}-{desk.now}" for place in range(len(reports))))
        for assignment, vector in zip(assignments, reports, strict=True):
            desk.report(assignment, vector=vector, sha256=f"{assignment.assignment:0>64}")
        desk.turn()


def all_say(before, training):
    """A round of ten devices whose losses are about these, spread as those of digits are."""
    return [says(before * loss / 2.3, training * loss / 2.3) for loss in HONEST]


# What an mlp on digits has: the mean loss before each round and in it.
EXPLODING = {
    "fedavg, client_lr=3": ((2.35, 175), (1.93, 1.93)),
    "fedavg, client_lr=30": ((2.29, 12.8), (1.7e4, 5.6e5), (6.1e5, 1.3e6), (7.6, 7.4), (11.4, 11.2)),
    "fedavg, client_lr=300": ((2.29, 863), (2.1e8, 5.3e11), (40, 43), (72, 73), (84, 84)),
    "fedadam, server_lr=10": ((2.29, 2.27), (94, 82.5), (7.4e3, 7.3e3), (1.4e4, 1.2e4)),
}


@pytest.mark.parametrize("name", EXPLODING)
def test_a_task_that_explodes_in_its_first_rounds_is_paused_at_once(name, counting, store, desk):
    task = counting()
    number = next(number for number, (_, training) in enumerate(EXPLODING[name], 1) if training > 60)
    play_counted(desk, *(all_say(*losses_of_round) for losses_of_round in EXPLODING[name][:number]))
    paused = store.task(task)
    assert paused.state is TaskState.PAUSED
    assert paused.reason.startswith(
        f"diverged in round {number}: 10 of 10 devices had a loss of 32 or more, after less"
    )


@pytest.mark.every_engine
def test_start_of_losses_is_a_metric_of_the_first_round_since_a_resume(counting, store, desk):
    task = counting()
    play_counted(desk, all_say(2.3, 2.2), all_say(2.3, 100))
    assert [record.metrics.get(START) for record in store.rounds(task)] == [3.0, None]
    assert store.task(task).state is TaskState.PAUSED
    store.resume(task)
    desk.pass_time(1)
    play_counted(desk, all_say(90, 99), all_say(90, 400))
    assert store.task(task).state is TaskState.ACTIVE
    assert [record.metrics.get(START) for record in store.rounds(task)] == [3.0, None, 96.0, None]
    play_counted(desk, all_say(90, 2e3))
    assert store.task(task).state is TaskState.PAUSED


def test_healthy_and_noisy_tasks_are_never_paused(counting, store, desk):
    task = counting()
    falling = [(2.3, 5), (4.3, 4.4), (4.1, 3.6), (3, 2.9), (1.6, 1.3), (0.3, 0.2), (0.01, 0.4)]
    play_counted(desk, *(all_say(*losses_of_round) for losses_of_round in falling))
    wide = [[says(loss, loss * 3) for loss in np.exp(np.random.default_rng(n).normal(0, 2, 10))] for n in range(20)]
    play_counted(desk, *wide)
    assert store.task(task).state is TaskState.ACTIVE


@pytest.mark.parametrize("weight", [1.0, 1e30])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1e30, 1e30), (1e30, 1e30)])
def test_two_devices_that_lie_in_every_round_pause_no_task(low, high, weight, counting, store, desk):
    task = counting(max_loss_growth=1.5, clear=ClearReports(max_weight=100))
    honest = all_say(2.3, 2.2)[2:]
    # The loss that they make of the others' means is another rule's, which three such rounds satisfy.
    play_counted(desk, *[[*honest, *[lies(low, high, weight)] * 2]] * 2)
    assert store.task(task).state is TaskState.ACTIVE
    play_counted(desk, [*(says(2.3, 99) for _ in honest), *[lies(low, low)] * 2])
    assert store.task(task).state is TaskState.PAUSED  # nor do they hide one


def test_a_round_of_few_devices_and_a_plan_without_counts_say_nothing(counting, register, store, desk):
    few, old = counting(population="few", goal=4), register(goal=10, population="old", rounds=9)
    for population, values in (("few", all_say(2.3, 2e3)[:4]), ("old", [report_vector((0,) * 4, 1, 2e3)] * 10)):
        for _ in range(3):
            waits = [desk.wait(f"{place}-{desk.now}", population=population) for place in range(len(values))]
            for wait, vector in zip(waits, values, strict=True):
                assignment = wait.result(timeout=0)
                desk.report(assignment, vector=vector, sha256=f"{assignment.assignment:0>64}")
            desk.pass_time(1)
    assert [store.task(task).state for task in (few, old)] == [TaskState.ACTIVE] * 2
    assert [len(store.rounds(task)) for task in (few, old)] == [3, 3]
