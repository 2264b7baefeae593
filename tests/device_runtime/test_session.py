import hashlib
import json
import os
import sqlite3
import tempfile
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_runtime import monitor
from device_runtime.conditions import Conditions, Requirements, constant
from device_runtime.config import DeviceConfig
from device_runtime.examples import Collection, ExampleStore
from device_runtime.permission.policy import Policy
from device_runtime.protocol.transport import Transport
from device_runtime.session import run_session
from device_runtime.state.folder import only_session
from device_runtime.state.records import read_journal
from device_runtime.trainer import InProcess
from fedcore import checkpoint
from fedcore.conditions import StatedConditions
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, Field, FrozenVectors
from fedcore.wire.messages import Abort, Receipt, Rejected, RetryWindow, encode
from tests.device_runtime import linear
from tests.device_runtime.coordinator import WINDOW, answer, cut, hang_up, refusal, report_of, status


def aborted(coordinator, outcome, reason):
    """The device gave up for `reason`, and the coordinator heard the same."""
    assert (outcome.outcome, outcome.reason) == ("aborted", reason)
    (abort,) = coordinator.aborts
    assert abort == Abort(reason)
    assert coordinator.reports == []
    return outcome.detail


def test_a_session_reports_once_what_numpy_computes(coordinator, config, examples):
    outcome = run_session(config)
    assert coordinator.calls[:2] == ["check-in", "assignment"]
    assert set(coordinator.calls[2:-1]) == {"blob"}
    assert coordinator.calls[-1] == "report"
    np.testing.assert_allclose(coordinator.reports[0], report_of(examples), rtol=2e-6, atol=1e-5)
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("reported", "", None)
    assert (outcome.task, outcome.round, outcome.attempt, outcome.slot) == ("t-1", 2, 1, 3)
    assert (outcome.examples, outcome.steps) == (10, 9)
    assert outcome.bytes_down > coordinator.plan.size + coordinator.checkpoint.size
    assert outcome.bytes_up > 4 * coordinator.reports[0].size
    assert 0 < outcome.seconds < 5
    assert sum(outcome.phases.values()) == pytest.approx(outcome.seconds, rel=0.05)
    assert all(outcome.phases[phase] > 0 for phase in ("start", "wait", "fetch", "train", "upload"))
    assert outcome.phases["mask"] == 0


def test_a_report_is_hashed_once_from_training_to_receipt(coordinator, config, monkeypatch):
    hashed, device, sha256 = [], threading.get_ident(), hashlib.sha256

    def counting(data=b"", **more):
        if threading.get_ident() == device:  # the coordinator's thread hashes what it receives
            hashed.append(bytes(data))
        return sha256(data, **more)

    monkeypatch.setattr(hashlib, "sha256", counting)
    assert run_session(config).outcome == "reported"
    assert hashed.count(checkpoint.encode({"report": coordinator.reports[0]})) == 1


def test_a_check_in_says_what_the_device_can_and_has(coordinator, config):
    outcome = run_session(config)
    (hello,) = coordinator.checkins
    able = hello.capabilities
    assert (able.formats, able.secagg, hello.examples) == (("onnx",), ("SA1",), {"default": 8})
    assert (able.runtime, able.version) == ("muster", version("muster-fl"))
    assert "onnxruntime" in able.engine
    assert able.memory_mb.bit_count() == 1
    assert hello.conditions == StatedConditions()
    assert outcome.device == "d-0"


def test_check_in_states_the_conditions_that_were_checked(coordinator, config):
    readings = iter([Conditions(charging=True, unmetered=False, battery=0.7345, free_storage_bytes=5 << 20)])
    config = replace(config, conditions=lambda: next(readings, PLUGGED), requirements=Requirements(charging=True))
    assert run_session(config).outcome == "reported"
    assert coordinator.checkins[0].conditions == StatedConditions(
        charging=True, unmetered=False, battery=0.7, free_storage_mb=4
    )


def test_a_check_in_tells_the_labels_that_the_owner_lists_and_no_others(coordinator, config):
    config = replace(config, labels={"region": "eu", "app_version": "3.2.1"})
    for listed in ((), ("app_version", "ring")):
        run_session(replace(config, policy=Policy(labels=listed)))
    assert [hello.labels for hello in coordinator.checkins] == [msgspec.UNSET, {"app_version": "3.2.1"}]


def test_an_outcome_is_json(config):
    outcome = run_session(config)
    assert json.loads(msgspec.json.encode(outcome))["outcome"] == "reported"


def test_an_example_store_gives_the_same_report_as_an_npz_file(coordinator, config, examples, tmp_path):
    store = ExampleStore.open(tmp_path / "examples")
    fields = tuple(Field(name, column.dtype.name, column.shape[1:]) for name, column in examples.items())
    store.declare(Collection("default", fields))
    store.append_all("default", [{"x": x, "y": y} for x, y in zip(examples["x"], examples["y"], strict=True)])
    run_session(config)
    run_session(replace(config, examples=store.path))
    first, second = coordinator.reports
    assert first.tobytes() == second.tobytes()


def test_what_is_kept_is_fetched_once_and_the_device_stays_who_it_is(coordinator, config):
    first, second = run_session(config), run_session(config)
    assert coordinator.calls.count("blob") == 1 + 5 + 1
    assert first.device == second.device
    assert second.bytes_down < first.bytes_down


def test_frozen_vectors_are_fetched_once_and_reach_the_graphs(coordinator, config, examples):
    shift = np.array([0.5, -1.0, 2.0], np.float32)
    blob = checkpoint.encode({"body.weight": shift})
    frozen = FrozenVectors(BlobRef.of(blob), (VectorSpec("body.weight", linear.D),))
    begin = linear.graph(
        [("Add", ["broadcast.params", "frozen.body.weight"], "next.params")],
        [linear.VECTOR, ("frozen.body.weight", linear.FLOAT, [linear.D])],
        [("next.params", linear.FLOAT, [linear.D])],
    )
    graphs = linear.graphs() | {"train.begin": begin}
    coordinator.offer(
        msgspec.structs.replace(linear.plan(graphs), frozen=frozen),
        {**graphs, "frozen": blob},
        {"params": linear.PARAMS},
    )
    outcomes = [run_session(config) for _ in range(2)]
    assert [outcome.outcome for outcome in outcomes] == ["reported"] * 2
    assert coordinator.calls.count("blob") == 1 + 5 + 1 + 1  # plan, graphs, frozen vectors, checkpoint
    assert not np.allclose(coordinator.reports[0], report_of(examples))
    (config.state / "blobs" / BlobRef.of(blob).sha256).write_bytes(blob[:-1] + b"?")
    assert run_session(config).outcome == "reported"
    assert coordinator.reports[2].tobytes() == coordinator.reports[0].tobytes()


def test_a_corrupt_cached_graph_is_fetched_again(coordinator, config):
    run_session(config)
    for path in (config.state / "blobs").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert run_session(config).outcome == "reported"
    assert coordinator.reports[0].tobytes() == coordinator.reports[1].tobytes()


@pytest.mark.parametrize("call", ["check-in", "assignment", "blob", "report"])
@pytest.mark.parametrize("fault", [status(503), cut, hang_up])
def test_two_passing_faults_anywhere_do_not_lose_the_report(coordinator, config, examples, call, fault):
    coordinator.faults[call] = [fault, fault]
    assert run_session(config).outcome == "reported"
    np.testing.assert_allclose(coordinator.reports[-1], report_of(examples), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("call", ["check-in", "assignment"])
def test_a_rejection_is_passed_on_with_its_window(coordinator, config, call):
    coordinator.faults[call] = [answer(encode(Rejected("not-selected", WINDOW)))]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason, outcome.retry) == ("rejected", "not-selected", WINDOW)


def test_a_device_whose_format_nobody_wants_says_which_and_what_to_do(coordinator, config):
    rejected = Rejected("unsupported-format", WINDOW, formats=("coreml", "executorch"))
    coordinator.faults["check-in"] = [answer(encode(rejected))]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("rejected", "unsupported-format", "permanent")
    assert outcome.retry == WINDOW
    assert outcome.detail == (
        "this device runs graphs in format 'onnx', the tasks for it have 'coreml', 'executorch': "
        "run it with --backend executorch, or export the plan for 'onnx' too"
    )
    assert (coordinator.calls, coordinator.aborts) == (["check-in"], [])


def test_device_without_examples_checks_in_and_gives_up_when_assigned(coordinator, config):
    np.savez(config.examples, **linear.examples(0))
    outcome = run_session(config)
    assert coordinator.checkins[0].examples == {"default": 0}
    aborted(coordinator, outcome, "too-few-examples")
    assert outcome.retryable == "permanent"


def test_nan_in_the_examples_aborts_with_the_place(coordinator, config, examples):
    examples["x"][4, 1] = np.nan
    np.savez(config.examples, **examples)
    detail = aborted(coordinator, run_session(config), "invalid-examples")
    assert "'x' of example 4" in detail


def test_examples_of_another_shape_abort_by_name(coordinator, config, examples):
    np.savez(config.examples, x=examples["x"][:, :2], y=examples["y"])
    detail = aborted(coordinator, run_session(config), "invalid-examples")
    assert "'x'" in detail
    assert "[10, 2]" in detail


def test_examples_are_checked_before_graphs_and_checkpoint_are_fetched(coordinator, config, examples):
    np.savez(config.examples, x=examples["x"])
    aborted(coordinator, run_session(config), "invalid-examples")
    assert coordinator.calls.count("blob") == 1


def test_a_plan_in_a_format_that_this_device_cannot_run_is_refused(coordinator, config):
    coordinator.offer(linear.plan(fmt="executorch"), linear.graphs(), {"params": linear.PARAMS})
    outcome = run_session(config)
    assert "executorch" in aborted(coordinator, outcome, "plan-refused")
    assert outcome.retryable == "permanent"


@pytest.mark.parametrize("plan", [b"{", b'{"version": 99}', b"\xff"])
def test_a_plan_that_is_malformed_or_of_another_version_is_refused(coordinator, config, plan):
    coordinator.offer(plan, {}, {"params": linear.PARAMS})
    assert "plan" in aborted(coordinator, run_session(config), "plan-refused")


@pytest.mark.parametrize("vectors", [{"params": np.zeros(4, np.float32)}, {"other": linear.PARAMS}])
def test_a_checkpoint_that_is_not_the_plans_is_refused(coordinator, config, vectors):
    coordinator.offer(linear.plan(), linear.graphs(), vectors)
    aborted(coordinator, run_session(config), "plan-refused")


def test_a_graph_that_cannot_be_loaded_is_refused_by_name(coordinator, config):
    blobs = linear.graphs() | {"train.step": b"junk"}
    coordinator.offer(linear.plan(blobs), blobs, {"params": linear.PARAMS})
    assert "'train.step'" in aborted(coordinator, run_session(config), "plan-refused")


def test_a_graph_that_wants_an_input_nobody_has_is_refused_by_name(coordinator, config):
    blobs = linear.graphs()
    blobs["train.begin"] = blobs["sweep.step"]
    coordinator.offer(linear.plan(blobs), blobs, {"params": linear.PARAMS})
    detail = aborted(coordinator, run_session(config), "plan-refused")
    assert "'train.begin' wants inputs" in detail


def test_a_graph_that_does_not_fit_the_examples_fails_and_says_so(coordinator, config):
    plan = linear.plan(fields=(Field("x", "float32", (2,)), Field("y", "float32")))
    coordinator.offer(plan, linear.graphs(), {"params": linear.PARAMS})
    np.savez(config.examples, x=np.zeros((3, 2), np.float32), y=np.zeros(3, np.float32))
    detail = aborted(coordinator, run_session(config), "runtime-failed")
    assert len(detail) > len("graph 'train.step' failed")


@pytest.mark.security("A report holds model-sized vectors, a weight and metric sums")
def test_what_may_hold_paths_or_data_stays_on_the_device(coordinator, config, examples):
    np.savez(config.examples, x=examples["x"])
    run_session(config)
    config.examples.write_bytes(config.examples.read_bytes()[:-60])
    run_session(config)
    plan = linear.plan(fields=(Field("x", "float32", (2,)), Field("y", "float32")))
    coordinator.offer(plan, linear.graphs(), {"params": linear.PARAMS})
    np.savez(config.examples, x=np.zeros((3, 2), np.float32), y=np.zeros(3, np.float32))
    run_session(config)
    assert [entry.detail for entry in read_journal(config.state) if entry.outcome == "aborted"] == [
        "examples have no field ['y'], they have ['x']",
        "graph 'train.step' failed",
    ]


def test_divergence_aborts_and_uploads_nothing(coordinator, config, examples):
    np.savez(config.examples, x=examples["x"] * np.float32(1e30), y=examples["y"])
    outcome = run_session(config)
    aborted(coordinator, outcome, "non-finite-report")
    assert outcome.retryable == "transient"


def test_a_deadline_that_passed_stops_the_work(coordinator, config):
    coordinator.report_within_s = 0.0
    assert "too late" in aborted(coordinator, run_session(config), "runtime-failed")


def test_wrong_bytes_for_a_digest_are_not_used(coordinator, config):
    coordinator.blobs[coordinator.checkpoint.sha256] = b"x" * coordinator.checkpoint.size
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("failed", "bad-answer", "transient")
    assert [abort.reason for abort in coordinator.aborts] == ["runtime-failed"]
    assert coordinator.reports == []


def test_a_blob_that_never_arrives_whole_ends_in_an_abort(coordinator, config):
    coordinator.faults["blob"] = [cut] * 4
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("failed", "unreachable")
    assert [abort.reason for abort in coordinator.aborts] == ["runtime-failed"]


def test_a_report_that_is_no_longer_needed_is_no_failure(coordinator, config):
    window = RetryWindow(1.0, 2.0)
    coordinator.faults["report"] = [refusal("no-longer-needed", retry=window)]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason, outcome.retry) == ("not-needed", "no-longer-needed", window)
    assert outcome.steps == 9
    assert coordinator.aborts == []


def test_a_conflicting_report_is_a_failure_and_is_not_sent_again(coordinator, config):
    coordinator.faults["report"] = [refusal("conflicting-report")]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("failed", "conflicting-report")
    assert coordinator.calls.count("report") == 1
    assert coordinator.aborts == []


def test_an_invalid_report_frees_the_slot(coordinator, config):
    coordinator.faults["report"] = [refusal("invalid-report")]
    assert run_session(config).retryable == "permanent"
    assert [abort.reason for abort in coordinator.aborts] == ["runtime-failed"]


def test_abort_that_is_lost_leaves_the_first_failure_in_the_outcome(coordinator, config):
    coordinator.offer(b"{", {}, {"params": linear.PARAMS})
    coordinator.faults["abort"] = [status(500)]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")


@pytest.mark.parametrize(
    ("body", "part"),
    [(b"{nonsense", "malformed"), (b'{"outcome":"assigned","version":2}', ""), (b"[]", "")],
)
def test_garbage_in_place_of_an_assignment_fails_for_hours(coordinator, config, body, part):
    coordinator.faults["assignment"] = [answer(body)]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("failed", "bad-answer", "permanent")
    assert part in outcome.detail


def test_an_assignment_of_an_unknown_version_is_refused(coordinator, config):
    newer = msgspec.structs.replace(coordinator.assignment(), version=2)
    coordinator.faults["assignment"] = [answer(encode(newer))]
    assert "version 2" in run_session(config).detail


@pytest.mark.parametrize(
    ("change", "reason", "retryable"),
    [
        ({"coordinator": "http://127.0.0.1:9"}, "unreachable", "transient"),
        ({"coordinator": "nonsense"}, "bad-configuration", "permanent"),
        ({"coordinator": "http://127.0.0.1:99999"}, "bad-configuration", "permanent"),
        ({"backend": "abacus"}, "bad-configuration", "permanent"),
        ({"population": "toasters"}, "unknown-resource", "permanent"),
    ],
)
def test_what_fails_before_an_assignment_is_in_the_outcome(config, change, reason, retryable):
    outcome = run_session(replace(config, **change))
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("failed", reason, retryable)
    assert outcome.detail


class Faulty(Transport):
    """A transport of an application, with a fault in it."""

    def report(self, *_):
        raise OverflowError("timestamp too large")


@pytest.mark.parametrize("earlier", [False, True])
def test_delivery_that_meets_a_fault_of_its_own_is_given_up(coordinator, config, earlier):
    """An exception would come again in every session, since the report is kept."""
    if earlier:
        coordinator.faults["report"] = [refusal("unavailable")] * 9
        assert "the report is kept" in run_session(config).notices[-1]
        coordinator.faults.clear()
    outcome = run_session(replace(config, connect=Faulty.to))
    assert (outcome.outcome, outcome.reason) == ("aborted", "runtime-failed")
    assert coordinator.aborts == [Abort("runtime-failed")]
    assert outcome.detail.startswith("the device's own code failed")
    assert run_session(config).outcome == "reported"


def test_missing_examples_are_in_the_outcome(config):
    config.examples.unlink()
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("failed", "invalid-examples")


def test_a_second_session_in_the_same_state_folder_does_not_start(coordinator, config):
    with only_session(config.state):
        outcome = run_session(config)
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("failed", "state-in-use", "transient")
    assert coordinator.calls == []


ALL = Requirements(charging=True, unmetered=True)
PLUGGED, UNPLUGGED = Conditions(charging=True), Conditions(charging=False)


def test_conditions_that_do_not_hold_mean_that_nothing_is_sent(coordinator, config):
    outcome = run_session(replace(config, conditions=constant(UNPLUGGED), requirements=ALL))
    assert (outcome.outcome, outcome.reason) == ("not-now", "conditions")
    assert outcome.detail == "not charging; unknown: network metered or not"
    assert (coordinator.calls, outcome.bytes_up) == ([], 0)


@pytest.mark.parametrize("batches", [0, 1, 5, 8])
def test_conditions_that_fail_end_the_work_within_a_batch(coordinator, config, batches, monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_EVERY_S", 0.0)
    before = 1 + 2 * (1 + 5 + 1)  # the check-in, and every download: before the request, and after its one piece
    asked = []

    def conditions():
        asked.append(1)
        return UNPLUGGED if len(asked) > before + batches else PLUGGED

    outcome = run_session(replace(config, conditions=conditions, requirements=Requirements(charging=True)))
    assert (outcome.outcome, outcome.reason) == ("aborted", "conditions")
    assert len(asked) == before + batches + 1
    assert [abort.reason for abort in coordinator.aborts] == ["conditions"]
    assert coordinator.reports == []


def test_conditions_are_not_read_again_for_every_small_batch(config, monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_EVERY_S", 3600.0)
    asked = []
    assert run_session(replace(config, conditions=lambda: asked.append(1) or PLUGGED)).outcome == "reported"
    assert len(asked) == 2


def test_what_is_required_and_not_known_does_not_hold(coordinator, config):
    outcome = run_session(replace(config, requirements=Requirements(charging=True)))
    assert (outcome.outcome, coordinator.calls) == ("not-now", [])


def test_a_download_goes_on_where_the_connection_broke(coordinator, config):
    first = len(coordinator.blobs[coordinator.checkpoint.sha256]) // 2
    run_session(config)
    coordinator.offer(linear.plan(), linear.graphs(), {"params": 2 * linear.PARAMS})
    coordinator.faults["blob"] = [begin(coordinator.checkpoint.sha256, first)]
    outcome = run_session(config)
    assert outcome.outcome == "reported"
    asked = [headers.get("range") for call, headers in coordinator.headers if call == "blob"]
    assert asked[-2:] == [None, f"bytes={first}-"]


def begin(sha256, count):
    """Answer with the first bytes of a blob, and hang up."""

    def fault(handler):
        data = handler.server.coordinator.blobs[sha256]
        handler.send_response(200)
        handler.send_header("ETag", f'"{sha256}"')
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:count])
        handler.close_connection = True

    return fault


def test_assignment_seen_again_after_its_receipt_is_not_trained_again(coordinator, config):
    run_session(config)
    coordinator.faults["assignment"] = [answer(encode(coordinator.assignment()))]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("failed", "bad-answer")
    assert len(coordinator.reports) == 1


def test_a_receipt_for_another_report_is_none(coordinator, config):
    other = Receipt(assignment="a-1", task="t-1", round=2, sha256="0" * 64)
    coordinator.faults["report"] = [answer(encode(other))]
    assert run_session(config).reason == "bad-answer"
    assert run_session(config).outcome == "reported"
    assert coordinator.calls.count("check-in") == 1


def test_a_folder_that_cannot_be_written_is_a_clear_outcome(coordinator, config):
    with tempfile.TemporaryDirectory() as bare, unprivileged():
        outcome = run_session(replace(config, state=Path(bare) / "state"))
    assert (outcome.outcome, outcome.reason) == ("failed", "state-unusable")
    assert "Permission denied" in outcome.detail
    assert coordinator.calls == []


@contextmanager
def unprivileged():
    """Without the rights of an administrator, whom no permission stops."""
    user = os.geteuid()
    if user:
        pytest.skip("made for an administrator: only one can make a folder of somebody else's")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_row_that_cannot_be_read_is_set_aside_for_the_next_session(coordinator, config):
    run_session(config)
    with closing(sqlite3.connect(config.state / "state.db")) as database:
        database.execute("UPDATE assignment SET stored = '{}'")
        database.commit()
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("failed", "state-unusable")
    (aside,) = config.state.glob("state.db.damaged-*")
    assert aside.name in outcome.detail
    assert run_session(config).outcome == "reported"


def test_only_values_make_a_configuration(config):
    with pytest.raises(AttributeError):
        config.wait_s = 1.0
    assert DeviceConfig(coordinator="c", population="p", examples=config.examples, state=config.state).wait_s == 30.0


@pytest.mark.parametrize("name", ["blobs/x.partial", "x.report"])
def test_what_cannot_be_swept_away_does_not_end_a_session(coordinator, config, name):
    (config.state / name).mkdir(parents=True)
    assert run_session(config).outcome == "reported"


def test_a_fault_of_the_runtime_gives_the_assignment_up_before_it_is_seen(coordinator, config):
    class Odd:
        format, runtime, cpu_s = "onnx", "odd", 0.0

        def train(self, job, limits, keep_going):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_session(replace(config, trainer=lambda name: Odd()))
    assert [abort.reason for abort in coordinator.aborts] == ["runtime-failed"]
    assert run_session(config).outcome == "reported"


def test_whatever_an_engine_raises_is_an_outcome(coordinator, config):
    class Odd:
        format, runtime = "onnx", "odd"

        def load(self, graph, name):
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")

    outcome = run_session(replace(config, trainer=lambda name: InProcess(Odd())))
    assert (outcome.outcome, outcome.reason) == ("aborted", "runtime-failed")
    assert coordinator.aborts == [Abort("runtime-failed")]
    assert outcome.detail.startswith("the engine failed")


def test_a_long_answer_with_control_characters_is_cut_before_it_is_kept(coordinator, config):
    coordinator.faults["check-in"] = [refusal("internal", "\x1b[2J" + "x" * 900_000)] * 3
    outcomes = [run_session(config) for _ in range(3)]
    assert all(len(outcome.detail) < 600 and outcome.detail.isprintable() for outcome in outcomes)
    assert (config.state / "state.db").stat().st_size < 100_000


@pytest.mark.parametrize("field", ["assignment", "task"])
def test_an_assignment_without_plain_names_is_refused(coordinator, config, field):
    odd = msgspec.structs.replace(coordinator.assignment(), **{field: "\x1b" + "y" * 900})
    coordinator.faults["assignment"] = [answer(encode(odd))]
    outcome = run_session(config)
    assert (outcome.reason, outcome.detail.isprintable()) == ("bad-answer", True)


@pytest.mark.parametrize("used_at", [0, 4e9])
def test_blobs_longest_unused_go_when_the_cache_exceeds_the_policy(coordinator, config, used_at):
    """So do those that were used by a clock that was ahead."""
    run_session(config)
    blobs = config.state / "blobs"
    sizes = [path.stat().st_size for path in blobs.iterdir() if not path.suffix]
    old = blobs / ("0" * 64)
    old.write_bytes(b"x")
    os.utime(old, (used_at, used_at))
    run_session(replace(config, policy=Policy(cache_bytes=sum(sizes))))
    assert (old.exists(), len(list(blobs.glob("?" * 64)))) == (False, len(sizes))
    run_session(replace(config, policy=Policy(cache_bytes=0)))
    assert list(blobs.iterdir()) == []


def test_a_password_in_the_coordinators_url_is_neither_taken_nor_repeated(config):
    outcome = run_session(replace(config, coordinator="http://me:s3cret@127.0.0.1:9"))
    assert (outcome.reason, "s3cret" in outcome.detail) == ("bad-configuration", False)


def test_the_state_folder_is_its_owners_alone(config):
    run_session(config)
    assert config.state.stat().st_mode & 0o777 == 0o700
    assert (config.state / "state.db").stat().st_mode & 0o777 == 0o600
