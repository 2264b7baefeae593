"""PostgreSQL that fails over, with two real servers, and a pooler in front of it: nothing relies on one session."""

import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import psycopg
import pytest
from sqlalchemy.engine import make_url

from benchmarks.postgresql import AS_USER, USER, binaries, cluster
from coordinator.errors import Unavailable, UnusableStore
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import TaskSettings
from coordinator.settings import Settings
from coordinator.store.tasks import open_coordinator_store
from tests.coordinator.bundles import report_body
from tests.coordinator.devices import speaking_to
from tests.coordinator.link import link_to
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, put
from tests.servers import serving

POOLER = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin")
needs_pooler = pytest.mark.skipif(POOLER is None, reason="no PgBouncer is installed (apt install pgbouncer)")
SESSIONS = 2


@contextmanager
def pooler_to(host, port, folder):
    """A pooler with few sessions, each of which it lends for one transaction; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = taken.getsockname()[1]
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={host} port={port} user={USER}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {own}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n"
        f"default_pool_size = {SESSIONS}\nserver_login_retry = 1\n"
    )
    config.chmod(0o644)
    with (folder / "pgbouncer.log").open("w") as log:
        running = subprocess.Popen([POOLER, config], stdout=log, stderr=log, **AS_USER)
    try:
        until(lambda: answers(own))
        yield own
    finally:
        running.terminate()
        running.wait()


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture
def pooled(postgresql):
    """The URL of a database without rows, behind a pooler."""
    folder = postgresql.folder
    with pooler_to(folder, 5432, folder) as port:
        yield at_port(postgresql.without_rows(), port)


def at_port(url, port):
    return make_url(url).set(host="127.0.0.1", port=port, query={}).render_as_string()


# --- failover


def fail_over(primary, standby):
    """The standby becomes the primary; the old one comes back as a standby."""
    primary.stop("fast")
    standby.run("pg_ctl", "promote", "-w")
    (primary.data / "standby.signal").touch()
    primary.start()


def sessions_on(server, database):
    """How many sessions the store has there."""
    with psycopg.connect(host=server.folder, user=USER, dbname="postgres") as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        return connection.execute(query, [make_url(database).database]).fetchone()[0]


def toggled(store, task):
    """Write once; whether that was possible."""
    try:
        (store.pause if store.task(task).state is TaskState.ACTIVE else store.resume)(task)
    except Unavailable:
        return False
    return True


@pytest.fixture
def two_servers():
    """A primary and its standby."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed (apt install postgresql)")
    with cluster(programs) as primary, cluster(programs, standby_of=primary) as standby:
        yield primary, standby


def test_stores_follow_a_failover_by_themselves(two_servers, bundle, tmp_path, caplog):
    primary, standby = two_servers
    database = primary.without_tables()
    with ExitStack() as open_:
        link = open_.enter_context(link_to(primary.folder))
        urls = {"an address that moves": link.url(database), "two addresses": f"{database}&host={standby.folder}"}
        if POOLER is not None:
            port = open_.enter_context(pooler_to("127.0.0.1", make_url(link.url(database)).port, primary.folder))
            urls["a pooler"] = at_port(database, port)
        stores = {
            name: open_.enter_context(open_coordinator_store(url, tmp_path / "blobs")) for name, url in urls.items()
        }
        task = stores["two addresses"].register_task(bundle, TaskSettings(population="phones", goal=2, rounds=2)).id
        assert all(toggled(store, task) for store in stores.values() for _ in range(6))
        fail_over(primary, standby)
        until(lambda: toggled(stores["two addresses"], task))
        del stores["two addresses"]
        for store in stores.values():  # their address leads to what is a standby now
            assert not any(toggled(store, task) for _ in range(6))
            with pytest.raises(Unavailable), store.database.reading():
                pass
        said = [record.message for record in caplog.records if "the database cannot be reached" in record.message]
        assert len(said) == len(stores)
        assert sessions_on(primary, database) <= SESSIONS  # the pooler's
        link.lead_to(standby.folder)
        until(lambda: toggled(stores["an address that moves"], task))
        with link.broken():
            pass  # the pooler must connect anew
        for store in stores.values():
            until(lambda store=store: toggled(store, task))
            assert all(toggled(store, task) for _ in range(6))


# --- single sessions


def pids_of(store, statement="SELECT 1"):
    """The server's processes of two transactions, of which the first ends with a statement that may fail."""
    pids = []
    for last in (statement, "SELECT 1"):
        with suppress(Unavailable), store.database.writing() as records:
            pids.append(records._connection.exec_driver_sql("SELECT pg_backend_pid()").scalar())
            records._connection.exec_driver_sql(last)
    return pids


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("code", ["25006", "57P01", "57P02", "57P03"])
def test_a_session_whose_server_stops_or_may_not_write_is_not_used_again(store, code):
    first, second = pids_of(store, f"DO $$ BEGIN RAISE 'no more' USING ERRCODE = '{code}'; END $$")
    assert first != second


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_session_is_used_again_after_an_error_of_a_statement(store):
    first, second = pids_of(store, "DO $$ BEGIN RAISE 'full' USING ERRCODE = '53100'; END $$")
    assert first == second


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_database_that_is_set_to_read_only_is_not_opened(database, tmp_path):
    with psycopg.connect(database, autocommit=True) as operator:
        operator.execute(f"ALTER ROLE {USER} SET default_transaction_read_only = on")
        try:
            with pytest.raises(UnusableStore, match="session is read-only"):
                open_coordinator_store(database, tmp_path / "blobs")
        finally:
            operator.execute(f"ALTER ROLE {USER} RESET default_transaction_read_only")


# --- a pooler


@needs_pooler
def test_transactions_behind_a_pooler_keep_their_limits_and_leave_none(pooled, tmp_path):
    names = ("lock_timeout", "idle_in_transaction_session_timeout", "timezone")
    with psycopg.connect(pooled, prepare_threshold=None) as other, open_coordinator_store(pooled, tmp_path) as store:
        before = [other.execute(f"SHOW {name}").fetchone()[0] for name in names]
        other.rollback()
        for database, waits in ((store.database.writing, "10s"), (store.database.writing_at_once, "50ms")):
            with database() as records:
                shown = [records._connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names]
            assert shown == [waits, "10s", "UTC"]
            for _ in range(2 * SESSIONS):
                assert [other.execute(f"SHOW {name}").fetchone()[0] for name in names] == before
                other.rollback()


@needs_pooler
def test_transactions_of_many_threads_behind_a_pooler_all_go_through(pooled, bundle, tmp_path):
    with open_coordinator_store(pooled, tmp_path / "blobs") as store:
        task = store.register_task(bundle, TaskSettings(population="phones", goal=2, rounds=2)).id

        def read(_):
            return [store.task(task).state for _ in range(10)]

        with ThreadPoolExecutor(4 * SESSIONS) as pool:
            states = list(pool.map(read, range(4 * SESSIONS)))
        assert all(state is TaskState.ACTIVE for several in states for state in several)
        assert all(toggled(store, task) for _ in range(10))


@needs_pooler
def test_rounds_are_committed_behind_a_pooler(pooled, bundle, tmp_path):
    place = {"database": pooled, "keys": tmp_path / "keys", "blobs": tmp_path / "blobs"}
    with open_coordinator_store(pooled, tmp_path / "blobs") as store:
        task = store.register_task(bundle, TaskSettings(population="phones", goal=2, rounds=3, over_selection=1.0)).id
        settings = Settings(**place, port=0, admin_port=0, accept_unattested=True)
        with serving(settings) as url, speaking_to(url) as client:
            for _ in range(3):
                for given in assign(client, "a", "b"):
                    assert put(client, given.assignment, report_body([1, 0, 0, 0], 1)).status_code == 200
            until(lambda: store.task(task).state is TaskState.COMPLETED)
