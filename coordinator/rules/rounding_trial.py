"""A trial of an algorithm under the rounding of secure rounds: whether rounding swamps it. Pure.

A sum of fixed-point numbers is off by the same amount in every value, however small the value is. Means that are only
added bear that. An algorithm that divides by a mean, or by its root, does not, where the mean is smaller than the
rounding: an average of squares, say. Nothing in a plan shows that, so the algorithm is run, on bowls in float64, with
exact means and with rounded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import InvalidTask
from fedcore.algorithms.algorithm import Algorithm, Report, ServerStep, trips_of
from fedcore.algorithms.rehearsal import Bowl, contribute, for_any_model, received

_VALUES, _DEVICES, _ROUNDS = 256, 8, 3
"""Parameters of a bowl, half of which have no gradient, as the weights of dead units; bowls; rounds of every trip."""

Vector_D = NDArray[np.float64]


def check_rounding(algorithm: Algorithm, step: float, devices: int, parameters: int) -> None:
    """Refuse an algorithm whose model would be moved as far by the rounding of secure rounds as by training.

    step: the difference of neighbouring fixed-point numbers, as `fedcore.masking` makes them. devices: in a sum, at
    least. parameters: of the model. Raises InvalidTask with the numbers and what to change.
    """
    error = rounding(step, devices)
    moved = moved_by(algorithm, error, parameters)
    if not moved < 1:
        far = f"{moved:.1f} times as far as training does" if math.isfinite(moved) else "to numbers that are not finite"
        raise InvalidTask(
            f"secure aggregation rounds every mean to {error:.1e} (steps of {step:.1e} by clip_norm and bits, "
            f"{devices} devices), and in a trial of {algorithm.name} with gradients of length 1 over {parameters} "
            f"parameters that moved the model {far}: what it divides by, or reports, is too small for that. Lower "
            "clip_norm to the length of a report, raise bits or minimum, raise the algorithm's steps or the floor of "
            "its divisor (epsilon, tau), or create the task without secagg"
        )


def rounding(step: float, devices: int) -> float:
    """The deviation of a value of the mean over devices that all have the greatest weight, at its worst."""
    return step / 2 / math.sqrt(devices)


def moved_by(algorithm: Algorithm, error: float, parameters: int) -> float:
    """How far means that are off by `error` move a model, relative to its whole movement; 0 if it does not move."""
    source = np.random.default_rng(0)
    centres_KD = source.standard_normal((_DEVICES, _VALUES)) + source.standard_normal(_VALUES)
    centres_KD[:, : _VALUES // 2] = 0
    centres_KD /= math.sqrt(parameters)
    with np.errstate(all="ignore"):
        exact = _trained(algorithm, centres_KD, lambda mean: mean)
        rounded = _trained(algorithm, centres_KD, partial(_off, error, source))
    way = float(np.linalg.norm(exact))
    return float(np.linalg.norm(rounded - exact)) / way if way else 0.0


def _off(error: float, source: np.random.Generator, mean: Report) -> Report:
    return {name: value + error * source.standard_normal(np.shape(value)) for name, value in mean.items()}


def _trained(algorithm: Algorithm, centres_KD: Vector_D, rounded: Callable[[Report], Report]) -> Vector_D:
    """The model after some rounds from 0, on devices with a bowl around each centre."""
    algorithm = for_any_model(algorithm)
    state = algorithm.init(np.zeros(_VALUES))
    for _ in range(_ROUNDS):
        for trip in trips_of(algorithm):
            broadcast = received(algorithm, trip.broadcast(state))
            reports = [contribute(trip, broadcast, Bowl(centre_D, centre_D)) for centre_D in centres_KD]
            mean = {name: np.mean([report[name] for report in reports], 0) for name in reports[0]}
            state = trip.update(state, rounded(mean), ServerStep(devices=len(reports)))
    params_D: Vector_D = state["params"]
    return params_D
