"""What is read from a file or a connection is data: the sources have nothing that would run it."""

import ast
import pickle
from contextlib import suppress

import pytest

from tests.test_damaged_inputs import READERS
from tests.tree import ROOT, files

PACKAGES = {
    "authority", "coordinator", "device_runtime", "export", "fedcore", "ingress", "muster", "secagg", "simulator"
}  # fmt: skip
LOADERS = {"pickle", "_pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "jsonpickle", "yaml"}
"""Modules whose readers make what the bytes name."""
OF_TORCH = {"torch.load", "torch.jit.load", "torch.package", "torch.hub"}
RUNNERS = {"eval", "exec", "compile", "__import__", "spec_from_file_location", "run_path", "SourceFileLoader"}


def runs_data(tree):
    """The lines of a source that load objects, or run text or files."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = LOADERS & {one.name.partition(".")[0] for one in names}
            case ast.ImportFrom(module=str(module), names=names):
                found = module.partition(".")[0] in LOADERS or {f"{module}.{one.name}" for one in names} & OF_TORCH
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in RUNNERS:
                found = name not in ("eval", "compile") or isinstance(node.func, ast.Name)
            case ast.Attribute(attr=name) if any(path.endswith(f".{name}") for path in OF_TORCH):
                found = ast.unparse(node) in OF_TORCH
            case ast.keyword(arg="allow_pickle", value=value):
                found = ast.unparse(value) != "False"
            case _:
                continue
        if found:
            yield node.lineno if hasattr(node, "lineno") else node.value.lineno


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "exec(path.read_text())",
        "eval(text)",
        "runpy.run_path(path)",
    ],
)
def test_a_source_that_would_run_what_it_reads_is_found(source):
    assert list(runs_data(ast.parse(source)))


@pytest.mark.security("No data is run as code. … There is no pickle")
def test_no_source_runs_what_it_reads():
    sources = [path for path in files(".py") if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert len(sources) > 300
    found = {str(path.relative_to(ROOT)): list(runs_data(ast.parse(path.read_text()))) for path in sources}
    assert {path: lines for path, lines in found.items() if lines} == {}


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.security("No data is run as code. … There is no pickle")
@pytest.mark.parametrize(("read", "refusal"), [one[1:] for one in READERS.values()], ids=READERS)
def test_no_reader_of_what_strangers_send_unpickles_it(tmp_path, read, refusal):
    loot = tmp_path / "loot"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with suppress(refusal):
            read(pickle.dumps(Payload(loot), protocol))
    assert not loot.exists()
    pickle.loads(pickle.dumps(Payload(loot))).close()
    assert loot.exists()
