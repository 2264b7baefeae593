"""Debian packages of any architecture and release, fetched and unpacked without root and without installing them.

apt does the work with separate lists and state: it checks signatures as usual, and does not touch the machine's
packages.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from simulator.errors import SysrootError
from tools.arm.calls import call

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
