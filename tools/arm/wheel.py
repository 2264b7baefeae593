"""Builds Muster's own wheel from this source tree."""

from __future__ import annotations

import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tools.arm.calls import call

TREE = Path(__file__).parents[2]
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
