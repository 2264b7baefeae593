"""Expressions on labels: what they match, their canonical text, and what is said of those that do not parse."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from fedcore.errors import BadTarget
from fedcore.labels import LONGEST_TARGET
from fedcore.targets import DEEPEST, parse

PHONE = {"app_version": "3.10", "region": "eu", "ring": "beta", "city": "São Paulo"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("app_version >= 3.2", True),
        ("app_version > 3.9", True),
        ("app_version = 3.10.0", True),
        ("app_version <= 3.10", True),
        ("app_version < 3.10", False),
        ("app_version != 03.010", False),
        ("region in (us, eu)", True),
        ("region not in (us, eu)", False),
        ("region in (eu)", True),
        ("region = EU", False),
        ("region < 4", False),
        ("not region < 4", False),
        ("city = 'São Paulo'", True),
        ('city = "S\\ão Paulo"', True),
        ("region = us or region = eu and ring = beta", True),
        ("(region = us or region = eu) and ring = alpha", False),
        ("not (region = us or ring = alpha)", True),
        ("tier = gold", False),
        ("tier != gold", False),
        ("not tier = gold", False),
        ("not (tier = gold)", False),
        ("tier not in (gold, silver)", False),
        ("tier = gold or region = eu", True),
        ("not (tier = gold and region = us)", True),
    ],
)
def test_labels_are_versions_or_words_and_untold_ones_never_match(text, wanted):
    assert parse(text).matches(PHONE) is wanted


@pytest.mark.parametrize(
    ("text", "canonical", "words"),
    [
        ("a=1", "a = 1", "a is 1"),
        ("not(a>=3.2)and(b in(x,y))", "a < 3.2 and b in (x, y)", "a is below 3.2 and b is one of x, y"),
        (
            "not (a = 1 or b = 2 and c = 3)",
            "a != 1 and (b != 2 or c != 3)",
            "a is not 1 and (b is not 2 or c is not 3)",
        ),
        ("a = 1 and (b = 2 and c = 3)", "a = 1 and b = 2 and c = 3", "a is 1 and b is 2 and c is 3"),
        ("a in (x, x)", "a = x", "a is x"),
        ("not a in (x, y)", "a not in (x, y)", "a is none of x, y"),
        ("region = 'in'", 'region = "in"', 'region is "in"'),
        (
            r"a = 'it\'s \"x\" \\'",
            r'a = "it\'s \"x\" \\"'.replace(r"\'", "'"),
            r'a is "it\'s \"x\" \\"'.replace(r"\'", "'"),
        ),
    ],
)
def test_the_canonical_text_and_the_words_of_a_target(text, canonical, words):
    found = parse(text)
    assert (str(found), found.words) == (canonical, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "column 1: here must be a label's name, `not` or `(`, and the expression ends"),
        ("app_version >=", "column 15: here must be a value, and the expression ends"),
        ("app_version >= beta", "column 16: here must be a version, such as 3.2, as >= compares versions, not `beta`"),
        ("app_version == 3", "column 13: there is no operator `==`; there are =, !=, <, <=, >, >=, in, not in"),
        ("app_version like 3", "column 13: here must be one of =, !=, <, <=, >, >=, in, not in, not `like`"),
        ("Region = eu", "column 1: label 'Region': a name has"),
        ("'region' = eu", "column 1: here must be a label's name"),
        ("region = in", 'column 10: here must be a value; "in" in quotes is one, not `in`'),
        ("region in eu", "column 11: here must be `(`, not `eu`"),
        ("region in (eu uk)", "column 15: here must be `)`, not `uk`"),
        ("region in ()", "column 12: here must be a value, not `)`"),
        ("region not = eu", "column 12: here must be `in`, not `=`"),
        ("region = eu ring = beta", "column 13: here must be `and`, `or` or the end, not `ring`"),
        ("region = eu && ring = beta", "column 13: here must be `and`, `or` or the end, not `&&`"),
        ("(region = eu", "column 13: here must be `)`, and the expression ends"),
        ("region = 'eu", "column 10: a quote that does not end"),
        ("region = ''", "column 10: its value must have 1 to 64 bytes, not 0"),
        (f"region = {'x' * 65}", "column 10: its value must have 1 to 64 bytes, not 65"),
        ("region = 'a\tb'", "column 10: its value must be text without control characters"),
        ("region = a\\b", r"column 11: a '\\'"),
        (" " * (LONGEST_TARGET + 1), f"column {LONGEST_TARGET + 1}: a target has {LONGEST_TARGET} characters at most"),
        ("a='&'or " * 124 + "a='&'", "written out, the target has 1"),
        (
            "(" * DEEPEST + "(a = 1",
            f"column {DEEPEST + 1}: more than {DEEPEST} parentheses and `not` within each other",
        ),
        ("not " * (DEEPEST + 1) + "a = 1", f"column {4 * DEEPEST + 1}: more than {DEEPEST} parentheses and `not`"),
    ],
)
def test_what_does_not_parse_is_refused_with_the_place(text, words):
    with pytest.raises(BadTarget) as refused:
        parse(text)
    assert words in str(refused.value)


def test_parentheses_and_not_may_be_as_deep_as_the_limit():
    assert str(parse("(" * DEEPEST + "a = 1" + ")" * DEEPEST)) == "a = 1"


# Trees of what a user may write, and their naive meaning with three values.

NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["1", "1.0", "1.2", "1.10", "01", "0", "x", "in", "x y", 'q"', "\\", "ü"])
VERSIONS = st.sampled_from(["1", "1.0", "1.2", "1.10", "01", "0"])
LABELS = st.dictionaries(NAMES, VALUES)
COMPARED = st.one_of(
    st.tuples(st.sampled_from(["=", "!="]), NAMES, VALUES),
    st.tuples(st.sampled_from(["<", "<=", ">", ">="]), NAMES, VERSIONS),
    st.tuples(st.sampled_from(["in", "not in"]), NAMES, st.lists(VALUES, min_size=1, max_size=3)),
)
TREES = st.recursive(
    COMPARED,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)


def text_of(tree):
    match tree:
        case ("not", inner):
            return f"not ({text_of(inner)})"
        case (("and" | "or") as word, parts):
            return "(" + f" {word} ".join(map(text_of, parts)) + ")"
        case (sign, name, [*values]):
            return f"{name} {sign} ({', '.join(map(quoted, values))})"
        case (sign, name, value):
            return f"{name} {sign} {quoted(value)}"


def quoted(value):
    return "'" + value.replace("\\", "\\\\") + "'"


def meaning(tree, labels):  # noqa: PLR0911  # one for each kind
    """True, False, or None where nobody knows, as in SQL."""
    match tree:
        case ("not", inner):
            inside = meaning(inner, labels)
            return None if inside is None else not inside
        case ("and", parts):
            found = [meaning(part, labels) for part in parts]
            return False if False in found else None if None in found else True
        case ("or", parts):
            found = [meaning(part, labels) for part in parts]
            return True if True in found else None if None in found else False
        case (sign, name, _) if name not in labels:
            return None
        case (("in" | "not in") as sign, name, [*values]):
            return (sign == "in") == any(same(labels[name], value) for value in values)
        case (("=" | "!=") as sign, name, value):
            return (sign == "=") == same(labels[name], value)
        case (sign, name, value):
            told, least = numbers(labels[name]), numbers(value)
            if told is None:
                return None
            return {"<": told < least, "<=": told <= least, ">": told > least, ">=": told >= least}[sign]


def same(one, other):
    return one == other if None in (numbers(one), numbers(other)) else numbers(one) == numbers(other)


def numbers(text):
    """Eight numbers of a version, or None of a word."""
    parts = text.split(".")
    return [*map(int, parts), *[0] * 8][:8] if all(part.isdigit() for part in parts) else None


@given(TREES, LABELS)
def test_any_expression_means_what_three_valued_logic_says(tree, labels):
    assert parse(text_of(tree)).matches(labels) is (meaning(tree, labels) is True)


@given(TREES, LABELS)
def test_the_canonical_text_of_any_expression_parses_to_the_same(tree, labels):
    found = parse(text_of(tree))
    assert parse(str(found)) == found
    assert str(parse(str(found))) == str(found)
    assert parse(str(found)).matches(labels) is found.matches(labels)
    assert set(found.names) <= {"a", "b", "c"}
    assert found.words


@given(st.text(alphabet="ab1.x=<>!(),'\" \\andorti", max_size=60))
def test_any_text_parses_or_is_refused_with_its_place(text):
    try:
        found, refusal = parse(text), ""
    except BadTarget as error:
        found, refusal = None, str(error)
    assert refusal.startswith("column ") if found is None else parse(str(found)) == found
