"""Heavy hitters of a population against plain counts, with noise too; graphs, values that are none, and refusals."""

import numpy as np
import pytest
import torch

import muster
from export.build import export_bundle
from export.model import Model
from export.questions.heavy_hitters import heavy_hitters, heavy_hitters_in_words
from fedcore.algorithms.algorithm import ServerStep
from fedcore.algorithms.heavy_hitters import CELL, VOTES
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.questions.answer import answer_found
from simulator.planned import ask_population
from simulator.population import Population
from tests.questions.words import HIGH, LETTERS, as_rows, counts, f1, zipf
from tests.sampled import sampled

WORD = Field("word", "uint8", (LETTERS,), HIGH)
SHORT = Field("word", "uint8", (3,), HIGH)
SMALL = {"candidates": 16, "step_bits": 6}


def words_of(answer):
    return [row[0] for row in answer.rows]


def cells_of(asked, state, values):
    """The cells that examples vote for, by the torch function."""
    model = Model(asked.spec())
    tensors = model.tensors(torch.as_tensor(state, dtype=torch.float32))
    return model.measure(tensors, {asked.field.name: torch.from_numpy(values)}, torch.ones(len(values)))[CELL].tolist()


def start_of(asked):
    return asked.algorithm().init(np.zeros(Model(asked.spec()).schema.size))["params"]


def test_all_words_that_enough_devices_have_are_found_with_exact_counts():
    users = zipf(120, 40, seed=0, most=3)
    asked = heavy_hitters("word", [WORD], minimum_devices=4, most_rows=3, candidates=32, step_bits=6)
    found = ask_population(asked, users)
    expected = {word: count for word, count in counts(users).items() if count >= 4}
    assert len(expected) >= 10
    assert {word: count for word, count, _ in found.rows} == expected
    assert {row[2] for row in found.rows} == {row[1] / 120 for row in found.rows}
    assert (found.devices, found.columns, found.errors) == (120, ("value", "devices", "share"), None)


def test_large_whole_numbers_are_found():
    values = [10**15 + 7] * 9 + [10**15 + 8] * 6 + [3] * 5 + list(range(100, 110))
    shards = [{"n": np.array([value, value])} for value in values]
    users = Population.of(list(map(str, range(30))), shards)
    asked = heavy_hitters("n", [Field("n", "int64", (), 10**16)], minimum_devices=5)
    assert [row[:2] for row in ask_population(asked, users).rows] == [(10**15 + 7, 9), (10**15 + 8, 6), (3, 5)]


def test_noise_of_a_small_population_hides_rare_words_and_no_frequent_one():
    source, rare = (
        np.random.default_rng(1),
        as_rows([b"%c%c%c" % (97 + n // 26, 97 + n % 26, 97) for n in range(100)], 3),
    )
    frequent = as_rows([b"the", b"of", b"a"], 3)
    shards = [{"word": frequent[source.integers(0, 3, 1)]} for _ in range(300)] + [{"word": row[None]} for row in rare]
    users = Population.of(list(map(str, range(400))), shards, HIGH)
    asked = heavy_hitters("word", [SHORT], minimum_devices=10, private=True, **SMALL)
    found = ask_population(asked, users, epsilon=4.0, delta=1e-4)
    assert set(words_of(found)) == {"the", "of", "a"}
    exact = counts(users)
    for (word, devices, share), errors in zip(found.rows, found.errors, strict=True):
        assert abs(devices - exact[word]) <= 1.5 * errors[1]
        assert (errors[0], errors[2]) == (None, pytest.approx(errors[1] / 400))
        assert share == devices / 400


@pytest.mark.parametrize(("least", "most"), [(15, 25), (5, 60), (100, 300)])
def test_errors_hold_the_devices_of_values_that_noise_lifted(least, most):
    hitters = heavy_hitters("n", [Field("n", "int64", (), 2**12)], candidates=64, step_bits=6).hitters
    source, within = np.random.default_rng(2), []
    exact = source.integers(least, most, 2**12)
    state = hitters.init(np.zeros(hitters.tree.places["out_of"].stop))
    for _ in range(5):
        votes = source.normal(0, 10, (64, 65)) + np.pad(exact.reshape(64, 64)[:, 1:], ((0, 0), (1, 1)))  # 0 is an end
        ended = hitters.update(state, {VOTES: votes.ravel() / 1e5}, ServerStep(devices=10**5))
        found = answer_found(hitters, ended["params"].astype(np.float32), 10.0)
        pairs = zip(found.rows, found.errors, strict=True)
        within += [abs(row[1] - exact[row[0]]) <= one[1] + 0.5 for row, one in pairs]
    assert len(within) > 50
    assert np.mean(within) >= 0.95


@pytest.mark.parametrize("target", ["onnx", "executorch"])
@pytest.mark.parametrize("field", [WORD, Field("n", "int64", (), 2**50)], ids=["words", "numbers"])
def test_graphs_vote_as_torch_does(target, field, tmp_path, request):
    if target == "executorch":
        request.getfixturevalue("executorch")
    asked = heavy_hitters(field.name, [field], most_rows=3)
    bundle = export_bundle(Model(asked.spec()), asked.algorithm(), tmp_path, targets=(target,))
    assert bundle.plan.question.startswith(f"Which values of {field.name} do most devices have?")
    (evidence,) = bundle.certificate.formats.values()
    assert {one.graph: one.l2 for one in evidence.parity} == {"vote.step": 0, "report": 0}
    assert [(one.name, one.size) for one in bundle.plan.report.segments] == [(VOTES, 8256), ("weight", 1)]
    assert evidence.footprint.graph_bytes < 40_000


def test_no_value_votes_that_is_none():
    asked = heavy_hitters("word", [SHORT])
    rows = np.array([[97, 98, 99], [0, 0, 0], [97, HIGH, 0], [255, 0, 0], [0, 0, 1], [97, 0, 98]], np.uint8)
    cells = cells_of(asked, start_of(asked), rows)
    assert [cell > 0 for cell in cells] == [True, True, False, False, True, True]
    assert cells[1] == 129  # the first candidate, of zeros alone, and all that follows is zeros
    numbers = heavy_hitters("n", [Field("n", "int64", (), 1000)])
    found = cells_of(numbers, start_of(numbers), np.array([-1, -(2**63), 1000, 2**63 - 1, 999, 0]))
    assert [cell > 0 for cell in found] == [False, False, False, False, True, True]


def test_empty_words_and_zeros_within_words_are_values_too():
    rows = [b"", b"", b"", b"a\0b", b"a\0b", b"a"]
    users = Population.of(list(map(str, range(6))), [{"word": as_rows([row], 3)} for row in rows], HIGH)
    found = ask_population(heavy_hitters("word", [SHORT], minimum_devices=1, **SMALL), users)
    assert [row[:2] for row in found.rows] == [("", 3), ("a\0b", 2), ("a", 1)]


def test_examples_of_a_device_are_drawn_anew_and_no_value_counts_twice():
    shards = [{"word": as_rows([b"aaa"] * 9 + [b"bbb"], 3)} for _ in range(400)]
    users = Population.of(list(map(str, range(400))), shards, HIGH)
    one = ask_population(heavy_hitters("word", [SHORT], minimum_devices=1, **SMALL), users)
    assert dict(row[:2] for row in one.rows) == pytest.approx({"aaa": 360, "bbb": 40}, abs=30)
    all_of_them = heavy_hitters("word", [SHORT], minimum_devices=1, most_rows=10, **SMALL)
    assert dict(row[:2] for row in ask_population(all_of_them, users).rows) == {"aaa": 400, "bbb": 400}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("heavy-hitters x", r"x holds real numbers, which hardly repeat: ask for its histogram"),
        ("heavy-hitters tokens", r"tokens is an array of 4 int32: heavy hitters are of words, uint8 with a zero"),
        ("heavy-hitters image", r"image is an array of 8 × 8 uint8"),
        ("heavy-hitters n", r"n holds whole numbers without an end: say it, as n:int64:1000000"),
        ("heavy-hitters pixels", r"values of 6,272 bits, which would take 896 rounds; there may be 64"),
        ("heavy-hitters wrod", r"no field is called 'wrod'; did you mean word\?"),
        ("heavy-hitters word x", r"heavy-hitters asks about 1 field, not 2"),
        ("heavy-hitters word bins=3", r"there is no bins=; there are candidates=, step_bits="),
        ("heavy-hitters word candidates=many", r"candidates and step_bits are whole numbers"),
        ("heavy-hitters word candidates=0", r"candidates must be a whole number from 1"),
        ("heavy-hitters word candidates=4096", r"make more than 16,384 numbers of a report: take fewer of either"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(words, message):
    fields = [
        *(WORD, Field("x", "float32"), Field("tokens", "int32", (4,), 99), Field("n", "int64")),
        *(Field("image", "uint8", (8, 8), 256), Field("pixels", "uint8", (784,), 256)),
    ]
    with pytest.raises(QuestionError, match=message):
        heavy_hitters_in_words(words.split(), fields)


def test_words_say_which_field_and_how_many_examples_vote():
    words = "heavy-hitters word candidates=32 step_bits=6 MAX 5 ROWS PER DEVICE"
    asked = heavy_hitters_in_words(words.split(), [WORD])
    assert (asked.hitters.values, asked.hitters.candidates, asked.rounds) == (5, 32, 9)
    assert heavy_hitters_in_words(["heavy-hitters", "word"], [WORD], private=True).algorithm().clipping.clip_norm == 1
    assert heavy_hitters("b", [Field("b", "uint8")]).field.high == 256


def test_python_asks_a_population():
    users = zipf(60, 10, seed=3)
    found = muster.ask("heavy-hitters", "word", "candidates=16", dataset=users, minimum_devices=5)
    assert words_of(found)[0] == counts(users).most_common(1)[0][0]
    assert {row[1] >= 5 for row in found.rows} == {True}
    assert list(found.dataframe().columns) == ["value", "devices", "share"]


@pytest.mark.parametrize(("devices", "words"), sampled([(800, 200), (2_000, 1_000), (20_000, 1_000)], [(800, 200)]))
def test_the_top_of_a_zipf_law_is_found(devices, words):
    """Every run has a small population; more devices with more words are long."""
    users = zipf(devices, words, seed=1)
    found = ask_population(heavy_hitters("word", [WORD], minimum_devices=5), users)
    assert f1(words_of(found), users) == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_top_of_a_zipf_law_is_found_at_epsilon_2(seed):
    users = zipf(20_000, 1_000, seed=100 + seed)
    asked = heavy_hitters("word", [WORD], private=True)
    found = ask_population(asked, users, seed=seed, epsilon=2.0, delta=1 / 200_000)
    assert f1(words_of(found), users) >= 0.9
    exact = counts(users)
    within = [abs(row[1] - exact[row[0]]) <= errors[1] for row, errors in zip(found.rows, found.errors, strict=True)]
    assert sum(within) >= 0.85 * len(within)
    assert all(exact[word] for word in words_of(found))
