"""A question as an algorithm: what devices make of their rows, and what the server adds up, against plain sums."""

from itertools import accumulate

import numpy as np
import pytest
from msgspec.structs import replace

from fedcore.algorithms import create
from fedcore.algorithms.algorithm import ServerStep, ranges_of, with_carries
from fedcore.algorithms.question import Ask, text_of
from fedcore.errors import InvalidSetting
from fedcore.questions.answer import answer
from fedcore.questions.question import Block, Cell, Column, Question, Rows

BIG = Question(
    text="sums of x",
    rows=(Rows("n"), Rows("x", words=True), Rows("f")),
    blocks=(
        Block("v", "n", "any", 0, 1),
        Block("n", "n", low=0, high=20),
        Block("x", "x", low=-(2**31), high=2**31 - 1),
        Block("f", "f", low=-3.5, high=3.5, whole=False, norm=3.5),
        Block("sizes", "n", "bins", edges=(1.0, 2.0, 4.0)),
    ),
    columns=tuple(Column(name, Cell(name)) for name in ("n", "x", "f", "sizes")),
    voters="v",
)


def algorithm_of(question):
    clip = {"clip_norm": question.clip} if question.private else {}
    return create("question", {"question": question.encode(), **clip})


def numbers_of(rows, size):
    """The row numbers of (n, x, f): one, the words of x, f; (R,) summed over a batch after examples and loss."""
    n, x, f = np.ones(len(rows)), np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    cells = np.stack([n, x % 4096, x // 4096, f], 1)
    return np.concatenate([[len(rows), 0], cells.sum(0)]) if len(rows) else np.zeros(size + 2)


def report_of(algorithm, state, rows, batch=2):
    """A device's report, as a plan runs it."""
    (trip,) = getattr(algorithm, "trips", (algorithm,))
    (stage,) = trip.passes
    broadcast = trip.broadcast(state)
    received = with_carries(broadcast, {})
    carry = stage.begin(received)
    for start in range(0, len(rows), batch):
        sums = numbers_of(rows[start : start + batch], 4)
        carry = stage.step(carry, received, lambda params, sums=sums: sums)
    return trip, trip.report(broadcast, {stage.name: carry})


def asked_of(question, devices, rounds=1):
    algorithm = algorithm_of(question)
    size = 2 * (1 + sum(question.block_sizes.values()))
    state = algorithm.init(np.zeros(size))
    for members in np.array_split(np.arange(len(devices)), rounds):
        reports = []
        for member in members:
            trip, report = report_of(algorithm, state, devices[member])
            reports.append(report)
        mean = {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}
        state = trip.update(state, mean, ServerStep(devices=len(reports)))
        state = {name: vector.astype(np.float32).astype(np.float64) for name, vector in state.items()}
    return answer(question, state["params"].astype(np.float32))


@pytest.mark.parametrize("rounds", [1, 3])
def test_answers_are_exact_sums_of_what_devices_hold(rounds):
    source = np.random.default_rng(0)
    devices = [
        list(zip(source.integers(-(2**28), 2**28, n).tolist(), (source.integers(-8, 8, n) / 8).tolist(), strict=True))
        for n in source.integers(1, 9, 24)
    ]
    found = asked_of(BIG, devices, rounds)
    sizes = [len(rows) for rows in devices]
    ends = [(-1, 1), (1, 2), (2, 4), (4, 99)]
    assert found.devices == 24
    assert found.rows == (
        (
            sum(sizes),
            sum(x for rows in devices for x, _ in rows),
            sum(min(max(sum(f for _, f in rows), -3.5), 3.5) for rows in devices),
            tuple(sum(low <= size < high for size in sizes) for low, high in ends),
        ),
    )


def test_what_one_device_adds_is_bounded_however_many_rows_it_has():
    found = asked_of(BIG, [[(1, 9.0)] * 1000])
    assert found.rows[0][0] == 20
    assert found.rows[0][2] == 3.5


def test_whole_numbers_are_exact_beyond_float32_over_many_rounds():
    many = [[(2**27 + index, 0.0)] * 8 for index in range(64)]
    expected = sum(x for rows in many for x, _ in rows)
    assert expected > 2**36
    assert asked_of(BIG, many, rounds=16).rows[0][1] == expected


def test_devices_receive_nothing_of_the_answer_so_far():
    algorithm = algorithm_of(BIG)
    state = {**algorithm.init(np.zeros(24)), "params": np.arange(24.0)}
    assert not algorithm.broadcast(state)["params"].any()


def test_secure_rounds_sum_whole_numbers_in_steps_of_one():
    ranges = ranges_of(algorithm_of(BIG))
    for name in ("v", "n", "x_low", "x_high"):
        steps = (ranges[name].high - ranges[name].low) / (2 ** ranges[name].bits - 1)
        assert steps == 1, name
    assert (ranges["x_low"].high, ranges["f"].bits) == (4095, 20)
    assert (ranges["x_high"].low, ranges["x_high"].high) == (-(2**19), 2**19 - 1)


def test_private_blocks_are_divided_by_their_norms_and_clipped_together():
    count, total = Block("n", "n", low=0, high=20, norm=20), Block("f", "f", whole=False, norm=7)
    private = Question(
        text="SELECT COUNT(*), SUM(f) FROM examples",
        rows=(Rows("n"), Rows("x"), Rows("y"), Rows("f")),
        blocks=(Block("v", "n", "any", 0, 1), count, total),
        columns=tuple(Column(name, Cell(name)) for name in ("n", "f")),
        voters="v",
        private=True,
    )
    algorithm = algorithm_of(private)
    assert algorithm.clipping.clip_norm == pytest.approx(3**0.5)
    assert ranges_of(algorithm.trips[0]) == {}
    _, report = report_of(algorithm, algorithm.init(np.zeros(8)), [(0, 0.5)] * 20)
    assert np.linalg.norm([vector[0] for vector in report.values()]) == pytest.approx(3**0.5)
    devices = [[(0, 0.25)] * count for count in (3, 5, 20)]
    assert asked_of(private, devices).rows[0] == (28, pytest.approx(7.0))


def test_rows_beyond_a_bound_are_drawn_not_the_first():
    (stage,) = Ask(question=replace(BIG, most_rows=5).encode()).passes
    assert (stage.loop.batch_size, stage.loop.steps, stage.loop.shuffle) == (5, 1, True)
    (stage,) = Ask(question=BIG.encode()).passes
    assert (stage.loop.steps, stage.loop.shuffle) == (None, False)


def test_the_text_of_a_question_is_what_owners_read():
    assert text_of(algorithm_of(BIG)) == "sums of x"
    assert text_of(create("fedavg", {})) == ""


def test_a_question_that_is_no_question_is_refused_by_name():
    with pytest.raises(InvalidSetting, match="question must be a question in JSON"):
        create("question", {"question": "SELECT 1"})


def test_vectors_of_rows_have_places_in_order():
    assert list(accumulate(rows.size * (1 + rows.words) for rows in BIG.rows))[-1] == BIG.row_numbers == 4
