"""Divergence: losses that explode pause a task, once, and an operator may let it go on."""

import itertools
import math

import pytest

from coordinator.rules.divergence import FIRST_ROUNDS, MOST_ROUNDS, divergence
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered


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
