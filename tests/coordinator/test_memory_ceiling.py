"""A hostile crowd against one coordinator under a ceiling of memory, while honest devices train on."""

import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import numpy as np
import pytest

from coordinator.rules.task_settings import Buffered, TaskSettings
from fedcore import checkpoint
from fedcore.checkpoint import applied
from fedcore.plan import BlobRef
from fedcore.wire import messages
from fedcore.wire.messages import Assignment
from tests.coordinator.bundles import make_bundle, make_plan, report_vector
from tests.coordinator.devices import speaking_to
from tests.coordinator.hostile import HELLO, MESSAGE, Strangers, Swarm
from tests.coordinator.replicas import until
from tests.coordinator.test_api import digest_of
from tests.sampled import sampled

pytestmark = pytest.mark.promise("A hostile crowd stays within the limits, and honest devices train on")

VALUES, PHONES = 1 << 21, 3
SIZE, PLAN = 4 * VALUES, make_plan(VALUES)
CONNECTIONS, OF_ADDRESS = 600, 55
CROWD = [
    ("silence", 200), ("head", 50), ("document", 50), ("enrolment", 50), ("message", 50), ("wait", 50),
    ("pipeline", 50), ("upload", 6), *[("blob", 50)] * 3, *[("delta", 50)] * 2,
]  # fmt: skip
"""What crowds at one address each do, and on how many connections at a time."""
LIMITS = {
    "connection_limit": CONNECTIONS,
    "address_connection_limit": OF_ADDRESS,
    "address_limit_per_minute": 0,
    "trusted_proxies": "127.0.0.1",
    "reports_bytes": (6 + PHONES + 1) * SIZE,  # of all devices at work
    "answers_bytes": 8 * SIZE,
    "max_wait_s": 5,
}
ROOM = LIMITS["reports_bytes"] + LIMITS["answers_bytes"] + CONNECTIONS * MESSAGE + 4 * SIZE
"""What the manual says that it takes: reports, answers, messages on their way, and a delta in the making."""


class Phone(threading.Thread):
    """An honest device. It takes part again and again, by the delta to the model that it has, and checks what it gets.

    Whenever it is told to come back, or its connection breaks, it asks again.
    """

    def __init__(self, url, number):
        super().__init__()
        self._url, self._name, self._address = url, f"phone {number}", f"198.51.100.{number}"
        self._random = np.random.default_rng(number)
        self._model = b""
        self.sessions, self.problem = 0, None
        self._over = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()

    def run(self):
        with speaking_to(self._url, timeout=30) as client:
            while not self._over.is_set() and self.problem is None:
                try:
                    self._session(client)
                except httpx2.TransportError:
                    continue
                except Exception as error:
                    self.problem = error

    def _ask(self, client, method, path, *expected, **given):
        given["headers"] = {"X-Forwarded-For": self._address, **given.get("headers", {})}
        while (answer := client.request(method, path, auth=client.devices[self._name], **given)).status_code == 503:
            if self._over.wait(0.05):
                raise httpx2.TransportError("it is over")
        assert answer.status_code in expected, answer.text
        return answer

    def _session(self, client):
        hello = self._ask(client, "POST", "/v1/populations/phones/checkins", 200, content=HELLO).json()
        if hello["outcome"] != "accepted":
            time.sleep(0.05)
            return
        path = f"/v1/sessions/{hello['session']}/assignments"
        answer = self._ask(client, "POST", path, 200, 404, headers={"Prefer": "wait=5"})
        if answer.json().get("outcome") != "assigned":
            return
        given = messages.decode(answer.content, Assignment)
        self._fetch(client, given.checkpoint)
        report = report_vector(self._random.standard_normal(VALUES, np.float32), 1, plan=PLAN)
        body = checkpoint.encode({"report": report})
        path, headers = f"/v1/assignments/{given.assignment}/report", {"Content-Digest": digest_of(body)}
        receipt = self._ask(client, "PUT", path, 200, 410, content=body, headers=headers)
        self.sessions += receipt.status_code == 200

    def _fetch(self, client, ref):
        path = f"/v1/blobs/{ref.sha256}"
        if self._model:
            base = BlobRef.of(self._model).sha256
            answer = self._ask(client, "GET", f"{path}/deltas/{base}", 200, 404)
            if answer.status_code == 200:
                self._model = applied(answer.content, self._model, ref)
                return
        self._model = ref.check(self._ask(client, "GET", path, 200).content)


def start_tasks(store, folder):
    """A task of the honest, one for whose rounds there are too few devices, and one that takes all devices at once."""
    bundle = make_bundle(folder, PLAN, start=np.zeros(VALUES, np.float32))
    given = {"goal": PHONES - 1, "rounds": 10_000, "over_selection": 1.0, "selection_timeout_s": 5.0}
    honest = store.register_task(bundle, TaskSettings(population="phones", **given)).id
    store.register_task(bundle, TaskSettings(population="idle", **given | {"goal": 10_000}))
    store.register_task(bundle, TaskSettings(population="uploading", **given, buffered=Buffered()))
    return honest


def train_on(phones, sessions):
    """Return once every phone has taken part so many times more."""
    wanted = [phone.sessions + sessions for phone in phones]
    until(lambda: all(p.problem or p.sessions >= w for p, w in zip(phones, wanted, strict=True)), 20 * sessions)
    assert [phone.problem for phone in phones] == [None] * PHONES


def open_files(many, *processes):
    """Allow processes so many open files, as far as the system does."""
    for pid in processes:
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(many, hard), hard))


def limit_memory(pid, client, sha256):
    """Allow a coordinator so much more address space than it has once all of its threads run.

    Twice what the manual says is for the holes between blocks, which stay the process's.
    """
    auth = client.devices["early"]
    with ThreadPoolExecutor(80) as pool:
        for answer in pool.map(lambda _: client.get(f"/v1/blobs/{sha256}", auth=auth), range(160)):
            assert answer.status_code == 200
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 2 * ROOM
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


@pytest.mark.security("holds no more than the limits say, and devices that go on are served")
@pytest.mark.parametrize("sessions", sampled((5, 60), (5,)))
def test_a_hostile_crowd_neither_fills_memory_nor_stops_honest_devices(coordinators, tmp_path, sessions):
    with coordinators.local(tmp_path / "coordinator", **LIMITS) as local, ExitStack() as stack:
        open_files(2 * CONNECTIONS + 400, 0, local.pid)
        task = start_tasks(local.store, tmp_path / "bundle")
        phones = [stack.enter_context(Phone(local.url, number)) for number in range(1, PHONES + 1)]
        until(lambda: len([one for one in local.store.rounds(task) if one.checkpoint_sha256]) > 5, 60)
        versions = [one.checkpoint_sha256 for one in local.store.rounds(task) if one.checkpoint_sha256]
        client = stack.enter_context(speaking_to(local.url, timeout=30))
        limit_memory(local.pid, client, versions[0])
        swarms = []
        for number, (kind, many) in enumerate(CROWD):
            strangers = Strangers(client, f"203.0.113.{number}", versions, "uploading", SIZE)
            swarms.append(stack.enter_context(Swarm(many, getattr(strangers, kind))))
        until(lambda: all(swarm.complete.is_set() for swarm in swarms), 60)
        train_on(phones, sessions)
        failed = [one for one in local.samples("muster_request_duration_seconds") if one.labels["status"] == "500"]
        assert failed == []
