"""Heavy hitters as an algorithm: the tree from round to round against plain counts, its limits, and who sees what."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fedcore.algorithms import create
from fedcore.algorithms.algorithm import ServerStep, ranges_of, with_carries
from fedcore.algorithms.heavy_hitters import CELLS, MOST_VOTES, PASS, VOTES, HeavyHitters
from fedcore.algorithms.question import text_of
from fedcore.algorithms.rehearsal import Probe
from fedcore.errors import InvalidSetting, QuestionError
from fedcore.questions.answer import FoundValue, answer_found, found
from fedcore.questions.question import DEAD, OUT_OF, PREFIXES, UNKNOWN, PrefixTree
from fedcore.schedule import Range

WORDS = HeavyHitters(of="word", letters=3, bits=7, candidates=8, step_bits=4, minimum_devices=2)
NUMBERS = HeavyHitters(of="n", letters=0, bits=40, candidates=5, step_bits=6, minimum_devices=2)


def whole_of(algorithm, value):
    """The bits of a value as one number."""
    if not algorithm.letters:
        return value
    whole = 0
    for letter in value.ljust(algorithm.letters, b"\0"):
        whole = (whole << algorithm.bits) + letter
    return whole


def cell_of(algorithm, params_D, value):
    """The number of the cell that a value votes for, from 1; 0 for none. As slow as it is plain."""
    tree, rest, digits = algorithm.tree, algorithm.tree.value_bits, []
    for width in tree.widths:
        rest -= width
        digits.append(whole_of(algorithm, value) >> rest & (1 << width) - 1)
    for place in range(tree.candidates):
        known = [int(params_D[where][place]) for where in tree.columns(PREFIXES)]
        known = [digit for digit in known if digit != UNKNOWN]
        if DEAD in known or digits[: len(known)] != known:
            continue
        further = digits[len(known) :]
        return place * (2**tree.step_bits + 1) + (further[0] if any(further) else 2**tree.step_bits) + 1
    return 0


def report_of(trip, state, algorithm, values):
    broadcast = trip.broadcast(state)
    (stage,) = trip.passes
    received, carry = with_carries(broadcast, {}), stage.begin(with_carries(broadcast, {}))
    for value in values:
        cell = float(cell_of(algorithm, broadcast["params"], value))
        carry = stage.step(carry, received, lambda params, cell=cell: np.array([1.0, 0.0, cell]))
    return trip.report(broadcast, {PASS: carry})


def size_of(algorithm):
    return algorithm.tree.places[OUT_OF].stop


def start_of(algorithm):
    return algorithm.init(np.zeros(size_of(algorithm)))


def run(algorithm, devices, rounds=None, noise=0.0, seed=0, float_type=np.float32):
    """The states after each round in which every device votes with all of its values."""
    source, state, states = np.random.default_rng(seed), start_of(algorithm), []
    for _ in range(rounds or algorithm.tree.rounds):
        alike = Counter(map(tuple, devices)).items()
        total = sum(times * report_of(algorithm, state, algorithm, values)[VOTES] for values, times in alike)
        total = total + noise * source.standard_normal(total.shape)
        state = algorithm.update(state, {VOTES: total / len(devices)}, ServerStep(devices=len(devices)))
        state = {name: vector.astype(float_type).astype(np.float64) for name, vector in state.items()}
        states.append(state)
    return states


def counted(devices):
    return Counter(value for values in devices for value in set(values))


def read(algorithm, state):
    return {one.value: one.devices for one in found(algorithm, state["params"].astype(np.float32))}


def some_words(source, devices, most=1):
    known = [b"the", b"of", b"a", b"and", b"an", b"", b"in", b"zzz", b"to", b"ox", b"at", b"as"]
    shares = 1 / np.arange(1, len(known) + 1)
    drawn = source.choice(len(known), (devices, most), p=shares / shares.sum())
    return [[known[index] for index in row] for row in drawn]


@pytest.mark.parametrize("most", [1, 3])
def test_words_that_nobody_listed_are_found_with_their_counts(most):
    devices = some_words(np.random.default_rng(0), 60, most)
    expected = {value: count for value, count in counted(devices).items() if count >= 2}
    assert len(expected) > 6
    assert read(replace(WORDS, candidates=16), run(replace(WORDS, candidates=16), devices)[-1]) == expected


def test_large_whole_numbers_are_found_to_the_last_digit():
    devices = [[value] for value in [10**12 - 1] * 5 + [10**12 - 2] * 4 + [2**39] * 3 + [0] * 2 + [7]]
    assert NUMBERS.tree.widths == (2, 6, 6, 6, 6, 6, 6, 2)
    expected = {10**12 - 1: 5, 10**12 - 2: 4, 2**39: 3, 0: 2}
    assert read(NUMBERS, run(NUMBERS, devices)[-1]) == expected


def test_only_the_best_candidates_stay():
    devices = [[bytes([65 + value]) * 3] for value in range(20) for _ in range(3 if value in (4, 9, 13) else 2)]
    few = replace(WORDS, candidates=4)
    values = found(few, run(few, devices)[-1]["params"].astype(np.float32))
    assert [(one.value, one.devices) for one in values[:3]] == [(b"EEE", 3), (b"JJJ", 3), (b"NNN", 3)]
    assert [one.devices for one in values[3:]] == [2]


def test_what_fewer_devices_have_is_neither_found_nor_sent_to_others():
    devices = [[b"abc"]] * 9 + [[b"abd"]] * 2 + [[b"xyz"]] * 2
    states = run(replace(WORDS, minimum_devices=3), devices)
    assert read(WORDS, states[-1]) == {b"abc": 9}
    for state in states[:-1]:
        digits = np.stack([WORDS.broadcast(state)["params"][where] for where in WORDS.tree.columns(PREFIXES)], 1)
        alive = digits[digits[:, 0] != DEAD]
        assert len(alive) == 1


def test_values_that_end_early_are_read_before_the_last_round():
    states = run(WORDS, [[b"a"]] * 4 + [[b"abc"]] * 5)
    assert [len(read(WORDS, state)) for state in states] == [0, 1, 1, 1, 2]
    assert read(WORDS, states[1]) == {b"a": 4}


def test_devices_receive_the_tree_and_nothing_of_the_answer():
    state = run(WORDS, [[b"a"]] * 4 + [[b"abc"]] * 5)[3]
    broadcast = WORDS.broadcast(state)
    assert read(WORDS, {"params": broadcast["params"]}) == {}
    assert broadcast["params"][0] == 0
    where = WORDS.tree.places[PREFIXES]
    np.testing.assert_array_equal(broadcast["params"][where], state["params"][where])


def test_further_rounds_change_nothing():
    devices = [[b"a"]] * 4 + [[b"abc"]] * 5
    states = run(WORDS, devices, rounds=8, noise=0.3)
    assert read(WORDS, states[4]) == read(WORDS, states[7])
    assert set(read(WORDS, states[7])) == {b"a", b"abc"}


def test_noise_is_measured_and_what_it_makes_is_no_value():
    algorithm = HeavyHitters(of="word", letters=3, bits=7, candidates=32, step_bits=6, minimum_devices=1, deviations=5)
    devices = [[b"abc"]] * 300 + [[b"dog"]] * 200 + [[b"cat"]] * 100 + [[bytes([65 + n % 26]) * 2] for n in range(52)]
    for seed in range(5):
        (*_, last) = run(algorithm, devices, noise=10.0, seed=seed)
        assert list(read(algorithm, last)) == [b"abc", b"dog", b"cat"]
        for value, count in read(algorithm, last).items():
            assert abs(count - counted(devices)[value]) < 45
    votes = 10 * np.random.default_rng(0).standard_normal(algorithm.tree.cell_count)
    assert algorithm._limit(votes)[0] == pytest.approx(50, rel=0.06)
    assert algorithm._limit(abs(votes))[0] == 0.5


def test_noise_alone_finds_nothing():
    algorithm = HeavyHitters(of="word", letters=3, bits=7, candidates=32, step_bits=6, minimum_devices=1, deviations=6)
    assert read(algorithm, run(algorithm, [[b"abc"]], noise=50.0)[-1]) == {}


def test_a_device_adds_one_to_a_count_whatever_it_reports():
    assert ranges_of(WORDS) == {VOTES: Range(0, 1, 1)}
    assert ranges_of(create("heavyhitters", {"clip_norm": 1}).trips[0]) == {}
    (trip,) = create("heavyhitters", {**settings_of_words(), "values": 4, "clip_norm": 2}).trips
    state = trip.inner.init(np.zeros(size_of(WORDS))) | {"clip_1": np.array([2.0])}
    honest = report_of(trip, state, WORDS, [b"abc", b"Abc", b"0", b"0"])[VOTES]
    assert sorted(honest[honest > 0]) == [1, 1, 1]
    liar = trip.report(trip.broadcast(state), {PASS: {VOTES: np.full(WORDS.tree.cell_count, 1e6)}})
    assert np.linalg.norm(liar[VOTES]) == pytest.approx(2)


def settings_of_words():
    return {"of": "word", "letters": 3, "bits": 7, "candidates": 8, "step_bits": 4, "minimum_devices": 2}


def test_a_device_counts_once_for_a_value_that_it_has_often():
    devices = [[b"abc"] * 5] * 3 + [[b"abd", b"abc"]]
    assert read(WORDS, run(WORDS, devices)[-1]) == {b"abc": 4}


@pytest.mark.parametrize("algorithm", [WORDS, NUMBERS, HeavyHitters()])
def test_the_server_uses_operators_alone_and_writes_into_nothing(algorithm):
    state = {name: Probe(vector).sealed() for name, vector in start_of(algorithm).items()}
    made = algorithm.init(Probe(np.zeros(size_of(algorithm))).sealed())
    for name, vector in state.items():
        np.testing.assert_array_equal(made[name].values, vector.values)
    mean = Probe(np.random.default_rng(0).normal(0, 1, algorithm.tree.cell_count)).sealed()
    after = algorithm.update(state, {VOTES: mean}, ServerStep(devices=100))
    assert {name: vector.values.shape for name, vector in after.items()} == {
        "params": (size_of(algorithm),),
        CELLS: (algorithm.tree.cell_count,),
    }
    np.testing.assert_array_equal(after[CELLS].values, np.arange(algorithm.tree.cell_count) + 1)


def test_rounds_follow_from_the_length_and_the_settings():
    tree = PrefixTree(8, 7, 64, 7)
    assert (tree.rounds, tree.cell_count, sum(tree.widths)) == (8, 8256, 56)
    assert PrefixTree(8, 5, 64, 7).rounds == 5
    assert PrefixTree(8, 7, 64, 4).rounds == 13
    assert PrefixTree(0, 1, 64, 7)._replace(candidates=1).widths == (1,)
    for tree in (PrefixTree(0, 3, 64, 7), PrefixTree(5, 8, 3, 3)):
        assert (len(tree.widths) - bool(tree.first_bits), sum(tree.widths)) == (tree.rounds, tree.value_bits)


def test_an_answer_is_a_table_with_the_noise_of_one_round():
    state = run(WORDS, [[b"\xff\x7f"]] * 3 + [[b"abc"]] * 5)[-1]
    wide = replace(WORDS, bits=8)
    made = answer_found(WORDS, state["params"].astype(np.float32), deviation=0.25)
    assert (made.columns, made.devices) == (("value", "devices", "share"), 8)
    assert made.rows[0] == ("abc", 5, 5 / 8)
    assert made.errors[0] == (None, pytest.approx(0.525), pytest.approx(0.525 / 8))
    state = run(wide, [[b"\xff\x7f"]] * 3 + [["é".encode()]] * 5)[-1]
    assert [row[0] for row in answer_found(wide, state["params"].astype(np.float32)).rows] == ["é", "\\xff\x7f"]
    assert FoundValue(b"a", 1, 4).share == 0.25


def test_the_model_of_another_tree_is_refused():
    with pytest.raises(QuestionError, match="a tree of this size has"):
        found(WORDS, np.zeros(7, np.float32))


def test_too_large_a_tree_is_refused_by_name():
    with pytest.raises(InvalidSetting, match=f"make more than {MOST_VOTES:,} numbers of a report: take fewer"):
        create("heavyhitters", {"candidates": 1 << 12})
    with pytest.raises(InvalidSetting, match="take fewer of either"):
        create("heavyhitters", {"step_bits": 1 << 20})
    with pytest.raises(InvalidSetting, match="of must be the name of a field"):
        create("heavyhitters", {"of": "my word"})


def test_owners_read_which_field_and_how_much_of_it():
    said = text_of(create("heavyhitters", {"of": "word", "values": 3, "clip_norm": 1}))
    assert said.startswith("Which values of word do most devices have? In each of 8 rounds a device says of 3 examples")
    assert said.endswith("What fewer than 20 devices have is not shown.")
