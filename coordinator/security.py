"""The security of a coordinator: which assumptions of the threat model hold, by what can be seen from here.

It reads settings, files and the store; it changes nothing.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.engine import make_url

from coordinator.errors import BrokenAudit, CoordinatorError
from coordinator.keys import check_keys, lineage_file
from coordinator.rules.alerts import Assumption, verify, whole_log
from coordinator.rules.progress import DRIVER_SILENT_S
from coordinator.rules.task_settings import TaskSettings
from coordinator.settings import Settings
from coordinator.store.database import TIMES, sqlite_path
from coordinator.store.tasks import CoordinatorStore, open_coordinator_store
from fedcore.compression import upload_bytes
from ingress.limits import is_this_machine

_GROUP = Path("/sys/fs/cgroup/memory.max")


def of_running(settings: Settings, store: CoordinatorStore) -> tuple[Assumption, ...]:
    """The assumptions on the coordinator that this process is."""
    return (*_settings(settings), *_limits(settings), *_store(settings, store))


def of_stopped(settings: Settings) -> tuple[Assumption, ...]:
    """The assumptions on a coordinator that would start with these settings, and on its store if there is one."""
    assumptions = (*_settings(settings),)
    try:
        store = open_coordinator_store(settings.database, settings.blobs, create=False)
    except CoordinatorError as error:
        remedy = "name it with --db and --blobs, or as its settings do"
        return (*assumptions, Assumption(name="the store can be read", holds=False, found=str(error), remedy=remedy))
    with store:
        return (*_nobody_runs(store), *assumptions, *_store(settings, store))


def _nobody_runs(store: CoordinatorStore) -> Iterator[Assumption]:
    """That no coordinator has beaten lately: its settings would be its own."""
    with store.database.reading() as records:
        urls = records.leases.seen_since(records.at - DRIVER_SILENT_S)
    if urls:
        yield Assumption(
            name="the running coordinator was asked",
            holds=False,
            found=f"one runs at {', '.join(urls)}; the settings judged here are those of this shell",
            remedy="--coordinator URL, its port for operators, with an operator's token in MUSTER_TOKEN",
        )


def _settings(settings: Settings) -> Iterator[Assumption]:
    yield from _network(settings)
    yield from _database(settings)
    yield from _enrolment(settings)
    yield from _files(settings)


def _network(settings: Settings) -> Iterator[Assumption]:
    remedy = "give tls_cert and tls_key, or put a proxy that ends TLS in front, and name it in trusted_proxies"
    tls = settings.tls_cert is not None
    if settings.trusted_proxies and not tls:
        yield Assumption(
            name="devices' requests are encrypted",
            holds=None,
            found=f"the proxy at {settings.trusted_proxies} must end TLS",
        )
    else:
        holds = tls or is_this_machine(settings.host)
        transport = "TLS" if tls else f"plain HTTP on {settings.host}" + (", on this machine only" if holds else "")
        yield Assumption(name="devices' requests are encrypted", holds=holds, found=transport, remedy=remedy)
    holds = tls or is_this_machine(settings.admin_host)
    transport = "TLS" if tls else f"plain HTTP on {settings.admin_host}"
    yield Assumption(
        name="tokens are encrypted", holds=holds, found=transport, remedy="admin_host 127.0.0.1, or tls_cert"
    )


def _enrolment(settings: Settings) -> Iterator[Assumption]:
    open_ = settings.accept_unattested
    evidence = "accept_unattested" if open_ else "a shared secret" if settings.enrolment_secret_file else "not here"
    yield Assumption(
        name="strangers cannot enrol",
        holds=not open_,
        found=evidence,
        remedy="accept_unattested only for development; else enrolment_secret_file, or an authority that attests",
    )
    remedy = "run `muster authority serve` on a machine of somebody else's, and name its key as authority"
    if settings.authority_url is None:
        yield Assumption(name="the authority is apart", holds=False, found="no authority is named", remedy=remedy)
    else:
        host = urlsplit(settings.authority_url).hostname or ""
        here = is_this_machine(host) or host == settings.host
        evidence = f"it is on this machine: {host}" if here else f"it is at {host}"
        yield Assumption(name="the authority is apart", holds=not here, found=evidence, remedy=remedy)


def _database(settings: Settings) -> Iterator[Assumption]:
    if sqlite_path(settings.database) is not None:
        return
    off = [name for name in TIMES if make_url(settings.database).query.get(name) == "0"]
    yield Assumption(
        name="a silent database is given up",
        holds=not off,
        found=f"its address has {' and '.join(f'{name}=0' for name in off)}" if off else "limits of time are in force",
        remedy=f"leave {' and '.join(off)} out of the address: a network that swallows packets stops the service",
    )


def _files(settings: Settings) -> Iterator[Assumption]:
    files = [settings.keys_file, lineage_file(settings.keys_file), settings.tls_key, settings.enrolment_secret_file]
    files.append(settings.alert_webhook_secret_file)
    if (database := sqlite_path(settings.database)) is not None:
        files += [database, *(database.with_name(f"{database.name}-{ending}") for ending in ("wal", "shm"))]
    if "://" not in settings.blobs:
        files.append(Path(settings.blobs))
    for path in files:
        if path is not None and path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
            yield Assumption(
                name=f"nobody else reads {path.name}",
                holds=not mode & 0o077,
                found=f"mode {mode:04o}",
                remedy=f"chmod {'700' if path.is_dir() else '600'} {path}",
            )


def _limits(settings: Settings) -> Iterator[Assumption]:
    """What this process and its machine must bear when somebody uses up all limits."""
    most, there = settings.most_bytes, _memory()
    yield Assumption(
        name="memory suffices for the limits",
        holds=most <= there,
        found=f"the limits allow {most / 1e9:.1f} GB, of {there / 1e9:.1f} GB",
        remedy="lower reports_bytes, answers_bytes or connection_limit, or give the service more memory",
    )
    files, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2 * settings.connection_limit
    yield Assumption(
        name="open files suffice for the limits",
        holds=files >= wanted,
        found=f"{files:,} of {wanted:,}",
        remedy=f"ulimit -n {wanted}, LimitNOFILE={wanted}, or a lower connection_limit",
    )


def _memory() -> int:
    """The memory in bytes that this process may use: the machine's, or its control group's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_GROUP.read_text()))
    except (OSError, ValueError):  # no control group, or one that sets no limit
        return machine


def _store(settings: Settings, store: CoordinatorStore) -> Iterator[Assumption]:
    running = [task for task in store.tasks() if not task.state.ended]
    clear = [task.id for task in running if task.settings.secagg is None]
    yield Assumption(
        name="the coordinator sees no report in the clear",
        holds=not clear,
        found=f"tasks in the clear: {', '.join(clear) or 'none'}",
        remedy="create tasks with --secagg",
    )
    wanted = sum(_at_work(task.settings) * upload_bytes(store.plan(task.plan_sha256).report) for task in running)
    yield Assumption(
        name="reports of all devices find room",
        holds=wanted <= settings.reports_bytes,
        found=f"those of all at work are {wanted / 1e6:,.0f} MB, of {settings.reports_bytes / 1e6:,.0f} MB",
        remedy=f"reports_bytes: {wanted} or more; else devices that send nothing may keep others out",
    )
    name = "the keys are those of the store"
    try:
        check_keys(settings.keys_file, store.database)
        yield Assumption(name=name, holds=True, found=f"{settings.keys_file}, and that of the lineage key beside it")
    except CoordinatorError as error:
        yield Assumption(name=name, holds=False, found=str(error), remedy="do that before the next start")
    try:
        head = verify(whole_log(store.audit))
        yield Assumption(name="the audit log is whole", holds=True, found=f"{head.number} entries")
    except BrokenAudit as error:
        yield Assumption(
            name="the audit log is whole", holds=False, found=str(error), remedy="find out who wrote the database"
        )


def _at_work(settings: TaskSettings) -> int:
    """The devices of a task that work at a time, at most."""
    return settings.policy.concurrency or settings.in_round(settings.rounds).policy.cohort
