"""Types are described to msgspec at import: threads that do it at once, at a first message, end the process."""

import ast
import json
import subprocess
import sys

import pytest

from fedcore.wire.messages import Accepted, Offer, RetryWindow, encode, problem
from tests.fedcore.test_plan import make_plan
from tests.fedcore.test_wire import ASSIGNMENT, CHECK_IN
from tests.tree import ROOT, files

HOME = "fedcore/validation.py"
# These describe a type: `checked` does so for the class that it decorates.
MAKERS = {"decoder", "converter", "checked", "field_converter"}
RACE = """
import importlib, json, sys, threading

sys.setswitchinterval(1e-6)
first = {kind: text.encode() for kind, text in json.load(sys.stdin).items()}

def at_once(work):
    together = threading.Barrier(8)

    def run():
        together.wait()
        work()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

for _ in range(int(sys.argv[1])):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fedcore", "device_runtime")]:
        del sys.modules[name]
    wire, plan = map(importlib.import_module, ("fedcore.wire.messages", "fedcore.plan"))
    answers = importlib.import_module("device_runtime.protocol.call")
    policy = importlib.import_module("device_runtime.permission.policy")
    problem = answers.Answer(500, {"content-type": "application/problem+json"}, first["Problem"])
    at_once(lambda: plan.Plan.decode(first["Plan"]))
    at_once(lambda: answers.refusal("asked", problem))
    at_once(policy.Policy)
    for kind in ("CheckIn", "CheckInAnswer", "AssignmentAnswer"):
        at_once(lambda: wire.decode(first[kind], getattr(wire, kind)))
"""
FIRST = {
    "Plan": make_plan().encode(),
    "Problem": encode(problem("unavailable", "later", RetryWindow(1, 2))),
    "CheckIn": encode(CHECK_IN),
    "CheckInAnswer": encode(Accepted("s", (Offer(task="t", collection="c"),), RetryWindow(1, 2))),
    "AssignmentAnswer": encode(ASSIGNMENT),
}


def sources():
    places = ((path.relative_to(ROOT), path) for path in files(".py"))
    yield from ((str(place), path.read_text("utf-8")) for place, path in places if place.parts[0] != "tests")


def left_outside(source):
    """The lines that describe a type to msgspec themselves, or have it done when they are called."""
    if not any(word in source for word in ("msgspec", *MAKERS)):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "msgspec":
            yield from (node.lineno for name in node.names if name.name in ("convert", "decode", "Decoder"))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec."):
            typed = len(node.args) > 1 or any(word.arg == "type" for word in node.keywords)
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("convert", "Decoder") or (name == "decode" and typed):
                yield node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from (inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id in MAKERS)


def test_types_are_described_in_one_home_and_at_import_alone():
    # `reader` fills constants, so its inside runs at import too.
    found = {place: list(left_outside(text)) for place, text in sources() if place != HOME}
    assert len(found) > 200
    assert found.pop("coordinator/store/records/rows.py") != []
    assert {place: lines for place, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "msgspec.json.decode(data, type=Plan)",
        "msgspec.toml.decode(data, type=Plan)",
        "msgspec.convert(value, Plan)",
        "PLAN = msgspec.json.Decoder(Plan)",
        "from msgspec import convert",
        "def read(data):\n    return decoder(Plan).decode(data)",
        "read = lambda data: converter(Plan)(data)",
        "def make():\n    @checked\n    class Limits(Struct): ...",
    ],
)
def test_what_describes_a_type_elsewhere_is_found(source):
    assert list(left_outside(source)) != []


def test_threads_may_decode_any_message_for_the_first_time_at_once():
    first = json.dumps({kind: data.decode() for kind, data in FIRST.items()})
    command = [sys.executable, "-c", RACE, "20"]
    done = subprocess.run(command, input=first, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
