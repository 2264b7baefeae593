"""Graphs run in a process of their own: whatever they do to it is an outcome, and the device goes on."""

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from onnx import TensorProto

from device_runtime.errors import DeadlinePassed, NonFiniteReport, PlanRefused, RuntimeFailed
from device_runtime.permission.policy import PlanLimits, Policy
from device_runtime.sandbox import process
from device_runtime.sandbox.channel import Channel, Done, Failed, Working
from device_runtime.sandbox.process import Sandbox
from device_runtime.session import run_session
from device_runtime.state.folder import KeyFile, Sealer
from device_runtime.state.records import read_journal
from device_runtime.trainer import Job, Limits
from fedcore.schedule import Loop
from fedcore.wire.messages import Abort
from tests.device_runtime import linear
from tests.device_runtime.coordinator import report_of
from tests.device_runtime.process import until

WIDE = Limits(memory_bytes=1_000_000_000, cpu_s=60.0)
ENDLESS = Loop(batch_size=4, epochs=10_000_000)
INT = TensorProto.INT64
TAKEN_OVER = "import time; time.sleep(600)"


def hungry(values):
    """A graph of a few hundred bytes that makes a tensor of so many float32 values."""
    return linear.graph(
        [
            ("Expand", ["broadcast.params", "shape"], "big"),
            ("Exp", ["big"], "bigger"),
            ("ReduceMin", ["bigger", "axis"], "next.params", {"keepdims": 0}),
        ],
        [linear.VECTOR],
        [("next.params", linear.FLOAT, [linear.D])],
        [("shape", INT, [values // linear.D, linear.D]), ("axis", INT, [0])],
    )


def busy(times=400):
    """A graph without a loop that multiplies large matrices, for minutes."""
    side = 1_000
    names = ["square", *(f"power{index}" for index in range(times))]
    return linear.graph(
        [
            ("ReduceSum", ["broadcast.params"], "total", {"keepdims": 1}),
            ("Expand", ["total", "shape"], names[0]),
            *(("MatMul", [before, names[0]], after) for before, after in pairwise(names)),
            ("ReduceSum", [names[-1]], "sum", {"keepdims": 0}),
            ("Add", ["broadcast.params", "sum"], "next.params"),
        ],
        [linear.VECTOR],
        [("next.params", linear.FLOAT, [linear.D])],
        [("shape", INT, [side, side])],
    )


def job(begin=None, **plan):
    graphs = linear.graphs() | ({"train.begin": begin} if begin else {})
    return Job(linear.plan(graphs, **plan), graphs, {"params": linear.PARAMS}, linear.examples(10), linear.KEY)


@pytest.fixture
def sandboxed(config):
    """The device as a host application has it: its graphs run in a process of their own."""
    return replace(config, trainer=Sandbox)


def offer(coordinator, begin=None, **plan):
    graphs = linear.graphs() | ({"train.begin": begin} if begin else {})
    coordinator.offer(linear.plan(graphs, **plan), graphs, {"params": linear.PARAMS})


def children():
    """The sandboxes of this process that have not ended."""
    own = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    commands = {child: Path(f"/proc/{child}/cmdline").read_text() for child in own}
    return [child for child, command in commands.items() if process.CHILD in command or TAKEN_OVER in command]


def test_a_report_from_the_sandbox_is_that_of_the_process_itself(coordinator, sandboxed, examples):
    assert run_session(sandboxed).outcome == "reported"
    np.testing.assert_allclose(coordinator.reports[0], report_of(examples), rtol=2e-6, atol=1e-5)
    assert children() == []
    (entry,) = read_journal(sandboxed.state)
    assert entry.compute_s > 0.05, "the CPU time of the other process counts"


@pytest.mark.security("run in a process of their own … no key of the device … no file and no connection")
@pytest.mark.security("A graph that is slow, large or crashes its runtime costs an assignment")
def test_a_graph_gets_no_more_memory_than_the_policy_allows(coordinator, sandboxed):
    offer(coordinator, hungry(400_000_000))
    policy = Policy(plan=PlanLimits(memory_bytes=400_000_000))
    outcome = run_session(replace(sandboxed, policy=policy))
    assert (outcome.outcome, outcome.reason) == ("aborted", "runtime-failed")
    assert [abort.reason for abort in coordinator.aborts] == ["runtime-failed"]


PEAKS = """
import contextlib, resource
from device_runtime.errors import RuntimeFailed
from device_runtime.sandbox.process import Sandbox
from device_runtime.trainer import Limits
from tests.device_runtime.test_sandbox import hungry, job
for begin in (None, hungry(400_000_000)):
    with contextlib.suppress(RuntimeFailed):
        Sandbox("onnxruntime").train(job(begin), Limits(400_000_000, 60.0), lambda: True)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def test_memory_of_a_sandbox_stays_within_what_was_allowed():
    done = subprocess.run([sys.executable, "-c", PEAKS], stdout=subprocess.PIPE, check=True)
    modest, hungry_bytes = map(int, done.stdout.split())
    assert hungry_bytes - modest < 400_000_000


@pytest.mark.security("run in a process of their own … no key of the device … no file and no connection")
@pytest.mark.security("A graph that is slow, large or crashes its runtime costs an assignment")
def test_a_graph_gets_no_more_time_than_the_policy_allows(coordinator, sandboxed):
    offer(coordinator, busy())
    outcome = run_session(replace(sandboxed, policy=Policy(plan=PlanLimits(compute_seconds=1.0))))
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert outcome.detail.startswith("against plan.compute_seconds of this device's policy")
    assert children() == []
    (entry,) = read_journal(sandboxed.state)
    assert 0.9 < entry.compute_s < 5


def test_many_small_steps_get_no_more_time_than_is_left_of_the_day(coordinator, sandboxed):
    offer(coordinator, train=ENDLESS)
    policy = msgspec.convert({"per_day": {"compute_seconds": 1.0}}, Policy)
    outcome = run_session(replace(sandboxed, policy=policy))
    assert outcome.reason == "plan-refused"
    assert "compute_seconds" in outcome.detail


def test_a_graph_that_runs_on_is_stopped_when_the_round_is_over(coordinator, sandboxed):
    offer(coordinator, busy())
    coordinator.report_within_s = 1.0
    outcome = run_session(sandboxed)
    assert (outcome.outcome, outcome.reason) == ("aborted", "runtime-failed")
    assert "the report would come too late" in outcome.detail
    assert children() == []


def test_an_application_that_stops_does_not_wait_for_a_graph(coordinator, sandboxed):
    offer(coordinator, busy())
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    outcome = run_session(replace(sandboxed, stopping=stop.is_set))
    assert (outcome.outcome, outcome.reason) == ("aborted", "conditions")
    assert children() == []


@pytest.mark.security("A graph that is slow, large or crashes its runtime costs an assignment")
def test_a_process_that_crashes_is_an_outcome_with_its_signal():
    sandbox = Sandbox("onnxruntime")

    def crash():
        for child in children():
            os.kill(int(child), signal.SIGSEGV)
        return True

    with pytest.raises(RuntimeFailed, match="the process of the training died: SIGSEGV"):
        sandbox.train(job(busy()), WIDE, crash)
    assert children() == []


@pytest.mark.security("A process of its own with limits on memory and time … and ends with its device")
@pytest.mark.security("a graph that finds a fault of its runtime has the examples, the graphs")
def test_a_taken_over_process_has_nothing_of_the_devices(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "of the application")
    monkeypatch.setattr(process, "CHILD", "tests.device_runtime.taken_over")
    with pytest.raises(RuntimeFailed) as said:
        Sandbox("onnxruntime").train(job(), WIDE, lambda: True)
    found = msgspec.json.decode(str(said.value).removeprefix("the process of the training gave up: "))
    own = {"PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}  # the last is Python's doing
    assert set(found["environment"]) <= own | set(process.ENVIRONMENT)
    assert set(found["descriptors"]) == {"/dev/null"}
    assert found["session"], "a session of its own"
    assert not found["started"], "no process, where it does not run as root"


@pytest.mark.security("run in a process of their own … no key of the device … no file and no connection")
@pytest.mark.security("a graph that finds a fault of its runtime has the examples, the graphs")
def test_a_sandbox_is_given_no_key_of_the_device(coordinator, sandboxed, examples, monkeypatch):
    given, send_bytes = [], Channel.send_bytes

    def noted(channel, data):
        given.append(bytes(data))
        send_bytes(channel, data)

    monkeypatch.setattr(Channel, "send_bytes", noted)
    assert run_session(sandboxed).outcome == "reported"
    whole, sealing = b"".join(given), (sandboxed.state / "sealing-key").read_bytes()
    opened = [
        Sealer(KeyFile(sandboxed.state / "sealing-key")).open(name, (sandboxed.state / name).read_bytes())
        for name in ("device-key", "secagg-key")
    ]
    assert examples["x"].tobytes() in whole
    for key in (sealing, *opened):
        assert not any(form in whole for form in (key, key.hex().encode(), base64.b64encode(key)[:-2]))


UNPRIVILEGED = """
import os
from device_runtime.backends import open_backend
from device_runtime.sandbox import child
open_backend({backend!r})
if os.geteuid() == 0:
    os.setuid(65534)
child.main()
"""


def test_training_needs_no_process_and_no_thread_more(monkeypatch, tmp_path):
    (tmp_path / "unprivileged.py").write_text(UNPRIVILEGED.format(backend="onnxruntime"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "CHILD", "unprivileged")
    result = Sandbox("onnxruntime").train(job(), WIDE, lambda: True)
    assert result.steps > 0


def test_what_a_taken_over_process_started_is_ended_with_it(monkeypatch, tmp_path):
    started = tmp_path / "started"
    code = f"""
import os, time
if (child := os.fork()):
    open({str(tmp_path / "part")!r}, "w").write(str(child))
    os.rename({str(tmp_path / "part")!r}, {str(started)!r})
time.sleep(600)
"""
    (tmp_path / "forking.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "CHILD", "forking")
    with pytest.raises(DeadlinePassed):
        Sandbox("onnxruntime").train(job(), WIDE, lambda: not started.exists())
    until(lambda: over(started.read_text()))


def over(pid):
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.security("A process of its own with limits on memory and time … and ends with its device")
def test_training_ends_in_mid_graph_when_its_device_is_killed():
    code = """
from device_runtime.sandbox.process import Sandbox
from device_runtime.trainer import Limits
from tests.device_runtime.test_sandbox import busy, job
Sandbox("onnxruntime").train(job(busy(4_000)), Limits(1_000_000_000, 600.0), lambda: True)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as device:
        tasks = Path(f"/proc/{device.pid}/task/{device.pid}/children")
        until(lambda: tasks.read_text().split())
        (child,) = tasks.read_text().split()
        # It gives up opening files once it has all that it works on.
        until(lambda: re.search(r"Max open files +0 +0 ", Path(f"/proc/{child}/limits").read_text()))
        device.kill()
    until(lambda: over(child))


@pytest.mark.security("run in a process of their own … no key of the device … no file and no connection")
def test_a_device_never_loads_the_engine_itself():
    code = (
        "import sys; from device_runtime.config import DeviceConfig; print(DeviceConfig.__dataclass_fields__['trainer']"
    )
    code += ".default('onnxruntime').runtime.split()[0], 'onnxruntime' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "onnxruntime False\n"


@pytest.fixture
def taken_over(monkeypatch):
    """Makes sandboxes whose process is in the hands of an attacker, who gives an answer over the channel."""
    with ExitStack() as held:  # what the device sends goes nowhere, and is no error

        def make(answer):
            def start(end):
                theirs = held.enter_context(end.dup())
                answer(Channel(theirs))
                theirs.shutdown(socket.SHUT_WR)
                return subprocess.Popen([sys.executable, "-c", TAKEN_OVER], start_new_session=True)

            monkeypatch.setattr(process, "_start", start)
            return Sandbox("onnxruntime")

        yield make


@pytest.mark.parametrize(
    "answer",
    [
        lambda channel: None,
        lambda channel: channel.send_bytes(b"\xff" * 100),
        lambda channel: channel.send_bytes(b"\0\0\0\x04nope"),
        lambda channel: channel.send_bytes(b"\0\0\0\x04{\xff\xff}"),
        lambda channel: (channel.send(Done(1)), channel.send_bytes(b"short")),
    ],
)
def test_a_process_that_answers_nonsense_is_ended_and_an_outcome(taken_over, answer):
    sandbox = taken_over(answer)
    with pytest.raises(RuntimeFailed, match="the process of the training died"):
        sandbox.train(job(), WIDE, lambda: True)
    assert children() == []


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_values_of_the_process_that_are_not_finite_are_no_report(taken_over, number):
    size = sum(segment.size for segment in job().plan.report.unweighted)
    values = np.full(size, number, np.float32)
    sandbox = taken_over(lambda channel: (channel.send(Done(1)), channel.send_bytes(values)))
    with pytest.raises(NonFiniteReport):
        sandbox.train(job(), WIDE, lambda: True)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"type":"working","cpu_s":-1e300}',
        b'{"type":"done","steps":-5}',
        b'{"type":"done","steps":100000000000000000000}',
    ],
)
def test_numbers_of_the_process_that_cannot_be_are_nonsense(taken_over, answer):
    sandbox = taken_over(lambda channel: channel.send_bytes(len(answer).to_bytes(4) + answer))
    with pytest.raises(RuntimeFailed, match="the process of the training died"):
        sandbox.train(job(), WIDE, lambda: True)
    assert sandbox.cpu_s >= 0


def test_a_process_cannot_claim_more_time_than_it_may_use(taken_over):
    claimed = []
    sandbox = taken_over(lambda channel: [channel.send(Working(1e300)) for _ in range(100)])

    def go_on():
        claimed.append(sandbox.cpu_s)
        return max(claimed) == 0

    with pytest.raises(DeadlinePassed):
        sandbox.train(job(), WIDE, go_on)
    assert claimed[-1] == WIDE.cpu_s + 1


def test_no_words_about_a_failure_leave_the_device(coordinator, sandboxed):
    offer(coordinator, b"no graph, but 0.25")
    outcome = run_session(sandboxed)
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert "train.begin" in outcome.detail
    assert coordinator.aborts == [Abort("plan-refused")]


def test_errors_of_the_process_are_those_of_a_trainer_and_plain(taken_over):
    for kind, expected in (("PlanRefused", PlanRefused), ("SystemExit", RuntimeFailed)):
        sandbox = taken_over(lambda channel, kind=kind: channel.send(Failed(kind, "\x1b[2J" + "x" * 900)))
        with pytest.raises(expected) as caught:
            sandbox.train(job(), WIDE, lambda: True)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600


def test_a_process_that_only_says_that_it_works_is_watched(taken_over):
    asked = []

    def go_on():
        asked.append(time.monotonic())
        return len(asked) < 20

    sandbox = taken_over(lambda channel: [channel.send(Working(0.1)) for _ in range(100)])
    with pytest.raises(DeadlinePassed):
        sandbox.train(job(), WIDE, go_on)
    assert children() == []
