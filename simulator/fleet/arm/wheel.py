"""Muster's own wheel, from the source tree that this process runs from."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.errors import SysrootError
from simulator.fleet.arm.calls import call

TREE = Path(__file__).parents[3]
BESIDE = ("pyproject.toml", "README.md", "LICENSE")


def device_requirements() -> list[str]:
    """The packages that a device needs beside Muster's own wheel. Raises SysrootError without a source tree."""
    project = _pyproject()["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["device"]]


def source_digest() -> str:
    """Twelve digits that change with any source of the wheel. Raises SysrootError without a source tree."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(f"{path.relative_to(TREE)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def build_wheel(folder: Path) -> Path:
    """Build the wheel into `folder`. Raises SysrootError without a source tree, or when pip fails.

    It is built from a copy, because setuptools leaves files in the tree and reuses old ones.
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
    packages = [name.rstrip("*") for name in _pyproject()["tool"]["setuptools"]["packages"]["find"]["include"]]
    yield from (TREE / name for name in BESIDE)
    for package in sorted(packages):
        yield from sorted(p for p in (TREE / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _pyproject() -> dict[str, Any]:
    try:
        return tomllib.loads((TREE / "pyproject.toml").read_text())
    except FileNotFoundError as error:
        raise SysrootError(
            f"emulated devices get a wheel of Muster, which is built from its source tree; {TREE} is not one"
        ) from error
