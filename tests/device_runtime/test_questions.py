"""Questions: what a device's owner allows, how many answers a week, and what the journal says of each."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from typer.testing import CliRunner

from device_runtime import Policy, Questions
from device_runtime.conditions import Clock
from device_runtime.errors import ConfigError
from device_runtime.session import run_session
from device_runtime.state.database import open_database
from device_runtime.state.records import WEEK_S, AnsweredQuestions, read_journal
from fedcore.plan import LONGEST_QUESTION, Plan
from muster.app import app
from tests.device_runtime import linear
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.node import device_words, sessions

ASKED = "SELECT y, COUNT(*)\nFROM examples \u202e GROUP BY y"
SHOWN = "SELECT y, COUNT(*) FROM examples \\u202e GROUP BY y"


@pytest.fixture
def asking(coordinator):
    """The coordinator asks a question."""
    ask(coordinator)
    return coordinator


def ask(coordinator, question=ASKED):
    plan = msgspec.structs.replace(Plan.decode(coordinator.blobs[coordinator.plan.sha256]), question=question)
    graphs = [coordinator.blobs[ref.sha256] for ref in plan.graph_refs]
    coordinator.offer(plan, {str(number): graph for number, graph in enumerate(graphs)}, {"params": linear.PARAMS})


def limited(config, **rules):
    return replace(config, policy=Policy(questions=Questions(**rules)))


def test_an_answer_is_in_the_journal_in_words(asking, config):
    assert run_session(config).outcome == "reported"
    (entry,) = read_journal(config.state)
    numbers = asking.reports[0].size
    assert (entry.question, entry.numbers, entry.masked) == (SHOWN, numbers, False)
    assert entry.told == f"answered a question: {SHOWN}; sent {numbers} numbers, in the clear"
    assert msgspec.structs.replace(entry, masked=True).told.endswith("numbers, masked")
    shown = CliRunner().invoke(app, ["device", "log", "--state", str(config.state)])
    assert "answered a question" in shown.output


def test_a_training_is_told_as_no_question(coordinator, config):
    run_session(config)
    (entry,) = read_journal(config.state)
    assert (entry.question, entry.told) == (None, "")


def test_an_owner_who_allows_no_question_is_told_who_asked_which(asking, config):
    outcome = run_session(limited(config, allowed=False))
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert [abort.reason for abort in asking.aborts] == ["plan-refused"]
    assert asking.calls.count("blob") == 1  # the plan: no graph and no model was fetched
    (entry,) = read_journal(config.state)
    assert entry.told == (
        f"was asked: {SHOWN}, by {asking.url}; refused because it is against questions.allowed of this device's policy"
    )


def test_a_question_over_the_weekly_limit_is_refused_and_trainings_go_on(coordinator, config):
    config = limited(config, per_week=2)
    ask(coordinator)
    assert [run_session(config).outcome for _ in range(3)] == ["reported", "reported", "aborted"]
    assert read_journal(config.state)[-1].told.endswith("it is against questions.per_week of this device's policy")
    assert "2 of 2 are answered within a week" in run_session(config).detail
    ask(coordinator, msgspec.UNSET)
    assert run_session(config).outcome == "reported"
    ask(coordinator)
    assert run_session(limited(config, per_week=0)).outcome == "aborted"


@pytest.mark.parametrize("rules", [{"allowed": False}, {"per_week": 0}])
def test_a_kept_answer_that_the_owner_forbids_now_is_not_sent(asking, config, rules):
    asking.faults["report"] = [refusal("unavailable", Retry_After="61")]
    run_session(config)
    first, _ = read_journal(config.state)
    calls = len(asking.calls)
    outcome = run_session(limited(config, **rules))
    assert any("not sent" in notice for notice in outcome.notices), outcome
    assert "report" not in asking.calls[calls:]
    assert first.numbers > 0
    assert first.told.startswith(f"made an answer to: {SHOWN}, by {asking.url}; not counted because ")


def test_a_kept_answer_counts_once_and_is_sent_within_its_limit(asking, config):
    config = limited(config, per_week=1)
    asking.faults["report"] = [refusal("unavailable", Retry_After="61")]
    run_session(config)
    assert run_session(config).outcome == "reported"
    assert read_journal(config.state)[-1].told.startswith("answered a question: ")
    assert run_session(config).reason == "plan-refused"


def test_an_answer_that_was_not_made_does_not_count(asking, config):
    config = limited(config, per_week=1)
    asking.faults["blob"] = [None, refusal("unknown-blob")]
    assert run_session(config).outcome != "reported"
    assert run_session(config).outcome == "reported"


class Time:
    """A clock whose hands a test moves; boot: its name."""

    def __init__(self):
        self.wall, self.since_boot = 1e9, 100.0

    def clock(self, boot="first"):
        return Clock(lambda: self.wall, lambda: self.since_boot, boot)

    def set(self, wall_s=0.0, passed_s=0.0):
        self.wall, self.since_boot = self.wall + wall_s + passed_s, self.since_boot + passed_s


def test_the_count_of_a_week_survives_restarts_and_a_clock_that_goes_back(tmp_path):
    time = Time()

    def count(boot):
        with open_database(tmp_path, time.clock(boot)) as database:
            return AnsweredQuestions(database, time.clock(boot)).within_a_week()

    with open_database(tmp_path, time.clock()) as database:
        AnsweredQuestions(database, time.clock()).count()
    assert count("first") == 1
    time.set(wall_s=30 * WEEK_S)
    assert count("first") == 1  # within one boot the wall clock means nothing
    time.set(wall_s=-60 * WEEK_S)
    assert [count("first"), count("second"), count("third")] == [1, 1, 1]
    time.set(passed_s=WEEK_S - 1)
    assert count("third") == 1
    time.set(passed_s=2)
    assert count("third") == 0


def test_a_policy_file_with_a_misspelt_rule_on_questions_is_refused(tmp_path):
    path = tmp_path / "policy.toml"
    for text, words in (
        ("[questions]\nallow = true", "questions: there is no 'allow'; did you mean allowed?"),
        ("[question]\nallowed = true", "there is no 'question'; did you mean questions?"),
        ("[questions]\nallowed = 'no'", "allowed must be true or false, not 'no'"),
        ("[questions]\nper_week = -1", "per_week must be a whole number, at least 0, not -1"),
        ("[questions]\nper_week = 1.5", "per_week must be a whole number, at least 0, not 1.5"),
        ("[questions]\nper_week = nan", "per_week must be a whole number, at least 0, not nan"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(words)):
            Policy.load(path)
    path.write_text("[questions]\nallowed = true\nper_week = 3")
    assert Policy.load(path).questions == Questions(allowed=True, per_week=3)


def test_a_plan_whose_question_is_too_long_is_malformed(coordinator, config):
    ask(coordinator, "ü" * LONGEST_QUESTION)
    assert run_session(config).outcome == "reported"
    ask(coordinator, "ü" * (LONGEST_QUESTION + 1))
    assert run_session(config).reason == "plan-refused"


@pytest.fixture(scope="module")
def node():
    with sessions() as run:
        yield run


@pytest.fixture
def typescript(node, coordinator, tmp_path, examples):
    """Runs a session of a device in TypeScript with these rules on questions."""
    words = partial(device_words, tmp_path / "node", coordinator.url, "phones", examples)
    return lambda **rules: node(words(questions=rules))


def test_a_device_in_typescript_tells_its_owner_what_python_does(asking, config, typescript):
    run_session(config)
    run_session(limited(config, allowed=False))
    answered, refused = read_journal(config.state)
    assert typescript()["told"] == answered.told
    found = typescript(allowed=False)
    assert (found["outcome"], found["reason"], found["question"]) == ("aborted", "plan-refused", SHOWN)
    assert found["told"].startswith(refused.told)
    assert asking.aborts[-1].reason == "plan-refused"


def test_a_device_in_typescript_holds_its_weekly_limit(coordinator, typescript):
    ask(coordinator)
    assert [typescript(per_week=2)["outcome"] for _ in range(3)] == ["reported", "reported", "aborted"]
    assert "questions.per_week" in typescript(per_week=2)["told"]
    ask(coordinator, msgspec.UNSET)
    found = typescript(per_week=2)
    assert (found["outcome"], found["question"], found["told"]) == ("reported", None, "")


def test_a_kept_answer_in_typescript_counts_once_and_may_be_forbidden(asking, typescript):
    asking.faults["report"] = [refusal("unavailable", Retry_After="61")]
    assert typescript(per_week=1)["told"].endswith("; not counted because because")
    assert typescript(per_week=1)["told"].startswith("answered a question: ")
    asking.faults["report"] = [refusal("unavailable", Retry_After="61")]
    typescript()
    calls = len(asking.calls)
    assert "; refused because it is against questions.allowed" in typescript(allowed=False)["told"]
    assert len(asking.calls) == calls, "nobody is told"


def test_a_question_that_is_too_long_is_malformed_in_typescript(coordinator, typescript):
    ask(coordinator, "𝕏" * LONGEST_QUESTION)
    assert typescript()["outcome"] == "reported"
    ask(coordinator, "𝕏" * (LONGEST_QUESTION + 1))
    assert typescript()["reason"] == "plan-refused"
