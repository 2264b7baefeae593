"""The answer to a question: read from parameters, with SQLite's rules, thresholds, words, order and errors."""

import math
import random

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from export.questions.sql import compile_sql
from fedcore.errors import QuestionError
from fedcore.plan import IGNORED, BlobRef, Field, Tokenizer
from fedcore.questions.answer import Answer, answer, check_columns
from fedcore.questions.functions import FUNCTIONS
from fedcore.questions.question import Block, Call, Cell, Column, Group, Key, Number, Order, Question, Rows, Shown
from muster.asking import Fields, Terms, compiled, fields_in
from simulator.planned import ask_population
from simulator.population import Population
from tests.questions.graphs import planned
from tests.questions.pooled import told
from tests.questions.test_sql_against_sqlite import on

QUESTION = Question(
    text="SELECT y, COUNT(*), SUM(x), AVG(x) FROM examples GROUP BY y",
    rows=(Rows("n", 3), Rows("x", 3, words=True)),
    blocks=(Block("voters", "n", "any", 0, 1), Block("n", "n"), Block("x", "x")),
    keys=(Key("y", (0, 1, None)),),
    columns=(
        Column("y", Group(0)),
        Column("COUNT(*)", Cell("n")),
        Column("SUM(x)", Cell("x")),
        Column("AVG(x)", Call("mean", (Cell("x"), Cell("n")))),
    ),
    voters="voters",
    minimum_devices=3,
)


def params(devices, voters, counts, low, high, question=QUESTION):
    total = np.array([devices, *voters, *counts, *low, *high], np.float64)
    whole = total // 2**24 * 2**24
    return np.concatenate([whole, total - whole]).astype(np.float32)


def test_an_answer_is_a_table_of_groups_with_enough_devices():
    found = answer(QUESTION, params(9, [5, 2, 3], [50, 2, 7], [2**25 + 1, 0, 3], [1, 0, 2**20]))
    assert found.columns == ("y", "COUNT(*)", "SUM(x)", "AVG(x)")
    assert found.rows == (
        (0, 50, 2**25 + 1 + 4096, (2**25 + 1 + 4096) / 50),
        (None, 7, 3 + 4096 * 2**20, (3 + 4096 * 2**20) / 7),
    )
    assert (found.devices, found.hidden, found.errors) == (9, 1, None)


def test_people_are_shown_six_digits_and_how_far_noise_moves_them():
    found = Answer(("n", "mean"), ((12_345_678, 1999.625), (None, 0.25)), 9, 0)
    assert found.shown() == [(12_345_678, "1999.62"), (None, "0.25")]
    assert found._replace(errors=((2.0, 0.5), (None, None))).shown()[0] == ("1.23457e+07 ± 2", "1999.62 ± 0.5")
    assert "<td>1999.62</td>" in found._repr_html_()


def test_a_whole_number_beside_null_keeps_its_digits_in_pandas():
    rows = ((None, None, 2**53 + 1), (2**53 + 1, 0.5, 2))
    frame = Answer(("a", "a", "b"), rows, 9, 0).dataframe()
    assert [frame.iloc[1, 0], frame.iloc[1, 1], frame.iloc[0, 2]] == [2**53 + 1, 0.5, 2**53 + 1]
    assert frame.isna().to_numpy().tolist() == [[True, True, False], [False, False, False]]


def test_columns_of_one_name_keep_their_errors_in_pandas():
    frame = Answer(("n", "n", "n ±"), ((1, 2, 3),), 9, 0, ((0.5, 0.25, None),)).dataframe()
    assert list(frame.columns) == ["n", "n", "n ±", "n ±", "n ±"]
    assert frame.iloc[0].tolist() == [1, 2, 3, 0.5, 0.25]


def test_rows_are_sorted_with_null_first_and_cut_off():
    asked = QUESTION.__class__.decode(QUESTION.encode())
    assert asked == QUESTION
    sorted_ = Question(
        **{**{name: getattr(asked, name) for name in asked.__struct_fields__}, "order": (Order(0, True),)}
    )
    given = params(9, [5, 4, 3], [50, 2, 7], [0, 0, 0], [0, 0, 0])
    assert [row[0] for row in answer(sorted_, given).rows] == [1, 0, None]


def test_parameters_of_another_question_are_refused():
    with pytest.raises(QuestionError, match="has 26 numbers, not 4"):
        answer(QUESTION, np.zeros(4, np.float32))


def test_errors_hold_the_truth_in_95_of_100_answers():
    asked = Question(
        text="SELECT COUNT(*), AVG(x) FROM examples",
        rows=(Rows("n"), Rows("x")),
        blocks=(Block("v", "n", "any", 0, 1), Block("n", "n", norm=20), Block("x", "x", norm=200, whole=False)),
        columns=(Column("n", Cell("n")), Column("mean", Call("mean", (Cell("x"), Cell("n"))))),
        voters="v",
        private=True,
    )
    source, truth, within = np.random.default_rng(1), np.array([100, 100, 2000, 9000.0]), np.zeros(2)
    scale = np.array([0, 1, 20, 200.0])
    for _ in range(1000):
        total = truth + 1.5 * scale * source.standard_normal(4)
        found = answer(asked, np.concatenate([total, 0 * total]).astype(np.float32), 1.5)
        apart = np.abs(np.array(found.rows[0]) - np.array([2000, 4.5]))
        within += apart <= np.array(found.errors[0])
    assert (within >= 935).all(), within


@pytest.mark.parametrize(
    ("value", "truth", "sums", "norms"),
    [
        ("root", 3**0.5, (0, 1500, 500), (20, 600, 5)),
        ("variance", 3, (0, 1500, 500), (20, 600, 5)),
        ("correlation", 0.2, (500, 0, 0, 250, 250, 50), (5, 5, 5, 10, 10, 100)),
    ],
)
def test_errors_hold_a_truth_that_noise_exceeds(value, truth, sums, norms):
    """Noise makes many variances and correlations what none can be, and they are held to what one can."""
    names = [f"b{number}" for number in range(len(sums))]
    spread = Call("variance" if value == "root" else value, tuple(map(Cell, names)))
    asked = Question(
        text="SELECT VARIANCE(x) FROM examples",
        rows=(Rows("row"),),
        blocks=(
            Block("v", "row", "any", 0, 1),
            *(Block(name, "row", norm=norm, whole=False) for name, norm in zip(names, norms, strict=True)),
        ),
        columns=(Column("spread", Call("root", (spread,)) if value == "root" else spread),),
        voters="v",
        private=True,
    )
    source, within = np.random.default_rng(5), 0
    for _ in range(100):
        total = np.array([500, 500, *(sums + 3 * np.array(norms) * source.standard_normal(len(sums)))])
        told_ = answer(asked, np.concatenate([total, 0 * total]).astype(np.float32), 3.0)
        within += abs(told_.rows[0][0] - truth) <= told_.errors[0][0]
    assert within >= 92


@pytest.mark.parametrize(
    ("truth", "order", "limit"),
    [((3,) * 200, (), None), ((0,) * 200 + (15, 100) * 50, (), None), ((60,) * 100, (Order(1, True),), 3)],
)
def test_errors_hold_truths_that_are_shown_because_noise_lifted_them(truth, order, limit):
    """Over the threshold, or to the first rows. What noise does not move has no error, and no one of 0."""
    text = "SELECT y + 1, COUNT(DISTINCT DEVICE), COUNT(*), COUNT(*) > -1000000 FROM examples GROUP BY y MAX 25 ROWS"
    compiled_ = compile_sql(f"{text} PER DEVICE", [Field("y", "int32", (), len(truth))], private=True)
    asked = replace(compiled_.question, order=order, limit=limit)
    source, within = np.random.default_rng(1), []
    for _ in range(40):
        noise = source.normal(0, [[1.6 * block.norm] for block in asked.blocks], (2, len(truth)))
        total = np.array([500, *(np.outer([1, 3], truth) + noise).ravel()])
        found = answer(asked, np.concatenate([total, 0 * total]).astype(np.float32), 1.6)
        for (place, devices, rows, _), (none, *errors, never) in zip(found.rows, found.errors, strict=True):
            assert none is never is None
            apart = devices - truth[place - 1], rows - 3 * truth[place - 1]
            within.append([abs(one) <= error + 0.5 for one, error in zip(apart, errors, strict=True)])
    assert (np.mean(within, 0) >= 0.95).all(), np.mean(within, 0)


FEW, TAIL = np.array([300, 300, 300, 300, 0, 300, *[0] * 34]), np.round(50 * np.exp(np.arange(100) / -10))


@pytest.mark.parametrize(
    ("function", "counts", "share", "truth", "apart"),
    [
        *(("quantile", FEW, 0.88, 5.4, 0.8), ("least_with_share", FEW, 0.88, 5, 0.8)),
        *(("quantile", TAIL, 0.9, 22.65, 40), ("least_with_share", TAIL, 0.9, 22, 40)),
    ],
)
def test_a_quantile_under_noise_is_not_drawn_to_empty_bins(function, counts, share, truth, apart):
    """Of 1,500 rows none are in the upper 34 bins, and noise adds 20 to each bin; a tail is below the noise."""
    values = tuple(range(len(counts) + (function == "quantile")))
    asked = Question(
        text="SELECT APPROX_QUANTILE(x, 0.88) FROM examples",
        rows=(Rows("row"), Rows("bins", len(counts))),
        blocks=(Block("v", "row", "any", 0, 1), Block("b", "bins", "sum", 0, 3, norm=3)),
        columns=(Column("p", Call(function, (Cell("b"), Number(share), Number(values)))),),
        voters="v",
        private=True,
    )
    source, within, found = np.random.default_rng(3), 0, []
    for _ in range(25):
        total = np.array([500, 500, *(counts + 20 * source.standard_normal(len(counts)))])
        told_ = answer(asked, np.concatenate([total, 0 * total]).astype(np.float32), 20 / 3)
        within += abs(told_.rows[0][0] - truth) <= told_.errors[0][0]
        found.append(told_.rows[0][0])
    assert within >= 22
    assert np.median(found) == pytest.approx(truth, abs=apart)


def test_errors_hold_what_jumps_and_what_is_computed_of_quantiles():
    """A number beside a limit, twice a quantile whose tail is below the noise, and a number without an end."""
    share, places = Number(0.9), Number(tuple(range(101)))
    few, tail = Cell("n"), Call("quantile", (Cell("b"), share, places))
    columns = Call("case", (Call(">", (few, Number(100))), Number(1), Number(0))), Call("*", (tail, Number(2)))
    asked = Question(
        text="SELECT CASE WHEN COUNT(*) > 100 THEN 1 ELSE 0 END, 2 * APPROX_QUANTILE(x, 0.9) FROM examples",
        rows=(Rows("row"), Rows("bins", 100)),
        blocks=(Block("v", "row", "any", 0, 1), Block("n", "row", norm=3), Block("b", "bins", "sum", 0, 3, norm=3)),
        columns=(*(Column("a", one) for one in columns), Column("far", Call("*", (Number(1e305), few)))),
        voters="v",
        private=True,
    )
    source, within = np.random.default_rng(3), []
    for _ in range(30):
        total = np.array([500, 500, *(np.array([103, *TAIL]) + 20 * source.standard_normal(101))])
        told_ = answer(asked, np.concatenate([total, 0 * total]).astype(np.float32), 20 / 3)
        assert told_.errors[0][2] == 1e300
        within.append(np.abs(np.array(told_.rows[0][:2]) - (1, 2 * 22.65)) <= told_.errors[0][:2])
    assert (np.mean(within, 0) >= 0.9).all(), np.mean(within, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("/", (-7, 2), -3),
        ("/", (7, -2), -3),
        ("/", (7, 0), None),
        ("/", (7, 2.0), 3.5),
        ("%", (-7, 3), -1),
        ("%", (7, -3), 1),
        ("%", (7.9, 3), 1.0),
        ("+", (None, 1), None),
        ("*", (1e300, -1e300), None),
        ("and", (None, 0), 0),
        ("and", (None, 1), None),
        ("or", (None, 1), 1),
        ("case", (None, 1, 0, 2, 3), 3),
        ("mean", (5, 0), None),
        ("variance", (6, 14, 3), 1.0),
        ("variance", (6, 14, 1), None),
        ("least", ((0, 2, 5), 3, (10, 20, 30)), 30),
        ("greatest", ((5, 2, 0), 3, (10, 20, 30)), 10),
        ("quantile", ((10, 0, 10), 0.5, (0.0, 1.0, 2.0, 3.0)), 1.0),
        ("quantile", ((7, 0, 93), 0.07, (0.0, 1.0, 2.0, 3.0)), 1.0),
        ("least_with_share", ([1] * 100, 0.07, tuple(range(100))), 6),
        ("least_with_share", ([1] * 100, 0.55, tuple(range(100))), 54),
        ("quantile", ((0, -3), 0.5, (0.0, 1.0, 2.0)), None),
        ("correlation", (3, 6, 6, 14, 14, 14), 1.0),
    ],
)
def test_functions_follow_sqlite(name, arguments, expected):
    found = FUNCTIONS[name](*arguments)
    assert (found, type(found)) == (expected, type(expected))


def test_text_in_arithmetic_is_refused_not_repeated():
    asked = Question(
        text="SELECT 'a' * 1000000000 FROM examples",
        rows=(Rows("n"),),
        blocks=(Block("v", "n", "any", 0, 1),),
        columns=(Column("a", Call("*", (Number("a"), Number(10**9)))),),
        voters="v",
    )
    with pytest.raises(QuestionError, match="text is no number"):
        answer(asked, np.array([1, 1, 0, 0], np.float32))


def expressions(source, depth=3):
    """An expression over sums as a stranger may write one."""
    kind = source.choice(("number", "cell", "shown", "group", "call", "call", "call")) if depth else "number"
    if kind == "number":
        one = source.choice(
            (None, 0, -1, 2**62, 10**400, 1e308, math.inf, math.nan, "a", "", True, (), (1, 2), ("a", None))
        )
        return Number(one)
    if kind == "call":
        count = source.choice((0, 1, 2, 2, 3, 3, 4))
        return Call(source.choice(list(FUNCTIONS)), tuple(expressions(source, depth - 1) for _ in range(count)))
    return Group(0) if kind == "group" else (Cell if kind == "cell" else Shown)(source.choice(("n", "x")))


def test_whatever_columns_are_there_is_a_table_or_one_error():
    source, given = random.Random(3), params(9, [5, 4, 3], [50, 2, 7], [5, 0, 3], [1, 0, 2])
    failures, tables = set(), 0
    for _ in range(3000):
        order = (Order(source.choice((0, 0, 1, -1, 7)), source.random() < 0.5),)
        asked = replace(QUESTION, columns=(Column("c", expressions(source)), Column("y", Group(0))), order=order)
        for deviation in (0.0, 1.0):
            try:
                found = answer(asked, given, deviation)
            except QuestionError as error:
                failures.add(str(error).split(":")[1])
            else:
                assert msgspec.json.encode(found)
                tables += 1
    assert tables > 300
    assert failures >= {" IndexError", " TypeError", " OverflowError"}


@pytest.mark.parametrize("private", [False, True])
def test_what_is_the_same_in_all_groups_is_computed_once(private, monkeypatch):
    added, groups = [], 500
    monkeypatch.setitem(FUNCTIONS, "total", lambda numbers: added.append(len(numbers)) or sum(numbers))
    asked = Question(
        text="SELECT share",
        rows=(Rows("n", groups),),
        blocks=(Block("v", "n", "any", 0, 1), Block("n", "n")),
        keys=(Key("y", tuple(range(groups))),),
        columns=(Column("share", Call("/", (Call("real", (Cell("n"),)), Call("total", (Shown("n"),))))),),
        voters="v",
        private=private,
    )
    given = np.concatenate([np.full(1 + 2 * groups, 5), np.zeros(1 + 2 * groups)]).astype(np.float32)
    assert answer(asked, given, 0.1 * private).rows == ((1 / groups,),) * groups
    assert added == [groups] * (402 if private else 1)


def test_a_table_that_looks_at_too_many_numbers_is_refused():
    columns = tuple(Column(f"c{number}", Call("mean", (Cell("x"), Cell("n")))) for number in range(30_000))
    asked = replace(QUESTION, columns=columns)
    for compute in (check_columns, lambda asked: answer(asked, params(9, [5, 2, 3], [1] * 3, [0] * 3, [0] * 3))):
        with pytest.raises(QuestionError, match="look at 270,000 numbers in 3 groups; there may be 262,144"):
            compute(asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"voters": "n"}, "voters must name"),
        ({"rows": (Rows("n", 9000),)}, "block x is of x"),
        ({"columns": (Column("a", Cell("b")),)}, "shows b, which is no block"),
        ({"columns": (Column("a", Call("eval", ())),)}, "calls 'eval'"),
        ({"columns": (Column("a", Group(1)),)}, "shows key 1"),
        ({"blocks": (Block("v", "n", "bins", edges=(2.0, 1.0)),)}, "edges in ascending order"),
        ({"blocks": (Block("v", "n", norm=math.nan),)}, "not finite"),
        ({"text": ""}, "0 characters"),
    ],
)
def test_a_question_whose_parts_do_not_fit_is_refused(change, message):
    with pytest.raises(QuestionError, match=message):
        replace(QUESTION, **change)


Y = np.array([0, 1, 2, 2, IGNORED, IGNORED])
USERS = Population(
    ("a", "b", "c", "d"), {"label": np.tile(Y, 4), "x": np.arange(24, dtype=np.float32)}, np.arange(0, 25, 6)
)
FIELDS = Fields((Field("label", "int64", (), 3, ignored=IGNORED), Field("x", "float32")), "")


def shown(words, fields=FIELDS, users=USERS, **terms):
    return ask_population(compiled(words, fields, Terms(minimum_devices=1, **terms)), users).rows


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("SELECT COUNT(*), COUNT(label), SUM(label), AVG(label) FROM examples", [(24, 16, 20, 1.25)]),
        ("SELECT label, COUNT(*) FROM examples GROUP BY label", [(None, 8), (0, 4), (1, 4), (2, 8)]),
        ("SELECT MIN(label), MAX(label), VAR_POP(label) FROM examples", [(0, 2, 0.6875)]),
        ("SELECT COUNT(*) FROM examples WHERE label < 0", []),
        ("SELECT COUNT(*) FROM examples WHERE NOT label = 2", [(8,)]),
        ("SELECT COUNT(*) FROM examples WHERE label IS NULL", [(8,)]),
        ("labels label", [(0, 4, 4, 0.25), (1, 4, 4, 0.25), (2, 8, 4, 0.5)]),
        ("histogram label", [(0, 0, 4, 4, 0.25), (1, 1, 4, 4, 0.25), (2, 2, 8, 4, 0.5)]),
        ("quantiles label", [(0, 0, 0, 1, 2, 2, 2, 16)]),
        ("normaliser label", [("label", None, 1.25, pytest.approx(0.6875**0.5), 16)]),
    ],
)
def test_ignored_labels_are_null(words, expected, secure):
    words = f"{words} MAX 6 ROWS PER DEVICE" if secure else words
    asked = [words] if words.startswith("SELECT") else words.split()
    assert list(shown(asked, secure=secure)) == expected


def test_a_correlation_is_of_rows_whose_label_counts():
    kept = USERS.fields["label"] >= 0
    ((found, rows),) = shown(["correlation", "label", "x", "low=0,0", "high=2,23"])
    expected = np.corrcoef(USERS.fields["label"][kept], USERS.fields["x"][kept])[0, 1]
    assert (found, rows) == (pytest.approx(expected, abs=1e-6), 16)


def test_elements_of_a_label_count_by_themselves():
    labels = np.array([[0, 1, IGNORED], [IGNORED, 1, 1]] * 3)
    users = Population(("a", "b", "c"), {"label": labels}, np.arange(0, 7, 2), 2)
    fields = fields_in(users, "a data set")
    assert fields.fields == (Field("label", "int64", (3,), 2, ignored=IGNORED),)
    assert list(shown(["labels", "label"], fields, users)) == [(0, 3, 3, 0.25), (1, 9, 3, 0.75)]
    assert [row[2:] for row in shown(["normaliser", "label"], fields, users)] == [
        (0.0, 0.0, 3),
        (1.0, 0.0, 6),
        (1.0, 0.0, 3),
    ]


def test_what_fills_the_tokens_of_a_text_is_no_token():
    tokens = np.array([[5, 0, 9], [7, 9, 9]] * 3, np.int32)
    users = Population(("a", "b", "c"), {"text": tokens}, np.arange(0, 7, 2))
    field = Field("text", "int32", (3,), 10, tokenizer=Tokenizer(BlobRef.of(b"{}"), 9))
    rows = shown(["labels", "text"], Fields((field,), ""), users)
    assert [row[:2] for row in rows] == [(0, 3), (5, 3), (7, 3)]


def test_whole_numbers_below_0_have_no_known_range():
    users = Population(("a", "b"), {"t": np.array([-5, 7]), "y": np.array([0, 1])}, np.arange(3))
    fields = fields_in(users, "a data set")
    assert fields.fields[0].high is None
    with pytest.raises(QuestionError, match="t is int64 of unknown range"):
        shown(["SELECT SUM(t) FROM examples"], fields, users)
    assert shown(["SELECT COUNT(*) FROM examples"], fields, users) == ((2,),)
    assert shown(["sizes"], fields, users)[0][3:] == (2, 1.0)


def test_infinity_is_null_in_sql_and_by_name():
    users = Population.of(["a"], [{"x": np.array([1, np.inf, -np.inf, np.nan, 3], np.float32)}])
    fields = fields_in(users, "a data set")
    assert shown(["SELECT COUNT(x) FROM examples"], fields, users) == ((2,),)
    assert [row[:3] for row in shown(["histogram", "x", "low=0", "high=4", "bins=2"], fields, users)] == [
        (0.0, 2.0, 1),
        (2.0, 4.0, 1),
    ]
    assert shown(["normaliser", "x", "low=0", "high=4"], fields, users) == (("x", None, 2.0, 1.0, 2),)


@pytest.mark.parametrize("words", ["SELECT SUM(t) FROM examples", "labels t", "heavy-hitters t"])
def test_a_field_of_a_type_that_no_device_has_is_refused_by_it(words):
    users = Population(("a", "b"), {"t": np.array([0.5, 7])}, np.arange(3))
    asked = [words] if words.startswith("SELECT") else words.split()
    with pytest.raises(QuestionError, match="t is float64; make it one of float32, int64"):
        shown(asked, fields_in(users, "a data set"), users)


@pytest.mark.parametrize("form", ["onnx", "executorch"])
def test_graphs_leave_out_what_is_ignored(form, request):
    from device_runtime.backends.executorch import ExecuTorch
    from device_runtime.backends.onnxruntime import OnnxRuntime

    if form == "executorch":
        request.getfixturevalue("executorch")
    backend = {"onnx": OnnxRuntime, "executorch": ExecuTorch}[form]()
    for words, expected in [
        (["SELECT COUNT(*), COUNT(label), SUM(label) FROM examples"], [(12, 8, 10)]),
        (["labels", "label"], [(0, 2, 2, 0.25), (1, 2, 2, 0.25), (2, 4, 2, 0.5)]),
    ]:
        asked = compiled(words, FIELDS, Terms(minimum_devices=1))
        reports = on(backend)(*planned(asked, form), [USERS.shard(client) for client in range(2)])
        assert list(told(asked, reports).rows) == expected
