"""Devices that work hold their assignments, over real HTTP: they hear when they are not needed, and are missed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import httpx2
import pytest

from coordinator.rules.states import AssignmentState
from tests.coordinator.bundles import report_body
from tests.coordinator.test_api import assign, refused

LONG_S = 4
PATIENCE_S = 30.0


def hold(client, given, seconds=LONG_S, **how):
    path = f"/v1/assignments/{given.assignment}"
    auth = client.devices.owner(given.assignment)
    return client.get(path, headers={"Prefer": f"wait={seconds}"}, auth=auth, **how)


def report(client, given):
    path = f"/v1/assignments/{given.assignment}/report"
    body = report_body([1, 0, 0, 0], 1.0)
    headers = {"Content-Type": "application/octet-stream"}
    return client.put(path, content=body, headers=headers, auth=client.devices.owner(given.assignment))


def test_request_is_held_as_long_as_asked_while_the_report_is_needed(register, client):
    register(goal=1)
    (given,) = assign(client, "a")
    assert given.lost_after_s == pytest.approx(5.01)
    assert not given.over_selected
    answer = hold(client, given, 1)
    assert (answer.status_code, answer.headers["preference-applied"], answer.content) == (204, "wait=1", b"")
    assert answer.elapsed.total_seconds() >= 1
    assert hold(client, given, 0).status_code == 204


def test_device_that_is_one_too_many_hears_it_at_once(register, client):
    register(goal=1, over_selection=2)
    quick, spare = assign(client, "a", "b")
    assert spare.over_selected
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold, client, spare)
        sleep(0.3)
        assert report(client, quick).status_code == 200
        refused(held.result(timeout=PATIENCE_S), "no-longer-needed")  # a hold that lasts its time ends with 204
    refused(hold(client, spare, 0), "no-longer-needed")
    refused(hold(client, quick, 0), "no-longer-needed")


def test_only_the_device_that_was_given_an_assignment_may_hold_it(register, client):
    register(goal=1)
    (given,) = assign(client, "a")
    path = f"/v1/assignments/{given.assignment}"
    refused(client.get(path, auth=client.devices["b"]), "foreign-assignment")
    refused(client.get("/v1/assignments/nobody", auth=client.devices["b"]), "unknown-assignment")


def until_lost(store, task, slot):
    """Wait until a device is lost."""
    until = monotonic() + PATIENCE_S
    while store.cohort(task, 1)[slot].state is not AssignmentState.LOST:
        assert monotonic() < until
        sleep(0.05)


def test_connection_that_breaks_frees_the_place_of_its_device_alone(store, register, client):
    task = register(goal=2)
    here, gone = assign(client, "a", "b")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold, client, here, LONG_S)
        with pytest.raises(httpx2.ReadTimeout):
            hold(client, gone, timeout=0.3)
        until_lost(store, task, gone.slot)
        assert held.result().status_code in (204, 410)
    refused(report(client, gone), "no-longer-needed")


def test_device_that_says_nothing_is_lost(store, register, client):
    task = register(goal=1)
    (given,) = assign(client, "a")
    until_lost(store, task, given.slot)
    refused(hold(client, given, 0), "no-longer-needed")
