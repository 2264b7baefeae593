"""Clipping: an algorithm whose reports are no longer than a bound, with constants and clamping in graphs.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS 2021, and for the
fixed bound McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018. With
v_i all vectors that the inner algorithm reports, as one, and C the bound that devices received:

    fixed       on the phone    v_i min(1, C / ‖v_i‖)
                on the server   the inner update, of their mean
    adaptive    on the phone    v_i min(1, ρ / ‖v_i‖)     b_i = C / 10 if ‖v_i‖ ≤ ρ, else −C / 10     ρ = √0.99 C
                on the server   the inner update, and then C ← C exp(−clip_lr (share − clip_quantile))
                                share = ½ + mean(b) / (C / 5), held to 0 … 1: of reports not longer than ρ

So a whole report, with the indicator b_i, has the norm C at most: noise of one standard deviation, z C, on all of its
sum is a Gaussian mechanism of noise multiplier z. In the paper the two have noise of their own. Here z_Δ = z / √0.99 on
the reports and σ_b = 5 z on the sum of bits ±½ follow from the tenth, and z = (z_Δ⁻² + (2σ_b)⁻²)^−½ as there.

Traps: the norm is that of all vectors together, and is cut before anything is weighed. A round uses the C that was
broadcast. Every trip has a C of its own, since gradients and deltas differ in length. Outside the graphs non-finite
reports become zeros, and the whole is held to C once more in float64 (`ReportLayout.concatenate`), as a norm in float32
may be too small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import e
from typing import ClassVar

from fedcore.algorithms.algorithm import (
    Algorithm,
    Broadcast,
    Carry,
    Pass,
    Report,
    ServerStep,
    State,
    Trip,
    Vector,
    figures_of,
    keeps_client_state,
    trips_of,
)
from fedcore.algorithms.settings import fraction, nonnegative, positive
from fedcore.errors import InvalidSetting
from fedcore.release import CLIP
from fedcore.schedule import Weighting


def indicator(comparison: Vector, like: Vector) -> Vector:
    """1 where a comparison is true, else 0, in the type of `like`."""
    return (0.0 * like + 1.0) * comparison


def clamped(values: Vector) -> Vector:
    """Values clamped to 0 … 1."""
    return values * (values > 0) * (values < 1) + indicator(values >= 1, values)


def constants(params_D: Vector, values: Sequence[float]) -> Vector:
    """A vector (n,) with the values, of the kind and type of `params_D`. For `init` alone: graphs never make one."""
    made = (0.0 * params_D[:1]).repeat(len(values))
    for index, value in enumerate(values):
        made[index : index + 1] = 0.0 * params_D[:1] + value
    return made


INDICATOR = "clip_indicator"
"""The name of b_i in a report."""
_SHARE = 0.1
"""The indicator's part of the bound."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """How reports are clipped.

    clip_norm: the bound C of the first round.
    clip_quantile: the share of reports that shall keep their length, towards which C moves; 0 fixes C.
    clip_lr: how fast C moves.
    """

    name: ClassVar[str] = "clipping"

    clip_norm: float = positive(1.0)
    clip_quantile: float = fraction(0.0)
    clip_lr: float = nonnegative(0.2)


@dataclass(frozen=True, slots=True)
class Clipped:
    """An algorithm whose reports are clipped. Down: the inner broadcast and C. Up: the inner report, and b_i.

    Raises InvalidSetting when the inner algorithm weighs devices by their examples, keeps vectors on them, or has a
    vector of one of the names that clipping takes.
    """

    inner: Algorithm
    clipping: Clipping

    def __post_init__(self) -> None:
        if keeps_client_state(self.inner):
            raise InvalidSetting(
                f"clip_norm is not for {self.inner.name}, whose clients keep vectors, which move by more than "
                "a clipped report says; take an algorithm without client state, or leave clip_norm out"
            )
        if self.inner.weighting != "uniform":
            raise InvalidSetting(
                f"clip_norm needs weighting=uniform, and {self.inner.name} has weighting={self.inner.weighting}: a "
                "weight would lengthen a report that was clipped"
            )

    @property
    def name(self) -> str:
        """The inner algorithm's name: clipping is among its settings."""
        return self.inner.name

    @property
    def family(self) -> str:
        """The inner algorithm's family."""
        return self.inner.family

    @property
    def weighting(self) -> Weighting:
        """Always "uniform"."""
        return self.inner.weighting

    @property
    def trips(self) -> tuple[Trip, ...]:
        """Those of the inner algorithm, each with a bound of its own."""
        return self._trips

    def init(self, params_D: Vector) -> State:
        """The inner state, with the bound of every trip."""
        bound = 0.0 * params_D[:1] + self.clipping.clip_norm
        return _joined(self.inner.init(params_D), {trip.key: bound for trip in self._trips})

    @property
    def _trips(self) -> tuple[ClippedTrip, ...]:
        inner = trips_of(self.inner)
        keys = tuple(f"{CLIP}_{number}" for number in range(1, len(inner) + 1))
        return tuple(ClippedTrip(trip, self.clipping, keys, key) for trip, key in zip(inner, keys, strict=True))


@dataclass(frozen=True, slots=True)
class ClippedTrip:
    """A trip whose report is clipped as a whole. keys: the bounds' names in the server state; key: that of its own."""

    inner: Trip
    clipping: Clipping
    keys: tuple[str, ...]
    key: str

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Those of the inner trip."""
        return self.inner.passes

    def broadcast(self, state: State) -> Broadcast:
        """The inner broadcast, with the bound."""
        return _joined(self.inner.broadcast(self._inner(state)), {CLIP: state[self.key]})

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        """The inner report, of the norm `broadcast["clip"]` at most together with the indicator, if there is one."""
        bound = broadcast[CLIP]
        vectors = self.inner.report({name: one for name, one in broadcast.items() if name != CLIP}, carries)
        adaptive = self.clipping.clip_quantile > 0
        longest = (1 - _SHARE**2) ** 0.5 * bound if adaptive else bound
        norm = sum((one**2).sum(-1)[..., None] for one in vectors.values()) ** 0.5
        within = 1.0 * (norm <= longest)
        scale = within + (1 - within) * longest / (norm + within)  # norm + within, lest it divides 0 by 0
        clipped = {name: one * scale for name, one in vectors.items()}
        return _joined(clipped, {INDICATOR: (2 * within - 1) * _SHARE * bound}) if adaptive else clipped

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """The inner update; then the bound moves, where it is adaptive."""
        after = {**state, **self.inner.update(self._inner(state), mean, step)}
        if not self.clipping.clip_quantile:
            return after
        # Noise may move it out of 0 … 1.
        share = clamped(0.5 + mean[INDICATOR] / (2 * _SHARE * state[self.key]))
        moved = e ** (-self.clipping.clip_lr * (share - self.clipping.clip_quantile))
        return after | {self.key: state[self.key] * moved}

    def figures(self, mean: Report, step: ServerStep) -> dict[str, float]:
        """The inner trip's."""
        return figures_of(self.inner, mean, step)

    def _inner(self, state: State) -> State:
        return {name: vector for name, vector in state.items() if name not in self.keys}


def _joined(inner: Mapping[str, Vector], ours: Mapping[str, Vector]) -> dict[str, Vector]:
    taken = sorted(set(inner) & set(ours))
    if taken:
        raise InvalidSetting(f"clip_norm is not for an algorithm that has a vector called {taken[0]!r} itself")
    return {**inner, **ours}
