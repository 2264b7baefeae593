"""The answer to a question: the table that is read from a task's model, whichever algorithm asked."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcore.algorithms import create
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.algorithms.question import Ask
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError, table_of, visible
from fedcore.params import Float32
from fedcore.questions.functions import FUNCTIONS, UNHELD, Function
from fedcore.questions.question import (
    ANSWERED,
    DEVICES,
    OUT_OF,
    WORD,
    WORDS,
    Call,
    Cell,
    Group,
    Literals,
    Number,
    Question,
    Shown,
    Value,
    words_of,
)

if TYPE_CHECKING:
    import pandas as pd


Float64 = NDArray[np.float64]
DRAWS, FEWEST_DRAWS, TIMES = 400, 64, 2.1
"""An interval of 95 % and a little more is so many deviations of a normal distribution. That of what is computed from
sums is estimated from draws of the noise: 400 give it to some 4 %, and 64, for long tables, to 9 %."""
MOST_STEPS, MOST_DRAWN = 2**18, 2**20
"""The numbers that computing a table may look at, and all draws of the noise together unless they are the fewest."""
LARGEST, FARTHEST = 2**63, 1e300
"""Whole numbers from the first on become real ones, as in SQLite. No error is larger than the second."""
_CHOOSING = frozenset({"case", "coalesce", "if_each", "max", "min", "null_if_none"})
"""Functions that give one of their arguments, which may be several numbers."""


class Answer(NamedTuple):
    """An answer. rows: of the table, by column. devices: that answered. hidden: groups with fewer devices than may be
    shown, or none: which of both is not said. errors: how far noise moves each number with 95 %, None for what it does
    not move; without noise no errors.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Literals, ...], ...]
    devices: int
    hidden: int
    errors: tuple[tuple[float | None, ...], ...] | None = None

    def dataframe(self) -> pd.DataFrame:
        """The table in pandas, with a column of errors beside each that has some."""
        import pandas as pd

        frame = pd.DataFrame([list(row) for row in self.rows], columns=list(self.columns))
        for place, values in enumerate(zip(*self.rows, strict=True)):
            if {type(value) for value in values} == {int, type(None)}:  # pandas' own choice is float64
                frame.isetitem(place, pd.array(list(values), dtype="Int64"))
        for column, name in enumerate(self.columns if self.errors else ()):
            errors = [row[column] for row in self.errors or ()]
            if any(error is not None for error in errors):
                frame.insert(len(frame.columns), f"{name} ±", errors, allow_duplicates=True)
        return frame

    def shown(self) -> list[tuple[Any, ...]]:
        """The rows for people: six digits of real numbers, and ± behind numbers that have noise."""
        errors = self.errors or [(None,) * len(self.columns)] * len(self.rows)
        return [tuple(map(_shown, row, beside)) for row, beside in zip(self.rows, errors, strict=True)]

    def _repr_html_(self) -> str:
        return table_of(self.columns, self.shown())


def _shown(value: Any, error: float | None) -> Any:
    if error is None or value is None:
        return f"{value:.6g}" if isinstance(value, float) else value
    return f"{value:.6g} ± {error:.2g}"


class _Sums(NamedTuple):
    """The sums over devices of every block, (G, width) each, or (1, width) of one for all groups.

    whole: which blocks are of whole numbers. shown: the groups that are shown, one at least.
    """

    blocks: Mapping[str, Float64]
    whole: frozenset[str]
    shown: tuple[int, ...] = ()

    def cells(self, block: str) -> list[Any]:
        """What a column reads of a block in each shown group, or once for all: a number, or several."""
        numbers = self.blocks[block]
        rows = (numbers[list(self.shown)] if len(numbers) > 1 else numbers).tolist()
        if block in self.whole:
            rows = [[round(number) for number in row] for row in rows]
        return [row[0] if len(row) == 1 else tuple(row) for row in rows]


def answer(question: Question, params_D: Float32, deviation: float = 0.0) -> Answer:
    """The answer in the parameters of a question's task.

    deviation: the standard deviation of the noise in each of the summed numbers, before blocks are multiplied by their
    norms again. Raises QuestionError for parameters of another question, and for columns that cannot be computed.
    """
    with _computing():
        check_steps(question)
        devices, sums = _sums_of(question, params_D)
        voters = np.broadcast_to(sums.blocks[question.voters][:, 0], question.groups)
        shown = [group for group, count in enumerate(voters.tolist()) if round(count) >= question.minimum_devices]
        hidden = question.groups - len(shown) if question.minimum_devices > 1 else 0
        table = _table(question, sums._replace(shown=tuple(shown)), deviation) if shown else []
        names = tuple(column.name for column in question.columns)
        errors = tuple(found for _, found in table) if deviation else None
        return Answer(names, tuple(row for row, _ in table), devices, hidden, errors)


def check_columns(question: Question) -> None:
    """Raise QuestionError for columns that take too long, or that no device's answer could be computed of."""
    with _computing():
        check_steps(question)
        sizes = {block.name: question.block_sizes[question.vectors(block)[0]] for block in question.blocks}
        whole = frozenset(block.name for block in question.blocks if block.whole)
        for number in (0.0, float(question.minimum_devices), -1.0):
            blocks = {
                block.name: np.full((question.groups_of(block), sizes[block.name] // question.groups_of(block)), number)
                for block in question.blocks
            }
            _table(question, _Sums(blocks, whole, tuple(range(question.groups))), 0.0)


def check_steps(question: Question) -> None:
    """Raise QuestionError where computing the table looks at more numbers than it may."""
    if _steps(question) > MOST_STEPS:
        raise QuestionError(
            f"its columns look at {_steps(question):,} numbers in {question.groups:,} groups; there may be "
            f"{MOST_STEPS:,}: ask for fewer columns or groups"
        )


@contextmanager
def _computing() -> Iterator[None]:
    """Makes one error of whatever columns fail with: a stranger may have written them."""
    try:
        yield
    except QuestionError:
        raise
    except Exception as error:
        raise QuestionError(f"its columns cannot be computed: {type(error).__name__}: {error!s:.200}") from error


def _sums_of(question: Question, params_D: Float32) -> tuple[int, _Sums]:
    half = 1 + sum(question.block_sizes.values())
    if params_D.shape != (2 * half,):
        raise QuestionError(f"an answer to this question has {2 * half:,} numbers, not {params_D.size:,}")
    both = params_D.astype(np.float64)
    total, sizes, blocks = both[:half] + both[half:], question.block_sizes, dict[str, Float64]()
    vectors = dict(zip(sizes, np.split(total[1:], np.cumsum(list(sizes.values()))), strict=False))
    for block in question.blocks:
        names = question.vectors(block)
        if len(names) == 2:
            low, high = (vectors[name].round() for name in words_of(block.name))
            vectors[block.name] = low + WORD * high
        blocks[block.name] = vectors[block.name].reshape(question.groups_of(block), -1)
    return round(float(total[0])), _Sums(blocks, frozenset(block.name for block in question.blocks if block.whole))


def _values(value: Value, question: Question, sums: _Sums, functions: Mapping[str, Function] = FUNCTIONS) -> list[Any]:
    """What an expression is in each shown group, or once where it is the same in all."""
    match value:
        case Number(constant):
            return [constant]
        case Cell(block):
            return sums.cells(block)
        case Shown(block):
            return [tuple(_in_each(sums.cells(block), len(sums.shown)))]
        case Group(key):
            places = np.unravel_index(sums.shown, [len(one.values) for one in question.keys])[key].tolist()
            return [question.keys[key].values[place] for place in places]
        case Call(name, arguments):
            values = [_values(argument, question, sums, functions) for argument in arguments]
            function = functions[name]
            count = max(map(len, values), default=1)
            return [function(*row) for row in zip(*(_in_each(one, count) for one in values), strict=True)] or [
                function()
            ]


def _in_each(values: list[Any], count: int) -> list[Any]:
    """The values of so many groups."""
    return values * count if len(values) == 1 else values


def _steps(question: Question) -> int:
    """How many numbers computing the table looks at."""
    return sum(
        work + question.groups * size for work, size, _ in (_work(one.value, question) for one in question.columns)
    )


def _work(value: Value, question: Question) -> tuple[int, int, bool]:
    """The numbers that computing an expression looks at, how many it gives in a group, and whether groups differ."""
    match value:
        case Number(constant):
            return 0, len(constant) if isinstance(constant, tuple) else 1, False
        case Cell(block) | Shown(block):
            (of,) = (one for one in question.blocks if one.name == block)
            size, groups = question.block_sizes[question.vectors(of)[0]], question.groups_of(of)
            return (0, size // groups, groups > 1) if isinstance(value, Cell) else (0, size, False)
        case Call(name, arguments):
            parts = [_work(argument, question) for argument in arguments]
            sizes, varies = [size for _, size, _ in parts], any(differs for _, _, differs in parts)
            looked = (1 if name == "item" else sum(sizes)) * (question.groups if varies else 1)
            return sum(work for work, _, _ in parts) + looked, max(sizes) if name in _CHOOSING else 1, varies
        case _:
            return 0, 1, True


def _table(question: Question, sums: _Sums, deviation: float) -> list[tuple[tuple[Any, ...], tuple[float | None, ...]]]:
    """The rows, with how far noise moves each number: sorted and cut off as was asked. NULL is first, as in SQLite."""
    count = len(sums.shown)
    columns = [_in_each(_values(column.value, question, sums), count) for column in question.columns]
    rows = list(zip(*(map(_plain, column) for column in columns), strict=True))
    errors = _errors(question, sums, deviation) if deviation else [()] * count
    kept = list(range(count))
    for order in reversed(question.order):
        kept.sort(key=lambda index: _sorted_by(rows[index][order.column]), reverse=order.descending)
    kept, times = kept[: question.limit], 1.0
    if len(kept) < count and any(_moved(question.columns[order.column].value) for order in question.order):
        # Benjamini, Yekutieli, "False discovery rate-adjusted multiple confidence intervals", JASA 2005.
        times = -NormalDist().inv_cdf(_beyond(TIMES) * len(kept) / count) / TIMES
    return [(rows[index], tuple(error and times * error for error in errors[index])) for index in kept]


def _sorted_by(value: Any) -> tuple[int, Any]:
    """NULL, then numbers, then text."""
    return (0, 0) if value is None else (2, value) if isinstance(value, str) else (1, value)


def _plain(value: Any) -> Any:
    """A value, or several, of which whole numbers have 64 bits at most."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, int) and not -LARGEST <= value < LARGEST else value


def _errors(question: Question, sums: _Sums, deviation: float) -> list[tuple[float | None, ...]]:
    """How far noise moves each number of the shown rows with 95 %, before it is held to what it may be."""
    spreads, values = _spreads(question, sums, deviation), [column.value for column in question.columns]
    both = _drawn(values, question, sums, spreads), _drawn(*_with_quantiles(values, question, sums, spreads))
    return [tuple(max(pair) or None for pair in zip(*one, strict=True)) for one in zip(*both, strict=True)]


def _drawn(
    values: Sequence[Value], question: Question, sums: _Sums, spreads: Mapping[str, Float64]
) -> list[list[float]]:
    """How far noise with these deviations moves each value with 95 %, in each shown group."""
    source, functions, count = np.random.default_rng(0), {**FUNCTIONS, **UNHELD}, len(sums.shown)

    def of_each(value: Value, given: _Sums) -> list[Any]:
        return _in_each(_values(value, question, given, functions), count)

    computed = [place for place, value in enumerate(values) if isinstance(value, Call) and _moved(value)]
    bare = {place: of_each(values[place], sums) for place in computed}
    apart: dict[int, list[list[float]]] = {place: [[] for _ in sums.shown] for place in computed}
    for _ in range(max(FEWEST_DRAWS, min(DRAWS, MOST_DRAWN // _steps(question))) if computed else 0):
        noisy = {name: one + spreads[name] * source.standard_normal(one.shape) for name, one in sums.blocks.items()}
        draw = sums._replace(blocks=noisy)
        for place in computed:
            for found, other, far in zip(bare[place], of_each(values[place], draw), apart[place], strict=True):
                if isinstance(found, int | float) and isinstance(other, int | float):
                    far.append(abs(other - found))

    def error(place: int, group: int) -> float:
        match values[place]:
            case Cell(block):
                return TIMES * float(spreads[block][sums.shown[group] % len(spreads[block]), 0])
        return _beyond_5_percent(apart[place][group]) if place in apart else 0.0

    return [[error(place, group) for place in range(len(values))] for group in range(count)]


def _beyond_5_percent(apart: Sequence[float]) -> float:
    """How far 95 % of numbers are from 0: of a normal distribution, or of one that jumps, as where 0 becomes 1."""
    spread = math.hypot(*apart) / math.sqrt(len(apart) or 1)
    return min(max(TIMES * spread, float(np.quantile(apart, 0.95)) if apart else 0.0), FARTHEST)


def _with_quantiles(
    values: Sequence[Value], question: Question, sums: _Sums, spreads: Mapping[str, Float64]
) -> tuple[list[Value], Question, _Sums, dict[str, Float64]]:
    """The values that have quantiles, each of these as a number with an error of its own: draws add noise to noise,
    and below it move quantiles too little.
    """
    blocks, far, shown = dict(sums.blocks), dict(spreads), list(sums.shown)

    def replaced(value: Value) -> Value:
        match value:
            case Call("quantile" | "least_with_share", (Cell(block), Number(share), Number(places))):
                name, spread = f"quantile {len(blocks)}", float(spreads[block][0, 0])
                found = _in_each(_values(value, question, sums), len(shown))
                pairs = zip(_in_each(sums.cells(block), len(shown)), found, strict=True)
                beside = [0.0 if one is None else _beside(of, share, places, spread, one) for of, one in pairs]
                blocks[name], far[name] = np.zeros((2, question.groups, 1))
                blocks[name][shown, 0], far[name][shown, 0] = [one or 0 for one in found], np.array(beside) / TIMES
                return Cell(name)
            case Call(name, arguments):
                return Call(name, tuple(map(replaced, arguments)))
        return value

    made = map(replaced, values)
    with_some = [new if new != old else Number(None) for new, old in zip(made, values, strict=True)]
    return with_some, question, sums._replace(blocks=blocks), far


def _beside(counts: Sequence[float], share: Any, places: Any, deviation: float, found: float) -> float:
    """How far from a quantile of bins the true one may be, with 95 % (Woodruff, JASA 1952).

    places: the bins' edges, or values.
    """
    edges, below = np.arange(len(counts) + 1), np.cumsum([0, *counts])
    apart = below - share * below[-1]
    moved = TIMES * deviation * np.sqrt(edges * (1 - share) ** 2 + (len(counts) - edges) * share**2)
    most, least = apart + moved, apart - moved
    low, high = int(np.argmax(most >= 0)), int(max(edges[least <= 0], default=len(counts)))
    before = most[low] / (most[low] - most[low - 1]) if low else 0.0
    behind = least[high] / (least[high] - least[high + 1]) if high < len(counts) else 0.0
    ends: Any = np.array([low - before, high + behind])
    ends = ends if len(places) > len(counts) else np.floor(ends)
    return float(np.abs(np.interp(ends, range(len(places)), places) - found).max())


def _spreads(question: Question, sums: _Sums, deviation: float) -> dict[str, Float64]:
    """The deviation of the noise in every block, (G, 1) or (1, 1); of shown counts of devices, as `_lifted` has it."""
    norms = {block.name: block.norm if question.private else 1.0 for block in question.blocks}
    spreads = {name: np.full((len(sums.blocks[name]), 1), deviation * norm, float) for name, norm in norms.items()}
    least, voters = question.minimum_devices - 0.5, spreads[question.voters]
    for group in sums.shown if len(voters) > 1 else (0,):
        count, spread = float(sums.blocks[question.voters][group, 0]), float(voters[group, 0])
        voters[group] = _lifted(count, least, spread, question.groups) / TIMES
    return spreads


def _moved(value: Value) -> bool:
    """Whether noise may move an expression."""
    return isinstance(value, Cell | Shown) or (isinstance(value, Call) and any(map(_moved, value.arguments)))


def _lifted(count: float, least: float, deviation: float, among: int) -> float:
    """How far from the truth, with 95 %, a count is that is shown because it exceeds the least one.

    Noise lifts some of many small counts, and no unbiased estimator of these is known. The truth may be so low that 2
    of 100 lifted over the least are lifted so far (Weinstein, Fithian, Benjamini, "Selection adjusted confidence
    intervals with more power to determine the sign", JASA 2013), but not below 0, nor farther than noise moves any of
    `among` counts in 99 of 100 answers (Andrews, Kitagawa, McCloskey, "Inference on winners", QJE 2024).
    """
    above, most = max(count - least, 0) / deviation, -NormalDist().inv_cdf(0.01 / among)
    far = TIMES
    while far < most and _beyond(far) > 1.01 * _beyond(TIMES) * _beyond(far - above):
        far += 0.05
    return max(TIMES, min(far, count / deviation)) * deviation


def _beyond(far: float) -> float:
    """The chance that noise lifts a number so many deviations or more."""
    return math.erfc(far / math.sqrt(2)) / 2


COLUMNS = "value", "devices", "share"


class FoundValue(NamedTuple):
    """A found value: a word, or a whole number. devices: that voted for it in the round that found it, of `out_of`."""

    value: bytes | int
    devices: int
    out_of: int

    @property
    def share(self) -> float:
        """Of the devices of that round."""
        return self.devices / self.out_of


def found(algorithm: HeavyHitters, params_D: Float32) -> list[FoundValue]:
    """The values that were found so far, most devices first. Raises QuestionError for parameters of another tree."""
    tree, places = algorithm.tree, algorithm.tree.places
    if params_D.shape != (places[OUT_OF].stop,):
        raise QuestionError(f"a tree of this size has {places[OUT_OF].stop:,} numbers, not {params_D.size:,}")
    digits = np.stack([params_D[where] for where in tree.columns(WORDS)], 1).astype(int).tolist()
    devices, out_of = (params_D[places[name]].tolist() for name in (DEVICES, OUT_OF))
    values = [
        FoundValue(tree.value(one), round(number), round(of))
        for one, number, of in zip(digits, devices, out_of, strict=True)
        if number > 0
    ]
    return sorted(values, key=lambda one: -one.devices)


def answer_found(algorithm: HeavyHitters, params_D: Float32, deviation: float = 0.0) -> Answer:
    """The same as a table: value, devices, share. deviation: of the noise in the sums of one round.

    Words are text; bytes that are no UTF-8 are escaped. Raises QuestionError as `found`.
    """
    values = found(algorithm, params_D)
    answered = round(float(params_D[algorithm.tree.places[ANSWERED]][0]))
    least = max(algorithm.minimum_devices - 0.5, algorithm.deviations * deviation)
    if len(values) == algorithm.candidates:  # there was no room for those below
        least = max(least, values[-1].devices)
    cells = algorithm.tree.cell_count * algorithm.tree.rounds
    far = [_lifted(one.devices, least, deviation, cells) if deviation else 0.0 for one in values]
    errors = tuple((None, each, each / one.out_of) for each, one in zip(far, values, strict=True))
    rows = tuple((_as_text(one.value), one.devices, one.share) for one in values)
    return Answer(COLUMNS, rows, answered, 0, errors if deviation else None)


def _as_text(value: bytes | int) -> str | int:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


_FORMULA = ("=", "+", "-", "@")


def answer_of(
    algorithm: AlgorithmRef, tensors: Mapping[str, Any], noise_multiplier: float = 0.0, rounds: int = 1
) -> Answer:
    """The answer in a model, by the names of its tensors.

    noise_multiplier: of the sum of all rounds, of which there are so many: its noise over the clip. Raises
    QuestionError for an algorithm that asks nothing, and for the model of another question.
    """
    made = create(algorithm.name, algorithm.settings)
    asking, clip = (made.inner, made.clipping.clip_norm) if isinstance(made, Clipped) else (made, 0.0)
    noise = noise_multiplier * clip
    if isinstance(asking, HeavyHitters):  # no count is of two rounds
        return answer_found(asking, _flat(tensors, asking.tree.shapes), noise / math.sqrt(rounds))
    if isinstance(asking, Ask):
        return answer(asking.asked, _flat(tensors, ("high", "low")), noise)
    raise QuestionError(f"{algorithm.name} trains or evaluates a model, and asks no question")


def _flat(tensors: Mapping[str, Any], names: Iterable[str]) -> Float32:
    """The tensors with these names as one vector."""
    try:
        return np.concatenate([np.ravel(tensors[name]) for name in names])
    except KeyError as error:
        raise QuestionError("the model is not one of this question") from error


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[object]], errors: Sequence[Sequence[object]] | None) -> str:
    """A table as CSV. A column that noise moves is followed by one with its errors; NULL is an empty field.

    Text that a spreadsheet would take for a formula begins with an apostrophe: names of groups may be strangers'.
    """
    noisy = {place for row in errors or () for place, error in enumerate(row) if error is not None}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([part for place, name in enumerate(columns) for part in _with(name, f"{name} ±", place in noisy)])
    for number, row in enumerate(rows):
        beside = errors[number] if errors else (None,) * len(row)
        pairs = enumerate(zip(row, beside, strict=True))
        writer.writerow([part for place, (value, error) in pairs for part in _with(value, error, place in noisy)])
    return text.getvalue()


def _with(value: object, other: object, both: bool) -> list[object]:
    return [_field(value), _field(other)] if both else [_field(value)]


def _field(value: object) -> object:
    if isinstance(value, tuple | list):
        return " ".join(str(_field(one)) for one in value)
    if isinstance(value, str):
        shown = visible(value)
        return f"'{shown}" if shown.startswith(_FORMULA) else shown
    return value
