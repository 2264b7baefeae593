"""SQL that is refused, and the words for it."""

import itertools
import math
import random
import sqlite3

import numpy as np
import pytest

from export.questions.sql import compile_sql
from fedcore.errors import QueryError, QuestionError
from fedcore.plan import Field
from tests.questions.pooled import FIELDS, answered, database, devices
from tests.sampled import sampled

REFUSED_FIELDS = (
    Field("x", "float32"),
    Field("y", "uint8", (), 10),
    Field("z", "int64", (), 10**9),
    Field("huge", "int64", (), 2**60),
    Field("wide", "int32"),
    Field("image", "float32", (28, 28)),
    Field("word", "uint8", (8,), 128),
)
FROM = "FROM examples"
REFUSED_ROWS = "MAX 20 ROWS PER DEVICE"
REFUSED = [
    # What is no query of the subset.
    ("", "an empty question", None),
    ("DELETE FROM examples", "a question is one SELECT", 1),
    ("ELSE", "a question is one SELECT", 1),
    ("SELECT COUNT(*) FROM examples AS ? AT b", "this is no SQL; a question is SELECT", 1),
    (f"SELECT COUNT(*) {FROM}; SELECT 1 {FROM}", "a question is one SELECT", 1),
    (f"SELECT COUNT(*) {FROM} UNION SELECT 2 {FROM}", "a question is one SELECT", 1),
    (f"SELECT SUM(x {FROM}", "this is no SQL here", 14),
    (f"SELECT 'a {FROM}", "a quote, or a comment, never ends", 24),
    (f"SELECT ABS() {FROM}", "an argument is missing", 12),
    ("SELECT COUNT(*)", "FROM examples is missing", 16),
    ("SELECT COUNT(*) FROM phones", "a device has one table, examples", 22),
    ("SELECT COUNT(*) FROM main.examples", "a device has one table, examples", 22),
    ("SELECT COUNT(*) FROM examples AS e", "a device has one table, examples", 22),
    (f"SELECT SUM(e.x) {FROM}", "a device has one table, examples", 12),
    (f"SELECT COUNT(*) {FROM} JOIN other ON x = y", "do not answer JOIN", 36),
    (f"SELECT COUNT(*) {FROM}, other", "do not answer JOIN", 32),
    ("SELECT COUNT(*) FROM (SELECT 1)", "a query inside a query", 22),
    (f"SELECT (SELECT 1) {FROM}", "a query inside a query", 8),
    (f"SELECT SUM(select) {FROM}", "a query inside a query", 12),
    (f"SELECT COUNT(*) {FROM} WHERE EXISTS (SELECT 1)", "a query inside a query", 37),
    (f"WITH a AS (SELECT 1) SELECT COUNT(*) {FROM}", "do not answer WITH", 6),
    (f"SELECT DISTINCT y {FROM}", "do not answer SELECT DISTINCT", None),
    (f"SELECT COUNT(DISTINCT y) {FROM}", "DISTINCT, other than COUNT(DISTINCT DEVICE)", 14),
    (f"SELECT SUM(DISTINCT y) {FROM}", "DISTINCT, other than COUNT(DISTINCT DEVICE)", 12),
    (f"SELECT SUM(x) OVER (ORDER BY y) {FROM}", "OVER; a device's rows have no order", 8),
    (f"SELECT * {FROM}", "do not answer *; only sums", 8),
    (f"SELECT examples.* {FROM}", "do not answer *; only sums", None),
    (f"SELECT COUNT(*) {FROM} LIMIT 2 OFFSET 1", "do not answer OFFSET", 46),
    (f"SELECT COUNT(*) {FROM} LIMIT y", "LIMIT takes a whole number", 37),
    (f"SELECT y, COUNT(*) {FROM} GROUP BY ROLLUP(y)", "do not answer ROLLUP", None),
    (f"SELECT y, COUNT(*) {FROM} GROUP BY y ORDER BY y NULLS LAST", "NULLS FIRST and NULLS LAST", 54),
    (f"SELECT y, COUNT(*) {FROM} GROUP BY y ORDER BY SUM(x)", "ORDER BY takes what is shown", 54),
    (f"SELECT COUNT(*) {FROM} ORDER BY 2", "there is no column 2; there are 1 to 1", 40),
    # Bounds.
    (f"SELECT COUNT(*) {FROM} MAX 0 ROWS PER DEVICE", "takes a whole number from 1 on", 35),
    *((f"SELECT COUNT(*) {FROM} MAX {n} ROWS PER DEVICE", "takes a whole number from 1 on", 35) for n in "x²٣"),
    (f"SELECT COUNT(*) {FROM} MAX 5000 ROWS PER DEVICE", "there may be 4,096", 31),
    (f"SELECT COUNT(*) {FROM} {REFUSED_ROWS} LIMIT 2", "comes at the end, after LIMIT", 38),
    (f"SELECT COUNT(*) {FROM} HAVING COUNT(*) > 5", "HAVING here is a number of devices", 38),
    (f"SELECT COUNT(*) {FROM} HAVING COUNT(DISTINCT DEVICE) < 5", "HAVING here is a number of devices", None),
    (f"SELECT COUNT(*) {FROM} HAVING COUNT(DISTINCT DEVICE) >= 2.5", "HAVING here is a number of devices", None),
    # Fields.
    (f"SELECT SUM(xx) {FROM}", "no field is called 'xx'; did you mean x?", 12),
    (f"SELECT COUNT(*) {FROM} WHERE clas = 1", "no field is called 'clas'", 37),
    (f"SELECT COUNT(DEVICE) {FROM}", "DEVICE is no field; it can be counted", 14),
    (f"SELECT x {FROM}", "x is of one row, and only sums leave a device", 8),
    (f"SELECT x + COUNT(*) {FROM} GROUP BY y", "x is of one row, and only sums leave a device", 8),
    (f"SELECT AVG(image) {FROM}", "image is an array of 28 × 28 numbers", 12),
    (f"SELECT AVG(image) {FROM}", "`muster ask normaliser image`", 12),
    (f"SELECT COUNT(word) {FROM}", "`muster ask normaliser word`", 14),
    (f"SELECT SUM(wide) {FROM}", "wide is int32 of unknown range", 12),
    (f"SELECT SUM(huge) {FROM}", "this may reach 1,152,921,504,606,846,976", None),
    # Keys.
    (f"SELECT COUNT(*) {FROM} GROUP BY", "GROUP BY names no key", 39),
    (f"SELECT x, COUNT(*) {FROM} GROUP BY x", "a number that is not whole has as many groups", 43),
    (f"SELECT z, COUNT(*) {FROM} GROUP BY z", "GROUP BY has 1,000,000,000 groups here", 43),
    (f"SELECT y, COUNT(*) {FROM} GROUP BY y, z % 1000", "10,000 groups take 10,000 numbers", 43),
    (f"SELECT COUNT(*) {FROM} GROUP BY y, y + 1, y + 2", "GROUP BY takes 2 keys, not 3", None),
    (f"SELECT COUNT(*) {FROM} GROUP BY COUNT(*)", "an aggregate in GROUP BY", 40),
    (f"SELECT CASE WHEN y > 1 THEN 1 ELSE 2.5 END, COUNT(*) {FROM} GROUP BY 1", "not whole has as many", 8),
    # Functions.
    (f"SELECT LOWER(word) {FROM}", "do not answer LOWER; there are ABS", 8),
    (f"SELECT MEDIAN(x) {FROM}", "do not answer MEDIAN; did you mean MIN? there are ABS", 8),
    (f"SELECT CLAP(x, 0, 1) {FROM}", "do not answer CLAP; did you mean CLIP?", 8),
    (f"SELECT GREATEST(y, 1) {FROM}", "do not answer GREATEST", 8),
    (f"SELECT COUNT(*) {FROM} WHERE x LIKE 'a'", "do not answer LIKE, as they have no functions of text", 37),
    (f"SELECT COUNT(*) {FROM} WHERE y || 'a' = 'b'", "do not answer ||, as they have no functions", 37),
    (f"SELECT SUM(y & 1) {FROM}", "do not answer BITWISE AND", 12),
    (f"SELECT COUNT(*) {FROM} WHERE x IS y", "do not answer IS, other than IS NULL", 37),
    (f"SELECT SUM(ROUND(x, 2)) {FROM}", "ROUND takes one number here", 12),
    (f"SELECT SUM(ROUND(x)) {FROM}", "without bounds cannot be rounded: CLIP", 12),
    (f"SELECT SUM(CAST(x AS TEXT)) {FROM}", "CAST here is to INTEGER or REAL", 12),
    (f"SELECT SUM(CAST(x AS INTEGER)) {FROM}", "without bounds cannot become whole: CLIP", 12),
    (f"SELECT SUM(x % 2) {FROM}", "without bounds cannot become whole: CLIP", 12),
    (f"SELECT SUM(CLIP(x, 1, 0)) {FROM}", "CLIP takes two constants, the lower one first", 12),
    (f"SELECT SUM(CLIP(x, y, 10)) {FROM}", "CLIP takes two constants, the lower one first", 12),
    (f"SELECT CLIP(COUNT(*), 9, 1) {FROM}", "CLIP takes two constants, the lower one first", 8),
    (f"SELECT 1 + CLIP(SUM(y), NULL, 9) {FROM}", "CLIP takes two constants, the lower one first", 12),
    (f"SELECT CLIP(SUM(y), 0, COUNT(*)) {FROM}", "an aggregate in the bounds of CLIP", 24),
    (f"SELECT SUM(WIDTH_BUCKET(x)) {FROM}", "WIDTH_BUCKET takes 4 arguments", 12),
    (f"SELECT SUM(1e) {FROM}", "1e is no number: write digits, as 1000, 0.5 or 1e-3", 12),
    (f"SELECT SUM(y + .2.5) {FROM}", ".2.5 is no number", 17),
    (f"SELECT SUM(0x{'f' * 17}) {FROM}", "0xfffffffffffffffff is no number", 12),
    (f"SELECT SUM(CLIP(x, 1)) {FROM}", "CLIP takes 3 arguments, not 2", 12),
    (f"SELECT SUM(WIDTH_BUCKET(x, 1, 0, 3)) {FROM}", "WIDTH_BUCKET takes a number, two constants", 12),
    (f"SELECT SUM(WIDTH_BUCKET(x, 0, 1, 0)) {FROM}", "WIDTH_BUCKET makes 1 to 8,192 parts", 12),
    (f"SELECT SUM(WIDTH_BUCKET(3, 0, 1, 2)) {FROM}", "WIDTH_BUCKET takes a number of the row", 12),
    (f"SELECT WIDTH_BUCKET(COUNT(*), 0, 1, 2) {FROM}", "WIDTH_BUCKET is of rows", 8),
    (f"SELECT COUNT(*) {FROM} WHERE y IN (SELECT 1)", "IN takes a list of values", 37),
    (f"SELECT COUNT(*) {FROM} WHERE x = y IN (1, 2)", "write parentheses", 37),
    (f"SELECT SUM(99999999999999999) {FROM}", "99999999999999999 is too large", 12),
    (f"SELECT SUM(1e999) {FROM}", "1e999 is too large", 12),
    (f"SELECT SUM(9007199254740991 * 4) {FROM}", "this constant is too large", 12),
    # Kinds.
    (f"SELECT SUM(CASE WHEN y > 1 THEN 'a' ELSE 1 END) {FROM}", "a text in some rows and a number in others", 12),
    (f"SELECT SUM('a') {FROM}", "SUM of a text", 8),
    (f"SELECT CASE y WHEN 0 THEN '' END AS k, COUNT(*) {FROM} GROUP BY k", "an empty text", 27),
    (f"SELECT SUM(NULL) {FROM}", "SUM of NULL", 8),
    (f"SELECT SUM(y + 'a') {FROM}", "+ of text; devices compute with numbers", 12),
    (f"SELECT COUNT(*) {FROM} WHERE 'a'", "a text is no condition", None),
    (f"SELECT COUNT(*) + 'a' {FROM}", "+ of text; columns compute with numbers", 8),
    (f"SELECT CASE WHEN 'a' THEN 1 END {FROM}", "a text is no condition", 8),
    (f"SELECT SUM(CASE WHEN y > 1 THEN 1 ELSE 2.5 END / 2) {FROM}", "whole in some rows only", 22),
    (f"SELECT SUM(CASE WHEN y > 1 THEN 1 ELSE 2.5 END) / 2 {FROM}", "CAST it AS REAL", 8),
    (f"SELECT SUM(z * z) {FROM}", "this may reach 999,999,998,000,000,00", 12),
    (f"SELECT STDDEV(x) {FROM}", "this needs CLIP(x, low, high) with constants: without bounds two large", 8),
    (f"SELECT VAR_POP(x + y) {FROM} {REFUSED_ROWS}", "this needs CLIP(x, low, high) with constants", 8),
    # Aggregates.
    (f"SELECT COUNT(*) {FROM} WHERE SUM(x) > 1", "an aggregate in WHERE", 37),
    (f"SELECT SUM(AVG(x)) {FROM}", "an aggregate in another aggregate, SUM", 12),
    (f"SELECT COUNT(x, y) {FROM}", "COUNT takes one expression", 8),
    (f"SELECT MIN(x) {FROM}", "MIN of a number that is not whole is one device's own", 8),
    (f"SELECT COUNT(*) {FROM} LIMIT 0", "LIMIT takes a whole number from 1 on", 37),
    (f"SELECT MAX(z) {FROM}", "MAX counts 1,000,000,000 values here", 8),
    (f"SELECT y, MIN(z % 1000) {FROM} GROUP BY y", "MIN counts 1,000 values in each of 10 groups", None),
    (f"SELECT APPROX_QUANTILE(x, 0.5) {FROM}", "counts values in bins: CLIP", 8),
    (f"SELECT APPROX_QUANTILE(y, 50) {FROM}", "takes a share from 0 to 1", 8),
    (f"SELECT y, APPROX_QUANTILE(y % 8, y) {FROM} GROUP BY y", "takes a share from 0 to 1", 11),
    (f"SELECT CLIP_PER_DEVICE(x, 0, 1) {FROM}", "takes SUM, TOTAL or COUNT", None),
    (f"SELECT CLIP_PER_DEVICE(AVG(x), 0, 1) {FROM}", "takes SUM, TOTAL or COUNT", 24),
    (f"SELECT CLIP_PER_DEVICE(SUM(x), 1, 2) {FROM}", "needs 0 between its bounds", 24),
    (f"SELECT CLIP_PER_DEVICE(SUM(x), 0, 0) {FROM}", "needs two bounds that are apart", 24),
    (f"SELECT CLIP_PER_DEVICE(SUM(x), 0) {FROM}", "CLIP_PER_DEVICE takes 3 arguments, not 2", 8),
    (f"SELECT ABS(x) FILTER (WHERE y) {FROM}", "FILTER follows an aggregate", 8),
]


@pytest.mark.parametrize(("text", "message", "column"), REFUSED)
def test_a_query_outside_the_subset_is_refused_by_name(text, message, column):
    with pytest.raises(QuestionError) as refused:
        compile_sql(text, REFUSED_FIELDS)
    first, *excerpt = str(refused.value).splitlines()
    assert message in first
    if text:
        assert isinstance(refused.value, QueryError)
        line, caret = excerpt
        assert line.strip() == text.strip()
    if column is not None:
        assert f"(line 1, column {column})" in first
        assert len(caret) - 2 == column


def test_a_query_that_nests_too_deeply_is_refused():
    with pytest.raises(QueryError, match="this query nests too deeply: maximum recursion depth"):
        compile_sql(f"SELECT SUM({'(' * 999}x{')' * 999}) {FROM}", REFUSED_FIELDS)


def test_the_place_is_found_in_a_text_of_several_lines():
    with pytest.raises(QueryError) as refused:
        compile_sql("SELECT y,\n       COUNT(*),\n       SUM(w)\nFROM examples\nGROUP BY y", REFUSED_FIELDS)
    first, line, caret = str(refused.value).splitlines()
    assert "(line 3, column 12)" in first
    assert line[len(caret) - 1] == "w"


@pytest.mark.parametrize("how", ["private", "secure"])
@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"SELECT COUNT(*) {FROM}", "this needs MAX n ROWS PER DEVICE"),
        (f"SELECT SUM(CLIP(x, 0, 5)) {FROM}", "this needs MAX n ROWS PER DEVICE"),
        (f"SELECT SUM(x) {FROM} {REFUSED_ROWS}", "this needs CLIP(x, low, high) with constants"),
        (f"SELECT AVG(x) {FROM} {REFUSED_ROWS}", "this needs CLIP(x, low, high) with constants"),
    ],
)
def test_without_bounds_there_is_neither_noise_nor_a_mask(text, missing, how):
    compile_sql(text, REFUSED_FIELDS)
    with pytest.raises(QueryError, match=missing.replace("(", r"\(").replace(")", r"\)")):
        compile_sql(text, REFUSED_FIELDS, **{how: True})


@pytest.mark.parametrize(("name", "share"), [("MIN", 0.01), ("MAX", 0.99)])
def test_noise_has_neither_a_least_nor_a_greatest_value(name, share):
    """Of many values that no device has, noise alone gives some as many devices as a group needs."""
    text = f"SELECT {name}(y) {FROM} {REFUSED_ROWS}"
    compile_sql(text, REFUSED_FIELDS)
    with pytest.raises(QueryError, match=rf"APPROX_QUANTILE\(x, {share}\) \(line 1, column 8\)"):
        compile_sql(text, REFUSED_FIELDS, private=True)


def test_a_query_that_is_too_long_or_of_no_fields_is_refused():
    with pytest.raises(QuestionError, match="a query of 4,0"):
        compile_sql(f"SELECT {' + '.join(['COUNT(*)'] * 370)} {FROM}", REFUSED_FIELDS)
    with pytest.raises(QuestionError, match="a query of 5,0"):
        compile_sql(f"SELECT {'5' * 5000} {FROM}", REFUSED_FIELDS)
    with pytest.raises(QuestionError, match="no fields"):
        compile_sql(f"SELECT COUNT(*) {FROM}", ())


ROWS = devices(1, 4, most=8)

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
        f"SELECT COUNT(y / (y * 0)), SUM(IFNULL(1.5 / CLIP(x, 0, 0), y)), SUM(y % (y * 0)) {FROM}",
        f"SELECT SUM(CASE y WHEN NULL THEN 1 ELSE 2 END), SUM(IFNULL(NULLIF(y, 1), 100)) {FROM}",
    ],
)
def test_words_of_sqlite_are_computed_as_it_does(text):
    found = answered(compile_sql(text, FIELDS, minimum_devices=1), ROWS).rows
    expected = database(ROWS).execute(text).fetchall()
    for row, wanted in zip(sorted(found, key=repr), sorted(expected, key=repr), strict=True):
        assert all(map(same, row, wanted)), (row, wanted)


REFUSED_WORDS = [
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
    ("SELECT SUM(ABS(y),)", "no SQL here, at )", 19),
    ("SELECT AVG(, y)", "no SQL here, at ,", 12),
    ("SELECT SUM(y) FILTER (y > 1)", "no SQL here, at Y", 23),
    ("SELECT CASE WHEN SUM(y) > 1 2 END", "no SQL here, at 2", 29),
    ("SELECT COUNT(*) FILTER (WHERE y BETWEEN 1 z AND 3)", "no SQL here, at Z", 43),
    ("SELECT SUM(y + INTEGER 3)", "no SQL here, at 3", 24),
    ("SELECT COUNT(DISTINCT y.DEVICE)", "DISTINCT, other than COUNT(DISTINCT DEVICE)", None),
    ("SELECT 1", "only sums leave a device", None),
    ("SELECT y IS TRUE", "do not answer IS, other than", None),
    ("SELECT COUNT(*) FILTER (WHERE y <=> 3)", "do not answer IS, other than", None),
    ("SELECT SUM(NOT y IN (z, 1) + 3)", "write parentheses", None),
    ("SELECT SUM(NOT y = z NOT NULL + 3)", "write parentheses", None),
]
AFTER = [
    ("GROUP BY -1", "there is no column below 1", 40),
    ("LIMIT 1 BY y", "do not answer BY", 39),
    ("WHERE y IN (1,)", "no SQL here, at )", 45),
    ("WHERE y DIV 2", "do not answer INT DIV", None),
    ("WHERE y RLIKE 3", "do not answer REGEXP LIKE", None),
]


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [(f"{text} {FROM}", *rest) for text, *rest in REFUSED_WORDS]
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


def test_a_field_called_device_is_not_counted_as_devices():
    fields = (Field("device", "uint8", (), 3),)
    compile_sql("SELECT SUM(device), COUNT(DISTINCT DEVICE) FROM examples", fields)
    with pytest.raises(QueryError, match=r"device is a field here: COUNT\(DISTINCT DEVICE\) is of devices"):
        compile_sql("SELECT COUNT(DISTINCT device) FROM examples", fields)


def test_a_name_that_may_be_several_fields_is_refused():
    fields = (Field("Ab", "uint8", (), 3), Field("aB", "uint8", (), 5))
    with pytest.raises(QuestionError, match="ab may be any of Ab, aB: write the field as it is called"):
        compile_sql("SELECT SUM(ab) FROM examples", fields)
