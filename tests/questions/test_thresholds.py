"""Thresholds, and attacks on them."""

import math

import numpy as np
import pytest

from coordinator.commands import CountReport
from coordinator.errors import BudgetExceeded, InvalidTask
from coordinator.rules.task_settings import PrivacyBudget, TaskSettings
from coordinator.store.tasks import open_coordinator_store
from device_runtime.backends.executorch import ExecuTorch
from device_runtime.backends.onnxruntime import OnnxRuntime
from export.questions.sql import compile_sql
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.validation import build
from muster.asking import Fields, Terms, begin, compiled, settings_of_question
from simulator.planned import ask_population
from simulator.population import Population
from tests.coordinator.conftest import LINEAGE, Desk
from tests.coordinator.questions import answer_values
from tests.questions import pooled
from tests.questions.graphs import planned
from tests.questions.pooled import answered
from tests.questions.test_sql_against_sqlite import on

FIELDS = (
    Field("p", "uint8", (), 10),
    Field("flag", "uint8", (), 2),
    Field("x", "int32", (), 100),
    Field("y", "uint8", (), 5),
)
LEAST, DEVICES = 3, 6
ROWS = " MAX 5 ROWS PER DEVICE"
ONE = [
    "p = 7",
    "flag",
    "p IN (7, 8)",
    "p BETWEEN 7 AND 8",
    "p > 6 AND y >= 0",
    "NOT p <> 7",
    "NOT (p < 7 OR p > 8)",
    "1 - MIN(ABS(p - 7), 1)",
    "p / 7",
    "p * flag",
    "COALESCE(NULLIF(p, 7), 9) = 9",
    "CASE p WHEN 7 THEN 1 ELSE 0 END",
    "IIF(p = 7, y < 5, 0)",
    "NULLIF(p, 7) IS NULL",
]
"""Conditions that the rows of one device meet."""
WAYS = [
    "SUM(x) FILTER (WHERE {0})",
    "AVG(x) FILTER (WHERE {0})",
    "AVG(CASE WHEN {0} THEN x END)",
    "SUM(CASE WHEN {0} THEN x ELSE 0 END)",
    "SUM(CASE WHEN {0} THEN x ELSE 1 END)",
    "SUM(CASE WHEN y > 4 THEN 2 WHEN {0} THEN x ELSE 1 END)",
    "SUM(CASE WHEN NOT ({0}) THEN 1 ELSE x END)",
    "SUM(IIF(y < 5, IIF({0}, x, 1), 1))",
    "SUM(COALESCE(IIF({0}, x, NULL), 1))",
    "SUM(COALESCE(IIF({0}, NULL, 1), x))",
    "SUM(x * (({0}) <> 0))",
    "SUM(1 + x * (({0}) <> 0))",
    "SUM(x * (1 - (NOT ({0}))))",
    "SUM((1 + x * (({0}) <> 0)) * (y + 1))",
    "SUM(MAX(IIF({0}, x, 0), 1))",
    "SUM(ABS(x * (({0}) <> 0) - 1))",
    "TOTAL(IIF({0}, x, 0)) / 2",
    "COALESCE(SUM(IIF({0}, x, 0)), -1)",
    "VAR_POP(CLIP(IIF({0}, x, 0), 0, 99))",
    "STDDEV(CLIP(IIF({0}, x, 0), 0, 99))",
    "APPROX_QUANTILE(IIF({0}, x, NULL), 0.5)",
    "APPROX_QUANTILE(IIF({0}, x, 0), 1)",
    "CLIP_PER_DEVICE(SUM(IIF({0}, x, 0)), 0, 400)",
    "CLIP_PER_DEVICE(SUM(x) FILTER (WHERE {0}), 0, 400)",
    "MIN(IIF({0}, x, 99))",
    "MAX(IIF({0}, x, 0))",
    "MAX(x) FILTER (WHERE {0})",
    "MIN(IIF({0}, 1, NULL))",
    "COUNT(*) FILTER (WHERE {0})",
    "COUNT(*) FILTER (WHERE ({0}) AND x > 20)",
    "COUNT(NULLIF(({0}) AND x > 20, 0))",
    "SUM(({0}) AND x > 20)",
    "COUNT(DISTINCT DEVICE) FILTER (WHERE ({0}) AND x > 20)",
    "MAX(({0}) AND x > 20)",
    "SUM(0) FILTER (WHERE ({0}) AND x > 20)",
    "AVG(IIF(({0}) AND x > 20, 0, NULL))",
    "SUM(CLIP(IIF(({0}) AND x > 20, 0, NULL), 0, 1))",
    "CLIP_PER_DEVICE(SUM(0) FILTER (WHERE ({0}) AND x > 20), 0, 1)",
    "VAR_POP(CASE WHEN ({0}) AND x > 20 THEN 0 END)",
]
"""Columns that would say something of those rows."""

PICKS = [
    "SUM(MAX(x - 1000 * ABS(p - 7), 1))",
    "SUM(MIN(x + 1000 * ABS(p - 7), 100))",
    "AVG(CLIP(x - 1000 * ABS(p - 7), 1, 100))",
    "APPROX_QUANTILE(MAX(x - 1000 * ABS(p - 7), 1), 1)",
    "STDDEV(CLIP(x - 1000 * ABS(p - 7), 1, 100))",
    "SUM(WIDTH_BUCKET(x + 1000 * ABS(p - 7), 0, 100, 50))",
    "SUM(MAX(p, 6))",
    "CLIP_PER_DEVICE(SUM((p * p * p * p - 300.0) * x), 0, 1000000)",
    "CLIP_PER_DEVICE(SUM((p * p * p * p - 300.0) * x), -1e-9, 1000000)",
    "CLIP_PER_DEVICE(TOTAL((300.0 - p * p * p * p) * x), -1000000, 0)",
]
"""Columns in which all others are held to a constant."""


def held(x, place=7):
    """Rows of devices, of which the last alone has place 7, or none."""
    rows = [[number % 5, 0, 10 + number, number % 5] for number in range(2 * DEVICES)]
    columns = [np.array(rows[2 * device :][:2]).T for device in range(DEVICES)]
    columns[-1][:3, 0] = place, place == 7, x
    return [
        {field.name: np.asarray(column, field.dtype) for field, column in zip(FIELDS, part, strict=True)}
        for part in columns
    ]


def told(text, *populations, least=LEAST, **how):
    """The rows of an answer and how many groups are hidden, of each population."""
    asked = compile_sql(text + ROWS, FIELDS, minimum_devices=least, **how)
    return [(found.rows, found.hidden) for found in (answered(asked, rows) for rows in populations)]


def differing():
    """Populations that differ in what one device has, and in whether it has any row with place 7."""
    return [held(15), held(55), held(0), held(15, place=5)]


@pytest.mark.security("A condition picks no device")
@pytest.mark.parametrize("way", WAYS)
def test_no_condition_tells_what_one_device_has(way):
    """Nor whether it has any such row: else "more than 20?" would be answered, then "more than 30?", and so on."""
    for number, condition in list(enumerate(ONE))[WAYS.index(way) % 3 :: 3]:
        text = f"SELECT {way.format(condition)} FROM examples"
        secure = bool(number % 2) and "VAR" not in way and "STD" not in way
        first, *others = told(text, *differing(), secure=secure)
        assert others == [first] * 3, (text, first, others)


@pytest.mark.security("A condition picks no device")
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("column", PICKS)
def test_no_bound_tells_what_one_device_has(column, secure):
    if not (secure and column.startswith("STD")):
        first, *others = told(f"SELECT {column} FROM examples", *differing(), secure=secure)
        assert others == [first] * 3, (first, others)


HELD = [
    "CLIP_PER_DEVICE(SUM(x + 1000 * ABS(p - 7)), 0, 100)",
    "CLIP_PER_DEVICE(TOTAL(- 1.0 * x - 1000 * ABS(p - 7)), -100, 0)",
    "CLIP_PER_DEVICE(SUM(x + 1000 * ABS(p - 7) - 20), -1, 100)",
    "CLIP_PER_DEVICE(SUM(x + 1000 * ABS(p - 7)) FILTER (WHERE y >= 0), 0, 100)",
]
"""Columns in which the sums of all other devices are held to a bound."""


@pytest.mark.security("A condition picks no device")
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("column", HELD)
def test_no_bound_of_a_devices_sum_tells_what_one_device_has(column, secure):
    populations = [[{name: values[:1] for name, values in device.items()} for device in rows] for rows in differing()]
    first, *others = told(f"SELECT {column} FROM examples", *populations, secure=secure)
    assert others == [first] * 3, (first, others)


@pytest.mark.security("A condition picks no device")
@pytest.mark.parametrize("words", ["normaliser x low=30 high=99", "correlation x y low=30,0 high=99,4"])
def test_no_bound_of_a_question_by_name_tells_what_one_device_has(words):
    def answers(least):
        asked = compiled(words.split(), Fields(FIELDS, ""), Terms(minimum_devices=least))
        return [answered(asked, held(x)).rows for x in (15, 35, 55)]

    assert answers(LEAST) == [()] * 3
    assert len(set(answers(1))) == 3


def test_what_enough_devices_have_within_a_bound_is_shown():
    """Sums of devices are 21, 25, 29, 33, 37 and 76."""
    for least, column, expected in [
        (4, "SUM(x), 0, 35", 178), (5, "SUM(x), 0, 35", None), (6, "SUM(x), 0, 900", 221), (6, "COUNT(*), 0, 1", 6),
        (6, "COUNT(*), 0, 2", 12), (2, "COUNT(*), 0, 2.5", 12), (6, "TOTAL(- x), -76, 0", -221),
    ]:  # fmt: skip
        ((((found,),), _),) = told(f"SELECT CLIP_PER_DEVICE({column}) FROM examples", held(55), least=least)
        assert found == expected, (least, column)


def test_a_held_sum_needs_as_many_devices_on_either_side_of_0():
    """Sums of devices are -9, -5, -1, 3, 7 and 46."""
    for least, low, expected in [(1, -50, 41), (3, -50, 41), (4, -50, None), (3, 0, 56), (4, 0, None)]:
        text = f"SELECT CLIP_PER_DEVICE(SUM(x - 15.0), {low}, 50) FROM examples"
        ((((found,),), _),) = told(text, held(55), least=least)
        assert found == expected, (least, low)


def test_what_enough_rows_give_to_a_choice_is_shown():
    for text, expected in [("SUM(MAX(x, 15))", 236), ("SUM(CLIP(x, 12, 18))", 183), ("SUM(MIN(x, y + 14))", 169)]:
        ((((found,),), _),) = told(f"SELECT {text} FROM examples", held(55))
        assert found == expected, text


@pytest.mark.security("A condition picks no device")
@pytest.mark.parametrize("condition", ONE)
def test_no_clause_tells_what_one_device_has(condition):
    for text in (
        f"SELECT COUNT(*), SUM(x) FROM examples WHERE ({condition}) AND x > 20",
        f"SELECT ({condition}) AND x > 20 AS met, COUNT(*) FROM examples WHERE {condition} GROUP BY met",
    ):
        first, *others = told(text, *differing())
        assert (first[0], others) == ((), [first] * 3), text


@pytest.mark.security("A condition picks no device")
@pytest.mark.parametrize("least", [1, 3, 4, 5])
def test_what_as_many_devices_have_as_a_group_needs_is_shown(least):
    """Four devices have five rows with y = 1 or y = 2."""
    ways = {
        "SUM(x) FILTER (WHERE y IN (1, 2))": 77,
        "AVG(IIF(y IN (1, 2), x, NULL))": 77 / 5,
        "SUM(x * (y IN (1, 2)))": 77,
        "COUNT(*) FILTER (WHERE y IN (1, 2))": 5,
        "COUNT(DISTINCT DEVICE) FILTER (WHERE y IN (1, 2))": 4,
    }
    for way, expected in ways.items():
        ((((found,),), _),) = told(f"SELECT {way} FROM examples", held(15), least=least)
        assert found == (expected if least <= 4 else None), way


def test_each_group_has_its_own_count():
    ((rows, hidden),) = told("SELECT y > 2 AS key, SUM(x) FILTER (WHERE p < 2) FROM examples GROUP BY key", held(15))
    assert (rows, hidden) == (((0, 10 + 11 + 15 + 16 + 21), (1, None)), 0)


def test_noise_hides_devices_by_itself_and_needs_no_count():
    text = "SELECT SUM(x) FILTER (WHERE p = 7) FROM examples" + ROWS
    clear, noisy = (compile_sql(text, FIELDS, minimum_devices=LEAST, private=private) for private in (False, True))
    assert ([len(one.question.blocks) for one in (clear, noisy)]) == [4, 2]


def test_who_asks_for_no_threshold_is_answered_as_by_sqlite():
    ((((found,),), hidden),) = told("SELECT SUM(x) FILTER (WHERE p = 7) FROM examples", held(55), least=1)
    assert (found, hidden) == (55, 0)


@pytest.mark.security("A threshold does not hold against differences and weights")
def test_what_two_columns_differ_in_is_not_hidden():
    """As the documents say: against differences there is only noise."""
    text = "SELECT SUM(x), SUM(x) FILTER (WHERE p <> 7) FROM examples"
    for x in (15, 55):
        ((((everybody, others),), _),) = told(text, held(x))
        assert everybody - others == x


@pytest.mark.security("A threshold does not hold against differences and weights")
def test_what_weights_pick_is_not_hidden():
    """As the documents say: all rows contribute, and one outweighs the others."""
    for x in (15, 55):
        ((((found,),), _),) = told("SELECT SUM(1.0 * x / (1 + 1e9 * ABS(p - 7))) FROM examples", held(x))
        assert found == pytest.approx(x, abs=1e-3)


@pytest.mark.parametrize("form", [None, "onnx", "executorch"])
def test_a_quantile_has_enough_devices_on_both_sides(form, request):
    if form == "executorch":
        request.getfixturevalue("executorch")
    source, shares = np.random.default_rng(4), (0, 0.05, 0.3, 0.5, 0.8, 0.97, 1)
    columns = ", ".join(f"APPROX_QUANTILE(x, {share})" for share in shares)
    where = "FROM examples WHERE p < 8 GROUP BY flag"
    asked = compile_sql(f"SELECT {columns} {where}", FIELDS, minimum_devices=LEAST)
    rows = [
        {
            "p": source.integers(0, 10, count).astype(np.uint8),
            "flag": source.integers(0, 2, count).astype(np.uint8),
            "x": source.integers(0, 100, count).astype(np.int32),
            "y": np.zeros(count, np.uint8),
        }
        for count in (9, 14, 3, 11, 8)
    ]  # fmt: skip
    backend = {"onnx": OnnxRuntime, "executorch": ExecuTorch}.get(form)
    reports = backend and on(backend())(*planned(asked, form), rows)
    found = pooled.told(asked, reports) if reports else answered(asked, rows)
    for flag, row in enumerate(found.rows):
        of = [device["x"][(device["p"] < 8) & (device["flag"] == flag)] for device in rows]
        values, expected = np.sort(np.concatenate(of)), []
        for share in shares:
            value = values[max(math.ceil(share * len(values)) - 1, 0)]
            sides = sum((x <= value).any() for x in of), sum((x >= value).any() for x in of)
            expected.append(int(value) if min(sides) >= LEAST else None)
        assert list(row) == expected
        assert None in expected
        assert any(value is not None for value in expected)


CLIENTS, VICTIM, SECRET = 40, 7, 11
BY_LABEL = "SELECT y, COUNT(*) FROM examples GROUP BY y"
BOUNDED = "SELECT COUNT(*), SUM(CLIP(y, 0, 3)) FROM examples{} MAX 20 ROWS PER DEVICE"
ATTACKED_FIELDS = Fields((Field("y", "uint8", (), 4), Field("id", "int64", (), CLIENTS)), "that tests have")


@pytest.fixture(scope="module")
def users():
    """Users of whom one alone has the label 3, on SECRET examples."""
    labels = [np.arange(6 + user % 5) % 3 for user in range(CLIENTS)]
    labels[VICTIM] = np.concatenate([labels[VICTIM], np.full(SECRET, 3)])
    shards = [{"y": y.astype(np.uint8), "id": np.full(len(y), user, np.int64)} for user, y in enumerate(labels)]
    return Population.of([f"user-{user}" for user in range(CLIENTS)], shards)


@pytest.fixture
def store(tmp_path):
    with open_coordinator_store(f"sqlite:///{tmp_path / 'm.db'}", tmp_path / "blobs") as opened:
        opened.lineage_key = lambda: LINEAGE
        yield opened


def made(question, minimum_devices=20, **terms):
    return compiled([question], ATTACKED_FIELDS, Terms(minimum_devices, **terms))


def asked(users, question, minimum_devices=20):
    return ask_population(made(question, minimum_devices), users)


def task(store, question, privacy=None, **settings):
    """A task of a question, which `begin` makes as the command does."""
    given = settings_of_question(question, {"population": "phones", **settings}, privacy)
    return begin(store, question, given, lambda note: None)


def test_a_group_of_one_device_is_hidden_whatever_the_query_says(users):
    found = asked(users, BY_LABEL)
    assert [row[0] for row in found.rows] == [0, 1, 2]
    assert found.hidden == 1
    for trick in ("HAVING COUNT(DISTINCT DEVICE) >= 1", "ORDER BY 2", "LIMIT 1"):
        assert all(row[0] != 3 for row in asked(users, f"{BY_LABEL} {trick}").rows)
    # In one group for all it is not hidden, and there it is among the others.
    assert asked(users, "SELECT SUM(y) FROM examples").rows == ((int(users.fields["y"].sum()),),)


def test_a_threshold_hides_a_group_from_readers_and_not_from_the_sum(users):
    # Who runs the coordinator sees what it sums, and so does who asks for no threshold.
    assert asked(users, BY_LABEL, minimum_devices=1).rows[3] == (3, SECRET)


def test_two_questions_that_differ_by_one_device_tell_what_it_has(users):
    everybody = asked(users, "SELECT COUNT(*) FROM examples WHERE y = 3 OR y = 0")
    others = asked(users, f"SELECT COUNT(*) FROM examples WHERE (y = 3 OR y = 0) AND id <> {VICTIM}")
    own = users.fields["y"][users.fields["id"] == VICTIM]
    assert others.devices == everybody.devices == CLIENTS
    assert everybody.rows[0][0] - others.rows[0][0] == ((own == 3) | (own == 0)).sum()


def test_under_noise_their_difference_is_within_what_noise_does(users):
    questions = [made(BOUNDED.format(where), private=True) for where in ("", f" WHERE id <> {VICTIM}")]
    differences = []
    for seed in range(10):
        first, second = (
            ask_population(question, users, seed=2 * seed + place, epsilon=1.0)
            for place, question in enumerate(questions)
        )
        differences.append(first.rows[0][0] - second.rows[0][0])
        assert first.errors[0][0] > 17  # the rows of the one device
    assert np.std(differences) > 17
    assert min(differences) < 0 < max(differences)


@pytest.mark.security("Questions without noise can be refused")
def test_a_budget_refuses_questions_without_noise_and_one_too_many(store):
    store.set_budget("phones", 1.1, 1e-4)
    with pytest.raises(BudgetExceeded, match="privacy"):
        task(store, made(BY_LABEL))
    private = made(BOUNDED.format(""), private=True)
    promise = {"epsilon": 1.0, "delta": 1e-4, "users": 100}
    task(store, private, promise)
    with pytest.raises(BudgetExceeded):
        task(store, made(BOUNDED.format(f" WHERE id <> {VICTIM}"), private=True), promise)
    assert len(store.tasks()) == 1


def test_a_question_about_one_id_has_no_answer(users):
    alone = asked(users, f"SELECT COUNT(*), SUM(y) FROM examples WHERE id = {VICTIM}")
    assert (alone.rows, alone.hidden) == ((), 1)
    everybody = asked(users, "SELECT id, COUNT(*) FROM examples GROUP BY id")
    assert (everybody.rows, everybody.hidden) == ((), CLIENTS)
    unbounded = Fields((Field("id", "int64"),), "that tests have")
    with pytest.raises(QuestionError, match="GROUP BY"):
        compiled(["SELECT id, COUNT(*) FROM examples GROUP BY id"], unbounded, Terms())


def test_a_threshold_of_one_is_refused_where_a_population_says_more(store):
    assert made(BY_LABEL, minimum_devices=0).question.minimum_devices == 1
    store.set_budget("phones", 100.0, 1e-3, minimum_devices=20)
    promise = {"epsilon": 1.0, "delta": 1e-4, "users": 100}
    for least in (1, 19):
        with pytest.raises(BudgetExceeded, match=f"shows groups of {least}"):
            task(store, made(BOUNDED.format(""), least, private=True), promise)
    task(store, made(BOUNDED.format(""), 20, private=True), promise)


def test_a_masked_sum_is_over_several_devices_whatever_the_threshold():
    question = made(BOUNDED.format(""), minimum_devices=1, secure=True)
    given = settings_of_question(question, {"population": "phones", "secagg": {}}, None)
    assert build(TaskSettings, given, text=True).minimum == 8
    with pytest.raises(InvalidTask, match="a sum over fewer says too much about each"):
        settings_of_question(question, {"population": "phones", "secagg": {}, "goal": 2}, None)


@pytest.mark.security("A device can lie within its bounds")
@pytest.mark.parametrize("lie", [1e6, -1e6])
@pytest.mark.parametrize("private", [False, True], ids=["bounds", "clip"])
def test_a_device_that_lies_counts_as_much_as_its_bounds_say(private, lie, store):
    question = made(BOUNDED.format(""), minimum_devices=1, private=private)
    blocks = question.question.blocks
    promise = PrivacyBudget(epsilon=1e6, delta=1e-6, users=1000, noise_multiplier=0.01) if private else None
    begun = task(store, question, promise and {name: getattr(promise, name) for name in promise.__slots__}, goal=7)
    desk = Desk(store)
    given = desk.assign(*"abcdef", "liar")
    honest = {block.name: 1.0 for block in blocks}
    for assignment, blocks_of in zip(given, [honest] * 6 + [dict.fromkeys(honest, lie)], strict=True):
        vector = answer_values(question.question, **blocks_of)
        desk.ask(CountReport(assignment.assignment, vector.tobytes().hex()[:64], vector))
    desk.pass_time(1)
    found = store.answer(begun.id)
    assert found.devices == 7
    for column, name in enumerate(("count", "sum")):
        (block,) = (one for one in blocks if one.name.startswith(name))
        moved = found.rows[0][column] - 6
        # A bound of whole numbers is that of a range of so many bits.
        most = block.norm * question.question.clip + 2 * found.errors[0][column] if private else 2 * block.high
        assert abs(moved) <= most < 1e3
        assert moved > 0 if lie > 0 else moved <= 0
