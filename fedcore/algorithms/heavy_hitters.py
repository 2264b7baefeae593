"""Heavy hitters: the values that most devices hold, though nobody listed them, found prefix by prefix.

Zhu, Kairouz, McMahan, Sun, Li, "Federated heavy hitters discovery with differential privacy", AISTATS 2020, algorithm 1
(TrieHH). That several bits are added in a round, to prefixes that are above the noise, is from Chadha et al.,
"Differentially private heavy hitter detection using federated analytics", SaTML 2024 (OptPrefixTree), after Wang, Li,
Jha, "Locally differentially private heavy hitter identification", TDSC 2021 (PEM). With C candidates that devices
receive, S + 1 ways in which a value may go on, and m examples v of a device, drawn at random in every round
(`fedcore.questions.question`):

    on the phone    q[c, e] = 1 if some v begins with candidate c and goes on by e, else 0
    on the server   n = Σ q, and a limit: `minimum_devices`, or `deviations` times the deviation of the noise if that is
                    more. The C largest n above the limit stay. One that ends there is a found value, which n devices
                    have; the others, longer by e, are the candidates of the next round

TrieHH draws devices at random and adds no noise; here privacy comes from noise, as in every other task.

What costs what: a value of T bits takes ⌈(T − ⌊log₂ C⌋) / b⌉ rounds with S = 2^b, and a report has C (S + 1) numbers. A
word of 8 letters below 128 takes 8 rounds of 8,256 numbers with C = 64 and b = 7, and 13 rounds of 1,088 with b = 4.
Letters below 32 have 5 bits instead of 7: 5 rounds. A device that takes part in every round spends ε in each, so the
noise grows by √rounds. Of a tree with more candidates fewer rare values are lost, and more of its counts are noise.

The deviation of the noise is read from the counts below 0, which nothing else makes. After the last round nothing is
left to extend: further rounds find nothing.

Traps: candidates are prefixes that as many devices as the limit have, and every device receives them. The coordinator
sees the sums of all cells, also of those that it drops. A count is of devices whose drawn examples have the value:
where devices have more than m examples, fewer than hold it. No report is longer than √m: the clip under noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Measure, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.clipped import indicator
from fedcore.algorithms.question import QUESTION
from fedcore.algorithms.settings import count, nonnegative, text, whole
from fedcore.errors import InvalidSetting
from fedcore.questions.question import ANSWERED, DEAD, DEVICES, OUT_OF, PREFIXES, UNKNOWN, WORDS, PrefixTree
from fedcore.schedule import Loop, Range, Weighting

PASS, CELL, VOTES, CELLS = "vote", "cell", "votes", "cells"
MOST_VOTES = 1 << 14
"""The most numbers of a report: the server compares all of them with each other."""
_TOGETHER = 1 << 10
"""How many numbers are compared with all others at a time, lest the memory be too small."""
_TIE = 0.25


def _name(field: str) -> str:
    """The name of a field. Raises ValueError."""
    if not field.isidentifier():
        raise ValueError(field)
    return field


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """Down: the tree, and the numbers of cells. Up: C (S + 1) numbers. Server state: the tree, found values, cells.

    of: the field.
    letters: of a value; 0 for a whole number.
    bits: of a letter, or of the whole number.
    candidates: prefixes that a round extends, and found values that are kept, C.
    step_bits: by which a round extends them, b.
    minimum_devices: devices that a prefix needs, and a value.
    deviations: of the noise, which a prefix needs too.
    values: examples of a device that vote in a round, m.
    """

    name: ClassVar[str] = "heavyhitters"
    family: ClassVar[str] = QUESTION
    weighting: ClassVar[Weighting] = "uniform"

    of: str = text("values", _name, "the name of a field")
    letters: int = whole(8)
    bits: int = count(7)
    candidates: int = count(64)
    step_bits: int = count(7)
    minimum_devices: int = count(20)
    deviations: float = nonnegative(4.0)
    values: int = count(1)

    def __post_init__(self) -> None:
        if self.step_bits > MOST_VOTES.bit_length() or self.tree.cell_count > MOST_VOTES:
            raise InvalidSetting(
                f"{self.name}: {self.candidates:,} candidates with {self.step_bits} step_bits make more than "
                f"{MOST_VOTES:,} numbers of a report: take fewer of either"
            )

    @property
    def tree(self) -> PrefixTree:
        """The tree."""
        return PrefixTree(self.letters, self.bits, self.candidates, self.step_bits)

    @property
    def text(self) -> str:
        """What owners of devices read."""
        drawn = "one example, drawn" if self.values == 1 else f"{self.values:,} examples, drawn"
        return (
            f"Which values of {self.of} do most devices have? In each of {self.tree.rounds} rounds a device says of "
            f"{drawn} at random, which of the frequent beginnings the value has, and how it goes on. What fewer than "
            f"{self.minimum_devices:,} devices have is not shown."
        )

    @property
    def passes(self) -> tuple[Pass, ...]:
        def begin(received: Broadcast) -> Carry:
            return {VOTES: 0.0 * received[CELLS]}

        def step(carry: Carry, received: Broadcast, measure: Measure) -> Carry:
            cell = measure(received["params"])[..., 2:3]
            return {VOTES: carry[VOTES] + indicator(abs(received[CELLS] - cell) < 0.5, carry[VOTES])}

        # One example of each step: the number of a cell is no sum.
        loop = Loop(batch_size=1, steps=self.values)
        return (Pass(PASS, loop, begin, step, ("loss", CELL)),)

    @property
    def ranges(self) -> dict[str, Range]:
        """A device says 0 or 1 of a cell, and nothing else is summed (docs/spec/plan.md §5.3)."""
        return {VOTES: Range(0.0, 1.0, 1)}

    def init(self, params_D: Vector) -> State:
        tree, params = self.tree, 0.0 * params_D
        params[..., tree.places[PREFIXES]] = 0.0 * params[..., tree.places[PREFIXES]] + UNKNOWN
        first, known = tree.columns(PREFIXES)[0], 2**tree.first_bits
        for place in range(tree.candidates):
            digit = DEAD if place >= known else place if tree.first_bits else UNKNOWN
            params[..., first.start + place : first.start + place + 1] = 0.0 * params[..., :1] + digit
        return {"params": params, CELLS: _counting(params_D, tree.cell_count)}

    def broadcast(self, state: State) -> Broadcast:
        params, where = 0.0 * state["params"], self.tree.places[PREFIXES]
        params[..., where] = state["params"][..., where]
        return {"params": params, CELLS: state[CELLS]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        votes = carries[PASS][VOTES]
        return {VOTES: indicator(votes > 0.5, votes)}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        tree, cells, votes = self.tree, state[CELLS], mean[VOTES] * step.devices
        prefixes = [state["params"][..., where] for where in tree.columns(PREFIXES)]
        passing = indicator(votes > self._limit(votes), votes) * self._possible(prefixes, cells)
        ranks = _ranks(passing * (votes - cells * (_TIE / tree.cell_count)), passing, tree.cell_count)
        places, ends = cells[..., : tree.candidates], 2**tree.step_bits
        chosen, devices = (_taken(places, ranks, vector) for vector in (cells, votes))
        parents, goes_on = self._parents(chosen)
        known = [_taken(parents, places, column) for column in prefixes]
        depth = sum(indicator(column >= 0, column) for column in known)
        there, last = indicator(chosen > 0, chosen), indicator(depth > tree.digits - 1.5, chosen)
        ended = there * (1.0 - (1.0 - indicator(goes_on == ends, chosen)) * (1.0 - last))
        digit = goes_on * (goes_on < ends)
        longer = [
            column * (depth > place) + digit * (depth == place) + UNKNOWN * indicator(depth < place, chosen)
            for place, column in enumerate(known)
        ]
        params = 0.0 * state["params"]
        params[..., tree.places[ANSWERED]] = 0.0 * params[..., :1] + step.devices
        for where, column in zip(tree.columns(PREFIXES), longer, strict=True):
            params[..., where] = (there - ended) * column + DEAD * (1.0 - there + ended)
        found = [
            *zip(tree.columns(WORDS), (ended * column * (column > 0) for column in longer), strict=True),
            (tree.places[DEVICES], ended * devices),
            (tree.places[OUT_OF], ended * step.devices),
        ]
        self._keep(params, state, found)
        return {**state, "params": params}

    def figures(self, mean: Report, step: ServerStep) -> dict[str, float]:
        """How many devices answered in this round."""
        return {f"{self.name}.devices": float(step.devices)}

    def _limit(self, votes: Vector) -> Vector:
        """What a cell must exceed: the threshold, or deviations of the noise, as the counts below 0 show it."""
        below = indicator(votes < 0, votes)
        there = below.sum(-1)[..., None]
        variance = (below * votes**2).sum(-1)[..., None] / (there + indicator(there < 0.5, there))
        least, noise = self.minimum_devices - 0.5, self.deviations * variance**0.5
        return noise * (noise > least) + least * indicator(noise <= least, noise)

    def _parents(self, cells: Vector) -> tuple[Vector, Vector]:
        """The places of candidates, from 1, and how they go on, from the numbers of cells, from 1; 0 has no parent."""
        ways = 2**self.step_bits + 1
        parents = (cells - 1.0) // ways + 1.0
        return parents, cells - 1.0 - (parents - 1.0) * ways

    def _possible(self, prefixes: list[Vector], cells: Vector) -> Vector:
        """1 for cells in which a device may vote, else 0: noise is in all."""
        tree = self.tree
        parents, goes_on = self._parents(cells)
        places, ends = cells[..., : tree.candidates], 2**tree.step_bits
        depth = sum(indicator(column >= 0, column) for column in prefixes)
        alive = indicator(prefixes[0] > DEAD + 0.5, depth)
        last = _taken(parents, places, alive * (depth > tree.digits - 1.5))
        # The last digit may have fewer bits, and all of them 0 is an end.
        too_large = indicator(goes_on >= 2 ** tree.widths[-1], goes_on) * (goes_on < ends)
        return _taken(parents, places, alive) * (1.0 - last * (too_large + (goes_on < 0.5)))

    def _keep(self, params: Vector, state: State, found: Sequence[tuple[slice, Vector]]) -> None:
        """Write the values that most devices have to `params`: of those in the state, and of those `found` now."""
        half = self.tree.candidates
        numbers = state[CELLS][..., : 2 * half]

        def with_new(where: slice, new: Vector) -> Vector:
            pair = 0.0 * numbers
            pair[..., :half], pair[..., half:] = state["params"][..., where], new
            return pair

        both = [(where, with_new(where, new)) for where, new in found]
        devices = next(pair for where, pair in both if where == self.tree.places[DEVICES])
        there = indicator(devices > 0, devices)
        ranks = _ranks(there * (devices - numbers * (_TIE / (2 * half))), there, 2 * half)
        for where, pair in both:
            params[..., where] = _taken(numbers[..., :half], ranks, pair)


def _counting(params_D: Vector, count: int) -> Vector:
    """1 … count, in the kind and type of a vector."""
    made = (0.0 * params_D[:1]).repeat(count)
    filled = 1
    made[..., :1] = 0.0 * params_D[:1] + 1.0
    while filled < count:
        more = min(filled, count - filled)
        made[..., filled : filled + more] = made[..., :more] + float(filled)
        filled += more
    return made


def _ranks(keys: Vector, among: Vector, size: int) -> Vector:
    """1 for the largest of the keys (size,) that are `among` (1 or 0), and so on; 0 for the others.

    Those among are above 0 and differ.
    """
    ranks = 0.0 * keys
    for start in range(0, size, _TOGETHER):
        part = keys[..., start : start + _TOGETHER]
        ranks[..., start : start + _TOGETHER] = 1.0 + (keys[..., None, :] > part[..., :, None]).sum(-1)
    return ranks * among


def _taken(places: Vector, numbers: Vector, values: Vector) -> Vector:
    """For every place the value whose number it is; 0 where none is. No two numbers but 0 are equal."""
    return ((places[..., :, None] == numbers[..., None, :]) * values[..., None, :]).sum(-1)
