"""The security of a deployment: which assumptions of the threat model hold, as far as it can be seen from here.

It reads settings, files and the coordinator's store, and a device's policy if one is named; it changes nothing.
"""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from coordinator.errors import BrokenAudit, CoordinatorError
from coordinator.lineage import lineage_file
from coordinator.rules.audit import verify, whole_log
from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from coordinator.store.tasks import open_coordinator_store
from device_runtime.permission.policy import Policy
from device_runtime.sandbox.confinement import lacking
from secagg.parameters import LEAST_COHORT


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """An assumption, whether it holds (None: not seen from here), what was found, and how to make it hold."""

    name: str
    holds: bool | None
    found: str
    remedy: str = ""


def of_coordinator(settings: Settings) -> tuple[Assumption, ...]:
    """The assumptions on a coordinator with these settings, and on its store if there is one."""
    return (*_network(settings), *_enrolment(settings), *_files(settings), *_store(settings))


def of_device(policy: Policy) -> tuple[Assumption, ...]:
    """The assumptions on devices with this policy, as far as they are like this machine: defences of their own."""
    return (
        _set("releases are signed", bool(policy.signers), "signers", "public keys that release plans"),
        _set("the authority is pinned", policy.authority is not None, "authority", "the authority's public key"),
        _set("no report leaves in clear", policy.require_secure_aggregation, "require_secure_aggregation", "true"),
        _set("cohorts hide a device", policy.min_cohort >= LEAST_COHORT, "min_cohort", f"{LEAST_COHORT} or more"),
        _set("releases are in a log", policy.require_release_log, "require_release_log", "true"),
        _set("requests are encrypted", policy.require_https, "require_https", "true"),
        _set("programs have a signer", not policy.unsigned_programs, "unsigned_programs", "false"),
        _sandbox(),
    )


def _sandbox() -> Assumption:
    lacks = ", ".join(lacking())
    return Assumption(
        name="sandboxes are closed",
        holds=not lacks,
        found=f"a device on this machine lacks {lacks}" if lacks else "a device on this machine has all defences",
        remedy="run devices on Linux 6.12 or newer, on x86-64 or 64-bit ARM, with Landlock and seccomp allowed",
    )


def _set(name: str, holds: bool, key: str, wanted: str) -> Assumption:
    found = f"the policy's {key} is set" if holds else f"the policy's {key} does not say so"
    return Assumption(name=name, holds=holds, found=found, remedy=f"{key}: {wanted}, in the device's policy.toml")


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
        holds = tls or _local(settings.host)
        found = "TLS" if tls else f"plain HTTP on {settings.host}" + (", on this machine only" if holds else "")
        yield Assumption(name="devices' requests are encrypted", holds=holds, found=found, remedy=remedy)
    holds = tls or _local(settings.admin_host)
    found = "TLS" if tls else f"plain HTTP on {settings.admin_host}"
    yield Assumption(name="tokens are encrypted", holds=holds, found=found, remedy="admin_host 127.0.0.1, or tls_cert")


def _enrolment(settings: Settings) -> Iterator[Assumption]:
    open_ = settings.accept_unattested
    found = "accept_unattested" if open_ else "a shared secret" if settings.enrolment_secret_file else "not here"
    yield Assumption(
        name="strangers cannot enrol",
        holds=not open_,
        found=found,
        remedy="accept_unattested only for development; else enrolment_secret_file, or an authority that attests",
    )
    remedy = "run `muster authority serve` on a machine of somebody else's, and name its key as authority"
    if settings.authority_url is None:
        yield Assumption(name="the authority is apart", holds=False, found="no authority is named", remedy=remedy)
    else:
        host = urlsplit(settings.authority_url).hostname or ""
        here = _local(host) or host == settings.host
        found = f"it is on this machine: {host}" if here else f"it is at {host}"
        yield Assumption(name="the authority is apart", holds=not here, found=found, remedy=remedy)


def _files(settings: Settings) -> Iterator[Assumption]:
    for path in (settings.keys_file, lineage_file(settings.keys_file)):
        if path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
            yield Assumption(
                name=f"nobody else reads {path.name}",
                holds=not mode & 0o077,
                found=f"mode {mode:04o}",
                remedy=f"chmod 600 {path}",
            )


def _store(settings: Settings) -> Iterator[Assumption]:
    try:
        store = open_coordinator_store(settings.database, settings.blobs, create=False)
    except CoordinatorError as error:
        remedy = "name it with --db and --blobs, or as its settings do"
        yield Assumption(name="the store can be read", holds=False, found=str(error), remedy=remedy)
        return
    with store:
        running = [task for task in store.tasks() if task.state in (TaskState.ACTIVE, TaskState.PAUSED)]
        clear = [task.id for task in running if task.settings.secagg is None]
        yield Assumption(
            name="the coordinator sees no report in clear",
            holds=not clear,
            found=f"tasks in clear: {', '.join(clear) or 'none'}",
            remedy="create tasks with --secagg",
        )
        try:
            head = verify(whole_log(store.audit))
            yield Assumption(name="the audit log is whole", holds=True, found=f"{head.number} entries")
        except BrokenAudit as error:
            yield Assumption(
                name="the audit log is whole", holds=False, found=str(error), remedy="find out who wrote the database"
            )


def _local(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
