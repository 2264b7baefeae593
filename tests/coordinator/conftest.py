from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future

import httpx2
import msgspec
import pytest
import sqlalchemy
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from authority.service import Beacons
from benchmarks.postgresql import binaries, cluster
from coordinator.commands import AbortAssignment, AwaitAssignment, CheckInDevice, CountReport, QueuedCommand
from coordinator.driver.driver import Driver
from coordinator.driver.replica_membership import Membership, ReplicaConfig
from coordinator.errors import UnknownRound
from coordinator.keys import Keys
from coordinator.rules.progress import GRACE_S
from coordinator.rules.selection import Eligibility
from coordinator.secure.group import Executors
from coordinator.secure.round import SecureRoundFactory
from coordinator.settings import Settings
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.signing import SigningKey, SucceedingKey, key_text
from fedcore.wire.messages import Abort, CheckIn, Rejected, RetryWindow
from muster.creating import released
from tests.coordinator.browser import chromium, look_as
from tests.coordinator.bundles import make_bundle, report_vector
from tests.coordinator.devices import CAPABILITIES, speaking_to
from tests.coordinator.ticks import shorten_ticks
from tests.servers import serving, serving_both
from tests.stores import without_rows

RETRY = RetryWindow(0.0, 0.0)
SERVER, AUTHORITY = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
KEYS = Keys(SucceedingKey("server", SERVER))
AUTHORITY_KEY = AUTHORITY.public_key().public_bytes_raw()
LINEAGE, RELEASE = (SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in (3, 4))
"""The key with which every coordinator here signs checkpoints, and the one that releases plans for secure rounds."""
PEM = Ed25519PrivateKey.from_private_bytes(bytes([3]) * 32).private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
)


@pytest.fixture(autouse=True, scope="session")
def short_ticks():
    """Servers of this process stop sooner."""
    shorten_ticks()


@pytest.fixture(scope="session")
def postgresql():
    """A PostgreSQL server for whoever needs one; a skip where none is installed."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed (apt install postgresql)")
    with cluster(programs) as running:
        yield running


def pytest_generate_tests(metafunc):
    """Run whatever is marked `every_engine`, and uses the store, once per kind of database."""
    if "database" in metafunc.fixturenames and metafunc.definition.get_closest_marker("every_engine"):
        metafunc.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def database(request, tmp_path):
    """The URL of a database without rows: an SQLite file, where nothing else is asked for."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return without_rows(tmp_path / "state.db")
    return request.getfixturevalue("postgresql").without_rows()


@pytest.fixture
def clock():
    """What gives the store the seconds since 1970; tests that move time have their own."""
    return time.time


@pytest.fixture
def store(database, tmp_path, clock):
    with open_coordinator_store(database, tmp_path / "blobs", clock=clock) as opened:
        opened.lineage_key = lambda: LINEAGE
        yield opened


@pytest.fixture
def bundle(tmp_path):
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def register(store, bundle):
    """Register the hand-made bundle as a task, with the name and the settings given; answers its id."""

    def make(bundle=bundle, name=None, **settings):
        given = {"population": "phones", "goal": 2, "rounds": 2, "over_selection": 1.0} | settings
        settings = TaskSettings(**given)
        release = released(bundle, settings, RELEASE, LINEAGE.signer) if settings.secagg else None
        return store.register_task(bundle, settings, release, name=name).id

    return make


@pytest.fixture
def client(store, database, tmp_path):
    (tmp_path / "keys.lineage").write_bytes(PEM)
    settings = Settings(
        database=database,
        keys=tmp_path / "keys",
        blobs=tmp_path / "blobs",
        port=0,
        admin_port=0,
        retry_min_s=3,
        retry_max_s=3,
        max_wait_s=5,
        message_limit_bytes=2048,
        authority=key_text(AUTHORITY_KEY),
        authority_url="https://authority.example",
    )
    with serving(settings) as url, speaking_to(url) as opened:
        yield opened


@pytest.fixture
def served(store, tmp_path):
    """Serve, with a page for browsers, and with whoever is on this machine a viewer; gives the URLs."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").touch()
    settings = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "page": tmp_path / "page"}
    with serving_both(Settings(**settings, port=0, admin_port=0, loopback_viewer=True)) as urls:
        yield urls


@pytest.fixture
def locked(store, tmp_path):
    """Serve, with tokens asked of everybody; gives a client of the pages."""
    settings = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs"}
    with (
        serving_both(Settings(**settings, port=0, admin_port=0)) as urls,
        httpx2.Client(base_url=urls.admin, timeout=10) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def chrome():
    """A real browser."""
    with chromium() as found:
        yield found


@pytest.fixture
def browser(chrome):
    """The browser as wide as a small phone, with nothing open, and nothing in its log."""
    look_as(chrome, 360)
    chrome.get("about:blank")
    chrome.delete_all_cookies()
    chrome.get_log("browser")
    return chrome


def committed(store, task, number):
    """The model after round `number`, once it is there: the last receipt is sent before the round is closed."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return store.checkpoint(task, number)["params"]
        except UnknownRound:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def states(store, task):
    """Every attempt at a round of a task: number, attempt, state and reason."""
    return [(one.number, one.attempt, one.state.value, one.reason) for one in store.rounds(task)]


def unmask_at_once(work):
    """Take masks off here and now, where the coordinator has processes for it."""
    future = Future()
    try:
        future.set_result(work.run())
    except Exception as error:
        future.set_exception(error)
    return future


def draw_at_once(asked):
    """The beacon that the authority draws, here and now."""
    future = Future()
    future.set_result(Beacons(AUTHORITY).draw(asked, 0.0))
    return future


def bare(rejected: Rejected) -> Rejected:
    """A rejection without its token, which no test can foresee."""
    assert isinstance(rejected, Rejected)
    return msgspec.structs.replace(rejected, token="")


class Desk:
    """A driver without its thread, on a clock that only the test moves: every turn is one call."""

    def __init__(
        self,
        store,
        source=None,
        url="http://desk",
        lease_s=math.inf,
        *,
        now=0.0,
        unmask=unmask_at_once,
        draw=draw_at_once,
        retry=RETRY,
        authority=AUTHORITY_KEY,
        lineage=LINEAGE,
        drives=True,
        quiet_s=GRACE_S,
    ):
        self.now = now
        self.store = store
        self.membership = Membership(store, ReplicaConfig(lease_s=lease_s, drives=drives, quiet_s=quiet_s), KEYS)
        self.membership.listen_at(url)
        secure = SecureRoundFactory(KEYS, authority, Executors(unmask, draw), lineage)
        self.driver = Driver(self.membership, secure, retry, 16, clock=lambda: self.now, source=source)
        self.driver.recover()

    def turn(self, *commands) -> list[Future]:
        queued = [QueuedCommand(command, Future()) for command in commands]
        self.driver.turn(queued)
        return [one.future for one in queued]

    def ask(self, command):
        (future,) = self.turn(command)
        return future.result(timeout=0)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    def hold(self, given) -> None:
        """From now on the device with this assignment is there."""
        self.driver.presence.begin(given.assignment)

    def live(self, seconds: float, *here, step_s=0.5) -> None:
        """Let time pass as it does, in small steps; devices with the assignments `here` ask something at every one."""
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            for given in here:
                self.hold(given)
                self.driver.presence.end(given.assignment, broken=False)
            self.turn()

    def arrive(self, device: str, population="phones", formats=("onnx",), examples=None, **stated):
        able = msgspec.structs.replace(CAPABILITIES, formats=formats)
        message = CheckIn(capabilities=able, examples=examples or {"default": 10}, **stated)
        return self.ask(CheckInDevice(population, device, Eligibility.of(device, message)))

    def wait(self, device: str, seconds=10.0, **kwargs) -> Future:
        (future,) = self.turn(AwaitAssignment(self.arrive(device, **kwargs).session, device, seconds))
        return future

    def assign(self, *devices: str):
        """Check everyone in and wait; answers their assignments, by slot."""
        futures = [self.wait(device) for device in devices]
        return sorted((future.result(timeout=0) for future in futures), key=lambda assignment: assignment.slot)

    def report(self, assignment, delta=(0, 0, 0, 0), weight=1.0, loss=0.0, sha256=None, vector=None):
        vector = report_vector(delta, weight, loss) if vector is None else vector
        return self.ask(CountReport(assignment.assignment, sha256 or vector.tobytes().hex()[:64], vector))

    def give_up(self, assignment, reason="runtime-failed"):
        return self.ask(AbortAssignment(assignment.assignment, Abort(reason)))


@pytest.fixture
def new_desk(store) -> Callable[[], Desk]:
    return lambda source=None: Desk(store, source)


@pytest.fixture
def desk(new_desk) -> Desk:
    return new_desk()


@pytest.fixture
def failing_commit(store):
    """While `failing` is set, COMMIT raises, as on a full disk."""
    switch = {"failing": False}

    def fail(_):
        if switch["failing"]:
            raise sqlalchemy.exc.OperationalError("COMMIT", {}, Exception("database or disk is full"))

    sqlalchemy.event.listen(store.database._engines.writer, "commit", fail)
    return switch
