"""`muster task` on bundles made by hand: what is refused, what is kept, what is shown."""

import dataclasses
import json
import re

import numpy as np
import pytest

from coordinator.rules.entities import AssignedDevice
from coordinator.rules.rounds import open_round
from coordinator.rules.task_settings import ClearReports, Secagg, TaskSettings
from coordinator.store.tasks import open_coordinator_store
from fedcore.codecs import LowRank, Rotation, Subsample
from fedcore.report import Segment
from fedcore.validation import text_of
from tests.coordinator.bundles import make_bundle, make_plan, make_private_bundle
from tests.muster.test_cli import in_process, muster
from tests.stores import without_rows

SECURE = ("--goal", 9, "--secagg")


@pytest.fixture
def where(tmp_path):
    """The options that name a store which a coordinator has made."""
    database, blobs = without_rows(tmp_path / "muster.db"), tmp_path / "blobs"
    open_coordinator_store(database, blobs).close()
    return ["--db", database, "--blobs", blobs]


@pytest.fixture
def bundle(tmp_path):
    """A bundle of two formats, each of 50 MB, 2 ms and 3 kB."""
    return make_bundle(tmp_path / "plan", plan=make_plan(formats=("onnx", "executorch"))).folder


def create(bundle, *more):
    return in_process("task", "create", "--plan", bundle, "--population", "p", "--goal", 3, "--rounds", 2, *more)


def new_key(folder):
    """The file of a new key that releases plans."""
    in_process("key", "new", "--out", folder / "release.pem")
    return folder / "release.pem"


def shown(result):
    """Names and values of a table of fields."""
    return dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if len(line.split()) > 1)


def defaults_of(kind, *names):
    return {field.name: field.default for field in dataclasses.fields(kind) if field.name in names}


def test_options_that_are_not_given_are_the_defaults_of_the_settings(bundle, where):
    times = ("selection_timeout_s", "reporting_deadline_s", "min_separation_s")
    task = defaults_of(TaskSettings, *times, "over_selection", "max_attempts", "min_examples", "seed")
    secagg = defaults_of(Secagg, "clip_norm", "bits", "max_examples", "phase_s", "group_size")
    clear = defaults_of(ClearReports, "max_norm", "max_weight", "estimator", "tolerate")
    key = bundle.parent / "release.pem"
    signer = in_process("key", "new", "--out", key).stdout.strip()
    secure = ["--goal", 9, "--secagg", "--release-key", key]
    facts = json.loads(create(bundle, *secure, *where, "--json").stdout)
    assert (facts["release"]["signer"], facts["release"]["counter"]) == (signer, 1)
    assert f"--signer {signer}" in create(bundle, *secure, *where).stderr
    assert {name: facts[name] for name in task} == task
    assert (facts["secagg"], facts["clear"]) == (secagg, clear)
    assert facts["formats"] == ["onnx"]
    listed = " ".join(in_process("task", "create", "--help").stdout.split())
    for name, default in (task | secagg | clear).items():
        option = name.replace("_", "-")
        assert re.search(rf"--{option} <\w+> [^\[]*\[[^\]]*default: ([^\]]+)\]", listed)[1] == text_of(default)


def test_formats_and_budget_are_kept_and_shown_in_words(bundle, where):
    limits = ["--minimum", 2, "--peak-rss-mb", 64, "--step-cpu-ms", 2.5, "--graph-bytes", 1.5e6]
    made = create(bundle, "--formats", "executorch", "--formats", "onnx", *limits, *where, "--json")
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    assert facts["formats"] == ["executorch", "onnx"]
    budget = {name: bound for name, bound in facts["budget"].items() if bound is not None}
    assert budget == {"peak_rss_mb": 64, "step_cpu_ms": 2.5, "graph_bytes": 1.5e6}
    assert json.loads(in_process("task", "show", facts["task"], *where, "--json").stdout) == facts
    fields = {name: value.strip() for name, value in shown(in_process("task", "show", facts["task"], *where)).items()}
    assert fields["formats"] == "executorch, onnx"
    assert fields["budget"] == "peak_rss_mb=64, step_cpu_ms=2.5, graph_bytes=1,500,000"
    assert (fields["algorithm"], fields["algorithm_settings"]) == ("fedavg", "–")


@pytest.mark.parametrize(
    ("codecs", "options", "longest"),
    [
        ((), (), "its update counts with a length of 1,000 at most."),
        ((Rotation(256), Subsample(4)), ("--max-norm", 2), "its update counts with a length of 32 at most."),
        ((LowRank(1, ((2, 128),)),), ("--max-norm", 2), "its update counts with a length of 45.25 at most."),
        ((Subsample(128),), SECURE, "the mean of a round counts with a length of 20 at most, and what rounding adds."),
    ],
)
def test_the_longest_update_that_counts_is_said(tmp_path, where, codecs, options, longest):
    segments = Segment("delta", 256, "mean", codecs=codecs), Segment("weight", 1, "sum")
    made = make_bundle(tmp_path / "coded", make_plan(256, segments=segments), start=np.zeros(256, np.float32))
    options = [*options, "--release-key", new_key(tmp_path)] if options == SECURE else options
    said = create(made.folder, *options, *where)
    assert f" Decoded, {longest}" in said.stderr


def test_rules_on_devices_are_kept_and_shown_in_words(bundle, where):
    rules = [
        "--requires",
        "charging,min_battery=0.4",
        "--requires",
        "min_version=0.2",
        "--min-separation-s",
        60,
        "--minimum",
        2,
    ]
    alone = ["--on-device", "unmetered, min_examples=20,max_example_age_s=604800"]
    made = create(bundle, *rules, *alone, *where, "--json")
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    asked = {name: value for name, value in facts["requires"].items() if value}
    assert asked == {"charging": True, "min_battery": 0.4, "min_version": "0.2"}
    checked = {name: value for name, value in facts["on_device"].items() if value}
    assert checked == {"unmetered": True, "min_examples": 20, "max_example_age_s": 604800.0}
    assert (facts["min_separation_s"], facts["min_separation_rounds"]) == (60, 1)
    assert json.loads(in_process("task", "show", facts["task"], *where, "--json").stdout) == facts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--requires", "plugged"], "requires: there is no 'plugged'; there are charging, idle, unmetered"),
        (["--requires", "charging=often"], "charging must be true or false, not often"),
        (["--requires", "min_battery"], "min_battery must be a number from 0 to 1, not True"),
        (["--requires", "min_battery=full"], "requires: min_battery must be a number from 0 to 1, not full"),
        (["--requires", "min_battery=2"], "requires: min_battery must be a number from 0 to 1, not 2"),
        (["--requires", "min_version=new"], "min_version must be numbers with points between"),
        (["--on-device", "max_example_age_s=60"], "min_examples must be at least 1 with max_example_age_s"),
        (["--min-separation-rounds", "0"], "min_separation_rounds must be a whole number from 1 to 2^31 - 1, not 0"),
        (["--formats", "coreml"], "the task needs graphs in format 'coreml', the plan has executorch, onnx"),
        (["--peak-rss-mb", "49"], "memory at the peak of format 'executorch' is 50 MB, the budget 49 MB"),
        (["--step-cpu-ms", "1.5"], "CPU time of a step of format 'executorch' is 2 ms, the budget 1.5 ms"),
        (
            ["--graph-bytes", "2000"],
            "size of all graphs of format 'executorch' is 3,000 bytes, the budget 2,000 bytes",
        ),
        (["--graph-bytes", "nan"], "budget: graph_bytes must be a number of bytes above 0, not nan"),
        (["--peak-rss-mb", "-1"], "budget: peak_rss_mb must be a number of MB above 0, not -1"),
        (["--bits", "9"], "it is a setting of secagg: add --secagg"),
    ],
)
def test_plan_that_the_devices_cannot_bear_is_a_usage_error_and_no_task(bundle, where, options, words, typed):
    arguments = ["--plan", bundle, "--population", "p", "--goal", 3, "--rounds", 2]
    status, out, err = typed("task", "create", *arguments, *options, *where)
    assert (status, out) == (2, "")
    assert words in " ".join(err.split())
    assert json.loads(in_process("task", "list", *where, "--json").stdout) == []


def test_mistyped_database_or_blob_folder_is_named_and_nothing_is_made(bundle, where, tmp_path, typed):
    _, database, _, blobs = where
    before = sorted(tmp_path.iterdir())
    typos = ["--db", f"sqlite:///{tmp_path}/typo.db"], ["--blobs", tmp_path / "typos"]
    for typo in typos:
        options = {"--db": database, "--blobs": blobs} | {typo[0]: typo[1]}
        names = [word for option in options.items() for word in option]
        arguments = ["--plan", bundle, "--population", "p", "--goal", 3, "--rounds", 2]
        for command in (["create", *arguments], ["list"], ["cancel", "t"]):
            status, out, err = typed("task", *command, *names)
            assert (status, out) == (1, "")
            assert f"{typo[1]}; start the coordinator first" in " ".join(err.split())
    assert sorted(tmp_path.iterdir()) == before


def test_metrics_show_why_devices_gave_up(bundle, where):
    task = json.loads(create(bundle, *where, "--json").stdout)["task"]
    with open_coordinator_store(where[1], where[3]) as store, store.database.writing() as records:
        row_id, _ = records.add_round(task, 1, open_round(records.task(task).settings.policy, 0.0))
        records.add_assignments(row_id, [AssignedDevice(f"seat-{slot}", slot, f"device-{slot}") for slot in range(4)])
        for slot, reason in enumerate(("plan-refused", "invalid-examples", "plan-refused")):
            records.move_assignment(records.assignment(f"seat-{slot}"), "aborted", "device", reason)
    reasons = {"invalid-examples": 1, "plan-refused": 2}
    assert (
        json.loads(in_process("task", "metrics", task, *where, "--json").stdout)["rounds"][0]["abort_reasons"]
        == reasons
    )
    out = in_process("task", "metrics", task, *where).stdout
    assert "invalid-examples=1, plan-refused=2" in out


def test_device_that_runs_another_format_is_told_at_check_in_over_http(where, coordinators, tmp_path):
    bundle = make_bundle(tmp_path / "executorch", plan=make_plan(formats=("executorch",)))
    np.savez(tmp_path / "mine.npz", x=np.zeros((3, 2), np.float32))
    made = create(bundle.folder, "--formats", "executorch", *where)
    assert made.exit_code == 0, made.output
    with coordinators.local(tmp_path) as local:
        device = ["device", "run", "--coordinator", local.url, "--population", "p", "--examples", tmp_path / "mine.npz"]
        device += ["--once", "--state"]
        status, out, err = muster(*device, tmp_path / "state")
        assert status == 75, out + err
        assert out.split()[:2] == ["rejected", "unsupported-format"]
        assert "this device runs graphs in format 'onnx', the tasks for it have 'executorch'" in out
        assert "run it with --backend executorch, or export the plan for 'onnx' too" in out
        outcome = json.loads(muster(*device, tmp_path / "another", "--json")[1])
    assert (outcome["reason"], outcome["task"], outcome["retryable"]) == ("unsupported-format", "", "permanent")
    assert 0.1 <= outcome["retry"]["min_s"] <= outcome["retry"]["max_s"] == 0.5


def test_a_task_like_another_has_all_that_is_not_given_anew(bundle, where):
    key = ["--release-key", new_key(bundle.parent)]
    asked = ["--secagg", "--bits", 12, "--goal", 9, "--requires", "charging", "--on-device", "idle", "--seed", 7]
    made = create(bundle, *asked, *key, "--name", "spring", *where, "--json")
    task = json.loads(made.stdout)
    like = ["task", "create", "--like", task["task"], *where, "--json"]
    clone = json.loads(in_process(*like).stdout)
    own = ("task", "progress")
    assert {**clone, **dict.fromkeys(own)} == {**task, **dict.fromkeys(own)}  # also name and release
    changes = ["--goal", 12, "--secagg", "--clip-norm", 2, "--requires", "min_battery=0.5", "--unset", "seed"]
    other = json.loads(in_process(*like, "--plan", bundle, *key, *changes).stdout)
    assert (other["goal"], other["minimum"], other["seed"], other["name"]) == (12, 12, 0, "hand-made")
    assert other["secagg"] == task["secagg"] | {"clip_norm": 2.0}
    assert other["requires"] == task["requires"] | {"min_battery": 0.5}
    for more, words in (
        (["--bits", 14, "--secagg"], "sign it again"),
        (key, "name it with --plan"),
        (["--unset", "goal"], "has no default"),
        (["--unset", "gaol"], "did you mean goal"),
    ):
        refused = in_process(*like, *more)
        assert refused.exit_code != 0
        assert words in f"{refused.output}{refused.exception}", words
    assert "--like" in f"{in_process('task', 'create', *where).exception}"


def test_noise_that_was_found_for_a_task_is_found_anew_for_one_like_it(where, tmp_path):
    plan = make_private_bundle(tmp_path / "plan").folder
    private = ["--privacy", "epsilon=8,delta=1e-6,users=1000"]

    def noise(*words):
        return json.loads(in_process("task", "create", *words, *where, "--json").stdout)

    first = noise("--plan", plan, "--population", "p", "--goal", 10, "--rounds", 4, *private)
    longer = noise("--like", first["task"], "--rounds", 16)
    assert longer["privacy"]["noise_multiplier"] > 1.5 * first["privacy"]["noise_multiplier"]
    fixed = noise("--like", first["task"], "--privacy", "noise_multiplier=9")
    assert noise("--like", fixed["task"], "--rounds", 5)["privacy"] == first["privacy"] | {"noise_multiplier": 9.0}
