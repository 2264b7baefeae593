"""The templates of `muster new`, as text, and a project made of them."""

from __future__ import annotations

import keyword
import shutil
from contextlib import ExitStack
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from fedcore.private_files import write_whole

PLACES = {
    "README.md.in": "README.md",
    "simulation.toml.in": "simulation.toml",
    "package.py.in": "$name/__init__.py",
    "model.py.in": "$name/model.py",
    "users.py.in": "$name/users.py",
    "algorithm.py.in": "$name/algorithm.py",
    "test.py.in": "tests/test_$name.py",
}


class ProjectError(Exception):
    """A project that cannot be made."""


def make_project(folder: Path) -> list[Path]:
    """Write a project into a new folder, whose name its package has too; returns the files.

    Raises ProjectError if the name cannot be a package's, a package has it, or the folder exists; OSError, which names
    the file. Nothing is left of the folder then.
    """
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise ProjectError(f"{name!r} cannot name a package: use lower-case letters, digits and _, a letter first")
    if folder.exists():
        raise ProjectError(f"{folder} exists already; take another name")
    if find_spec(name) is not None:
        raise ProjectError(f"a package {name!r} is installed here, which would hide the project's; take another name")
    words = {"name": name, "cls": "".join(part.capitalize() for part in name.split("_"))}
    templates = files(__name__)
    paths = []
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        for template, place in PLACES.items():
            path = folder / Template(place).substitute(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, Template((templates / template).read_text("utf-8")).substitute(words).encode())
            paths.append(path)
        undo.pop_all()
    return paths
