"""A device that works says that it is there, and hears that its report is not needed any more."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from device_runtime.backends import open_backend
from device_runtime.session import run_session
from device_runtime.trainer import InProcess
from fedcore.wire.messages import RetryWindow
from tests.device_runtime.coordinator import hang_up, refusal, status

WINDOW = RetryWindow(1.0, 2.0)


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
    coordinator.faults["hold"] = [refusal("no-longer-needed", retry=WINDOW)]
    slow.step_s = 0.5
    outcome = run_session(working(config, slow))
    assert (outcome.outcome, outcome.reason, outcome.retry) == ("not-needed", "no-longer-needed", WINDOW)
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
    coordinator.faults["hold"] = [refusal("no-longer-needed", retry=WINDOW)]
    assert run_session(config).outcome == "not-needed"
    assert "report" not in coordinator.calls
    assert run_session(config).outcome == "reported", "nothing of it is kept"


def test_no_thread_is_left_when_the_session_is_over(config, slow):
    run_session(working(config, slow))
    assert [thread for thread in threading.enumerate() if thread.name == "hold"] == []
