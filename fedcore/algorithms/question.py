"""A question: devices count and add up what is asked of their rows, and the model of the task is the answer so far.

Corrigan-Gibbs and Boneh, "Prio: private, robust, and scalable computation of aggregate statistics", NSDI 2017, for
statistics from sums alone. With S the sums over a device's rows of what the graph computes of each
(`fedcore.questions.question`):

    on the phone    S in one sweep; where rows are bounded, over so many that are drawn at random
                    b, the blocks of the question, made of S
    on the server   T ← T + Σ b, and n ← n + the number of devices

The model holds n and T as two float32 numbers each, h + l with h the next multiple of 2²⁴ towards 0, so that whole
numbers are exact to 2⁴⁸. Devices receive zeros instead: what others answered is none of their business.

Sums of real numbers grow in stages, which float32 rounds as often as a few dozen steps, however many there are: every
32 steps a stage is added to the next one, and begins again.

Traps: without bounds a device whose sum of whole numbers passes 2³⁶, or whose count passes 2²⁴, gives up, as its report
is not finite. Under noise every block is divided by the norm that one device's block has at most, lest the largest take
the whole clip; the server multiplies it again. Answers of several rounds add up: a device that takes part in two of
them counts twice.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from fedcore.algorithms.algorithm import Algorithm, Broadcast, Carry, Measure, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.clipped import Clipped, constants, indicator
from fedcore.algorithms.settings import count, text
from fedcore.errors import QuestionError
from fedcore.questions.question import WORD, Block, Question, words_of
from fedcore.schedule import MOST_BITS, Loop, Range, Weighting

QUESTION = "question"
"""The family of algorithms that ask devices for statistics, and the name of the only one that takes any question."""
AUTO = "auto"
PASS, CELLS, STEPS = "ask", "c", "steps"
SPAN = 32
"""The steps of a stage."""
_HALF, _FAR, _WIDEST = 2.0**24, 1e38, 1e29
_decoded = functools.lru_cache(maxsize=8)(Question.decode)
_COUNTED = Question.decode(
    '{"text":"SELECT COUNT(DISTINCT DEVICE) FROM examples","rows":[{"name":"row"}],"voters":"devices",'
    '"blocks":[{"name":"devices","of":"row","kind":"any","high":1}],'
    '"columns":[{"name":"devices","value":{"type":"cell","block":"devices"}}]}'
)
"""The question of rehearsals, which have models of a few parameters: how many devices have a row."""


def _written(question: str) -> str:
    """The same question in the one way to write it. Raises ValueError."""
    if question == AUTO:
        return AUTO
    try:
        return Question.decode(question).encode()
    except QuestionError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Ask:
    """Down: d zeros. Up: V numbers. Server state: the answer, in d = 2 (V + 1) numbers.

    question: as `muster ask` writes it, in JSON; "auto" counts devices.
    batch_size: rows of a step.
    """

    name: ClassVar[str] = QUESTION
    family: ClassVar[str] = QUESTION
    weighting: ClassVar[Weighting] = "uniform"

    question: str = text(AUTO, _written, "a question in JSON, as `muster ask` writes it, or auto")
    batch_size: int = count(64)

    @property
    def asked(self) -> Question:
        """The question."""
        return _COUNTED if self.question == AUTO else _decoded(self.question)

    @property
    def text(self) -> str:
        """What owners of devices read."""
        return self.asked.text

    @property
    def minimum_devices(self) -> int:
        """The least devices of a group that is shown."""
        return self.asked.minimum_devices

    @property
    def passes(self) -> tuple[Pass, ...]:
        asked = self.asked
        places, staged = rows_of(asked), _staged(asked)

        def begin(received: Broadcast) -> Carry:
            # The answer is longer than what it is made of.
            sizes = {name: where.stop - where.start for name, where in places.items()}
            sizes |= {stage: sizes[stages[0]] for stages in staged for stage in stages}
            sizes |= dict.fromkeys([STEPS] if staged else [], 1)
            return {name: 0.0 * received["params"][..., :size] for name, size in sizes.items()}

        def step(carry: Carry, received: Broadcast, measure: Measure) -> Carry:
            cells_R = measure(received["params"])[..., 2:]
            sums = {name: carry[name] + cells_R[..., where] for name, where in places.items()}
            return _in_words(asked, _in_stages(staged, carry, sums))

        # One batch of a shuffled sweep is a draw without replacement.
        most = asked.most_rows
        loop = Loop(batch_size=self.batch_size, shuffle=False) if most is None else Loop(batch_size=most, steps=1)
        return (Pass(PASS, loop, begin, step, ("loss", *cells_of(asked))),)

    @property
    def ranges(self) -> dict[str, Range]:
        """The bounds and the precision of what devices report (docs/spec/plan.md §5.3); none under a clip.

        Blocks without bounds have wide ranges, lest what is for updates bounds their norm. Secure rounds take none.
        """
        asked, ranges = self.asked, dict[str, Range]()
        for block in () if asked.private else asked.blocks:
            low, high = _ends(block)
            ranges |= dict.fromkeys(asked.vectors(block), _range(low, high, block.whole))
            if len(asked.vectors(block)) == 2:
                words = _range(0, WORD - 1, whole=True), _range(low // WORD, high // WORD, whole=True)
                ranges |= dict(zip(asked.vectors(block), words, strict=True))
        return ranges

    def init(self, params_D: Vector) -> State:
        bins = [block for block in self.asked.blocks if block.kind == "bins"]
        return {"params": 0.0 * params_D} | {
            f"edges_{block.name}": constants(params_D, [-_FAR, *block.edges, _FAR]) for block in bins
        }

    def broadcast(self, state: State) -> Broadcast:
        return {**state, "params": 0.0 * state["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        asked, sums, report = self.asked, carries[PASS], dict[str, Vector]()
        for block in asked.blocks:
            if len(asked.vectors(block)) == 2:
                low, high = (sums[word] for word in words_of(block.of))
                words = low, _counted(high) if block.high is None else high
                report |= zip(asked.vectors(block), words, strict=True)
                continue
            S = functools.reduce(operator.add, (sums[stage] for stage in _stages(block.of) if stage in sums))
            if block.kind == "any":
                S = indicator(S > 0.5, S)
            if block.kind == "bins":
                edges = broadcast[f"edges_{block.name}"]
                S = indicator(edges[..., :-1] <= S, S) * (edges[..., 1:] > S)
            S = _held(S, block.low, block.high)
            if block.kind == "sum" and block.whole and block.high is None:
                S = _counted(S)
            report[block.name] = S / block.norm if asked.private else S
        return report

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        asked, devices = self.asked, step.devices
        half = 1 + sum(asked.block_sizes.values())
        answer = state["params"][..., :half] + state["params"][..., half : 2 * half]
        answer[..., :1] += devices
        start = 1
        for block in asked.blocks:
            for name in asked.vectors(block):
                size = asked.block_sizes[name]
                norm = block.norm if asked.private else 1.0
                answer[..., start : start + size] += mean[name] * devices * norm
                start += size
        params_D = 0.0 * state["params"]
        params_D[..., :half] = abs(answer) // _HALF * _HALF * (1.0 - 2.0 * (answer < 0))  # towards 0
        params_D[..., half : 2 * half] = answer - params_D[..., :half]
        return {**state, "params": params_D}

    def figures(self, mean: Report, step: ServerStep) -> dict[str, float]:
        """How many devices answered in this round."""
        return {f"{QUESTION}.devices": float(step.devices)}


class Asking(Protocol):
    """An algorithm of this family: what it asks, and the least devices of anything that its answer shows."""

    @property
    def text(self) -> str:
        """What owners of devices read."""

    @property
    def minimum_devices(self) -> int:
        """The least devices of a group, or with a value, that is shown."""


def asking_in(algorithm: Algorithm) -> Asking | None:
    """The algorithm that asks, without its clip; None of one that asks nothing."""
    asking = algorithm.inner if isinstance(algorithm, Clipped) else algorithm
    return cast("Asking", asking) if asking.family == QUESTION else None


def text_of(algorithm: Algorithm) -> str:
    """The question that an algorithm asks, in words; empty where it asks none."""
    asking = asking_in(algorithm)
    return "" if asking is None else asking.text


def rows_of(asked: Question) -> dict[str, slice]:
    """The place of every vector of row numbers among all of them, by name; of words there are two vectors."""
    places, start = dict[str, slice](), 0
    for rows in asked.rows:
        for name in words_of(rows.name) if rows.words else (rows.name,):
            places[name] = slice(start, start + rows.size)
            start += rows.size
    return places


def cells_of(asked: Question) -> tuple[str, ...]:
    """The names of the row numbers, as metrics of the model."""
    return tuple(f"{CELLS}{index}" for index in range(asked.row_numbers))


def _stages(name: str) -> tuple[str, ...]:
    """The names of the stages of a sum, of which the first takes every step's numbers."""
    return name, f"{name}_of_{SPAN}", f"{name}_of_{SPAN**2}"


def _staged(asked: Question) -> list[tuple[str, ...]]:
    """The stages of all rows of real numbers that are added up in many steps."""
    real = {one.of: _stages(one.of) for one in asked.blocks if one.kind == "sum" and not one.whole}
    words = {rows.name for rows in asked.rows if rows.words}
    return [stages for name, stages in real.items() if name not in words and asked.most_rows is None]


def _in_stages(staged: Sequence[tuple[str, ...]], carry: Carry, sums: Carry) -> Carry:
    """The same sums, in stages."""
    if not staged:
        return sums
    steps = carry[STEPS] + 1.0
    full = [indicator(steps // period * period >= steps, steps) for period in (SPAN, SPAN**2)]
    for stages in staged:
        for lower, upper, moves in zip(stages, stages[1:], full, strict=False):
            sums |= {upper: carry[upper] + moves * sums[lower], lower: (1.0 - moves) * sums[lower]}
    return {**sums, STEPS: steps}


def _in_words(asked: Question, sums: Carry) -> Carry:
    """The same sums, with low words below WORD."""
    for low, high in (words_of(rows.name) for rows in asked.rows if rows.words):
        over = sums[low] // WORD
        sums |= {low: sums[low] - WORD * over, high: sums[high] + over}
    return sums


def _counted(values: Vector) -> Vector:
    """Whole numbers; beyond what float32 counts, infinity or none: the device gives up."""
    return values / indicator(abs(values) <= _HALF, values)


def _held(values: Vector, low: float | None, high: float | None) -> Vector:
    """Values held to low … high, where there are such bounds: those between stay as they are, to the bit."""
    if low is not None:
        values = values * (values >= low) + low * indicator(values < low, values)
    if high is not None:
        values = values * (values <= high) + high * indicator(values > high, values)
    return values


def _ends(block: Block) -> tuple[float, float]:
    """The bounds of a block; of one without any, the largest that float32 counts to, or those of a range."""
    if block.kind != "sum":
        return 0, 1
    far = _HALF * WORD if block.whole else _WIDEST
    return -far if block.low is None else block.low, far if block.high is None else block.high


def _range(low: float, high: float, whole: bool) -> Range:
    """A range that holds low … high; of whole numbers in steps of 1, if 20 bits have so many."""
    steps = int(high) - int(low) + 1
    bits = max(steps - 1, 1).bit_length()
    if whole and bits <= MOST_BITS:
        return Range(float(low), float(low + 2**bits - 1), bits)
    return Range(low, high, MOST_BITS)
