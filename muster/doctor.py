"""The examination of an installation: its abilities, how to get those that it lacks, and its security."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from coordinator.rules.alerts import Assumption
from device_runtime.backends.executorch import default_folder, shim_name
from device_runtime.permission.policy import Policy
from device_runtime.sandbox.channel import lacking
from secagg.parameters import LEAST_COHORT
from simulator.errors import SysrootError
from simulator.fleet import browsers, fork_servers


def of_device(policy: Policy) -> tuple[Assumption, ...]:
    """The assumptions on devices with this policy, as far as they are like this machine: defences of their own."""
    return (
        _set("releases are signed", bool(policy.signers), "signers", "public keys that release plans"),
        _set("the authority is pinned", policy.authority is not None, "authority", "the authority's public key"),
        _set("no report leaves in the clear", policy.require_secure_aggregation, "require_secure_aggregation", "true"),
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


def _set(name: str, holds: bool, key: str, value: str) -> Assumption:
    state = f"the policy's {key} is set" if holds else f"the policy's {key} does not say so"
    return Assumption(name=name, holds=holds, found=state, remedy=f"{key}: {value}, in the device's policy.toml")


DISTRIBUTION = "muster-fl"
EXTRAS = (
    *("", "cli", "device", "coordinator", "export", "sim"),
    *("executorch", "data", "ray", "tensorboard", "mlflow", "privacy", "plot", "browser", "huggingface", "text"),
)
DEMO = {"", "cli", "device", "coordinator", "export", "sim"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
POSTGRES = Path("/usr/lib/postgresql")
CUDA_ASK_S = 20.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing: what was `found` (a version, a path; None if missing), its purpose, and how to get it.

    needed: `muster demo` does not run without it.
    """

    name: str
    found: str | None
    purpose: str
    get: str = ""
    needed: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, and whether those that `muster demo` needs are present."""

    core_works: bool
    findings: tuple[Finding, ...]


def examine() -> Report:
    """Look at everything. Takes a second or two, most of it asking for a CUDA device."""
    findings = (*_python(), *_packages(), *_executorch(), *_compilers(), *_emulation(), *_programs(), *_machine())
    return Report(core_works=all(finding.found for finding in findings if finding.needed), findings=findings)


def _python() -> Iterator[Finding]:
    yield Finding(name="Python", found=platform.python_version(), purpose="everything", needed=True)


def _packages() -> Iterator[Finding]:
    """The packages of every extra, each under the first extra that wants it."""
    seen = set()
    for extra in EXTRAS:
        for name in _wanted(extra):
            if name in seen:
                continue
            seen.add(name)
            yield Finding(
                name=name,
                found=_version(name),
                purpose=f"extra {extra}" if extra else "every command",
                get=f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}",
                needed=extra in DEMO,
            )


def _wanted(extra: str) -> list[str]:
    """The names of the packages that an extra adds; those of the installation itself for ""."""
    names = []
    for line in metadata.requires(DISTRIBUTION) or ():
        belongs, name = EXTRA.search(line), NAME.match(line)
        if name and name[0] != DISTRIBUTION and (belongs[1] if belongs else "") == extra:
            names.append(name[0])
    return names


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _executorch() -> Iterator[Finding]:
    for arch in ("x86_64", "aarch64"):
        library = default_folder(arch) / shim_name(arch)
        yield Finding(
            name=f"ExecuTorch library, {arch}",
            found=str(library.parent) if library.is_file() else None,
            purpose="devices on backend executorch",
            get=f"muster device build-executorch --arch {arch}",
        )


def _compilers() -> Iterator[Finding]:
    for program, package in (("g++", "g++"), ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")):
        yield Finding(
            name=program,
            found=shutil.which(program),
            purpose="building the ExecuTorch library",
            get=f"apt-get install {package}",
        )


def _emulation() -> Iterator[Finding]:
    get, ready = fork_servers.COMMAND, None
    try:
        ready = str(fork_servers.ready().folder)
    except SysrootError as error:
        get = str(error)
    program = fork_servers.find_qemu(fork_servers.default_folder())
    emulator = f"{program}, {'.'.join(map(str, fork_servers.qemu_version(program)))}" if program else None
    yield Finding(name=fork_servers.QEMU, found=emulator, purpose="emulated ARM devices", get=fork_servers.COMMAND)
    yield Finding(name="sysroot", found=ready, purpose="emulated ARM devices", get=get)


def _programs() -> Iterator[Finding]:
    postgres = shutil.which("postgres") or next(map(str, sorted(POSTGRES.glob("*/bin/postgres"))), None)
    yield Finding(
        name="PostgreSQL", found=postgres, purpose="tests against PostgreSQL", get="apt-get install postgresql"
    )
    yield Finding(
        name="Chromium", found=browsers.program(), purpose="tests in a browser", get="apt-get install chromium"
    )


def _machine() -> Iterator[Finding]:
    yield Finding(name="CUDA device", found=_cuda(), purpose="muster simulate --device cuda", get="an NVIDIA driver")
    free = shutil.disk_usage(Path.home()).free
    yield Finding(name="free disk", found=f"{free / 1e9:.0f} GB", purpose="1 GB for the ARM sysroot and its making")
    yield Finding(name="cores", found=str(_cores()), purpose="devices that train at a time")


def _cuda() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=CUDA_ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return ", ".join(done.stdout.split("\n")).strip(", ") or None if done.returncode == 0 else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
