"""Builds the sysroot of emulated ARM devices from packages of Debian and PyPI, and our wheel (docs/emulators.md)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from device_runtime.backends import executorch
from device_runtime.errors import ConfigError
from fedcore.private_files import write_whole
from simulator.errors import SysrootError
from simulator.fleet import fork_servers

# Builds the sysroot of `simulator.fleet.fork_servers` from Debian's and PyPI's packages and Muster's wheel.


def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a program and return its output. Raises SysrootError with the reason if it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"} if environment is None else environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise SysrootError(f"cannot run {command[0]} on this machine: {error.strerror}") from error
    if done.returncode:
        raise SysrootError(f"`{' '.join(command)}` failed: {_reason(done.stderr or done.stdout, done.returncode)}")
    return done.stdout


def _reason(words: str, code: int) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()] or [f"exit code {code}"]
    telling = [line for line in lines if line.lower().startswith(("e:", "error"))] or lines
    return telling[-1]


# Debian packages of any architecture and release, fetched and unpacked without root and without installing them.
#
# apt does the work with separate lists and state: it checks signatures as usual, and does not touch the machine's
# packages.

MIRROR = "http://deb.debian.org/debian"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# apt's network settings on this machine. Its other settings may hold hooks that need root.
NETWORK = re.compile(r"Acquire::(https?|Retries|ForceIPv[46])\b.*")


def unpack(packages: Sequence[str], arch: str, suite: str, folder: Path) -> None:
    """Unpack packages and their dependencies, of Debian's architecture `arch` and release `suite`, into `folder`.

    Raises SysrootError if this machine lacks apt or Debian's keys, or apt fails.
    """
    if not KEYS.is_file():
        raise SysrootError(f"there are no Debian keys at {KEYS}: apt-get install debian-archive-keyring")
    with tempfile.TemporaryDirectory(prefix="muster-apt-") as place:
        own, environment = Path(place), {**os.environ, "LC_ALL": "C"}
        settings = _settings(own, arch)
        for part in ("state", "lists/partial", "cache/archives/partial"):
            (own / part).mkdir(parents=True)
        (own / "status").touch()
        (own / "sources.list").write_text(f"deb [signed-by={KEYS}] {_mirror()} {suite} main\n")
        (own / "apt.conf").write_text(settings)
        environment["APT_CONFIG"] = str(own / "apt.conf")
        call(["apt-get", "-q", "update"], environment)
        call(["apt-get", "-qy", "--no-install-recommends", "--download-only", "install", *packages], environment)
        for package in sorted((own / "cache" / "archives").glob("*.deb")):
            call(["dpkg-deb", "--extract", str(package), str(folder)])


def _settings(own: Path, arch: str) -> str:
    """apt's configuration: the machine's network settings, and everything else in `own`."""
    network = [line for line in call(["apt-config", "dump"]).splitlines() if NETWORK.fullmatch(line)]
    return "\n".join(
        [
            *network,
            f'APT::Architecture "{arch}";',
            f'APT::Architectures {{ "{arch}"; }};',
            'APT::Sandbox::User "root";',  # another user may be unable to read the cache
            'Debug::NoLocking "true";',
            'Acquire::Languages "none";',
            f'Dir::State "{own}/state";',
            f'Dir::State::lists "{own}/lists";',
            f'Dir::State::status "{own}/status";',
            f'Dir::Cache "{own}/cache";',
            f'Dir::Etc::sourcelist "{own}/sources.list";',
            'Dir::Etc::sourceparts "/dev/null";',
            'Dir::Etc::main "/dev/null";',
            'Dir::Etc::parts "/dev/null";',
            "",
        ]
    )


def _mirror() -> str:
    """The Debian mirror that this machine uses; else the public one."""
    uris = call(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"])
    return next(iter(uris.split()), MIRROR).rstrip("/")


TREE = Path(__file__).parents[1]
BESIDE = ("pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """Build the wheel into `folder`. Raises SysrootError when pip fails.

    It is built from a copy: setuptools leaves files in the tree, and picks up old ones there.
    """
    with tempfile.TemporaryDirectory(prefix="muster-wheel-") as place:
        for path in _sources():
            copy = Path(place) / "tree" / path.relative_to(TREE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--wheel-dir", place]
        call([sys.executable, "-m", "pip", "wheel", *options, str(Path(place) / "tree")])
        wheel = next(Path(place).glob("*.whl"))
        return Path(shutil.copy(wheel, folder))


def _sources() -> Iterator[Path]:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    packages = [name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    yield from (TREE / name for name in BESIDE)
    for package in sorted(packages):
        yield from sorted(p for p in (TREE / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts)


QEMU_SUITE = "bookworm-backports"
LOADS = "import device_runtime.capabilities, device_runtime.session, simulator.fleet.fork_server; "
LOADS += "from device_runtime.backends import BACKENDS; BACKENDS['onnxruntime'](); "
LOADS += "from importlib.metadata import version; version('muster-fl')"

Tell = Callable[[str], None]


class Built(msgspec.Struct, frozen=True):
    """A sysroot: its folder and qemu, the backends of its devices, its size, and what it lacks and why."""

    folder: str
    qemu: str
    backends: tuple[str, ...]
    size_bytes: int
    lacks: str


def build(out: Path | None = None, tell: Tell = lambda doing: None) -> Built:
    """Build the sysroot in `out`, by default where a fleet looks; parts that exist are kept.

    Each part appears whole, and a second process waits for the first. Raises SysrootError, naming the program that
    failed and its message.
    """
    folder = (out or fork_servers.default_folder()).absolute()
    with _locked(folder):
        if not fork_servers.is_current(folder):
            _make_base(folder, tell)
        (folder / fork_servers.IDENTITY).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / fork_servers.IDENTITY, fork_servers.identity().encode())
        program = fork_servers.find_qemu(folder)
        if program is None:
            tell("qemu (60 MB)")
            program = _fetch_qemu(folder)
        sysroot = fork_servers.Sysroot(folder, program)
        lacks = _make_executorch(sysroot, tell)
        tell("try the sysroot")
        call(sysroot.python("-c", LOADS), sysroot.environment())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return Built(str(folder), str(program), sysroot.backends, size, lacks)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build in `folder`; the lock ends with its process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_base(folder: Path, tell: Tell) -> None:
    """Make `root` from Debian and `site` from PyPI."""
    if folder.exists() and any(folder.iterdir()):
        raise SysrootError(f"{folder} holds something else, or an older sysroot: remove it, or name another folder")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        base = Path(place) / "made"
        base.mkdir()
        tell("Debian packages for 64-bit ARM (20 MB)")
        unpack(fork_servers.PACKAGES, "arm64", fork_servers.SUITE, base / "root")
        tell("Python packages for 64-bit ARM (40 MB)")
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--target", str(base / "site")]
        call([sys.executable, "-m", "pip", "install", *options, *wheels_for_arm(), *fork_servers.device_requirements()])
        (base / "recipe").write_text(fork_servers.recipe())
        base.replace(folder)


def wheels_for_arm() -> list[str]:
    """pip's options for wheels of the emulated machine."""
    platforms = [word for name in fork_servers.PLATFORMS for word in ("--platform", f"{name}_{fork_servers.ARCH}")]
    return [*platforms, "--implementation", "cp", "--python-version", fork_servers.PYTHON, "--only-binary=:all:"]


def _fetch_qemu(folder: Path) -> Path:
    """Put Debian's qemu into the sysroot `folder`. Raises SysrootError if it cannot."""
    if platform.machine() != "x86_64":
        raise SysrootError(
            f"this machine needs {fork_servers.QEMU} {'.'.join(map(str, fork_servers.OLDEST_QEMU))} or newer on its "
            "PATH"
        )
    with tempfile.TemporaryDirectory(prefix=f".{fork_servers.QEMU}-", dir=folder) as place:
        unpack(["qemu-user"], "amd64", QEMU_SUITE, Path(place))
        return (Path(place) / "usr" / "bin" / fork_servers.QEMU).replace(folder / fork_servers.QEMU)


def _make_executorch(sysroot: fork_servers.Sysroot, tell: Tell) -> str:
    """Build the ExecuTorch library. Returns why it cannot, or an empty text."""
    if "executorch" not in sysroot.backends:
        tell("ExecuTorch for 64-bit ARM")
        try:
            executorch.build(fork_servers.ARCH, sysroot.folder / "executorch")
        except ConfigError as error:
            return f"devices run only ONNX Runtime: {error}"
    return ""
