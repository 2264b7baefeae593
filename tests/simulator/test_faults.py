"""Devices that fail in fleets, and what heals."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from coordinator.rules.states import AssignmentState, RoundState
from coordinator.store.tasks import Secagg
from device_runtime.backends import open_backend
from device_runtime.conditions import Conditions
from device_runtime.errors import ConfigError
from device_runtime.protocol.connection import ConnectionFailed, Connections, HttpRequest, address_of
from device_runtime.protocol.transport import Transport
from fedcore.signing import SigningKey
from simulator.fleet import faults

SIZE = 50_000


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.server.received += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(b"ok")

    def do_GET(self):
        self.answer(bytes(SIZE))

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def road(**how):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.received = 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = address_of(f"http://127.0.0.1:{server.server_port}")
    with closing(faults.ThrottledTransport(Connections(address), **how)) as carrier:

        def ask(method, target, body=b""):
            headers = {"host": address.authority, "content-length": str(len(body))}
            with closing(carrier.send(HttpRequest(method, target, headers, [body], 30.0))) as response:
                assert response.status == 200
                return b"".join(response)

        yield ask, server
    server.shutdown()
    thread.join()
    server.server_close()


def seconds(do):
    started = time.monotonic()
    do()
    return time.monotonic() - started


@pytest.fixture
def sleeps(monkeypatch):
    """Seconds for which something asked to sleep, which nothing does."""
    asked = []
    monkeypatch.setattr("simulator.fleet.faults.time.sleep", asked.append)
    return asked


def test_bytes_wait_for_their_turn_in_both_directions():
    with road(bytes_per_s=100_000.0) as (ask, server):
        assert seconds(lambda: ask("GET", "/blob")) >= 0.5
        assert seconds(lambda: ask("POST", "/report", bytes(SIZE))) >= 0.5
        assert server.received == SIZE


def test_a_transport_without_a_bandwidth_never_waits(sleeps):
    with road(bytes_per_s=None) as (ask, _):
        ask("GET", "/blob")
    assert sleeps == []


def test_a_transport_that_breaks_does_so_when_the_assignment_is_there():
    with road(bytes_per_s=None, breaks=True) as (ask, server):
        assert ask("POST", "/v1/populations/p/checkins", b"hello") == b"ok"
        assert ask("POST", "/v1/sessions/s/assignments") == b"ok"
        with pytest.raises(ConnectionFailed, match="network is gone"):
            ask("POST", "/v1/assignments/a:abort", b"why")
        assert server.received == len(b"hello")


class Slow:
    """A backend whose graphs take two hundredths of a second on the clock of `faults`."""

    format, runtime, now = "slow", "slow 1", 0.0

    def load(self, graph, name="graph"):
        return self

    def run(self, inputs, outputs):
        self.now += 0.02


@pytest.mark.parametrize(("name", "factor"), [("train.step", 5), ("train.steps", 5), ("train.begin", 1), ("report", 1)])
def test_training_steps_take_their_factor_longer_and_nothing_else_does(name, factor, sleeps, monkeypatch):
    slow = Slow()
    monkeypatch.setattr("simulator.fleet.faults.time.perf_counter", lambda: slow.now)
    graph = faults.SlowBackend(slow, 5.0, None).load(b"", name)
    for _ in range(5):
        graph.run({}, {})
    assert slow.now == pytest.approx(5 * 0.02)
    assert sum(sleeps) == pytest.approx(5 * 0.02 * (factor - 1))


def test_a_device_dies_after_so_many_steps_also_where_a_call_takes_many(monkeypatch):
    killed = []
    monkeypatch.setattr("simulator.fleet.faults.os.kill", lambda *_: killed.append(True))
    graph = faults.SlowBackend(Slow(), 1.0, 5).load(b"", "train.steps")
    for steps, deaths in ((3, 0), (3, 1)):
        graph.run({"mask": np.ones((steps, 2), np.float32)}, {})
        assert len(killed) == deaths


def test_a_slow_backend_is_the_same_backend_to_the_coordinator():
    slow, plain = (
        faults.load_backend("onnxruntime", faults.EmulatedDevice(slow_down=2.0), faults.PlannedFailure()),
        open_backend("onnxruntime"),
    )
    assert (slow.format, slow.runtime) == (plain.format, plain.runtime)
    with pytest.raises(ConfigError, match="'tflite'"):
        faults.load_backend("tflite", faults.EmulatedDevice(slow_down=2.0), faults.PlannedFailure())


def test_a_device_without_faults_has_what_a_real_one_has():
    assert faults.connect(faults.EmulatedDevice(), faults.PlannedFailure()) == Transport.to
    assert faults.load_backend(
        "onnxruntime", faults.EmulatedDevice(), faults.PlannedFailure()
    ) is faults.cached_backend("onnxruntime")
    assert faults.EmulatedDevice().source(0.0)() == Conditions()


def test_a_throttled_transport_refuses_the_same_urls():
    with pytest.raises(ConfigError, match="https:// or http://"):
        faults.connect(faults.EmulatedDevice(bandwidth=1e6), faults.PlannedFailure())("ftp://example.org")


def test_a_clock_that_is_off_is_off_by_date_alone():
    clock, right = faults.EmulatedDevice(clock_skew_s=-3600.0).clock(), faults.EmulatedDevice().clock()
    assert right.wall() <= clock.wall() + 3600 <= right.wall()
    assert right.since_boot() <= clock.since_boot() <= right.since_boot()


def test_conditions_begin_with_the_fleet_and_not_with_the_machine(tmp_path):
    (tmp_path / "trace.json").write_text('[[10, {"charging": true}], [1000, {"charging": false}]]')
    device = faults.EmulatedDevice(conditions=faults.EmulatedConditions(trace=str(tmp_path / "trace.json")))
    now = time.monotonic()
    assert device.source(now)().charging is True
    assert device.source(now - 500)().charging is False


def test_flapping_follows_the_devices_seed():
    def readings(seed):
        device = faults.EmulatedDevice(
            seed=seed, conditions=faults.EmulatedConditions(flapping=faults.Flapping(1.0, 1.0))
        )
        now = time.monotonic()
        return [device.source(now - second)().charging for second in np.arange(0.05, 60)]

    assert readings(1) == readings(1) != readings(2)


DEVICES = 10
PATIENCE_S = 90.0
SECAGG = Secagg(max_examples=100)
"""Far longer than a round takes to heal, and far shorter than the deadlines that it must not wait for."""
# Training of some seconds that costs no computing time.
SLOW = '[[kind]]\nname = "slow"\nslow_down = {}\n'


@contextmanager
def fleet(url, folder, signers, slow_down=1.0):
    """A fleet of processes in a process group of their own; whatever is left of it dies at the end."""
    profile = folder / "profile.toml"
    profile.write_text(SLOW.format(slow_down))
    command = [sys.executable, "-m", "muster", "fleet", "run", "--coordinator", url, "--population", "p"]
    command += ["--devices", str(DEVICES), "--concurrency", str(DEVICES), "--profile", str(profile), "--json", *signers]
    with (folder / "fleet.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def until(happened, what):
    """Wait for it."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() < began + PATIENCE_S, f"{what} did not happen in {PATIENCE_S:g} s"
        time.sleep(0.05)


def vanish_and_heal(task, folder, sign, secagg):
    """Interrupt a fleet whose devices train, and start another: the attempts until the commit, and all assignments."""
    settings = {"goal": 8, "rounds": 1, "over_selection": DEVICES / 8, "secagg": secagg}
    signers = [] if secagg is None else ["--signer", SigningKey.load(folder / "release.pem").signer]
    with task(**settings, selection_timeout_s=60.0, reporting_deadline_s=3600.0) as (store, url, task_id):

        def trains():
            rounds = store.rounds(task_id)
            return bool(rounds) and rounds[-1].state is RoundState.REPORTING

        with fleet(url, folder, signers, slow_down=1e5) as first:
            until(trains, "training")
            time.sleep(2)  # into the middle of it: devices hold their assignments by now
            os.killpg(first.pid, sign)
            # A killed fleet is gone. One that was interrupted ends in its own time, while the next one begins.
            with fleet(url, folder, signers):
                until(lambda: store.rounds(task_id)[-1].state is RoundState.COMMITTED, "the commit")
        attempts = store.rounds(task_id)
        with store.database.reading() as records:
            states = [seat.state for one in attempts for seat in records.cohorts.drawn(task_id, 1, one.attempt)]
    return attempts, states


@pytest.mark.promise("Devices that vanish during a round do not hold it up")
@pytest.mark.parametrize(
    ("sign", "secagg"),
    [
        pytest.param(signal.SIGINT, None, id="interrupted-plain", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, SECAGG, id="killed-secure", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, SECAGG, id="interrupted-secure", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, None, id="killed-plain", marks=pytest.mark.long),
    ],
)
def test_next_fleet_commits_after_a_whole_fleet_vanished_in_mid_round(task, tmp_path, sign, secagg):
    attempts, states = vanish_and_heal(task, tmp_path, sign, secagg)
    assert attempts[-1].state is RoundState.COMMITTED
    assert attempts[-1].reported >= 8
    assert {one.reason for one in attempts[:-1]} <= {"devices-lost", "too-few-reports"}
    assert AssignmentState.EXPIRED not in states
    assert states.count(AssignmentState.LOST) + states.count(AssignmentState.ABORTED) >= 3
