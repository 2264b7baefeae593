"""Names of tests: each is a promise that fits on one line of a report."""

import ast

from tests.tree import ROOT, files

LONGEST = 69


def names(source):
    """The names of the tests in a file's source."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if function.name.startswith("test_")]


def test_names_of_tests_are_under_70_characters():
    paths = [path for path in files(".py") if path.name.startswith("test_")]
    found = {f"{path.relative_to(ROOT)}: {name}" for path in paths for name in names(path.read_text("utf-8"))}
    assert len(found) > 1000
    assert not [place for place in found if len(place.rpartition(" ")[2]) > LONGEST]
