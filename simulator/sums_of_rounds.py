"""The sums of rounds that a configuration asks for: with or without noise, masked or in the clear."""

from __future__ import annotations

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm
from fedcore.codecs.compression import Compression
from fedcore.privacy.mechanisms import check_private
from fedcore.privacy.settings import Privacy
from simulator.cohorts import Cohorts
from simulator.compressed import CompressedReports
from simulator.configuration import SimulationConfig
from simulator.engines.sums import layouts_of
from simulator.errors import EngineError
from simulator.masked_sums import MaskedSums, square_of
from simulator.private_training import PrivateSums, check_private_training, promise_of


def sums_of(
    config: SimulationConfig, model: Model, algorithm: Algorithm, cohorts: Cohorts, users: int
) -> tuple[PrivateSums | None, MaskedSums | None]:
    """The noise on the sums of a training, and the sums of its masked reports; None for what it lacks.

    users: the number that train. Raises PrivacyError or EngineError for options that do not go together.
    """
    asked, secagg, rounds = config.privacy, config.secagg, config.rounds
    reports = CompressedReports(Compression.parse(config.compress), model.schema, config.seed, algorithm.weighting)
    layouts = [reports.layout(trip.report, trip.ranges) for trip in layouts_of(model, algorithm)] if secagg else []

    def masked(promise: Privacy | None) -> MaskedSums | None:
        if secagg is None:
            return None
        sums = MaskedSums(secagg, cohorts, rounds, layouts, promise)
        sums.warn_of_rounding(algorithm, layouts, model.schema.size)
        return sums

    if not asked.asked:
        return None, masked(None)
    if asked.mechanism == "distributed" and secagg is None:
        raise EngineError("with the mechanism distributed devices add noise to masked reports: set secagg too")
    check_private_training(asked, cohorts)
    square = min(square_of(secagg, layout) for layout in layouts) if secagg else 0
    promise = promise_of(asked, users, cohorts, rounds, square)
    check_private(promise, algorithm)
    return PrivateSums(promise, config.seed), masked(promise)
