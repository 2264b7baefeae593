"""The surface of every package: the names that other packages, examples and documents take from it.

tests/surface.txt has them, a module a line; a change of the surface is a change of that file. `python -m
tests.test_surface` writes it anew. `muster` is left out as a user: it puts the packages together and may use anything.
"""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import device_runtime

ROOT = Path(__file__).parents[1]
HELD = Path(__file__).with_name("surface.txt")
PACKAGES = ("fedcore", "secagg", "export", "ingress", "authority", "coordinator", "device_runtime", "simulator")
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def taken(program, own):
    """Pairs of module and name that a program takes from packages other than its own."""
    tree, modules = ast.parse(program), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in {*PACKAGES} - {own}:
            for alias in node.names:
                if is_module(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    yield node.module, alias.name
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] in {*PACKAGES} - {own})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def users():
    """Every program that uses packages, and the package that it is part of."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield path.read_text(), package
    for path in (ROOT / "examples").glob("*.py"):
        yield path.read_text(), None
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for program in PROGRAM.findall(path.read_text()):
            yield program, None


@functools.cache
def surface():
    found = defaultdict(set)
    for program, own in users():
        for module, name in taken(program, own):
            found[module].add(name)
    return "".join(f"{module}: {' '.join(sorted(found[module]))}".rstrip() + "\n" for module in sorted(found))


def test_the_surface_of_every_package_is_the_one_that_is_written_down():
    assert surface() == HELD.read_text()


def test_no_package_takes_a_private_name_of_another():
    names = [name for line in surface().splitlines() for name in line.replace(":", "").replace(".", " ").split()]
    assert [name for name in names if name.startswith("_")] == []


def test_every_name_for_host_applications_is_in_their_manual():
    document = (ROOT / "docs" / "device.md").read_text()
    assert [name for name in device_runtime.__all__ if not re.search(rf"\b{name}\b", document)] == []
    (used,) = [line.split()[1:] for line in surface().splitlines() if line.startswith("device_runtime: ")]
    assert set(used) <= set(device_runtime.__all__)


if __name__ == "__main__":
    HELD.write_text(surface())
    print(f"wrote {HELD}")
