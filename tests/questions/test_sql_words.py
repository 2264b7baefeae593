"""Words and signs that the parser knows from other databases: computed as SQLite does, or refused by name."""

import itertools
import math
import random
import sqlite3

import numpy as np
import pytest

from export.questions.sql import compile_sql
from fedcore.errors import QuestionError
from fedcore.plan import Field
from tests.questions.pooled import FIELDS, answered, database, devices
from tests.sampled import sampled

ROWS = devices(1, 4, most=8)
FROM = "FROM examples"
BETWEEN_TWO = (
    *("=", "==", "<>", "<", "<=", ">=", "IS", "IS NOT", "AND", "OR", "+", "-", "*", "/", "%", "LIKE", "GLOB", "||"),
    *("&", "|", "<<", ">>", "IN", "NOT IN", "BETWEEN 1 AND", "NOT BETWEEN 1 AND", "IS NULL AND", "IS NOT NULL ="),
    *("ISNULL =", "NOTNULL <", "NOT NULL +", "IS NULL <", "= NOT", "AND NOT", "< NOT", "+ -", "- -", "* -"),
    *("IS NOT DISTINCT FROM", "COLLATE NOCASE ="),
)
EXPRESSIONS = list(itertools.product(("", "NOT ", "- ", "~", "+"), BETWEEN_TWO, BETWEEN_TWO))


def same(found, expected):
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=2e-6, abs_tol=1e-6)
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("part", sampled(range(20), [0]))
def test_two_signs_in_a_row_bind_as_in_sqlite_or_are_refused(part):
    """All pairs of signs with all that may stand before them: 7,220, of which every run takes a twentieth."""
    connection, asked = database(ROWS), 0
    for before, one, other in random.Random(0).sample(EXPRESSIONS, len(EXPRESSIONS))[part::20]:
        written = f"{before}y {one} z {other} 3".replace("IN z", "IN (z, 1)").replace("IN 3", "IN (3, 2)")
        text = f"SELECT SUM({written}), COUNT({written}), COUNT(*) FILTER (WHERE {written}) {FROM}"
        try:
            compiled = compile_sql(text, FIELDS, minimum_devices=1)
        except QuestionError:
            continue
        (found,), (expected,) = answered(compiled, ROWS).rows, connection.execute(text).fetchall()
        assert all(map(same, found, expected)), (text, found, expected)
        asked += 1
    assert asked > 60


@pytest.mark.parametrize(
    "text",
    [
        f"SELECT SUM(0x10 * y), 0X1F, SUM(1e3), SUM(.5), SUM(5.), SUM(1.e1), SUM(1E+2), SUM(1e-400) {FROM}",
        f"SELECT COUNT(), COUNT(ALL y), SUM(ALL y), COUNT(NULL) {FROM}",
        f"SELECT SUM(CAST(y / 2.0 AS INT)), SUM(CAST(y / 2.0 AS BIGINT)), SUM(CAST(y AS DOUBLE PRECISION) / 2) {FROM}",
        f"SELECT y, COUNT(*) {FROM} GROUP BY (1) ORDER BY (2), 1",
        f"SELECT y, COUNT(*) {FROM} GROUP BY +1",
        f"SELECT - y AS y, COUNT(*) {FROM} GROUP BY y ORDER BY y NULLS FIRST",
        f'SELECT SUM("y"), SUM([y]), SUM(`y`), SUM("Y"), SUM(EXAMPLES.Y) AS date, COUNT(*)first {FROM}',
        f"SELECT COUNT(*) {FROM} /* /* */ WHERE y = 1 /* */ -- */ AND 0",
        f"SELECT COUNT(*) {FROM} WHERE y=1--1",
        f"SELECT CASE WHEN COUNT(*) > 1 THEN 'from' END, COALESCE(NULL, 'FROM') {FROM}",
        f"SELECT SUM(y) * 4503599627370496 * 4096, CAST(-1e30 * COUNT(*) AS INTEGER), 1e30 % 7 {FROM}",
        f"SELECT 1e300 * 1e300 - 1e300 * 1e300, -9007199254740991 % 10 + 0 * COUNT(*) {FROM}",
        f"SELECT COUNT(*) {FROM} WHERE y ISNULL OR x NOTNULL AND y NOT NULL",
        f"SELECT SUM(y > 3 > 2), SUM(y = 1 = 1), SUM(1 < 2 < 3), SUM(NOT y = 3) {FROM}",
        f"SELECT SUM(MAX(y, z)), SUM(MIN(y, z, 2)), ROUND(2.5), ROUND(-2.5) {FROM}",
        f"SELECT SUM(CASE y WHEN NULL THEN 1 ELSE 2 END), SUM(IFNULL(NULLIF(y, 1), 100)) {FROM}",
    ],
)
def test_words_of_sqlite_are_computed_as_it_does(text):
    found = answered(compile_sql(text, FIELDS, minimum_devices=1), ROWS).rows
    expected = database(ROWS).execute(text).fetchall()
    for row, wanted in zip(sorted(found, key=repr), sorted(expected, key=repr), strict=True):
        assert all(map(same, row, wanted)), (row, wanted)


REFUSED = [
    ("SELECT SUM(MOD(y, 3) / 2)", "MOD, which SQLite computes of real numbers; write a % b", 12),
    ("SELECT SUM(MOD(CLIP(x, 0, 10), 2))", "MOD, which", 12),
    ("SELECT SUM(y) > 1_000", "1_000 is no number: write digits alone", 17),
    ("SELECT SUM(y) > 0b11", "0b11 is no number", 17),
    ("SELECT SUM(y) > 12abc", "12abc is no number", 17),
    ("SELECT SUM(y::int)", "do not answer ::", 13),
    ("SELECT SUM(x'10' * y)", "do not answer HEX STRING", None),
    ("SELECT SUM(!y)", "do not answer !", 12),
    ("SELECT SUM(~y)", "do not answer BITWISE NOT", None),
    *((f"SELECT SUM(CAST(y / 2.0 AS {kind}))", f"do not answer {kind}", 28) for kind in ("BIT", "LONG", "SHORT")),
    ("SELECT SUM(CAST(y / 2.0 AS LONG)) AS LONG", "do not answer LONG", None),
    ("SELECT SUM(TRY_CAST(y AS INT))", "do not answer TRY CAST", None),
    ("SELECT SUM(NVL(y, 1))", "do not answer NVL", 12),
    ("SELECT SUM(IF(y, 1, 2))", "do not answer IF", 12),
    ("SELECT VAR_SAMP(y)", "do not answer VAR_SAMP; did you mean VAR_POP?", 8),
    ("SELECT STDDEV_SAMP(y)", "do not answer STDDEV_SAMP", 8),
    ("SELECT SUM(COALESCE(y))", "COALESCE two or more", None),
    ("SELECT SUM(IFNULL(y, 1, 2))", "IFNULL takes two", None),
    ("SELECT COUNT(*) {# WHERE y #}", "no comment in SQLite", 16),
    ("SELECT COUNT(*),", "a column is missing beside a comma", None),
    ("SELECT SUM(ABS(y),)", "nothing follows this comma", None),
    ("SELECT 1", "only sums leave a device", None),
    ("SELECT y IS TRUE", "do not answer IS, other than", None),
    ("SELECT COUNT(*) FILTER (WHERE y <=> 3)", "do not answer IS, other than", None),
    ("SELECT SUM(NOT y IN (z, 1) + 3)", "write parentheses", None),
    ("SELECT SUM(NOT y = z NOT NULL + 3)", "write parentheses", None),
]
AFTER = [
    ("GROUP BY -1", "there is no column below 1", 40),
    ("LIMIT 1 BY y", "do not answer BY", 39),
    ("WHERE y IN (1,)", "nothing follows this comma", 44),
    ("WHERE y DIV 2", "do not answer INT DIV", None),
    ("WHERE y RLIKE 3", "do not answer REGEXP LIKE", None),
]


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [(f"{text} {FROM}", *rest) for text, *rest in REFUSED]
    + [(f"SELECT COUNT(*) {FROM} {clause}", *rest) for clause, *rest in AFTER],
)
def test_words_of_other_databases_are_refused_by_name(text, message, column):
    with pytest.raises(QuestionError) as refused:
        compile_sql(text, FIELDS)
    assert message in str(refused.value).splitlines()[0]
    assert column is None or f"(line 1, column {column})" in str(refused.value)


def test_fields_that_differ_in_case_only_are_two():
    """SQLite has no such columns: there one of them has another name."""
    source = np.random.default_rng(0)
    rows = [{"a": source.integers(0, 5, 6), "A": source.integers(0, 50, 6)} for _ in range(5)]
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE examples (a INTEGER, other INTEGER)")
    for columns in rows:
        pairs = zip(columns["a"].tolist(), columns["A"].tolist(), strict=True)
        connection.executemany("INSERT INTO examples VALUES (?, ?)", pairs)
    fields = (Field("a", "int64", (), 5), Field("A", "int64", (), 50))
    for text in (
        "SELECT SUM(a), SUM({}), SUM(a + {}), SUM({} - a) FROM examples",
        'SELECT SUM({}), SUM("a") FROM examples WHERE "{}" > 10 AND a < 4',
        "SELECT a, SUM({}) FROM examples GROUP BY a",
        "SELECT {} % 3, a, COUNT(*) FROM examples GROUP BY 1, a",
    ):
        found = answered(compile_sql(text.replace("{}", "A"), fields, minimum_devices=1), rows).rows
        assert sorted(found) == sorted(connection.execute(text.replace("{}", "other")).fetchall()), text


def test_a_name_that_may_be_several_fields_is_refused():
    fields = (Field("Ab", "uint8", (), 3), Field("aB", "uint8", (), 5))
    with pytest.raises(QuestionError, match="ab may be any of Ab, aB: write the field as it is called"):
        compile_sql("SELECT SUM(ab) FROM examples", fields)
