"""Mixed fleets: devices in Python, on Node, in a browser, on a JVM and on emulated ARM train one model in one round."""

import random
import subprocess
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.rules.states import TaskState
from coordinator.store.tasks import Secagg, TaskSettings
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from fedcore.signing import SigningKey
from muster.app import app
from simulator import datasets
from simulator.engine import Engine
from simulator.errors import BrowserMissing, FleetError, ProfileError
from simulator.fleet import browsers, fork_servers as fleet_node
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_server import Ended
from simulator.fleet.fork_servers import BROWSER, HERE, JVM, NODE, fork_servers, java_command
from simulator.fleet.profile import Kind, counted_kinds
from simulator.proofs import counted_cohort, worst_difference
from tests.conformance.browser import served
from tests.coordinator.fork_server import authority, free_port
from tests.device_runtime.coordinator import serving
from tests.device_runtime.node import node
from tests.device_runtime.pages import build
from tests.simulator.federation import SEED, rounding_error
from tests.simulator.test_arm import machine  # noqa: F401  # a fixture
from tests.simulator.test_keystone import RUNTIME, TOLERANCE

SECAGG = Secagg(clip_norm=4.0, max_examples=400)


@pytest.fixture
def mixed(tmp_path, federate):
    """One round of logistic regression on devices of several runtimes that tell a label: its run, and the error that
    rounding allows."""

    def run(runtimes, secagg=None):
        kinds = labelled(runtimes)
        skip_without({kind.runtime for kind in kinds})
        page = build(tmp_path / "page") if BROWSER in runtimes else None
        goal = sum(int(kind.weight) for kind in kinds)
        users, _ = datasets.users("digits", None, goal)
        model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
        round_of = {"rounds": 1, "goal": goal, "secagg": secagg, "where": "region = eu"}
        # On a busy machine a browser that loads its engine is silent for seconds.
        found = federate(model, algorithm, users, RUNTIME, kinds=kinds, page=page, silence_s=60.0, **round_of)
        assert found.reported == Counter({kind.name: int(kind.weight) for kind in kinds})
        layout = Bundle(tmp_path / "plan").plan.report
        error = rounding_error(secagg, layout, users.sizes.tolist()) / found.ways[-1] if secagg else TOLERANCE
        return found.difference, error

    return run


def labelled(runtimes):
    """The kinds of runtimes, all of whose devices draw a label."""
    return tuple(msgspec.structs.replace(kind, labels=("region=eu:1",)) for kind in counted_kinds(runtimes))


def skip_without(runtimes):
    """Skip, saying why, where a program of these runtimes is missing."""
    try:
        if JVM in runtimes:
            java_command()
        if BROWSER in runtimes:
            browsers.programs()
    except (BrowserMissing, FleetError) as error:
        pytest.skip(str(error))
    if {NODE, BROWSER} & set(runtimes):
        node()


@pytest.mark.long
@pytest.mark.parametrize("secagg", [None, SECAGG], ids=["plain", "secure"])
def test_devices_of_one_jvm_train_the_engines_model(secagg, mixed):
    difference, allowed = mixed("jvm:8", secagg)
    assert difference < allowed


@pytest.mark.long
def test_devices_of_three_runtimes_sum_to_the_engines_model(mixed):
    # A sum that is off by one word fails its check word, and the round with it.
    difference, allowed = mixed("node:3,python:3,browser:2", SECAGG)
    assert TOLERANCE < difference < allowed < 1e-2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("secagg", [None, SECAGG], ids=["plain", "secure"])
def test_devices_of_all_runtimes_train_the_engines_model(secagg, machine, mixed, capsys):  # noqa: F811
    difference, allowed = mixed("node:6,python:6,browser:4,aarch64:4", secagg)
    with capsys.disabled():
        print(f"\nPython, Node, browser and ARM: {difference:.1e} relative l2 from the engine, {allowed:.1e} allowed")
    assert difference < allowed


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("secagg", [None, SECAGG], ids=["plain", "secure"])
def test_devices_of_all_runtimes_and_the_jvm_train_the_engines_model(secagg, machine, mixed):  # noqa: F811
    difference, allowed = mixed("node:2,python:2,browser:2,aarch64:2,jvm:4", secagg)
    assert difference < allowed


ROUNDS, EVERY = 10, 9
"""Committed rounds; and of the sessions on the JVM, each EVERY-th kills the whole process."""
KILLED = (
    Kind(name="python", weight=5, drop_out=0.1, drop_out_secagg=0.15),
    Kind(name="jvm", weight=3, runtime="jvm"),
    Kind(name="node", weight=3, runtime="node"),
    Kind(name="browser", weight=3, runtime="browser"),
)


class KilledJvm:
    """The JVM host of a fleet, whose process is killed in each EVERY-th session, with all sessions that it runs."""

    def __init__(self, ended):
        self._ended, self._started, self._random = ended, 0, random.Random(SEED)
        self._process, self._running, self._lock = None, set(), threading.Lock()
        self.killed = []

    def start(self, start):
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(java_command("fleet"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                threading.Thread(target=self._read, args=(self._process,)).start()
            self._running.add(start.client)
            with suppress(BrokenPipeError):
                self._process.stdin.write(msgspec.json.encode(start) + b"\n")
                self._process.stdin.flush()
            self._started += 1
            if self._started % EVERY == 0:
                threading.Timer(self._random.uniform(0, 4), self._process.kill).start()

    def close(self):
        with self._lock:
            if self._process is not None:
                self._process.stdin.close()

    def _read(self, process):
        with process.stdout as lines:
            for line in lines:
                ended = msgspec.json.decode(line, type=Ended)
                with self._lock:
                    self._running.discard(ended.client)
                self._ended.put(ended)
        code = process.wait()
        with self._lock:
            self._process, died, self._running = None, self._running, set()
            with suppress(BrokenPipeError):
                process.stdin.close()
        self.killed += died
        for client in died:
            self._ended.put(Ended(client, None, code))


@contextmanager
def hosts_with_a_killed_jvm():
    """Hosts of all runtimes, and the JVM among them."""
    with fork_servers(dict.fromkeys((HERE, NODE, BROWSER), ("onnxruntime",))) as (start, ended):
        jvm = KilledJvm(ended)
        try:
            yield (lambda host, one: jvm.start(one) if host == JVM else start(host, one), ended), jvm
        finally:
            jvm.close()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_secure_fleet_of_four_runtimes_sums_exactly_through_kills(tmp_path, coordinators, capsys):
    skip_without({kind.runtime for kind in KILLED})
    devices = sum(int(kind.weight) for kind in KILLED)
    users, _ = datasets.users("digits", None, devices)
    model, algorithm = Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 5})
    bundle = export_bundle(model, algorithm, tmp_path / "plan")
    secret, key = tmp_path / "secret", SigningKey.new(tmp_path / "release.pem")
    secret.write_text("0123456789abcdef\n")
    given = {"page": str(build(tmp_path / "page")), "enrolment_secret_file": secret}
    with (
        coordinators.local(tmp_path, SEED, silence_s=60.0, secure=True, **given) as local,
        hosts_with_a_killed_jvm() as (servers, jvm),
    ):
        secagg = Secagg(clip_norm=4.0, max_examples=400, phase_s=15)
        settings = TaskSettings(
            population="p", goal=devices, minimum=8, rounds=ROUNDS, over_selection=1.0, seed=SEED, secagg=secagg,
            selection_timeout_s=10, reporting_deadline_s=120,
        )  # fmt: skip
        task = local.create_task(bundle, settings, key).id
        config = FleetConfig(
            coordinator=local.url, population="p", folder=tmp_path / "devices", concurrency=devices, seed=SEED,
            kinds=KILLED, policy=Policy(signers=(key.signer,)), enrolment_secret=secret,
        )  # fmt: skip
        summary = Fleet(config, users).run(servers=servers)
        assert local.store.task(task).state is TaskState.COMPLETED
        cohorts = [counted_cohort(local.store, task, number, summary.clients) for number in range(1, ROUNDS + 1)]
        models = [local.store.checkpoint(task, number)["params"] for number in range(1, ROUNDS + 1)]
        attempts = len(local.store.rounds(task))
        attested = Counter(one.attestation for one in local.store.devices())
    difference = worst_difference(Engine(model, algorithm, users, seed=SEED), users, cohorts, models)
    sizes = dict(zip(users.clients, users.sizes.tolist(), strict=True))
    rounding = [
        rounding_error(secagg, bundle.plan.report, [sizes[one] for one in cohort.values()]) for cohort in cohorts
    ]
    allowed = sum(rounding) / np.linalg.norm(models[-1] - model.initial)
    killed, sessions = summary.endings["killed"] + len(jvm.killed), summary.endings.total()
    with capsys.disabled():
        print(
            f"\nfour runtimes, secure: {difference:.1e} relative l2 from the engine, {allowed:.1e} allowed; {killed} "
            f"of {sessions} sessions killed, {len(jvm.killed)} on the JVM; {attempts} attempts at {ROUNDS} rounds"
        )
        print({kind: dict(endings) for kind, endings in summary.by_kind.items()})
    assert difference < allowed < 1e-2
    assert killed >= sessions // 10
    assert jvm.killed
    assert all(endings["reported"] for endings in summary.by_kind.values())
    assert attested == {"shared-secret": devices}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_secure_fleet_is_attested_by_a_secret_at_the_authority(tmp_path, coordinators):
    kinds = counted_kinds("python:3,node:3,browser:2,jvm:3")
    skip_without({kind.runtime for kind in kinds})
    users, _ = datasets.users("digits", None, 11)
    bundle = export_bundle(Model(load("logreg", (1, 8, 8), 10), SEED), create("fedavg", {}), tmp_path / "plan")
    secret, key, port = tmp_path / "secret", SigningKey.new(tmp_path / "release.pem"), free_port()
    secret.write_text("0123456789abcdef\n")
    closed = {"accept_unattested": False, "allowed_origins": (f"http://127.0.0.1:{port}",)}
    given = {"accept_unattested": False, "port": port, "page": str(build(tmp_path / "page"))}
    with (
        authority(tmp_path / "authority", enrolment_secret_file=secret, **closed) as parties,
        coordinators.local(tmp_path, SEED, silence_s=60.0, **given, **parties) as local,
    ):
        settings = TaskSettings(population="p", goal=11, rounds=2, over_selection=1.0, secagg=SECAGG)
        task = local.create_task(bundle, settings, key).id
        known = Policy(signers=(key.signer,), **parties)
        config = FleetConfig(
            coordinator=local.url, population="p", folder=tmp_path / "devices", concurrency=11, kinds=kinds,
            policy=known, enrolment_secret=secret,
        )  # fmt: skip
        for policy in (known, Policy(signers=known.signers)):
            strangers = {"folder": tmp_path / "strangers", "enrolment_secret": None, "policy": policy}
            with pytest.raises(FleetError, match="not-attested"):
                Fleet(replace(config, kinds=counted_kinds("node:11"), **strangers), users).run()
        summary = Fleet(config, users).run()
        assert len(local.committed(task)) == 2
        assert all(endings["reported"] for endings in summary.by_kind.values())
        assert {one.attestation for one in local.store.devices()} == {"credential"}


def test_devices_of_a_fleet_tell_the_labels_that_they_draw(tmp_path):
    kinds = labelled("node:2,python:2")
    skip_without({kind.runtime for kind in kinds})
    users, _ = datasets.users("digits", None, sum(int(kind.weight) for kind in kinds))
    with serving() as coordinator:
        config = FleetConfig(
            coordinator=coordinator.url, population="phones", folder=tmp_path, kinds=kinds, sessions=len(users)
        )
        Fleet(config, users).run()
    assert [hello.labels for hello in coordinator.checkins] == [{"region": "eu"}] * len(users)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nod:1", "did you mean node?"),
        ("node", "as in node:8"),
        ("node:0", "as in node:8"),
        ("node:1,node:2", "comes once"),
    ],
)
def test_a_text_that_counts_no_runtimes_is_refused(text, words):
    with pytest.raises(ProfileError, match=words):
        counted_kinds(text)


@pytest.mark.parametrize("runtime", ["node", "browser", "jvm"])
def test_devices_that_share_a_program_cannot_be_slowed_down_or_killed(runtime):
    with pytest.raises(ValueError, match="leave out silence"):
        Kind(name="a", runtime=runtime, silence=0.2)


@pytest.mark.parametrize(
    ("path", "node_program", "words"),
    [("", None, "there is none on the PATH"), ("", "#!/bin/sh\nexit 1\n", "older"), ("nowhere", None, "checkout")],
)
def test_a_fleet_says_what_devices_on_node_lack(tmp_path, monkeypatch, path, node_program, words):
    if node_program:
        (tmp_path / "node").write_text(node_program)
        (tmp_path / "node").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    if path:
        monkeypatch.setattr(fleet_node, "_FLEET", tmp_path / path)
    with pytest.raises(FleetError, match=words):
        fleet_node.fleet_command()


def test_a_fleet_says_what_devices_in_browsers_lack(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrowserMissing, match="apt-get install chromium chromium-driver"):
        browsers.command()


@pytest.mark.parametrize(
    ("java", "words"), [("", "none on the PATH"), ("#!/bin/sh\n", "`make android` in a checkout of Muster builds it")]
)
def test_a_fleet_says_what_devices_on_the_jvm_lack(tmp_path, monkeypatch, java, words):
    if java:
        (tmp_path / "java").write_text(java)
        (tmp_path / "java").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fleet_node, "JVM_PROGRAM", tmp_path / "nowhere")
    with pytest.raises(FleetError, match=words):
        java_command()


def test_a_coordinator_without_a_page_for_browsers_is_named(tmp_path):
    with served(tmp_path, tmp_path) as without_page:
        for url, words in (
            (without_page, "make page"),
            ("http://127.0.0.1:1", "no coordinator answers"),
            ("http://10.0.0.1:8080", "https"),
        ):
            with pytest.raises(FleetError, match=words):
                browsers.check_page(url)


def test_the_command_counts_devices_by_runtime(tmp_path):
    words = ["fleet", "run", "--coordinator", "http://127.0.0.1:1", "--population", "p", "--runtime", "node:2,python:1"]
    in_browsers = CliRunner().invoke(app, [*words[:-1], "browser:33"])
    assert "at most 32 devices of a fleet are in browsers, not 33" in str(in_browsers.exception)
    assert "leave this out" in CliRunner().invoke(app, [*words, "--devices", "9"]).output
    labelled = CliRunner().invoke(app, [*words, "--label", "region=eu:1.5"])
    assert "label region=eu: its share must be a number from 0 to 1, not 1.5" in labelled.output
    assert "names runtimes itself" in CliRunner().invoke(app, [*words, "--profile", str(tmp_path)]).output
