"""Answers that wait to be read: they take bounded memory in all, and nobody else waits for their readers."""

import itertools
import re
import threading
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.api.devices import blobs
from coordinator.rules.task_settings import TaskSettings
from fedcore import checkpoint
from fedcore.plan import BlobRef
from tests.coordinator.bundles import make_bundle, make_plan, report_vector
from tests.coordinator.connections import begun, rest_of, status_of
from tests.coordinator.devices import speaking_to
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, blob, check_in, put, refused

pytestmark = pytest.mark.promise("Unread answers take bounded memory and delay no other reader")

VALUES, ROUNDS = 1 << 21, 6
SIZE, PLAN = 4 * VALUES, make_plan(VALUES)
PAIRS = ROUNDS * (ROUNDS - 1)
PIECE = 1 << 18


def memory(coordinator, what="VmRSS"):
    """Bytes of memory of a coordinator's process."""
    status = Path(f"/proc/{coordinator.pid}/status").read_text()
    return 1024 * int(re.search(rf"{what}:\s+(\d+)", status)[1])


def at_random(seed):
    return np.random.default_rng(seed).standard_normal(VALUES, np.float32)


def versions(store, client, folder, rounds=ROUNDS, name="first"):
    """The digests of the checkpoints of a task whose every model is another, with deltas that are hardly shorter."""
    settings = TaskSettings(population="phones", goal=1, rounds=rounds, over_selection=1.0)
    task = store.register_task(make_bundle(folder / name, PLAN, start=at_random(list(name.encode()))), settings).id
    found = []
    until(lambda: "session" in check_in(client).json())
    for number in range(1, rounds + 1):
        (given,) = assign(client, "a")
        found.append(given.checkpoint.sha256)
        report = report_vector(at_random(number), 1, plan=PLAN)
        assert put(client, given.assignment, checkpoint.encode({"report": report})).status_code == 200
        until(lambda number=number: [one.state for one in store.rounds(task)].count("committed") == number)
    return found


@pytest.fixture
def coordinator(request, coordinators, tmp_path):
    """A process with little room for answers: a quarter is for deltas."""
    settings = {"retry_min_s": 0.0, "retry_max_s": 0.1, "answers_bytes": request.param}
    with coordinators.local(tmp_path / "coordinator", **settings) as local:
        yield local


@pytest.mark.security("holds no more than the limits say, and devices that go on are served")
@pytest.mark.parametrize("coordinator", [12 * SIZE], indirect=True)
@pytest.mark.parametrize("devices", [1, PAIRS])
def test_unread_deltas_take_bounded_memory_and_nobody_waits_for_them(coordinator, tmp_path, devices):
    with speaking_to(coordinator.url, timeout=60) as client, ExitStack() as open_:
        found = versions(coordinator.store, client, tmp_path)
        signers = [client.devices[f"attacker {number}"] for number in range(devices)]
        client.devices["honest"]
        before = memory(coordinator)
        pairs = itertools.permutations(found, 2)
        for (base, target), signer in zip(pairs, itertools.cycle(signers)):
            path = f"/v1/blobs/{target}/deltas/{base}"
            open_.enter_context(begun(client, signer, "GET", path, receive_bytes=4096))
        base, target = found[-2:]
        answer = client.get(f"/v1/blobs/{target}/deltas/{base}", auth=client.devices["honest"])
        if devices > 1 and answer.status_code != 200:
            refused(answer, "unknown-blob")  # there is no room: then it fetches the whole
            answer = client.get(f"/v1/blobs/{target}", auth=client.devices["honest"])
        assert len(answer.content) > SIZE / 2
        # What is held, and a delta in the making, which takes four times its blob.
        assert memory(coordinator, "VmHWM") - before < PAIRS / 2 * SIZE


def test_only_two_checkpoints_of_one_task_have_a_delta(store, client, tmp_path):
    (one, another), (foreign, _) = (versions(store, client, tmp_path, 2, name) for name in ("first", "second"))
    assert blob(client, f"{another}/deltas/{one}").status_code == 200
    for pair in ((one, foreign), (foreign, another)):
        refused(blob(client, "{}/deltas/{}".format(*pair)), "unknown-blob")


def test_deltas_that_nobody_waits_for_any_more_are_not_made(store, client, tmp_path, monkeypatch):
    made, go_on = [], threading.Event()

    def make(base, target):
        made.append((BlobRef.of(base).sha256, BlobRef.of(target).sha256))
        assert go_on.wait(60)
        return b"shorter"

    asked, left, between = [], [], blobs.Deltas.between

    @asynccontextmanager
    async def counted(*arguments):
        asked.append(arguments)
        try:
            async with between(*arguments) as delta:
                yield delta
        finally:
            left.append(arguments)

    monkeypatch.setattr(blobs, "delta_between", make)
    monkeypatch.setattr(blobs.Deltas, "between", counted)
    found = versions(store, client, tmp_path, 4)
    pairs = list(itertools.permutations(found, 2))
    paths = [f"/v1/blobs/{target}/deltas/{base}" for base, target in pairs]
    signers = [client.devices[f"device {number}"] for number in range(len(pairs))]
    with ExitStack() as open_:
        asks = zip(signers, paths, strict=True)
        first = open_.enter_context(begun(client, next(asks)[0], "GET", paths[0]))
        until(lambda: made)
        *others, last = (open_.enter_context(begun(client, signer, "GET", path)) for signer, path in asks)
        until(lambda: len(asked) == len(pairs))
        for one in others:
            one.close()
        until(lambda: len(left) == len(others))
        go_on.set()
        assert (status_of(first), status_of(last)) == (200, 200)
    assert made == [pairs[0], pairs[-1]]


@pytest.mark.security("holds no more than the limits say, and devices that go on are served")
@pytest.mark.parametrize("coordinator", [64 * PIECE], indirect=True)
def test_unread_blobs_take_bounded_memory_and_leave_slow_readers_alone(coordinator, tmp_path):
    many = 600
    with speaking_to(coordinator.url, timeout=60) as client, ExitStack() as open_:
        (sha256,) = versions(coordinator.store, client, tmp_path, 1)
        whole, path = coordinator.store.blobs.get(sha256), f"/v1/blobs/{sha256}"
        before = memory(coordinator)
        slow = open_.enter_context(
            begun(client, client.devices["slow"], "GET", path, receive_bytes=1 << 16, Connection="close")
        )
        got = slow.recv(1 << 10)
        attackers = []
        for number in range(many):
            attackers.append(open_.enter_context(begun(client, client.devices["a"], "GET", path, receive_bytes=4096)))
            if number % 5 == 0:
                got += slow.recv(1 << 16)
        for one in attackers:
            one.recv(1)
        while piece := slow.recv(1 << 16):
            got += piece
        assert got.endswith(whole)
        assert memory(coordinator, "VmHWM") - before < 0.75 * many * PIECE
        assert len(rest_of(attackers[0])) < len(whole)
