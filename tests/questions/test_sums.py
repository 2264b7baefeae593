"""Sums that are exact however large, deviations that do not cancel, and what is refused in their place."""

import math
import statistics

import numpy as np
import pytest

from device_runtime.backends.executorch import ExecuTorch
from device_runtime.backends.onnxruntime import OnnxRuntime
from export.build import build_plan
from export.model import Model
from export.parity import certify
from export.questions import sums
from export.questions.builtin import BuiltIn, compile_built_in
from export.questions.sql import compile_sql
from export.trial import TOLERANCE
from fedcore.algorithms.question import Ask, rows_of
from fedcore.errors import QuestionError
from fedcore.plan import Field
from muster.asking import Fields, Terms, compiled
from simulator.planned import ask_population
from simulator.population import Population
from tests.questions.graphs import planned
from tests.questions.pooled import FAR, FIELDS, answered, database, devices, reports, told
from tests.questions.test_sql_against_sqlite import on
from tests.sampled import sampled

ROWS = devices(5, 45, most=60, null=0.1)
USERS = Population.of([str(user) for user in range(45)], ROWS)
END = "FROM examples"
BOUNDED = f"{END} MAX 60 ROWS PER DEVICE"


def column(name):
    return [value for columns in ROWS for value in columns[name].tolist() if not math.isnan(value)]


def asked(text, **how):
    return compile_sql(text, FIELDS, minimum_devices=1, **how)


@pytest.mark.parametrize(("end", "secure"), [(END, False), (BOUNDED, False), (BOUNDED, True)])
@pytest.mark.parametrize("name", ["at", "id", "cents", "big"])
def test_sums_of_whole_numbers_are_exact_in_a_simulation(name, end, secure):
    question = asked(f"SELECT SUM({name}), SUM(- {name}), SUM({name} - 5000), AVG({name}) {end}", secure=secure)
    values = column(name)
    total = sum(values)
    ((found, opposite, less, mean),) = ask_population(question, USERS).rows
    assert (found, opposite, less) == (total, -total, total - 5000 * len(values))
    assert mean == total / len(values)


def test_words_of_more_than_20_clients_add_up_exactly():
    shards = [{"n": np.full(29, 2**31 - 1 - 4097 * user)} for user in range(40)]
    users = Population.of([str(user) for user in range(40)], shards)
    text = "SELECT SUM(n) FROM examples MAX 30 ROWS PER DEVICE"
    question = compile_sql(text, [Field("n", "int64", (), 2**31)], minimum_devices=1)
    assert ask_population(question, users).rows == ((int(users.fields["n"].sum()),),)


@pytest.mark.parametrize(("end", "secure"), [(END, False), (BOUNDED, False), (BOUNDED, True)])
@pytest.mark.parametrize(
    ("name", "written", "precise"),
    [
        ("far", "CLIP(far, 0, 10000000)", 1e-8),
        ("far", "CLIP(far, -1e9, 1e9)", 1e-6),
        ("at", "at", 1e-15),
        ("at", "5 - at", 1e-15),
        ("id", "id", 1e-15),
        ("cents", "cents", 1e-15),
        ("x", "CLIP(x, -8, 8)", 1e-14),
    ],
)
def test_deviations_far_from_0_are_those_of_the_values(name, written, precise, end, secure):
    question = asked(f"SELECT STDDEV({written}), VAR_POP({written}) {end}", secure=secure)
    ((deviation, variance),) = ask_population(question, USERS).rows
    assert deviation == pytest.approx(statistics.stdev(column(name)), rel=precise)
    assert variance == pytest.approx(statistics.pvariance(column(name)), rel=2 * precise)


def test_a_held_sum_that_float32_would_round_is_refused():
    held = "SELECT CLIP_PER_DEVICE(SUM({}), -1000, 1000) {}"
    with pytest.raises(QuestionError, match="CLIP_PER_DEVICE adds up in float32"):
        asked(held.format("z - 500", END))
    question = asked(held.format("z - 500", BOUNDED))
    of_devices = [int(columns["z"].astype(int).sum()) - 500 * len(columns["z"]) for columns in ROWS]
    assert answered(question, ROWS).rows == ((int(np.clip(of_devices, -1000, 1000).sum()),),)


@pytest.mark.parametrize("aggregate", ["VAR_POP", "STDDEV"])
def test_a_deviation_whose_squares_are_infinite_is_refused(aggregate):
    with pytest.raises(QuestionError, match=r"needs a narrower CLIP.*\(line 1, column 8\)"):
        asked(f"SELECT {aggregate}(CLIP(x, -1e200, 1e200)) {END}")
    with pytest.raises(QuestionError, match=r"needs a narrower CLIP.*\(line 1, column 8\)"):
        asked(f"SELECT {aggregate}(CLIP(x, -2e13, 2e13)) {BOUNDED}", private=True)  # held to 1e26, they would be 0


def test_a_constant_has_no_deviation():
    rows = [{**columns, "x": np.full_like(columns["x"], 3.3)} for columns in ROWS]
    assert answered(asked(f"SELECT STDDEV(CLIP(x, 0, 10)), VARIANCE(7) {END}"), rows).rows == ((0.0, 0.0),)


def test_a_client_with_more_rows_than_exact_sums_hold_is_refused(monkeypatch):
    """With 2^20 rows each it would take minutes, so exact sums hold fewer here."""
    monkeypatch.setattr(sums, "MOST_ROWS", 16)
    with pytest.raises(QuestionError, match="clients have more rows than exact sums hold: MAX n ROWS PER DEVICE"):
        ask_population(asked(f"SELECT SUM(id) {END}"), USERS)
    ask_population(asked(f"SELECT SUM(id) {BOUNDED}"), USERS)


def test_a_device_whose_words_do_not_hold_its_sum_gives_up():
    question = asked(f"SELECT SUM(z) {END}").question
    trip, size = Ask(question=question.encode()), 2 * (1 + sum(question.block_sizes.values()))
    broadcast = trip.broadcast(trip.init(np.zeros(size, np.float32)))
    for high, finite in [(2.0**24, True), (2.0**24 + 2, False), (-(2.0**24) - 2, False)]:
        carry = {"rows_0": np.ones(1), "sum_1_low": np.zeros(1), "sum_1_high": np.array([high])}
        with np.errstate(divide="ignore"):
            report = trip.report(broadcast, {"ask": carry})
        assert all(np.isfinite(vector).all() for vector in report.values()) == finite


@pytest.mark.parametrize(
    ("built_in", "told_"),
    [
        (BuiltIn("normaliser", ("far",), low=(0.0,), high=(1e7,)), False),
        (BuiltIn("normaliser", ("far",), low=(FAR - 10.0,), high=(FAR + 10.0,)), True),
        (BuiltIn("normaliser", ("at",)), False),
        (BuiltIn("normaliser", ("at",), low=(1_700_000_000,), high=(1_700_200_000,)), True),
        (BuiltIn("correlation", ("far", "y"), low=(0.0, 0), high=(1e7, 4)), False),
        (BuiltIn("correlation", ("far", "y"), low=(FAR - 10.0, 0), high=(FAR + 10.0, 4)), True),
    ],
)
def test_a_deviation_that_rounding_could_make_up_is_null(built_in, told_):
    of, end = np.array(column(built_in.of[0])), "correlation" if built_in.word == "correlation" else "deviation"
    found = ask_population(compile_built_in(built_in, FIELDS, minimum_devices=1), USERS)
    shown = found.rows[0][found.columns.index(end)]
    expected = np.corrcoef(of, column("y"))[0, 1] if end == "correlation" else of.std()
    assert shown == (pytest.approx(expected, rel=1e-2, abs=1e-4) if told_ else None)


def masked(asked, of_devices, source):
    """Reports as masks round them: each number up or down to a step of its range, at random."""
    found = [dict(report) for report in of_devices]
    for name, span in asked.algorithm().ranges.items():
        step = (span.high - span.low) / (2**span.bits - 1)
        for report in found:
            steps = (report[name].astype(np.float64) - span.low) / step
            report[name] = np.floor(steps + source.random(steps.shape)) * step + span.low
    return found


@pytest.mark.parametrize("most", [64, 4096])
@pytest.mark.parametrize("words", ["normaliser x low=0 high=600", "correlation x y low=0,0 high=600,4"])
def test_masks_make_up_no_deviation(words, most):
    source, fields = np.random.default_rng(3), Fields((Field("x", "float32"), Field("y", "uint8", (), 5)), "")
    rows = [{"x": np.full(1, 590, np.float32), "y": np.full(1, number % 5, np.uint8)} for number in range(30)]
    terms = Terms(minimum_devices=5, secure=True)
    question = compiled([*words.split(), *f"MAX {most} ROWS PER DEVICE".split()], fields, terms)
    of_devices = reports(question, rows)
    for _ in range(20):
        found = told(question, masked(question, of_devices, source))
        assert not found.rows[0][-2 if words.startswith("n") else 0]


@pytest.mark.parametrize(("form", "backend"), [("onnx", OnnxRuntime), ("executorch", ExecuTorch)])
def test_sums_of_real_numbers_of_many_steps_do_not_drift(form, backend, request):
    """4,000 steps of 5 rows in float32 alone were off by 10^-5 and more."""
    if form == "executorch":
        request.getfixturevalue("executorch")
    question = asked(f"SELECT SUM(x), AVG(v), SUM(- x) {END}")
    (columns,) = devices(3, 1, most=0)
    rows = {name: np.zeros(20_000, column.dtype) for name, column in columns.items()} | {
        "x": np.full(20_000, 0.137, np.float32), "v": np.full(20_000, 0.331, np.float32),
    }  # fmt: skip
    found = told(question, on(backend())(*planned(question, form), [rows])).rows[0]
    assert found == answered(question, [rows]).rows[0] == pytest.approx((2740, 0.331, -2740), rel=1e-6)


@pytest.mark.parametrize(
    ("value", "rows", "most"), sampled([(0.1, 1_000_000, None), (0.05, 4096, 4096)], [(0.05, 4096, 4096)])
)
def test_no_deviation_is_made_up_of_many_rows(value, rows, most, caplog):
    """Those constants on one device had one of 0.006, and of 0.005."""
    users = Population.of(["a"], [{"x": np.full(rows, value, np.float32)}])
    question = BuiltIn("normaliser", ("x",), low=(0.0,), high=(1.0,), most_rows=most)
    ((*_, mean, deviation, _),) = ask_population(compile_built_in(question, FIELDS, minimum_devices=1), users).rows
    assert (mean, deviation, caplog.text) == (pytest.approx(value, rel=3e-6), None, "")


def test_sums_of_real_numbers_are_certified():
    question = asked(f"SELECT AVG(x), SUM(v) {END}")
    model, algorithm = Model(question.spec()), question.algorithm()
    plan, blobs = build_plan(model, algorithm, ("onnx",))
    assert certify(model, algorithm, plan, blobs).formats["onnx"].tolerance == TOLERANCE


def test_elements_of_large_arrays_are_counted_exactly():
    """A device has more of them than float32 counts to, by odd numbers."""
    users = Population.of(["a"], [{"image": np.ones((259, 255, 257), np.uint8)}])
    fields, count = [Field("image", "uint8", (255, 257), 2)], 259 * 255 * 257
    for words, column in [(("labels",), 1), (("histogram",), 2), (("normaliser", True), 4)]:
        question = BuiltIn(words[0], ("image",), overall=len(words) > 1)
        rows = ask_population(compile_built_in(question, fields, minimum_devices=1), users).rows
        assert [row[column] for row in rows] == [count], words


def test_a_device_with_more_rows_than_float32_counts_gives_up():
    question = asked(f"SELECT COUNT(*), SUM(y > 2) {END}").question
    trip, size = Ask(question=question.encode()), 2 * (1 + sum(question.block_sizes.values()))
    broadcast = trip.broadcast(trip.init(np.zeros(size, np.float32)))
    for rows, finite in [(2.0**24, True), (2.0**24 + 2, False)]:
        carry = dict.fromkeys(rows_of(question), np.array([rows], np.float32))
        with np.errstate(divide="ignore"):
            report = trip.report(broadcast, {"ask": carry})
        assert all(np.isfinite(vector).all() for vector in report.values()) == finite


LARGE = asked(
    "SELECT y, SUM(at), SUM(id - 4503599627370497), SUM(- big), VARIANCE(id), STDDEV_POP(5 - at), "
    f"VAR_POP(CLIP(far, -1e8, 1e8)) {END} GROUP BY y"
)


@pytest.mark.parametrize(("form", "backend"), [("onnx", OnnxRuntime), ("executorch", ExecuTorch)])
def test_graphs_add_up_large_numbers_as_sqlite_does(form, backend, request):
    if form == "executorch":
        request.getfixturevalue("executorch")
    rows = devices(8, 4, null=0)
    plan, graphs, broadcast = planned(LARGE, form)
    found = told(LARGE, on(backend())(plan, graphs, broadcast, [columns for columns in rows if len(columns["x"])]))
    expected = database(rows).execute(LARGE.question.text).fetchall()
    assert [row[:4] for row in found.rows] == [row[:4] for row in sorted(expected)]
    for row, want in zip(found.rows, sorted(expected), strict=True):
        assert row[4:] == pytest.approx(want[4:], rel=1e-6), (row, want)
