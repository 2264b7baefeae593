"""Rounds of thousands of light devices, some of which fall silent or die: no round stalls, and nothing is left over."""

import asyncio
import time

import pytest
import sqlalchemy

from benchmarks.load import POPULATION, LoadConfig, LoadFleet, null_coordinator
from benchmarks.usage import Usage
from coordinator.rules.states import AssignmentState
from coordinator.store.tables import ASSIGNMENTS, ROUNDS
from coordinator.store.tasks import TaskSettings

SILENT, KILLED = 0.08, 0.2
PATIENCE_S = 600.0
LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.promise("Silent devices, and devices that die during an upload, stall no round")
@pytest.mark.parametrize(("devices", "size"), [(25, 50), pytest.param(10_000, 1000, marks=LONG)])
def test_round_with_silent_and_dying_devices_is_won_at_its_first_attempt(capsys, devices, size):
    goal = round(devices * (1 - SILENT - KILLED)) - (devices // 50)  # one in fifty is a reserve
    waits = {"selection_timeout_s": PATIENCE_S, "reporting_deadline_s": PATIENCE_S}
    task = TaskSettings(population=POPULATION, goal=goal, over_selection=devices / goal, rounds=1, **waits)
    bounds = {"connection_limit": 2 * devices, "queue_limit": 2 * devices, "max_wait_s": PATIENCE_S}
    with null_coordinator(size, task, **bounds) as (server, name):

        async def completed():
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until and not await asyncio.to_thread(server.committed, name):
                await asyncio.sleep(0.25)

        fleet = asyncio.run(run(server, devices, completed, wait_s=PATIENCE_S))
        (row,) = server.store.rounds(name)
        (record,) = server.committed(name)
        used = Usage.of(server.pid)
    with capsys.disabled():
        print(f"\n{devices} devices: {record.seconds:.1f} s, {used.cpu_s:.1f} CPU s, {used.peak_rss_mb:.0f} MB at most")
    assert (row.attempt, record.assigned, record.reported) == (1, devices, goal)
    assert fleet.endings["reported"] >= goal
    assert fleet.endings["killed"] == round(KILLED * devices)


@pytest.mark.parametrize("minutes", [0.1, pytest.param(30, marks=LONG)])
def test_a_coordinator_that_works_for_long_keeps_nothing(capsys, minutes):
    devices, seconds = 300 if minutes > 1 else 60, 60 * minutes
    goal = devices // 6
    waits = {"selection_timeout_s": 10.0, "reporting_deadline_s": 20.0}
    task = TaskSettings(population=POPULATION, goal=goal, minimum=goal // 2, rounds=10**6, over_selection=2.0, **waits)
    with null_coordinator(10_000, task) as (server, name):
        before = Usage.of(server.pid)

        asyncio.run(run(server, devices, lambda: asyncio.sleep(seconds), pause_s=1.0, wait_s=20.0))
        server.store.cancel(name)
        time.sleep(10)  # until connections are closed
        committed, after, left = server.committed(name), Usage.of(server.pid), waiting_rows(server.store, name)
    with capsys.disabled():
        print(f"\nsoak: {len(committed)} rounds, {before.rss_mb:.0f} MB before, {after.rss_mb:.0f} MB after")
    assert committed
    assert left == 0
    assert after.rss_mb < 400
    assert after.descriptors <= before.descriptors + 20  # connections to the database, and files of the log


async def run(server, devices, while_, **more):
    light = LoadConfig(coordinator=server.url, devices=devices, silent=SILENT, killed=KILLED, **more)
    async with LoadFleet(light) as fleet:
        await fleet.enrol()
        await fleet.run(while_)
    return fleet


def waiting_rows(store, task):
    """Waiting assignments of ended rounds."""
    over = (ROUNDS.c.task == task) & ROUNDS.c.ended_at.is_not(None)
    waiting = over & (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED)
    query = sqlalchemy.select(ASSIGNMENTS.c.id).select_from(ASSIGNMENTS.join(ROUNDS)).where(waiting)
    with store.database.engine.connect() as connection:
        return len(connection.execute(query).all())
