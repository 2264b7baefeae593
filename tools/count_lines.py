"""The budgets of the repository, as JSON: `python -m tools.count_lines [COMMIT]`, the work tree by itself.

Product lines are all lines of Python and TypeScript outside tests, tools, examples, docs and generated files.
tests/test_budgets.py keeps every budget from growing.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = {"tests", "tools", "examples", "docs"}
GENERATED = b"written by tools/"
DECISION = re.compile(r"docs/decisions/\d{4}-[^/]+\.md")
LONG = 25
COUNTED = (".py", ".ts", ".md")


def git(*arguments):
    return subprocess.run(("git", *arguments), cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def work_tree():
    """The counted files on disk that git does not ignore: their bytes by path."""
    paths = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    return {path: (ROOT / path).read_bytes() for path in paths if path.endswith(COUNTED) and (ROOT / path).is_file()}


def at(commit):
    """The counted files of a commit: their bytes by path."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        members = (one for one in archive if one.isfile() and one.name.endswith(COUNTED))
        return {one.name: archive.extractfile(one).read() for one in members}


def is_product(path, source):
    """Whether the lines of this source count as product."""
    folders = path.split("/")[:-1]
    beside = "tests" in folders or BESIDE & set(folders[:1])
    return path.endswith((".py", ".ts")) and not beside and GENERATED not in source[:400]


def imports(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def lines_of_imports(tree):
    return len({line for node in imports(tree) for line in range(node.lineno, node.end_lineno + 1)})


def sizes_of_functions(tree):
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.end_lineno - node.lineno + 1 for node in functions]


def imported(tree, name, modules):
    """The names among `modules` that a module imports, inside functions too, with the packages that hold them.

    Not those that hold it itself: they are under way when it is loaded.
    """
    found = set()
    for node in imports(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        else:
            deep = {one.name: f"{node.module}.{one.name}" for one in node.names}
            found |= {name if name in modules else node.module for name in deep.values()}
    found |= {parent for one in found & modules for parent in packages(one)} - packages(name)
    return found & modules


def packages(name):
    """The packages that hold a module."""
    return set(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))


def circles(edges):
    """Strongly connected components of more than one node, by Kosaraju's two passes."""

    def reach(node, graph, seen):
        """Nodes that are new from here, each after those that it leads to."""
        if node in seen:
            return []
        seen.add(node)
        return [*(one for successor in graph[node] for one in reach(successor, graph, seen)), node]

    seen, again = set(), set()
    order = [one for node in edges for one in reach(node, edges, seen)]
    back = {node: [one for one in edges if node in edges[one]] for node in edges}
    components = (reach(node, back, again) for node in reversed(order))
    return sorted(sorted(component) for component in components if len(component) > 1)


def budgets(files):
    """Every budget of these files."""
    python = {path: source for path, source in files.items() if path.endswith(".py") and not path.startswith("tests/")}
    trees = {path: ast.parse(source) for path, source in python.items()}
    product = Counter()
    for path, source in files.items():
        if is_product(path, source):
            product["device_runtime/js" if path.endswith(".ts") else path.split("/")[0]] += source.count(b"\n")
    names = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in python}
    ours = {name for name, path in names.items() if is_product(path, python[path])}
    edges = {name: imported(trees[names[name]], name, ours) - {name} for name in sorted(ours)}
    sizes = list(itertools.chain(*(sizes_of_functions(trees[names[name]]) for name in ours)))
    found = circles(edges)
    python_lines = sum(source.count(b"\n") for source in python.values())
    return {
        "product lines": product.total(),
        "product lines by folder": dict(sorted(product.items())),
        "Python files outside tests": len(python),
        "import lines, %": round(100 * sum(map(lines_of_imports, trees.values())) / python_lines, 2),
        "test lines": sum(s.count(b"\n") for p, s in files.items() if p.startswith("tests/") and p.endswith(".py")),
        "words": sum(len(source.decode().split()) for path, source in files.items() if path.endswith(".md")),
        "decisions": sum(bool(DECISION.fullmatch(path)) for path in files),
        "circles": len(found),
        "files in circles": [" ".join(circle) for circle in found],
        f"functions over {LONG} lines, %": round(100 * sum(size > LONG for size in sizes) / len(sizes), 2),
    }


if __name__ == "__main__":
    print(json.dumps(budgets(at(sys.argv[1]) if sys.argv[1:] else work_tree()), indent=1))
