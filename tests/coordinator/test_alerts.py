"""Alerts: raised once and cleared once, by one replica, and told to a webhook at least once."""

import asyncio
import itertools
import json
import logging
import re
import ssl
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import msgspec
import pytest
import sqlalchemy

from coordinator.driver.watch import HEADER, AlertSender, Watch, Webhook, send_trial
from coordinator.errors import Unavailable, WebhookFailed
from coordinator.monitoring import Metrics
from coordinator.rules.alerts import AlertKind, of_tasks
from coordinator.rules.progress import Progress, Reason
from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from coordinator.store.tasks import open_coordinator_store
from tests.coordinator.conftest import Desk
from tests.coordinator.receiver import receiving
from tests.coordinator.test_operations import self_made_certificate
from tests.muster.test_cli import in_process
from tests.servers import serving_both

SECRET = b"a secret of sixteen bytes or more"
NOWHERE = Settings(blobs="/nowhere")
FAILED = "round 2 failed 5 times"


class Clock:
    """Seconds since 1970 that only the test moves."""

    now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stuck(store, register):
    """The id of a task that needs somebody."""
    task = register(name="keyboard")
    stop(store, task)
    return task


@pytest.fixture
def watch(store, stuck, clock):
    desk = Desk(store)
    return Watch(store.database, NOWHERE, desk.membership.id, tells=True)


@pytest.fixture(scope="module")
def server():
    with receiving() as running:
        yield running


@pytest.fixture
def receiver(server):
    """The receiver, which was sent nothing yet."""
    server.sent.clear()
    server.answers.clear()
    server.cut.clear()
    yield server
    server.cut.set()


@pytest.fixture
def courier(store, receiver, monkeypatch):
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):  # where nothing listens
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    return AlertSender(store.database, webhook_of(receiver), Metrics(), Clock())


def webhook_of(receiver, **more):
    return Webhook(f"http://erin:pa55@{receiver.address}/alerts?token=t0k3n", SECRET, **more)


def findings(store, tasks, reason):
    """What is found where all tasks are stalled for a reason."""
    return of_tasks([(store.task(id_), Progress(id_, reason, "", stalled=True)) for id_ in tasks.values()])


def stop(store, task):
    """Pause a task as a driver does after failures."""
    with store.database.writing() as records:
        records.move_task(records.task(task), TaskState.PAUSED, "driver", FAILED)


def look_after(watch, clock, seconds):
    """Let time pass, with beats of the driver, and look."""
    clock.now += seconds
    with watch.database.writing() as records:
        records._connection.execute(sqlalchemy.text("UPDATE replicas SET seen_at = :at"), {"at": clock.now})
    return watch.look()


def deliver(courier):
    asyncio.run(courier.deliver())


def due(store):
    with store.database.reading() as records:
        return records.alerts.due(1000)


def secret_file(folder):
    path = folder / "webhook.secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


def told(receiver):
    return [msgspec.json.decode(one.body) for one in receiver.sent]


def count(courier, outcome):
    return courier.metrics.registry.get_sample_value("muster_alert_deliveries_total", {"outcome": outcome}) or 0


def documented():
    """What the documentation verifies events with."""
    text = Path("docs/operations.md").read_text()
    section = text[text.index("### A webhook for alerts") :]
    names = {}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names)
    return names["event_of"]


@pytest.mark.every_engine
def test_an_alert_is_raised_once_and_cleared_after_a_minute(store, stuck, watch, clock):
    began = clock.now
    assert watch.look()
    (alert,) = store.alerts()
    assert (alert.kind, alert.task, alert.task_name, alert.population) == (
        Reason.PAUSED_AFTER_FAILURES, stuck, "keyboard", "phones",
    )  # fmt: skip
    assert (alert.text, alert.raised_at, alert.cleared_at) == (f"paused: {FAILED}", began, None)
    assert "resume the task" in alert.remedy
    store.cancel(stuck)
    look_after(watch, clock, 10)
    look_after(watch, clock, 59)
    assert store.alerts() == [alert]
    look_after(watch, clock, 1)
    (cleared,) = store.alerts()
    assert (cleared.id, cleared.cleared_at) == (alert.id, began + 70)
    assert [one.cleared for one in due(store)] == [False, True]


def test_what_comes_and_goes_within_a_minute_is_one_alert(store, stuck, watch, clock):
    watch.look()
    for _ in range(3):
        store.resume(stuck)
        look_after(watch, clock, 5)
        look_after(watch, clock, 5)
        stop(store, stuck)
        look_after(watch, clock, 40)
    assert [(one.kind, one.cleared_at) for one in store.alerts()] == [(Reason.PAUSED_AFTER_FAILURES, None)]


def test_nothing_is_written_while_only_time_passes(store, watch, clock):
    commits = []
    sqlalchemy.event.listen(store.database._engines.writer, "commit", commits.append)
    watch.look()
    assert len(commits) == 1
    for _ in range(5):
        look_after(watch, clock, 3600)
        commits.pop()  # the beat
    assert len(commits) == 1
    assert len(store.alerts()) == 1


@pytest.mark.every_engine
def test_devices_that_do_not_come_are_one_alert_for_a_population(store, register, clock):
    Desk(store)
    tasks = {name: register(name=name, population=where) for name, where in (("a", "x"), ("b", "x"), ("c", "y"))}
    found = findings(store, tasks, Reason.NO_DEVICES)
    assert [(one.kind, one.task.name) for one in found] == [("no-devices", "a"), ("no-devices", "c")]
    assert [one.task.name for one in findings(store, tasks, Reason.BACK_OFF)] == ["a", "b", "c"]


def test_an_alert_is_deleted_ninety_days_after_it_was_cleared(store, register, stuck, watch, clock):
    other = register(name="words")
    watch.look()
    stop(store, other)
    store.cancel(stuck)
    look_after(watch, clock, 10)
    look_after(watch, clock, 60)
    assert [bool(alert.cleared_at) for alert in store.alerts()] == [False, True]
    look_after(watch, clock, 90 * 86400)
    assert len(store.alerts()) == 2
    look_after(watch, clock, 1)
    assert [(alert.task, alert.cleared_at) for alert in store.alerts()] == [(other, None)]


def test_one_replica_looks_and_another_takes_over(store, stuck, clock):
    first, second = (Desk(store, url=f"http://{name}", lease_s=15.0) for name in ("first", "second"))
    watches = [Watch(store.database, NOWHERE, desk.membership.id, tells=True) for desk in (first, second)]
    assert [watch.look() for watch in watches] == [True, False]
    assert len(store.alerts()) == 1
    first.membership.leave()
    second.pass_time(1)
    assert [watch.look() for watch in watches] == [False, True]
    assert len(store.alerts()) == 1
    store.cancel(stuck)
    clock.now += 5
    watches[1].look()
    clock.now += 60
    second.pass_time(20)
    assert [watch.look() for watch in watches] == [False, True]
    assert store.alerts()[0].cleared_at == clock.now


def test_a_replica_that_has_lost_its_lease_writes_nothing(store, stuck, clock, monkeypatch):
    first, second = (Desk(store, url=f"http://{name}", lease_s=15.0) for name in ("first", "second"))
    watch = Watch(store.database, NOWHERE, first.membership.id, tells=True)

    def lose_it(*_):
        first.membership.leave()
        second.pass_time(1)
        return []

    monkeypatch.setattr("coordinator.driver.watch.findings_here", lose_it)
    assert not watch.look()
    assert store.alerts() == []


def test_nobody_who_looks_is_an_alert_without_a_row(store, register, clock):
    assert store.alerts() == []
    register()
    (alert,) = store.alerts()
    assert (alert.kind, alert.task) == (AlertKind.UNWATCHED, None)
    assert "no coordinator drives population phones" in alert.text
    Desk(store)
    assert store.alerts() == []
    clock.now += 31
    assert [(one.kind, one.raised_at) for one in store.alerts()] == [(AlertKind.UNWATCHED, clock.now - 31)]


def test_an_event_is_told_once_signed_and_as_documented(store, stuck, watch, receiver, courier, clock):
    watch.look()
    for _ in range(2):
        deliver(courier)
    (sent,) = receiver.sent
    (alert,) = store.alerts()
    event_of = documented()
    assert event_of(sent.headers[HEADER], sent.body, SECRET) == {
        "id": f"{alert.id}-raised",
        "event": "raised",
        "alert": alert.id,
        "kind": "paused-after-failures",
        "population": "phones",
        "task": stuck,
        "task_name": "keyboard",
        "text": alert.text,
        "remedy": alert.remedy,
        "raised_at": alert.raised_at,
        "cleared_at": None,
    }
    seconds = int(re.search(r"t=(\d+)", sent.headers[HEADER])[1])
    old = sent.headers[HEADER].replace(str(seconds), str(seconds - 400))
    for header, body, secret in (
        (sent.headers[HEADER], sent.body + b" ", SECRET),
        (sent.headers[HEADER], sent.body, b"another secret of sixteen bytes"),
        (old, sent.body, SECRET),
        ("", sent.body, SECRET),
        (sent.headers[HEADER].partition(",")[2], sent.body, SECRET),
        ("t=1,v1=é", sent.body, SECRET),
    ):
        with pytest.raises(ValueError, match="not signed"):
            event_of(header, body, secret)
    store.cancel(stuck)
    for seconds in (1, 60):
        look_after(watch, clock, seconds)
    deliver(courier)
    events = [(one["id"], one["event"], one["cleared_at"]) for one in told(receiver)]
    assert events[1:] == [(f"{alert.id}-cleared", "cleared", clock.now)]
    assert count(courier, "delivered") == 2


def test_an_event_survives_an_end_between_its_row_and_its_delivery(watch, receiver, courier, store, database, tmp_path):
    watch.look()
    store.close()
    with open_coordinator_store(database, tmp_path / "blobs") as again:
        deliver(AlertSender(again.database, courier.webhook, Metrics()))
    assert [one["event"] for one in told(receiver)] == ["raised"]


def test_an_event_whose_delivery_was_not_noted_comes_again(store, watch, receiver, courier, failing_commit):
    watch.look()
    failing_commit["failing"] = True
    for _ in range(2):
        with pytest.raises(Unavailable):
            deliver(courier)
    assert len(receiver.sent) == 1
    failing_commit["failing"] = False
    deliver(AlertSender(store.database, courier.webhook, Metrics()))  # of a process that knows only the row
    first, second = receiver.sent
    assert first.body == second.body


def test_what_fails_is_tried_again_after_longer_and_longer(watch, receiver, courier, caplog):
    caplog.set_level(logging.DEBUG)
    receiver.answers.extend([500, 302, 404, 200])
    watch.look()
    tries = []
    for _ in range(100):
        before = len(receiver.sent)
        deliver(courier)
        if len(receiver.sent) > before:
            tries.append(courier.clock.now - 1e9)
        courier.clock.now += 5
    assert tries == [0, 10, 30, 70]
    assert {one.path for one in receiver.sent} == {"/alerts?token=t0k3n"}  # the redirect was not followed
    assert (count(courier, "failed"), count(courier, "delivered")) == (3, 1)
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert said[0] == (
        f"an alert was not delivered, and is tried again in 10 s: http://{receiver.address} answered 500, not 2xx"
    )
    assert len(said) == 3
    for secret in ("pa55", "erin", "t0k3n", "/alerts", SECRET.decode()):
        assert secret not in " ".join(said)
        assert secret not in repr(courier)


def test_waits_between_tries_have_an_end(watch, receiver, courier):
    receiver.answers.extend([500] * 20)
    watch.look()
    waits = []
    while deliver(courier) or not count(courier, "delivered"):
        waits.append(courier._next - courier.clock.now)
        courier.clock.now = courier._next
    assert waits == [10, 20, 40, 80, 160, 320, 640] + [900] * 13


def test_a_slow_receiver_is_cut_at_the_limit(store, watch, receiver):
    receiver.answers.append("slow")
    watch.look()
    courier = AlertSender(store.database, webhook_of(receiver, limit_s=0.1), Metrics())
    deliver(courier)
    assert receiver.cut.wait(5)
    assert (count(courier, "failed"), len(due(store))) == (1, 1)


def test_many_events_and_a_slow_receiver_keep_no_look_waiting(store, watch, register, receiver, courier, clock):
    for name in ("a", "b", "c", "d"):
        stop(store, register(name=name))
    watch.look()
    courier.clock = itertools.count(1e9, 4.0).__next__  # a try takes 4 s
    sent = []
    for _ in range(3):
        deliver(courier)
        sent.append(len(receiver.sent))
    assert sent == [3, 5, 5]
    assert due(store) == []


@pytest.mark.every_engine
def test_only_the_first_events_are_read_in_order(store, stuck, watch, clock, register):
    watch.look()
    store.cancel(stuck)
    look_after(watch, clock, 1)
    stop(store, register(name="later"))
    look_after(watch, clock, 60)
    every = due(store)
    assert sorted(event.cleared for event in every) == [False, False, True]
    for limit in range(4):
        with store.database.reading() as records:
            assert records.alerts.due(limit) == every[:limit]


def test_a_clock_that_is_behind_clears_nothing_before_it_was_raised(store, stuck, watch, clock):
    watch.look()
    store.cancel(stuck)
    for seconds in (-3600, 60):
        look_after(watch, clock, seconds)
    assert [event.word for event in due(store)] == ["raised", "cleared"]


def test_an_endless_answer_is_not_read(store, watch, receiver, courier):
    receiver.answers.append("endless")
    watch.look()
    deliver(courier)
    assert receiver.cut.wait(5)
    assert (count(courier, "delivered"), due(store)) == (1, [])


def test_events_from_before_a_webhook_was_set_are_not_told(store, watch, receiver, courier):
    watch.tells = False
    watch.look()
    deliver(courier)
    assert (len(store.alerts()), receiver.sent) == (1, [])


def test_a_receiver_that_is_not_there_is_named_by_its_host_only():
    hook = Webhook("http://erin:pa55@127.0.0.1:9/alerts?token=t0k3n", SECRET)
    with pytest.raises(WebhookFailed, match=r"^http://127\.0\.0\.1:9 cannot be reached: ConnectError$"):
        send_trial(hook)
    with pytest.raises(WebhookFailed, match=r"^https://älerts\.\.example cannot be reached: InvalidURL$"):
        send_trial(Webhook("https://älerts..example/t0k3n", SECRET))
    with pytest.raises(WebhookFailed, match="no webhook is set: set alert_webhook and alert_webhook_secret_file"):
        send_trial(None)


def test_a_receiver_with_the_certificate_of_another_gets_nothing(store, watch, tmp_path):
    certificate, key = self_made_certificate(tmp_path)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(certificate, key)
    watch.look()
    (event,) = due(store)
    with receiving() as server:
        server.socket = own.wrap_socket(server.socket, server_side=True)
        for host, trusted in (
            ("127.0.0.1", ssl.create_default_context()),
            ("localhost", ssl.create_default_context(cafile=certificate)),  # the certificate is for 127.0.0.1
        ):
            hook = Webhook(f"https://{host}:{server.server_port}/", SECRET, _trusted=trusted)
            with pytest.raises(WebhookFailed, match="cannot be reached: ConnectError"):
                asyncio.run(hook.send(event))
        assert server.sent == []
        asyncio.run(Webhook(f"https://{server.address}/", SECRET, _trusted=trusted).send(event))
        assert len(server.sent) == 1


def test_a_coordinator_tells_of_alerts_and_shows_them(store, stuck, receiver, clock, tmp_path):
    clock.now = datetime.now(UTC).timestamp()
    settings = Settings(
        database=f"sqlite:///{tmp_path}/state.db",
        blobs=tmp_path / "blobs",
        port=0,
        admin_port=0,
        loopback_viewer=True,
        alert_webhook=f"http://{receiver.address}/alerts",
        alert_webhook_secret_file=secret_file(tmp_path),
    )
    receiver.answers.append("slow")  # a stop does not wait for it, and loses nothing
    while receiver.came.acquire(blocking=False):
        pass
    with serving_both(settings) as urls:
        assert receiver.came.acquire(timeout=10)
        page = httpx2.get(f"{urls.admin}/").text
        listed = httpx2.get(f"{urls.admin}/admin/v1/alerts").json()
    assert f"paused: {FAILED} <span" in page
    assert f'<a href="/tasks/{stuck}">keyboard' in page
    assert [one["task"] for one in listed] == [stuck]
    assert len(due(store)) == 1
    event = documented()(receiver.sent[0].headers[HEADER], receiver.sent[0].body, SECRET)
    assert event["id"] == f"{listed[0]['id']}-raised"


def test_commands_list_alerts_and_try_the_webhook(store, watch, receiver, tmp_path, monkeypatch):
    watch.look()
    monkeypatch.setenv("MUSTER_DATABASE", f"sqlite:///{tmp_path}/state.db")
    monkeypatch.setenv("MUSTER_BLOBS", str(tmp_path / "blobs"))
    listed = in_process("coordinator", "alerts", "--json")
    (alert, told_nobody) = sorted(json.loads(listed.stdout), key=lambda one: one["kind"])
    assert alert | asdict(store.alerts()[-1]) == alert
    assert told_nobody["kind"] == "unwatched"  # the desk's clock stands in 2001
    assert f"paused: {FAILED}" in " ".join(in_process("coordinator", "alerts", "--last", 1).stdout.split())
    monkeypatch.setenv("MUSTER_ALERT_WEBHOOK", f"http://{receiver.address}/")
    monkeypatch.setenv("MUSTER_ALERT_WEBHOOK_SECRET_FILE", str(secret_file(tmp_path)))
    for _ in range(2):
        assert in_process("coordinator", "alerts", "--test").exit_code == 0
    events = [documented()(one.headers[HEADER], one.body, SECRET) for one in receiver.sent]
    assert {(one["kind"], one["task"]) for one in events} == {("test", None)}
    assert len({one["id"] for one in events}) == 2
    receiver.answers.append(403)
    failed = in_process("coordinator", "alerts", "--test").exception
    assert (type(failed), str(failed)) == (WebhookFailed, f"http://{receiver.address} answered 403, not 2xx")
