"""Queries of the subset, drawn at random, as devices answer them and as SQLite answers them on the pooled rows."""

import random

import pytest

from export.questions.sql import compile_sql
from fedcore.errors import QuestionError
from tests.questions.pooled import FIELDS, answered, database, devices
from tests.questions.queries import Queries


def drawn(source, *, most_rows=True, **how):
    """A query that is not refused, as it was asked, and the text of its scales."""
    while True:
        text, scales, ordered = Queries(source).query()
        bound = source.choice(["", " MAX 64 ROWS PER DEVICE"]) if most_rows else ""
        try:
            return text, scales, ordered, compile_sql(text + bound, FIELDS, minimum_devices=1, **how)
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


@pytest.mark.parametrize("part", range(8))
def test_2000_queries_are_answered_as_sqlite_answers_them(part):
    source = random.Random(part)
    for number in range(250):
        if number % 25 == 0:
            rows = devices(1000 * part + number)
            connection = database(rows)
        text, scales, ordered, asked = drawn(source)
        assert_same(text, scales, ordered, answered(asked, rows).rows, connection)
