"""Built-in questions: their figures against NumPy's of the pooled examples, bounds, norms, refusals, and graphs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from export.build import export_bundle
from export.model import Model
from export.questions.builtin import BUILTIN, BuiltIn, compile_built_in
from fedcore.algorithms.question import PASS
from fedcore.errors import QuestionError
from fedcore.plan import Field
from simulator.planned import ask_population
from simulator.population import Population
from tests.sampled import sampled

FIELDS = (
    Field("image", "float32", (2, 3)),
    Field("pixel", "uint8", (2, 2), 256),
    Field("steps", "int64", (), 10**12),
    Field("f", "float32"),
    Field("g", "float32"),
    Field("y", "uint8", (), 5),
)
ALL = (
    BuiltIn("sizes", high=(40,)),
    BuiltIn("labels", ("y",)),
    BuiltIn("labels", ("pixel",)),
    BuiltIn("histogram", ("f",), bins=8, low=(-1.0,), high=(1.0,)),
    BuiltIn("histogram", ("steps",), bins=7),
    BuiltIn("quantiles", ("y",)),
    BuiltIn("quantiles", ("image",), low=(0.0,), high=(4.0,)),
    BuiltIn("normaliser", ("f",), low=(-2.0,), high=(3.0,)),
    BuiltIn("normaliser", ("image",), low=(0.0,), high=(4.0,)),
    BuiltIn("normaliser", ("pixel",)),
    BuiltIn("normaliser", ("image",), low=(0.0,) * 6, high=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)),
    BuiltIn("normaliser", ("pixel",), overall=True),
    BuiltIn("correlation", ("f", "g"), low=(-3.0, -5.0), high=(3.0, 5.0)),
    BuiltIn("correlation", ("f", "steps"), low=(-3.0, 0.0), high=(3.0, 10**12 - 1)),
)


def shard(source, rows):
    f = source.normal(0.5, 1.0, rows).astype(np.float32)
    made = {
        "image": source.normal(2.0, 0.5, (rows, 2, 3)),
        "pixel": source.integers(0, 256, (rows, 2, 2)),
        "steps": source.integers(0, 10**12, rows),
        "f": np.where(source.random(rows) < 0.2, np.nan, f),
        "g": f + source.normal(0.0, 1.0, rows),
        "y": source.integers(0, 4, rows),
    }
    return {field.name: made[field.name].astype(field.dtype) for field in FIELDS}


@pytest.fixture(scope="module")
def users():
    source = np.random.default_rng(0)
    shards = [shard(source, rows) for rows in source.integers(1, 60, 40)]
    return Population.of([f"user {user}" for user in range(40)], shards)


def asked_of(users, asked, minimum_devices=1, **terms):
    made = compile_built_in(asked, FIELDS, minimum_devices=minimum_devices, **terms)
    return ask_population(made, users)


def test_sizes_are_devices_by_doubling_bins_with_total_and_mean(users):
    found = asked_of(users, BuiltIn("sizes"), minimum_devices=3)
    counts = [int(((users.sizes >= low) & (users.sizes < 2 * low)).sum()) for low in (1, 2, 4, 8, 16, 32)]
    shown = [(low, count) for low, count in zip((1, 2, 4, 8, 16, 32), counts, strict=True) if count >= 3]
    assert [row[:3] for row in found.rows] == [(low, count, count / 40) for low, count in shown]
    assert found.hidden == 17 - len(shown) > 0
    total = int(users.sizes.sum())
    assert {row[3:] for row in found.rows} == {(total, total / 40)}


def test_a_size_above_the_largest_counts_as_the_largest(users):
    expected = int(users.sizes.clip(max=8).sum())
    for asked in (BuiltIn("sizes", high=(8,)), BuiltIn("sizes", most_rows=8)):
        found = asked_of(users, asked)
        assert found.rows[-1][0] == 8
        assert found.rows[-1][1] == (users.sizes >= 8).sum()
        assert found.rows[0][3] == expected


@pytest.mark.parametrize("secure", [False, True])
def test_labels_are_rows_and_devices_of_each_value(users, secure):
    found = asked_of(users, BuiltIn("labels", ("y",)), secure=secure)
    y, owners = users.fields["y"], np.repeat(np.arange(40), users.sizes)
    expected = [(label, (y == label).sum(), len(set(owners[y == label])), (y == label).mean()) for label in range(4)]
    assert [row[:3] for row in found.rows] == [row[:3] for row in expected]
    np.testing.assert_allclose([row[3] for row in found.rows], [row[3] for row in expected], rtol=1e-12)


def test_shares_are_of_what_is_shown(users):
    found = asked_of(users, BuiltIn("labels", ("y",)), minimum_devices=37)
    assert found.hidden == 5 - len(found.rows) > 0
    assert sum(row[3] for row in found.rows) == pytest.approx(1)


def test_labels_of_an_array_count_its_elements(users):
    found = asked_of(users, BuiltIn("labels", ("pixel",)))
    counts = np.bincount(users.fields["pixel"].ravel(), minlength=256)
    assert [row[1] for row in found.rows] == counts[counts > 0].tolist()


def test_histograms_have_bins_for_what_is_outside(users):
    found = asked_of(users, BuiltIn("histogram", ("f",), bins=4, low=(0.0,), high=(1.0,)))
    f = users.fields["f"]
    inside = np.histogram(f[~np.isnan(f)], np.linspace(0, 1, 5))[0].tolist()
    assert [row[:2] for row in found.rows] == [
        *((None, 0.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, None)),
    ]
    assert [row[2] for row in found.rows] == [(f < 0).sum(), *inside, (f > 1).sum()]


def test_histograms_of_large_whole_numbers_are_exact(users):
    found = asked_of(users, BuiltIn("histogram", ("steps",), bins=7))
    steps, width = users.fields["steps"], -(-(10**12) // 7)
    assert [row[2] for row in found.rows] == np.bincount(steps // width, minlength=7).tolist()
    assert found.rows[0][:2] == (0, width - 1)
    assert found.rows[-1][1] == 10**12 - 1


def test_quantiles_are_numpys_to_the_width_of_a_bin(users):
    found = asked_of(users, BuiltIn("quantiles", ("image",), bins=200, low=(0.0,), high=(4.0,)))
    values = users.fields["image"].ravel()
    np.testing.assert_allclose(found.rows[0][1:6], np.quantile(values, [0.1, 0.25, 0.5, 0.75, 0.9]), atol=0.02)
    np.testing.assert_allclose([found.rows[0][0], found.rows[0][6]], [values.min(), values.max()], atol=0.02)
    assert found.rows[0][7] == values.size


def test_quantiles_of_few_whole_values_are_values(users):
    found = asked_of(users, BuiltIn("quantiles", ("y",)))
    y = users.fields["y"]
    expected = np.quantile(y, [0.1, 0.25, 0.5, 0.75, 0.9], method="inverted_cdf").tolist()
    assert found.rows[0] == (0, *expected, 3, y.size)


@pytest.mark.parametrize("secure", [False, True])
def test_least_greatest_and_quantiles_are_those_of_enough_devices(secure):
    shards = [{"y": np.full(3, label, np.uint8)} for label in (0, 1, 1, 1, 2, 2, 4)]
    users = Population.of(list("abcdefg"), shards, 5)
    quantiles = BuiltIn("quantiles", ("y",), most_rows=3 if secure else None)
    made = compile_built_in(quantiles, FIELDS[-1:], minimum_devices=2, secure=secure)
    assert ask_population(made, users).rows == ((1, None, 1, 1, 2, None, 2, 21),)


@pytest.mark.parametrize("offset", [0.0, 10_000.0, 1e6])
def test_normalisers_are_numpys_of_each_element_far_from_0_too(offset):
    source = np.random.default_rng(1)
    shards = [{"x": (source.normal(0, [1, 2, 3], (50, 3)) + offset).astype(np.float32)} for _ in range(30)]
    shards[0]["x"][:7, 1] = np.nan
    users = Population.of([str(user) for user in range(30)], shards)
    asked = BuiltIn("normaliser", ("x",), low=(offset - 19.981,), high=(offset + 20.019,))
    made = compile_built_in(asked, [Field("x", "float32", (3,))])
    found = ask_population(made, users)
    x = users.fields["x"].astype(np.float64)
    assert [row[:2] for row in found.rows] == [("x", 0), ("x", 1), ("x", 2)]
    means = np.array([row[2] for row in found.rows])
    np.testing.assert_allclose(means - offset, np.nanmean(x, 0) - offset, rtol=1e-5, atol=1e-5)  # none of float32
    np.testing.assert_allclose([row[3] for row in found.rows], np.nanstd(x, 0), rtol=1e-5)
    assert [row[4] for row in found.rows] == [1500, 1493, 1500]


def test_elements_of_a_normaliser_may_have_bounds_of_their_own():
    source = np.random.default_rng(3)
    shards = [{"x": source.normal([0, 1e6], [1e-3, 1e4], (20, 2)).astype(np.float32)} for _ in range(25)]
    users = Population.of([str(user) for user in range(25)], shards)
    asked = BuiltIn("normaliser", ("x",), low=(-0.002, 0), high=(0.01, 1_005_000), most_rows=20)
    made = compile_built_in(asked, [Field("x", "float32", (2,))], secure=True)
    found = ask_population(made, users)
    held = users.fields["x"].astype(np.float64).clip([-0.002, 0], [0.01, 1_005_000])
    np.testing.assert_allclose([row[2] for row in found.rows], held.mean(0), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose([row[3] for row in found.rows], held.std(0), rtol=1e-3)
    assert "held to -0.002 … 0.01 (1 elements), 0 … 1.005e+06 (1 elements)?" in made.question.text


def test_normalisers_of_all_elements_are_one_pair(users):
    found = asked_of(users, BuiltIn("normaliser", ("pixel",), overall=True))
    pixel = users.fields["pixel"]
    ((field, element, mean, deviation, values),) = found.rows
    assert (field, element, values) == ("pixel", None, pixel.size)
    np.testing.assert_allclose([mean, deviation], [pixel.mean(), pixel.std()], rtol=1e-6)


def test_correlation_is_numpys_of_rows_that_have_both(users):
    found = asked_of(users, BuiltIn("correlation", ("f", "g"), low=(-6.0, -9.0), high=(6.0, 9.0)))
    f, g = users.fields["f"], users.fields["g"]
    both = ~np.isnan(f)
    assert found.rows[0][1] == both.sum()
    assert found.rows[0][0] == pytest.approx(np.corrcoef(f[both], g[both])[0, 1], abs=1e-6)


def report_of(asked, shard):
    """The blocks that a device with these rows sends, in float64."""
    algorithm, question = asked.algorithm(), asked.question
    (trip,) = getattr(algorithm, "trips", (algorithm,))
    trip = getattr(trip, "inner", trip)
    state = trip.init(torch.zeros(2 * (1 + sum(question.block_sizes.values())), dtype=torch.float64))
    rows = asked.rows({name: torch.from_numpy(values) for name, values in shard.items()}).double()
    numbers = torch.cat([torch.tensor([float(len(rows)), 0.0]), rows.sum(0)])
    (stage,) = trip.passes
    broadcast = trip.broadcast(state)
    carry = stage.step(stage.begin(broadcast), broadcast, lambda params: numbers)
    return trip.report(broadcast, {PASS: carry})


def extreme(source, rows, kind):
    """Rows of a device that moves sums as far as it can: all alike, at either end, or all apart."""
    made = shard(source, rows)
    alike = {name: np.repeat(values[:1], rows, 0) for name, values in made.items()}
    ends = {field.name: np.full((rows, *field.shape), (field.high or 10**6) - 1, field.dtype) for field in FIELDS}
    apart = {
        field.name: (np.arange(rows * int(np.prod(field.shape))).reshape(rows, *field.shape) % (field.high or 10**6))
        for field in FIELDS
    }
    zeros = {name: np.zeros_like(values) for name, values in made.items()}
    chosen = {"drawn": made, "alike": alike, "ends": ends, "apart": apart, "zeros": zeros}[kind]
    return {field.name: chosen[field.name].astype(field.dtype) for field in FIELDS}


@pytest.mark.parametrize("asked", ALL, ids=lambda asked: f"{asked.word}-{'-'.join(asked.of)}")
def test_no_block_of_a_device_is_longer_than_its_norm_and_some_reach_it(asked):
    source, longest = np.random.default_rng(2), {}
    made = compile_built_in(replace(asked, most_rows=6), FIELDS, private=True)
    for kind in ("drawn", "alike", "ends", "apart", "zeros"):
        for rows in (1, 6, 6, 6, 50 if asked.word == "sizes" else 6):
            report = report_of(made, extreme(source, rows, kind))
            for block in made.question.blocks:
                longest[block.name] = max(longest.get(block.name, 0), float(report[block.name].norm()))
    assert max(longest.values()) <= 1 + 1e-6
    # A product of two fields may be shorter than what is proven, and rows of one device rarely fill all bins.
    reached = [name for name, norm in longest.items() if norm > 0.99]
    assert {"counts", "total"} & set(reached), longest
    assert made.question.clip == pytest.approx(len(made.question.blocks) ** 0.5)


def test_unbounded_rows_travel_in_words_under_secure_aggregation_only():
    for secure in (False, True):
        made = compile_built_in(BuiltIn("labels", ("y",)), FIELDS, secure=secure)
        assert [rows.words for rows in made.question.rows] == ([True, False] if secure else [False])


def test_secure_and_private_questions_have_a_range_for_every_number():
    for asked in ALL:
        made = compile_built_in(replace(asked, most_rows=20), FIELDS, secure=True)
        for block in made.question.blocks:
            assert block.low is not None, (asked, block)
            assert block.high is not None, (asked, block)


def test_owners_read_what_is_asked_and_its_bounds():
    made = compile_built_in(BuiltIn("labels", ("y",), most_rows=50), FIELDS, minimum_devices=25)
    assert made.question.text == (
        "How many examples have each value of y, 0 to 4, and how many devices? Of each device 50 examples count at "
        "most, drawn at random. What fewer than 25 devices have is not shown."
    )
    assert made.question.most_rows == 50


@pytest.mark.parametrize(
    ("asked", "terms", "message"),
    [
        (BuiltIn("label", ("y",)), {}, "no built-in question is called 'label'; did you mean labels"),
        (BuiltIn("labels"), {}, "labels asks about 1 fields, not 0"),
        (BuiltIn("labels", ("z",)), {}, "no field is called 'z'; there are image, pixel"),
        (BuiltIn("labels", ("f",)), {}, "f holds real numbers, .* ask for its histogram"),
        (BuiltIn("labels", ("steps",)), {}, "steps has 1,000,000,000,000 groups; there is room for 4,096"),
        (BuiltIn("labels", ("y",), bins=3), {}, "labels takes no bins"),
        (BuiltIn("labels", ("y",)), {"private": True}, "say how many rows of a device count: MAX n ROWS PER DEVICE"),
        (BuiltIn("sizes"), {"private": True}, "say how many rows of a device count: MAX n ROWS PER DEVICE"),
        (BuiltIn("sizes", high=(0,)), {}, "the largest size is a whole number from 2, not 0"),
        (BuiltIn("sizes", most_rows=1), {}, "the largest size is a whole number from 2, not 1"),
        (BuiltIn("histogram", ("f",)), {}, "say between which bounds f lies: low and high"),
        (BuiltIn("histogram", ("f",), low=(1.0,)), {}, "f has one bound; say both"),
        (BuiltIn("histogram", ("f",), low=(1.0,), high=(1.0,)), {}, "low must be less than high"),
        (BuiltIn("histogram", ("f",), low=(1.0,), high=(float("nan"),)), {}, "low must be less than high"),
        (BuiltIn("histogram", ("f",), bins=0, low=(0.0,), high=(1.0,)), {}, "0 bins; there is 1 at least"),
        (BuiltIn("histogram", ("f",), bins=9, low=(1e8,), high=(1e8 + 8,)), {}, "too narrow for 9 bins of f"),
        (BuiltIn("histogram", ("f",), bins=9999, low=(0.0,), high=(1.0,)), {}, "9,999 groups; there is room for"),
        (BuiltIn("histogram", ("y",), low=(0.5,), high=(2.0,)), {}, "y holds whole numbers, and its bounds 0.5 to 2"),
        (BuiltIn("normaliser", ("f",)), {}, "say between which bounds f lies: low and high"),
        (BuiltIn("correlation", ("f", "y")), {}, "say between which bounds f lies"),
        (BuiltIn("normaliser", ("y",)), {"secure": True}, "say how many rows of a device count"),
        (BuiltIn("normaliser", ("y",), low=(0, 1)), {}, "normaliser takes one low and one high for each"),
        (BuiltIn("correlation", ("f", "image")), {}, "two fields of one number each"),
        (BuiltIn("correlation", ("f", "f")), {}, "two fields of one number each"),
        (BuiltIn("labels", ("y",), most_rows=0), {}, "1 row of a device or more counts"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked, terms, message):
    with pytest.raises(QuestionError, match=message):
        compile_built_in(asked, FIELDS, **terms)


def test_an_array_too_long_for_a_report_is_asked_for_overall():
    long = Field("x", "float32", (3, 32, 32))
    with pytest.raises(QuestionError, match="3,072 elements, too many for one report: say overall"):
        compile_built_in(BuiltIn("normaliser", ("x",), low=(0,), high=(1,)), [long])
    overall = BuiltIn("normaliser", ("x",), low=(0,), high=(1,), overall=True)
    assert compile_built_in(overall, [long]).question.groups == 1
    compile_built_in(BuiltIn("normaliser", ("x",)), [Field("x", "uint8", (3, 32, 32), 256)])


def test_bytes_in_a_row_may_be_a_text_and_need_bounds():
    word = Field("word", "uint8", (8,), 128)
    for asked in ("labels", "histogram", "quantiles", "normaliser"):
        with pytest.raises(QuestionError, match="word may be a text with zeros behind it, which are no data"):
            compile_built_in(BuiltIn(asked, ("word",)), [word])
    compile_built_in(BuiltIn("histogram", ("word",), bins=128, low=(0,), high=(127,)), [word])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sizes", BuiltIn("sizes")),
        ("labels y max 20 rows per device", BuiltIn("labels", ("y",), most_rows=20)),
        ("histogram f low=-0.5 high=600 bins=12", BuiltIn("histogram", ("f",), bins=12, low=(-0.5,), high=(600,))),
        (
            "normaliser image low=0 high=4 overall",
            BuiltIn("normaliser", ("image",), low=(0,), high=(4,), overall=True),
        ),
        (
            "correlation f steps low=0,0 high=1,9007199254740991 MAX 1 ROW PER DEVICE",
            BuiltIn("correlation", ("f", "steps"), low=(0, 0), high=(1, 2**53 - 1), most_rows=1),
        ),
    ],
)
def test_questions_in_words_have_options_and_the_end_of_sql(words, expected):
    assert BuiltIn.parse([words]) == BuiltIn.parse(words.split()) == expected
    assert compile_built_in(BuiltIn.parse(words.split()), FIELDS).question.minimum_devices == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("histogram f low=a high=1", "bins, low and high are numbers"),
        ("histogram f lo=0 high=1", "there is no lo=; did you mean low="),
        ("histogram f low=0 high=1 bins=1.5", "bins, low and high are numbers"),
        ("labels y MAX 20 ROWS", "labels asks about 1 fields, not 4"),
    ],
)
def test_words_that_say_nothing_are_refused(words, message):
    with pytest.raises(QuestionError, match=message):
        compile_built_in(BuiltIn.parse(words.split()), FIELDS)


def test_every_built_in_question_is_among_those_of_the_tests():
    assert {asked.word for asked in ALL} == set(BUILTIN)


@pytest.mark.parametrize(
    "asked",
    sampled(ALL, [ALL[0], ALL[2], ALL[4], ALL[6], ALL[10], ALL[11], ALL[12]]),
    ids=lambda asked: f"{asked.word}-{'-'.join(asked.of)}",
)
def test_graphs_of_built_in_questions_compute_what_torch_does(asked, tmp_path):
    """Every run has each word, arrays and single values, whole and real numbers, and bounds of every kind."""
    made = compile_built_in(replace(asked, most_rows=16), FIELDS, secure=True)
    bundle = export_bundle(Model(made.spec()), made.algorithm(), tmp_path)
    assert bundle.plan.question == made.question.text
    assert bundle.certificate.worst < 1e-5


@pytest.mark.parametrize("asked", [ALL[2], ALL[6], ALL[11]], ids=lambda asked: asked.word)
def test_executorch_computes_built_in_questions_as_torch_does(asked, tmp_path, executorch):
    made = compile_built_in(replace(asked, most_rows=16), FIELDS, private=True)
    bundle = export_bundle(Model(made.spec()), made.algorithm(), tmp_path, targets=("executorch",))
    assert bundle.certificate.worst < 1e-5
