"""Queries of the subset, drawn at random, as devices answer them and as SQLite answers them on the pooled rows."""

import functools
import random
import subprocess

import pytest
import safetensors.numpy

from device_runtime.backends.executorch import ExecuTorch
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from export.questions.sql import compile_sql
from fedcore.errors import QuestionError
from tests.device_runtime.node import command
from tests.questions.graphs import KEY, apart, packed, planned, together, values_of, write
from tests.questions.pooled import FIELDS, answered, database, devices, told
from tests.questions.queries import Queries
from tests.sampled import sampled


def drawn(source, *, bounds=("", " MAX 64 ROWS PER DEVICE"), bounded=False, **how):
    """A query that is not refused, as it was asked, the text of its scales, and whether its rows have an order.

    bounds: of rows per device. bounded: whether real fields are clipped. how: it is compiled.
    """
    while True:
        text, scales, ordered = Queries(source, bounded=bounded).query()
        try:
            return text, scales, ordered, compile_sql(text + source.choice(bounds), FIELDS, minimum_devices=1, **how)
        except QuestionError:
            continue


def close(found, expected, scale):
    """Whether two values are the same: whole numbers and texts exactly, real ones to 1e-6 of what was added up."""
    if found == expected or expected is None or found is None or isinstance(expected, str):
        return found == expected
    return (
        isinstance(found, float)
        and not isinstance(scale, str)
        and abs(found - expected) <= 1e-6 * abs(scale or 0) + 1e-12 * abs(expected)
    )


def assert_same(text, scales, ordered, found, connection):
    expected, sizes = connection.execute(text).fetchall(), connection.execute(scales).fetchall()
    if "GROUP BY" not in text and not connection.execute(text.replace("SELECT", "SELECT COUNT(*),", 1)).fetchone()[0]:
        expected = sizes = []  # nobody has such a row, and a group of no devices is not shown
    order = sorted if not ordered else list
    pairs = order(zip(expected, sizes, strict=True), **({} if ordered else {"key": lambda pair: repr(pair[0])}))
    rows = list(found) if ordered else sorted(found, key=repr)
    assert len(rows) == len(expected), text
    remaining = list(pairs)
    for row in rows:
        at = next((i for i, (want, size) in enumerate(remaining) if all(map(close, row, want, size))), None)
        assert at is not None, (text, row, remaining)
        assert not ordered or at == 0, (text, row, remaining)
        remaining.pop(at)


@pytest.mark.parametrize("part", sampled(range(8), [0, 1]))
def test_queries_are_answered_as_sqlite_answers_them(part):
    """Every run has 500 queries; 2,000 are long."""
    source = random.Random(part)
    for number in range(250):
        if number % 25 == 0:
            rows = devices(1000 * part + number)
            connection = database(rows)
        text, scales, ordered, asked = drawn(source)
        assert_same(text, scales, ordered, answered(asked, rows).rows, connection)


@functools.cache
def graphs_of(count, form):
    """Queries, and the plans of their graphs, with many queries each."""
    source = random.Random(count)
    questions = [drawn(source, bounds=("",)) for _ in range(count)]
    lists = packed([asked for *_, asked in questions])
    return questions, lists, [planned(together(several), form) for several in lists]


def by_graphs(count, form, run, null=0.2):
    """Runs the graphs of queries for three devices, and compares with SQLite.

    run: (plan, graphs, broadcast, examples of each device) -> the report of each device, by name.
    """
    rows = [columns for columns in devices(count, 4, null=null) if len(columns["x"])]
    connection, answers = database(rows), []
    questions, lists, plans = graphs_of(count, form)
    for several, plan in zip(lists, plans, strict=True):
        split = [apart(several, report) for report in run(*plan, rows)]
        answers += [told(asked, [report[index] for report in split]) for index, asked in enumerate(several)]
    for (text, scales, ordered, _), found in zip(questions, answers, strict=True):
        assert_same(text, scales, ordered, found.rows, connection)


def on(backend):
    def run(plan, graphs, broadcast, rows):
        found = []
        for columns in rows:
            loaded = {name: backend.load(graph, name) for name, graph in graphs.items()}
            found.append(values_of(plan, execute(plan, loaded, broadcast, columns, KEY).values))
        return found

    return run


def in_node(folder):
    runs = []

    def run(plan, graphs, broadcast, rows):
        folders = [folder / f"{len(runs)}-{index}" for index in range(len(rows))]
        runs.append(graphs)
        for place, columns in zip(folders, rows, strict=True):
            write(place, plan, graphs, broadcast, columns)
        subprocess.run(command("tests/train.ts", *folders), check=True)
        return [
            values_of(plan, safetensors.numpy.load_file(place / "report.safetensors")["report"]) for place in folders
        ]

    return run


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.long)])
def test_graphs_on_onnx_runtime_answer_as_sqlite_does(count):
    by_graphs(count, "onnx", on(OnnxRuntime()))


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.long)])
def test_the_same_graphs_answer_in_node_as_sqlite_does(count, tmp_path):
    by_graphs(count, "onnx", in_node(tmp_path), null=0)  # a device takes no example with NaN


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.long)])
def test_graphs_on_executorch_answer_as_sqlite_does(count, executorch):
    by_graphs(count, "executorch", on(ExecuTorch()))
