"""A check of the tests themselves: small faults, put into the product one at a time, that some test should find.

    python -m tools.mutation_check > benchmarks/results/mutations-DATE.json

A seed draws the places, so that two states of the tests meet the same faults while the product stays the same. Every
fault goes into a copy of the tree, where the test files nearest to the module run until one fails: those that import
it, else those that import a module that imports it, and so on.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from muster.output import header
from tests.tree import ROOT
from tools.pages import PACKAGES

SKIPPED = ("migrations", "node_modules")
SEED = 20261124
OPPOSITE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A piece of a file, by byte offsets in its lines, and what stands there instead."""

    kind: str
    path: str
    start: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str

    def applied(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        head = b"".join(lines[: self.start[0] - 1]) + lines[self.start[0] - 1][: self.start[1]]
        tail = lines[self.end[0] - 1][self.end[1] :] + b"".join(lines[self.end[0] :])
        return (head + self.after.encode() + tail).decode()


def fault_of(node):
    """The kind of fault that a node can have, and the node that stands in its place; None without one."""
    match node:
        case ast.Compare(left, [operator], comparators):
            return "comparison", ast.Compare(left, [OPPOSITE[type(operator)]()], comparators)
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return "constant", ast.Constant(value + 1)
        case ast.UnaryOp(ast.Not(), operand):
            return "not", operand
        case ast.BoolOp(operator, values):
            return "and-or", ast.BoolOp(OPPOSITE[type(operator)](), values)
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            return "return", ast.Return(ast.Constant(None))


def executed(node):
    """A node and all below it, without annotations and the keys of subscripts in them."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from executed(child)


def faults(tree: Path):
    """Every fault of every module, by kind."""
    by_kind: dict[str, list[Fault]] = {}
    for path in modules(tree).values():
        source = (tree / path).read_text()
        for node in executed(ast.parse(source)):
            if change := fault_of(node):
                kind, other = change
                text = ast.unparse(other)
                start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
                after = text if isinstance(node, ast.Return | ast.Constant) else f"({text})"
                by_kind.setdefault(kind, []).append(Fault(kind, path, start, end, ast.unparse(node), after))
    return by_kind


def modules(tree: Path):
    """The path of every module of the product, by name."""
    paths = sorted(path.relative_to(tree) for package in sorted(PACKAGES) for path in (tree / package).rglob("*.py"))
    return {name_of(path): str(path) for path in paths if not set(SKIPPED) & set(path.parts)}


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path):
    """The names that a file imports, and their modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


class Tests:
    """Which test files are nearest to a module."""

    def __init__(self, tree: Path) -> None:
        paths = {path.relative_to(tree) for path in (tree / "tests").rglob("*.py")}
        self.tests = {str(path): imported(tree / path) for path in sorted(paths) if path.name.startswith("test_")}
        self.imports = {name: imported(tree / path) - {name} for name, path in modules(tree).items()}
        for path in paths:
            if path.name == "conftest.py":  # as if every file beside it imported it
                for other, names in self.tests.items():
                    if Path(other).parent == path.parent:
                        names.add(name_of(path))
            if str(path) not in self.tests:
                self.imports[name_of(path)] = imported(tree / path)

    def of(self, name: str) -> list[str]:
        """Those that import it, directly or over the fewest modules, after those that have its name."""
        package, last = name.split(".", maxsplit=1)[0], name.rsplit(".", maxsplit=1)[-1]
        ring, seen, near = {name}, {name}, []
        while ring and not near:
            near = [path for path, names in self.tests.items() if names & ring]
            ring = {other for other, names in self.imports.items() if names & ring} - seen
            seen |= ring
        named = [path for path in self.tests if path.startswith(f"tests/{package}/test_{last}")]
        own = [path for path in near if path.startswith(f"tests/{package}/")]
        return list(dict.fromkeys(named + own + near)) or [f"tests/{package}"]


def copied(tree: Path, folder: Path) -> Path:
    """A copy of what git keeps of a tree, with the packages of npm that are installed in it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, folder / name)
    packages = "device_runtime/js/node_modules"
    if (tree / packages).is_dir():
        (folder / packages).symlink_to(tree / packages)
    return folder


def run(tests: list[str], folder: Path, limit_s: float):
    """The exit code of the tests, None once the time is up, and the first that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return None, ""
        output.seek(0)
        failed = [line for line in output.read().splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return code, failed[0].split(" ", 1)[1].split(" - ")[0] if failed else ""


def tried(fault: Fault, folder: Path, tests: list[str], limit_s: float):
    """What the tests say of a fault, and which: a failure counts as found if that test passes without the fault."""
    path = folder / fault.path
    sound = path.read_text()
    try:
        path.write_text(fault.applied(sound))
        code, failed = run(tests, folder, limit_s)
    finally:
        path.write_text(sound)
    if code == 0:
        return "not found", ""
    if code is None or (failed and run([failed], folder, limit_s)[0]):
        return "undecided", failed
    return "found", failed


def main():
    """Draw places, try each in a copy of the tree, and print what became of all as JSON."""
    parser = argparse.ArgumentParser(description="Put small faults into the product; say which of them a test finds.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--places", type=int, default=30)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the places to try; without it all")
    parser.add_argument("--limit-s", type=float, default=300, help="for the tests of one fault")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    kinds = dict(sorted(faults(tree).items()))
    source = random.Random(arguments.seed)
    drawn = [source.choice(kinds[list(kinds)[number % len(kinds)]]) for number in range(arguments.places)]
    tests = Tests(tree)
    with tempfile.TemporaryDirectory(prefix="mutations-") as place, ThreadPoolExecutor(arguments.at_once) as pool:
        folders: Queue[Path] = Queue()
        for number in range(arguments.at_once):
            folders.put(copied(tree, Path(place, str(number))))

        def result(number: int):
            """The fault at a place, the tests that were run for it, and whether they found it."""
            fault, folder, began = drawn[number], folders.get(), time.monotonic()
            chosen = tests.of(name_of(Path(fault.path)))
            try:
                outcome, failed = tried(fault, folder, chosen, arguments.limit_s)
            finally:
                folders.put(folder)
            print(number, fault.path, fault.start[0], fault.after, outcome, failed, file=sys.stderr)
            wall_s = round(time.monotonic() - began)
            facts = {"tests": chosen, "outcome": outcome, "by": failed, "wall_s": wall_s}
            return {"number": number, **asdict(fault), **facts}

        numbers = range(arguments.places) if arguments.only is None else arguments.only
        results = list(pool.map(result, numbers))
    found_faults = sum(result["outcome"] == "found" for result in results)
    print(
        json.dumps({**header("mutations"), "seed": arguments.seed, "found": found_faults, "places": results}, indent=1)
    )


if __name__ == "__main__":
    main()
