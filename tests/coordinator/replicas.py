"""Several coordinator processes on one database, and devices that ask whichever comes next."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import msgspec
import numpy as np

from fedcore.wire import messages
from fedcore.wire.messages import Assignment, CheckIn
from tests.coordinator.bundles import START, report_body
from tests.coordinator.devices import CAPABILITIES, speaking_to
from tests.coordinator.fork_server import CoordinatorForkServer, runs, urls
from tests.coordinator.test_api import digest_of

LEASE_S = 2.0


class Replica:
    """A process, and where it answers."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid = pid
        self.url = url

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a power cut would, and return when it is no more."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.ended()

    def ended(self) -> None:
        """Return when it is no more."""
        while runs(self.pid):
            time.sleep(0.005)


class Replicas:
    """The replicas on a database that a test started."""

    def __init__(self, coordinators: CoordinatorForkServer, folder: Path, store, database: str) -> None:
        self._coordinators = coordinators
        self._folder = folder
        self._store = store
        self._database = database
        self._numbers = itertools.count()
        self.alive: list[Replica] = []

    def start(
        self, environment: dict[str, str] | None = None, silence_s: float | None = None, **settings: object
    ) -> Replica:
        """One more, once it answers. silence_s: as for `CoordinatorForkServer.fork`."""
        ready = self._folder / f"url{next(self._numbers)}"
        given = {"database": self._database, "blobs": str(self._folder / "blobs"), "keys": str(self._folder / "keys")}
        given |= {"port": 0, "admin_port": 0, "lease_s": LEASE_S, "retry_min_s": 0.02, "retry_max_s": 0.05}
        given |= {"device_limit_per_minute": 0}
        pid = self._coordinators.fork(ready, given | settings, environment or {}, silence_s=silence_s)
        self.alive.append(Replica(pid, urls(pid, ready)[0]))
        return self.alive[-1]

    def holder(self, population: str = "phones") -> Replica | None:
        """The replica that drives a population, if one of those that should be alive does."""
        with self._store.database.reading() as records:
            urls = {replica.id: replica.url for replica in records.leases.replicas()}
            held = {lease.population: urls.get(lease.holder) for lease in records.leases.leases()}
        return next((replica for replica in self.alive if replica.url == held.get(population)), None)

    def kill(self, replica: Replica) -> None:
        """Kill one, and expect no more of it."""
        self.alive.remove(replica)
        replica.kill()


@contextmanager
def replicas_on(coordinators: CoordinatorForkServer, folder: Path, store, database: str) -> Iterator[Replicas]:
    """No replica yet, and the means to start some; all are killed in the end."""
    replicas = Replicas(coordinators, folder, store, database)
    try:
        yield replicas
    finally:
        for replica in replicas.alive:
            replica.kill()


@contextmanager
def driver_and_other(replicas):
    """Clients of a replica that drives the population, and of one that does not, with these replicas."""
    driver = replicas.start()
    until(replicas.holder)
    other = replicas.start(role="api")
    with speaking_to(driver.url) as here, speaking_to(other.url, devices=here.devices) as there:
        yield here, there, other


def until(condition: Callable[[], object], seconds: float = 20.0) -> object:
    """What `condition` gives once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "this did not come about"
        time.sleep(0.01)
    return found


def delta_of(assignment: Assignment) -> list[int]:
    """What a device reports: whole numbers, which add up exactly in any order, and another for every slot and round."""
    return [1 << assignment.slot, assignment.round, assignment.round * (assignment.slot + 1), 1]


def undisturbed(rounds: int, goal: int) -> np.ndarray:
    """The model after so many rounds of `delta_of`, of which each counted every slot once."""
    model = START.astype(np.float64)
    for round_ in range(1, rounds + 1):
        seats = [_Seat(s, round_) for s in range(goal)]
        model += np.mean([delta_of(seat) for seat in seats], axis=0)
    return model.astype(np.float32)


class _Seat(msgspec.Struct):
    slot: int
    round: int


class Phones:
    """Devices on threads. Each request of each goes to the next address of the list, as through a load balancer.

    `watch` is told "accepted", "assigned" and "reported" as they happen, with the assignment when there is one.
    """

    def __init__(self, count: int, urls: Callable[[], list[str]], watch: Callable[..., None] = lambda *_: None) -> None:
        self._urls = urls
        self._watch = watch
        self._turn = itertools.count()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._live) for _ in range(count)]
        self.problems: list[Exception] = []
        self.statuses: set[int] = set()

    def __enter__(self) -> Phones:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for problem in self.problems if error is not None else ():
            error.add_note(f"a device had ended: {''.join(traceback.format_exception(problem))}")

    def _live(self) -> None:
        with speaking_to(self._urls()[0]) as client:
            while not self._over.is_set():
                try:
                    self._session(client)
                except httpx2.TransportError:
                    time.sleep(0.02)
                except Exception as error:
                    self.problems.append(error)
                    return

    def _ask(self, client: httpx2.Client, method: str, path: str, **given: object) -> httpx2.Response:
        urls = self._urls()
        client.base_url = urls[next(self._turn) % len(urls)]
        response = client.request(method, path, auth=client.devices["phone"], **given)
        self.statuses.add(response.status_code)
        assert response.status_code < 500 or response.status_code == 503, response.text
        return response

    def _session(self, client: httpx2.Client) -> None:
        hello = CheckIn(capabilities=CAPABILITIES, examples={"default": 10})
        answer = self._ask(client, "POST", "/v1/populations/phones/checkins", content=messages.encode(hello))
        if answer.status_code != 200 or answer.json()["outcome"] != "accepted":
            time.sleep(0.02)
            return
        self._watch("accepted", None)
        path = f"/v1/sessions/{answer.json()['session']}/assignments"
        answer = self._ask(client, "POST", path, headers={"Prefer": "wait=2"})
        if answer.status_code == 200 and answer.json()["outcome"] == "assigned":
            assignment = messages.decode(answer.content, Assignment)
            self._watch("assigned", assignment)
            if self._report(client, assignment):
                self._watch("reported", assignment)

    def _train(self, client: httpx2.Client, assignment: Assignment) -> bytes:
        """The report of an assignment; one that does not depend on the model."""
        return report_body(delta_of(assignment), 1)

    def _report(self, client: httpx2.Client, assignment: Assignment) -> bool:
        """Send the report until there is an answer that is final; whether it was a receipt."""
        body = self._train(client, assignment)
        while not self._over.is_set():
            with suppress(httpx2.TransportError):
                path = f"/v1/assignments/{assignment.assignment}/report"
                answer = self._ask(client, "PUT", path, content=body, headers={"Content-Digest": digest_of(body)})
                if answer.status_code != 503:
                    return answer.status_code == 200
            time.sleep(0.02)
        return False
