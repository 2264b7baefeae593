"""What a plan holds out, and asking before a report is sent."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from device_runtime.backends import open_backend
from device_runtime.sandbox.process import Sandbox
from device_runtime.session import run_session
from device_runtime.state.records import read_journal
from device_runtime.trainer import InProcess
from fedcore.batching import HoldOut
from fedcore.wire.messages import Abort, Accepted, Offer, RetryWindow, encode
from tests.device_runtime import linear
from tests.device_runtime.coordinator import WINDOW, answer, cut, hang_up, refusal, report_of, status
from tests.device_runtime.node import device_words, sessions

HOLD_WINDOW = RetryWindow(1.0, 2.0)


class Slow:
    """An engine whose training steps take a while; it counts them."""

    def __init__(self, step_s):
        self.engine, self.step_s, self.steps = open_backend("onnxruntime"), step_s, 0
        self.format, self.runtime = self.engine.format, self.engine.runtime

    def load(self, graph, name="graph"):
        executable = self.engine.load(graph, name)
        return Step(executable, self) if name.endswith(".step") else executable


class Step:
    def __init__(self, executable, engine):
        self.executable, self.engine = executable, engine

    def run(self, inputs, outputs):
        self.engine.steps += 1
        time.sleep(self.engine.step_s)
        self.executable.run(inputs, outputs)


@pytest.fixture
def slow(coordinator):
    """Work of a second, for a coordinator that takes a device for lost after half a second."""
    coordinator.lost_after_s = 0.5
    return Slow(0.1)


def working(config, slow):
    return replace(config, trainer=lambda name: InProcess(slow))


def test_work_that_takes_a_while_keeps_a_request_open(coordinator, config, slow):
    assert run_session(working(config, slow)).outcome == "reported"
    assert 1 <= coordinator.calls.count("hold") <= 3, "each waits for a second"
    assert coordinator.calls.index("hold") < coordinator.calls.index("report")


def test_work_that_is_done_at_once_asks_nothing_more(coordinator, config):
    coordinator.lost_after_s = 60.0
    assert run_session(config).outcome == "reported"
    assert "hold" not in coordinator.calls


def test_device_not_needed_stops_within_one_batch_and_sends_nothing(coordinator, config, slow):
    coordinator.faults["hold"] = [refusal("no-longer-needed", retry=HOLD_WINDOW)]
    slow.step_s = 0.5
    outcome = run_session(working(config, slow))
    assert (outcome.outcome, outcome.reason, outcome.retry) == ("not-needed", "no-longer-needed", HOLD_WINDOW)
    assert slow.steps < 9
    assert "report" not in coordinator.calls
    assert coordinator.aborts == []


@pytest.mark.parametrize("fault", [hang_up, status(503)])
def test_request_that_breaks_off_is_made_again(coordinator, config, slow, fault):
    coordinator.faults["hold"] = [fault, fault]
    assert run_session(working(config, slow)).outcome == "reported"
    assert 3 <= coordinator.calls.count("hold") <= 5


def test_device_in_a_round_of_too_many_asks_before_it_sends(coordinator, config):
    coordinator.over_selected = True
    assert run_session(config).outcome == "reported"
    assert coordinator.calls[-2:] == ["hold", "report"]


@pytest.mark.parametrize("fault", [hang_up, status(503)])
def test_report_is_sent_when_nobody_says_whether_it_is_needed(coordinator, config, fault):
    coordinator.over_selected = True
    coordinator.faults["hold"] = [fault]
    assert run_session(config).outcome == "reported"
    assert coordinator.calls[-2:] == ["hold", "report"]


@pytest.mark.parametrize("lost_after_s", [1e-9, 1e300])
def test_no_coordinator_makes_a_device_spin_or_fall_silent(coordinator, config, slow, lost_after_s):
    coordinator.lost_after_s = lost_after_s
    assert run_session(working(config, slow)).outcome == "reported"
    assert coordinator.calls.count("hold") <= 40


def test_report_of_one_too_many_is_not_sent(coordinator, config):
    coordinator.over_selected = True
    coordinator.faults["hold"] = [refusal("no-longer-needed", retry=HOLD_WINDOW)]
    assert run_session(config).outcome == "not-needed"
    assert "report" not in coordinator.calls
    assert run_session(config).outcome == "reported", "nothing of it is kept"


def test_no_thread_is_left_when_the_session_is_over(config, slow):
    run_session(working(config, slow))
    assert [thread for thread in threading.enumerate() if thread.name == "hold"] == []


SHARE = 0.4


def held_out_plan(side="train", share=SHARE):
    plan = linear.plan()
    return changed(plan, examples=changed(plan.examples, hold_out=HoldOut(share, side)))


def on_side(examples, side="train"):
    kept = held_out_plan(side).examples.kept(examples)
    assert 0 < np.count_nonzero(kept) < len(kept)
    return {name: column[kept] for name, column in examples.items()}


@pytest.fixture
def offer(coordinator):
    """Offers the linear plan with a hold-out, as the plan of a task that needs so many examples."""

    def offered(min_examples=1, **hold_out):
        coordinator.offer(held_out_plan(**hold_out), linear.graphs(), {"params": linear.PARAMS})
        if min_examples > 1:
            task = Offer(task="t-1", collection="default", min_examples=min_examples)
            coordinator.faults["check-in"] = [answer(encode(Accepted("s-1", (task,), WINDOW)))]

    return offered


@pytest.fixture(params=["python", "typescript"])
def session(request, config, coordinator, examples, tmp_path):
    """Runs a session of a device in either language; answers its outcome, reason and number of examples."""
    if request.param == "python":

        def run_python():
            outcome = run_session(config)
            return [outcome.outcome, outcome.reason, outcome.examples]

        yield run_python
    else:
        with sessions() as run:
            words = device_words(tmp_path / "node", coordinator.url, "phones", examples)

            def run_typescript():
                outcome = run(words)
                return [outcome["outcome"], outcome["reason"], outcome["examples"]]

            yield run_typescript


@pytest.mark.parametrize("side", ["train", "held-out"])
def test_a_device_reports_what_one_side_of_its_examples_gives(coordinator, session, offer, examples, side):
    offer(side=side)
    left = on_side(examples, side)
    assert session() == ["reported", "", len(left["y"])]
    np.testing.assert_allclose(coordinator.reports[0], report_of(left), rtol=1e-5, atol=1e-5)
    assert coordinator.checkins[0].examples == {"default": 8}  # all ten, rounded down: the plan was not known yet


def test_a_device_whose_examples_are_all_held_out_says_too_few(coordinator, session, offer):
    offer(share=1 - 2**-53)
    assert session()[:2] == ["aborted", "too-few-examples"]
    assert coordinator.aborts == [Abort("too-few-examples")]


def test_a_task_needs_its_examples_without_those_held_out(coordinator, session, offer, examples):
    left = len(on_side(examples)["y"])
    offer(min_examples=left + 1)
    assert session()[:2] == ["aborted", "too-few-examples"]
    offer(min_examples=left)
    assert session()[0] == "reported"


def test_a_sandbox_is_given_no_example_that_is_held_out(coordinator, config, offer, examples):
    given = []

    class Watched(Sandbox):
        def train(self, job, limits, keep_going):
            given.append(job.examples)
            return super().train(job, limits, keep_going)

    offer()
    assert run_session(replace(config, trainer=Watched)).outcome == "reported"
    for name, column in on_side(examples).items():
        np.testing.assert_array_equal(given[0][name], column)


def test_a_report_that_a_later_session_sends_counts_what_was_left(coordinator, config, offer, examples):
    left = len(on_side(examples)["y"])
    offer()
    coordinator.faults["report"] = [cut] * 50
    assert run_session(config).outcome != "reported"
    coordinator.faults["report"] = []
    outcome = run_session(config)
    assert (outcome.outcome, outcome.examples) == ("reported", left)
    assert coordinator.calls.count("assignment") == 1
    np.testing.assert_allclose(coordinator.reports[-1], report_of(on_side(examples)), rtol=2e-6, atol=1e-5)
    assert [entry.examples for entry in read_journal(config.state)][-1] == left
