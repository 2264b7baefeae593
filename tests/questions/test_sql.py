"""SQL as questions: what is bounded, hidden, shared and read, beside what SQLite has too."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from export.build import export_bundle
from export.model import Model
from export.questions.sql import compile_sql
from export.questions.sums import norm_of_ones, norm_of_sums
from export.trial import TOLERANCE
from fedcore.algorithms.algorithm import ranges_of
from fedcore.algorithms.question import Ask
from fedcore.plan import Field
from simulator.planned import ask_population
from simulator.population import Population
from tests.questions.pooled import FIELDS, answered, clip, database, devices, reports, told
from tests.questions.test_sql_against_sqlite import assert_same, drawn

ROWS = "MAX 16 ROWS PER DEVICE"


def compiled(text, **how):
    return compile_sql(text, FIELDS, **{"minimum_devices": 1, **how})


def one(text, rows, **how):
    """The only number of an answer."""
    ((found,),) = answered(compiled(text, **how), rows).rows
    return found


def test_the_text_for_owners_has_no_comments_and_is_one_line():
    asked = compiled(
        "SELECT COUNT(*) -- only a count\n  AS n /* really */ FROM examples\n WHERE IIF(y, 'a;--b', NULL) IS NULL;"
    )
    assert asked.question.text == "SELECT COUNT(*) AS n FROM examples WHERE IIF(y, 'a;--b', NULL) IS NULL"


def test_columns_are_called_as_they_are_written():
    asked = compiled('SELECT y AS "a b", COUNT( * ), CASE y WHEN 1 THEN 2 END, MAX(y, 2) FROM examples GROUP BY y')
    assert [column.name for column in asked.question.columns] == [
        "a b", "COUNT( * )", "CASE y WHEN 1 THEN 2 END", "MAX(y, 2)",
    ]  # fmt: skip


def test_only_fields_that_are_read_are_fields_of_the_plan():
    assert [item.name for item in compiled("SELECT SUM(z) FROM examples WHERE X > 1").fields] == ["x", "z"]
    image = Field("image", "float32", (28, 28))
    assert [item.name for item in compile_sql("SELECT COUNT(*) FROM examples", (image, *FIELDS)).fields] == ["x"]
    assert compile_sql("SELECT COUNT(*) FROM examples", (image,)).fields == (image,)


def test_a_field_is_found_in_any_case_and_exactly_where_two_differ_in_it():
    fields = (Field("A", "uint8", (), 3), Field("a", "uint8", (), 5), Field("Big", "uint8", (), 9))
    names = [compile_sql(f"SELECT SUM({name}) FROM examples", fields).fields[0].name for name in ("A", "a", "bIG")]
    assert names == ["A", "a", "Big"]


def test_aggregates_share_the_sums_that_they_need():
    asked = compiled("SELECT y, COUNT(*), SUM(z), AVG(z), TOTAL(z), SUM(z) / COUNT(*) FROM examples GROUP BY y")
    assert [(rows.size, rows.words) for rows in asked.question.rows] == [(5, False), (5, True)]
    assert [block.kind for block in asked.question.blocks] == ["any", "sum", "sum"]


def test_infinity_and_nan_are_null_and_numbers_stay_finite():
    rows = [{**devices(0, 1)[0]}]
    rows[0]["x"] = np.array([math.inf, -math.inf, math.nan, 3e38, -1], np.float32)
    rows[0] |= {name: np.zeros(5, rows[0][name].dtype) for name in ("v", "y", "z", "big")}
    assert one("SELECT COUNT(x) FROM examples", rows) == 2
    assert one("SELECT COUNT(*) FROM examples WHERE x IS NULL", rows) == 3
    assert math.isfinite(one("SELECT SUM(x * x * x * x * x * x * x * x * x) FROM examples", rows))
    assert one("SELECT COUNT(1 / (x - x)) FROM examples", rows) == 0


def test_a_group_needs_as_many_devices_as_having_says_and_never_fewer():
    text = "SELECT y, COUNT(*) FROM examples GROUP BY y HAVING {} COUNT(DISTINCT DEVICE) {}"
    for before, after, expected in [
        ("", ">= 30", 30),
        ("", "> 30", 31),
        ("", ">= 2", 20),
        ("50 <=", "", 50),
        ("7 <", "", 20),
    ]:
        assert compile_sql(text.format(before, after), FIELDS).question.minimum_devices == expected
    columns = "SELECT y, MIN(z), SUM(z) FILTER (WHERE x > 0), APPROX_QUANTILE(z, 0.5) FROM examples GROUP BY y"
    raised = compiled(f"{columns} HAVING COUNT(DISTINCT DEVICE) >= 7", minimum_devices=3)
    assert replace(raised.question, text="q") == replace(compiled(columns, minimum_devices=7).question, text="q")
    rows = devices(3, 9)
    shown = answered(compiled("SELECT y, COUNT(*) FROM examples GROUP BY y", minimum_devices=7), rows)
    voters = dict(database(rows).execute("SELECT y, COUNT(DISTINCT DEVICE) FROM examples GROUP BY y").fetchall())
    assert [row[0] for row in shown.rows] == [value for value, count in sorted(voters.items()) if count >= 7]
    assert shown.hidden == sum(count < 7 for count in voters.values()) > 0


def test_the_least_value_is_one_that_enough_devices_have():
    rows = devices(3, 9)
    having = {}
    for columns in rows:
        for value in set(columns["z"].tolist()):
            having[value] = having.get(value, 0) + 1
    for least in (1, 2, 3):
        enough = [value for value, count in having.items() if count >= least]
        assert one("SELECT MIN(z) FROM examples", rows, minimum_devices=least) == min(enough)
        assert one("SELECT MAX(z) FROM examples", rows, minimum_devices=least) == max(enough)
    assert one("SELECT MAX(z) FROM examples", rows) > one("SELECT MAX(z) FROM examples", rows, minimum_devices=3)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 1])
def test_a_quantile_of_few_values_is_exact_and_of_many_within_a_bin(share):
    rows = devices(5, 9)
    few, many = (np.sort(np.concatenate([columns[name] for columns in rows])) for name in ("y", "z"))
    place = max(math.ceil(share * len(few)) - 1, 0)
    assert one(f"SELECT APPROX_QUANTILE(y, {share}) FROM examples", rows) == few[place]
    assert abs(one(f"SELECT APPROX_QUANTILE(z, {share}) FROM examples", rows) - many[place]) <= 10
    real = np.sort(np.concatenate([columns["x"][np.isfinite(columns["x"])] for columns in rows]).clip(-4, 4))
    found = one(f"SELECT APPROX_QUANTILE(CLIP(x, -4, 4), {share}) FROM examples", rows)
    assert abs(found - real[max(math.ceil(share * len(real)) - 1, 0)]) <= 0.08


@pytest.mark.parametrize(
    ("aggregate", "low", "high"), [("SUM(y)", 0, 9), ("SUM(x)", -2.5, 3.5), ("COUNT(x)", 0, 3), ("TOTAL(y - 2)", -2, 2)]
)
def test_clip_per_device_holds_the_sum_of_each_device(aggregate, low, high):
    rows = devices(7, 9)
    connection = database(rows)
    of_devices = connection.execute(f"SELECT {aggregate} FROM examples GROUP BY device").fetchall()
    expected = sum(clip(value or 0, low, high) for (value,) in of_devices)
    found = one(f"SELECT CLIP_PER_DEVICE({aggregate}, {low}, {high}) FROM examples", rows)
    assert found == expected
    assert expected != connection.execute(f"SELECT {aggregate} FROM examples").fetchone()[0]


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("most_rows", [1, 2, 4])
@pytest.mark.parametrize("held", [0.5, 1.5, 100])
def test_no_device_moves_a_sum_by_more_than_its_norm(groups, most_rows, held):
    options = list(itertools.product(range(groups), (-2.0, 0.0, 0.7, 2.0)))
    norm = norm_of_sums(groups, most_rows, 2.0, held)
    largest = 0.0
    for rows in itertools.combinations_with_replacement(options, most_rows):
        sums = np.zeros(groups)
        for group, value in rows:
            sums[group] += value
        largest = max(largest, float(np.linalg.norm(sums.clip(-held, held))))
    assert largest <= norm + 1e-12
    assert held < 100 or largest == pytest.approx(norm)


@pytest.mark.parametrize(("cells", "most_rows"), [(1, 3), (3, 1), (3, 2), (3, 5), (4, None)])
def test_no_device_moves_counts_of_devices_by_more_than_their_norm(cells, most_rows):
    rows = itertools.product(range(cells), repeat=most_rows or cells)
    largest = max(math.sqrt(len(set(one))) for one in rows)
    assert norm_of_ones(cells, most_rows) == pytest.approx(largest)


def extreme(seed, count=8):
    """Devices with rows at the ends of what fields may hold, and many of one kind."""
    source = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rows = int(source.integers(1, 17))
        few = max(int(source.integers(1, 3)), 1)
        drawn_ = {
            "x": source.choice([-3e38, -8, 0, 8, 3e38, math.nan], few),
            "v": source.choice([-8.0, 8.0], few),
            "y": source.choice([0, 4], few),
            "z": source.choice([0, 999], few),
            "big": source.choice([0, 10**9 - 1], few),
            "far": source.choice([-3e38, 0, 999_990, 1_000_010], few),
            "at": source.choice([0, 2**31 - 1], few),
            "id": source.choice([0, 2**53 - 1], few),
            "cents": source.choice([0, 10**7 - 1], few),
        }
        kinds = source.integers(0, few, rows)
        found.append({field.name: drawn_[field.name][kinds].astype(field.dtype) for field in FIELDS})
    return found


def bounded(seed, how):
    """Queries with bounds, that are not refused."""
    source = random.Random(seed)
    while True:
        yield drawn(source, bounds=(f" {ROWS}",), bounded=True, **how)


def test_no_device_exceeds_the_norms_of_300_private_queries():
    queries, largest = bounded(11, {"private": True}), 0.0
    for number in range(300):
        *_, asked = next(queries)
        trip = Ask(question=asked.question.encode())
        for report in reports(asked, extreme(number), algorithm=trip):
            norms = {name: float(np.linalg.norm(vector.astype(np.float64))) for name, vector in report.items()}
            assert max(norms.values()) <= 1 + 1e-6, (asked.question.text, norms)
            assert math.hypot(*norms.values()) <= asked.question.clip * (1 + 1e-6)
            largest = max(largest, *norms.values())
    assert largest > 0.999


def test_masked_queries_lie_in_their_ranges_in_whole_steps():
    queries = bounded(12, {"secure": True})
    for number in range(200):
        text, *_, asked = next(queries)
        ranges = ranges_of(asked.algorithm())
        rows = devices(number, 4) + extreme(number, 2)
        of_devices = reports(asked, rows)
        for report in of_devices:
            for name, vector in report.items():
                span = ranges[name]
                assert ((span.low <= vector) & (vector <= span.high)).all(), (text, name)
                steps = (vector.astype(np.float64) - span.low) * ((2**span.bits - 1) / (span.high - span.low))
                exact = np.abs(steps - steps.round()).max() < 1e-9
                assert exact or not whole(asked, name), (text, name)


def whole(asked, vector):
    """Whether a vector of a report is of whole numbers."""
    return any(vector in asked.question.vectors(block) and block.whole for block in asked.question.blocks)


def test_private_answers_without_noise_are_those_of_sqlite():
    queries = bounded(16, {"private": True})
    for number in range(100):
        text, scales, ordered, asked = next(queries)
        if any(word in text for word in ("SUM", "%", "/", "NULL", "cents")):  # no NULL; cents are far from the middle
            continue
        rows = devices(number)
        found = told(asked, reports(asked, rows)).rows
        assert_same(text, scales, ordered, found, database(rows))


def test_a_mean_under_noise_is_of_numbers_about_the_middle_of_their_range():
    plain, private = (
        compiled(f"SELECT AVG(CLIP(x, 0, 10)) FROM examples {ROWS}", private=how) for how in (False, True)
    )
    (sum_,) = [block for block in private.question.blocks if not block.whole]
    assert (sum_.low, sum_.high, sum_.norm) == (-80, 80, 80)
    assert max(block.high for block in plain.question.blocks) == 160
    rows = devices(1)
    assert one_of(answered(private, rows)) == pytest.approx(one_of(answered(plain, rows)))


def one_of(found):
    ((value,),) = found.rows
    return value


def test_without_a_bound_of_rows_only_held_sums_are_private():
    asked = compiled(
        "SELECT CLIP_PER_DEVICE(SUM(COALESCE(x, 0)), -5, 5), COUNT(DISTINCT DEVICE) FROM examples", private=True
    )
    assert [block.norm for block in asked.question.blocks] == [1, 5]


@pytest.mark.parametrize("most_rows", ["", ROWS])
def test_a_bundle_is_certified_in_both_formats(most_rows, executorch, tmp_path):
    asked = compiled(
        "SELECT y, AVG(CLIP(x, -1, 1)), SUM(big / (z - 3)), MIN(z % 50), COUNT(*) FILTER (WHERE x > v OR x IS NULL) "
        f"FROM examples WHERE NOT z = 7 GROUP BY y {most_rows}"
    )
    bundle = export_bundle(Model(asked.spec()), asked.algorithm(), tmp_path, targets=("onnx", "executorch"))
    for evidence in bundle.certificate.formats.values():
        assert evidence.worst <= evidence.tolerance == TOLERANCE
    assert bundle.plan.question == asked.question.text


def test_constants_are_where_the_rows_are():
    source = random.Random(4)
    for _ in range(50):
        *_, asked = drawn(source)
        empty = {item.name: torch.empty(3, dtype=getattr(torch, item.dtype), device="meta") for item in asked.fields}
        numbers = asked.rows(empty)
        assert (numbers.device.type, numbers.shape) == ("meta", (3, asked.question.row_numbers))


def test_clients_of_a_simulation_answer_as_sqlite_does():
    source, rows = random.Random(5), [columns for columns in devices(9, 6, null=0) if len(columns["x"])]
    starts = np.cumsum([0, *(len(columns["x"]) for columns in rows)])
    fields = {field.name: np.concatenate([columns[field.name] for columns in rows]) for field in FIELDS}
    population = Population(tuple(f"c{index}" for index in range(len(rows))), fields, starts)
    for _ in range(3):
        text, scales, ordered, asked = drawn(source)
        found = ask_population(asked, population)
        assert_same(text, scales, ordered, found.rows, database(rows))
