"""Every query that devices do not answer is refused by name, with the place in its text."""

import pytest

from export.questions.sql import compile_sql
from fedcore.errors import QueryError, QuestionError
from fedcore.plan import Field

FIELDS = (
    Field("x", "float32"),
    Field("y", "uint8", (), 10),
    Field("z", "int64", (), 10**9),
    Field("huge", "int64", (), 2**60),
    Field("wide", "int32"),
    Field("image", "float32", (28, 28)),
    Field("word", "uint8", (8,), 128),
)
FROM = "FROM examples"
ROWS = "MAX 20 ROWS PER DEVICE"
REFUSED = [
    # What is no query of the subset.
    ("", "an empty question", None),
    ("DELETE FROM examples", "a question is one SELECT", 1),
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
    (f"SELECT COUNT(*) {FROM} MAX x ROWS PER DEVICE", "takes a whole number from 1 on", 35),
    (f"SELECT COUNT(*) {FROM} MAX 5000 ROWS PER DEVICE", "there may be 4,096", 31),
    (f"SELECT COUNT(*) {FROM} {ROWS} LIMIT 2", "comes at the end, after LIMIT", 38),
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
    (f"SELECT VAR_POP(x + y) {FROM} {ROWS}", "this needs CLIP(x, low, high) with constants", 8),
    # Aggregates.
    (f"SELECT COUNT(*) {FROM} WHERE SUM(x) > 1", "an aggregate in WHERE", 37),
    (f"SELECT SUM(AVG(x)) {FROM}", "an aggregate in another aggregate, SUM", 12),
    (f"SELECT COUNT(x, y) {FROM}", "COUNT takes one expression", 8),
    (f"SELECT MIN(x) {FROM}", "MIN of a number that is not whole is one device's own", 8),
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
        compile_sql(text, FIELDS)
    first, *excerpt = str(refused.value).splitlines()
    assert message in first
    if text:
        assert isinstance(refused.value, QueryError)
        line, caret = excerpt
        assert line.strip() == text.strip()
    if column is not None:
        assert f"(line 1, column {column})" in first
        assert len(caret) - 2 == column


def test_the_place_is_found_in_a_text_of_several_lines():
    with pytest.raises(QueryError) as refused:
        compile_sql("SELECT y,\n       COUNT(*),\n       SUM(w)\nFROM examples\nGROUP BY y", FIELDS)
    first, line, caret = str(refused.value).splitlines()
    assert "(line 3, column 12)" in first
    assert line[len(caret) - 1] == "w"


@pytest.mark.parametrize("how", ["private", "secure"])
@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"SELECT COUNT(*) {FROM}", "this needs MAX n ROWS PER DEVICE"),
        (f"SELECT SUM(CLIP(x, 0, 5)) {FROM}", "this needs MAX n ROWS PER DEVICE"),
        (f"SELECT SUM(x) {FROM} {ROWS}", "this needs CLIP(x, low, high) with constants"),
        (f"SELECT AVG(x) {FROM} {ROWS}", "this needs CLIP(x, low, high) with constants"),
    ],
)
def test_without_bounds_there_is_neither_noise_nor_a_mask(text, missing, how):
    compile_sql(text, FIELDS)
    with pytest.raises(QueryError, match=missing.replace("(", r"\(").replace(")", r"\)")):
        compile_sql(text, FIELDS, **{how: True})


def test_a_query_that_is_too_long_or_of_no_fields_is_refused():
    with pytest.raises(QuestionError, match="a query of 4,0"):
        compile_sql(f"SELECT {' + '.join(['COUNT(*)'] * 370)} {FROM}", FIELDS)
    with pytest.raises(QuestionError, match="no fields"):
        compile_sql(f"SELECT COUNT(*) {FROM}", ())
