"""A device that an operator revokes is refused everywhere, and what it did there ends."""

from __future__ import annotations

import contextlib

import pytest
import sqlalchemy
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.errors import DeviceRevoked, NoLongerNeeded, UnknownDeviceId
from coordinator.settings import Settings
from fedcore.wire.messages import CheckIn, decode_problem, encode
from fedcore.wire.signatures import PublicKey, Signer, device_id
from tests.coordinator.devices import CAPABILITIES, SignedBy, enrol, speaking_to
from tests.coordinator.replicas import until
from tests.servers import serving

CHECK_IN = encode(CheckIn(capabilities=CAPABILITIES, examples={"default": 10}))


@pytest.fixture
def enrolled(store):
    """Devices of the desk, which knows no keys, as rows."""

    def make(*names):
        with store.database.writing() as records:
            for name in names:
                records.devices.add(name, f"ed25519:{name}", "none")

    return make


def refused(answer):
    return answer.status_code == 403 and decode_problem(answer.content).slug == "device-revoked"


@pytest.mark.every_engine
def test_revoked_device_waits_no_more_and_its_assignment_is_anothers(store, register, desk, enrolled):
    task = register(goal=2, rounds=1)
    enrolled("a", "b", "c")
    given = {one.assignment: one for one in desk.assign("a", "b")}
    mine = next(given[one.id] for one in store.cohort(task, 1) if one.device == "a")
    desk.hold(mine)
    waiting = desk.wait("c", 100.0)
    store.revoke_device("c")
    desk.pass_time(1)
    with pytest.raises(DeviceRevoked):
        waiting.result(timeout=0)
    store.revoke_device("a")
    replacement = desk.wait("d", 100.0)
    desk.live(2)
    assert {one.device: one.state.value for one in store.cohort(task, 1)} == {
        "a": "lost",
        "b": "assigned",
        "d": "assigned",
    }
    with pytest.raises(NoLongerNeeded):
        desk.report(mine)
    assert replacement.result(timeout=0).task == task


@pytest.fixture
def settings(database, tmp_path):
    """Those of a coordinator where any device may enrol."""
    return Settings(
        database=database,
        keys=tmp_path / "keys",
        blobs=tmp_path / "blobs",
        port=0,
        admin_port=0,
        accept_unattested=True,
    )


@pytest.mark.security("muster coordinator devices revoke sends a device away")
def test_device_is_refused_at_every_replica_and_taken_back(store, settings, register):
    register()
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    name = device_id(PublicKey.of(key).text)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(settings)) for _ in range(2)]
        first, second = (stack.enter_context(speaking_to(url)) for url in urls)
        for one in (key, other):
            assert enrol(first, one).status_code == 200

        def ask(client, key=key):
            auth = SignedBy(Signer(device_id(PublicKey.of(key).text), key))
            return client.post("/v1/populations/phones/checkins", content=CHECK_IN, auth=auth)

        for client in (first, second):
            until(lambda: ask(client).status_code == 200)  # noqa: B023 - called before the next one
        store.revoke_device(name)
        for client in (first, second):
            until(lambda: refused(ask(client)))  # noqa: B023 - called before the next one
            assert ask(client, other).status_code == 200
            assert refused(enrol(client, key))
        store.allow_device(name)
        for client in (first, second):
            until(lambda: ask(client).status_code == 200)  # noqa: B023 - called before the next one
            assert enrol(client, key).status_code == 200


def test_device_revoked_before_the_start_is_refused(store, settings):
    key = Ed25519PrivateKey.generate()
    with serving(settings) as url, speaking_to(url) as client:
        assert enrol(client, key).status_code == 200
    store.revoke_device(device_id(PublicKey.of(key).text))
    with serving(settings) as url, speaking_to(url) as client:
        auth = SignedBy(Signer(device_id(PublicKey.of(key).text), key))
        assert refused(client.post("/v1/populations/phones/checkins", content=CHECK_IN, auth=auth))


@pytest.mark.every_engine
def test_devices_are_listed_newest_first_and_revoked_ones_alone(store, enrolled):
    enrolled("a")
    enrolled("b")
    store.revoke_device("a", "operator alice")
    assert [one.id for one in store.devices()] == ["b", "a"]
    assert [one.id for one in store.devices(limit=1)] == ["b"]
    assert [one.id for one in store.devices(revoked=True)] == ["a"]
    with store.database.reading() as records:
        assert records.devices.counts() == (2, 1)
    for change in (store.revoke_device, store.allow_device):
        with pytest.raises(UnknownDeviceId, match="no device 'nope'"):
            change("nope")


def test_newest_devices_are_found_by_an_index(store):
    statements = []
    sqlalchemy.event.listen(store.database.engine, "before_cursor_execute", lambda *args: statements.append(args[2:4]))
    store.devices(limit=5)
    text, values = next(one for one in statements if "enrolled_at DESC" in one[0])
    with store.database.engine.connect() as connection:
        plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)]
    assert any("USING INDEX devices_enrolled" in step for step in plan)
