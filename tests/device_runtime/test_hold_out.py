"""Devices train on the examples that the plan does not hold out, or on exactly those that it does."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from device_runtime.sandbox.process import Sandbox
from device_runtime.session import run_session
from device_runtime.state.journal import read_journal
from fedcore.hold_out import HoldOut
from fedcore.wire.messages import Abort, Accepted, Offer, encode
from tests.device_runtime import linear
from tests.device_runtime.coordinator import WINDOW, answer, cut, report_of
from tests.device_runtime.node import device_words, sessions

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
