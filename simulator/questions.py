"""A question to the clients of a simulation: all of them answer in every round, in the engine."""

from __future__ import annotations

import math

from export.model import Model
from export.questions.asked import Asks
from fedcore.algorithms import name_of, settings_of
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError
from fedcore.questions.answer import Answer
from fedcore.questions.reading import answer_of
from simulator.cohorts import Cohorts
from simulator.configuration import PrivateTraining
from simulator.engine import Engine
from simulator.errors import Diverged
from simulator.population import Population
from simulator.private_training import PrivateSums, SimulatedPrivacy, promise_of
from simulator.texts import with_tokens


def ask_population(
    asked: Asks,
    population: Population,
    *,
    seed: int = 0,
    rounds: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Answer:
    """What all clients answer, in every round. rounds: by default as many as an answer takes.

    epsilon, delta: with noise for such a promise.

    Raises EngineError when the data lack a field, PrivacyError for a promise that cannot be, QuestionError when clients
    have more rows than their sums hold.
    """
    model, algorithm, clients = Model(asked.spec()), asked.algorithm(), len(population)
    rounds = asked.rounds if rounds is None else rounds
    promise: SimulatedPrivacy | None = None
    if epsilon is not None:
        private = PrivateTraining(epsilon=epsilon, delta=1 / (10 * clients) if delta is None else delta)
        promise = promise_of(private, clients, Cohorts(clients), rounds)
    sums = None if promise is None else PrivateSums(promise, seed)
    engine = Engine(model, algorithm, with_tokens(population, model.spec), seed=seed, private=sums)
    for number in range(1, rounds + 1):
        try:
            excluded = engine.run_round(number, range(clients)).excluded
        except Diverged:
            excluded = clients
        if excluded:
            raise QuestionError(
                f"{excluded:,} of {clients:,} clients have more rows than exact sums hold: MAX n ROWS PER DEVICE draws "
                "some of them, or CAST what is summed AS REAL"
            )
    multiplier = 0.0 if promise is None else promise.noise_multiplier * math.sqrt(rounds)
    reference = AlgorithmRef(name_of(algorithm), settings_of(algorithm))
    return answer_of(reference, model.schema.unflatten(engine.state["params"]), multiplier, rounds)
