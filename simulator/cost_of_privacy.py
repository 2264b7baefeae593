"""The cost of privacy: the accuracy of a short training with the noise of a plan, and without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedcore.privacy.planning import Deployment, MechanismPlan
from simulator import datasets
from simulator.configuration import HELD_OUT, SimulationConfig
from simulator.course import overall
from simulator.engines.threads import one_thread
from simulator.errors import EngineError
from simulator.private_training import PrivateSums, SimulatedPrivacy
from simulator.simulation import training_on

CLIPPED = {"weighting": "uniform", "clip_norm": 0.5}


def stand_in(planned: Deployment, way: MechanismPlan, cohort: int) -> SimulatedPrivacy:
    """The noise that makes the mean of a cohort of this size as noisy as that of the planned cohort."""
    return SimulatedPrivacy(
        epsilon=planned.epsilon,
        delta=planned.delta,
        users=planned.population,
        noise_multiplier=way.noise_multiplier * cohort / planned.cohort,
        mechanism=way.mechanism,
        bands=way.bands,
        min_separation_rounds=planned.min_separation_rounds,
    )


@one_thread()
def accuracy_of(
    planned: Deployment,
    way: MechanismPlan | None,
    model: str,
    dataset: str,
    data: Path | None,
    settings: Mapping[str, object],
) -> float:
    """The accuracy on held-out users of FedAvg after the rounds of the plan, with the noise of `way` or without any.

    settings: override those of CLIPPED. Cohorts are as large as planned, or as the number of users allows. The noise on
    a round's mean is that of the plan in any case; only the variance between cohorts is larger.
    """
    users = datasets.load(dataset, data).split(HELD_OUT, seed=0)
    cohort = min(planned.cohort, len(users[0]))
    config = SimulationConfig(
        model=model, dataset=dataset, data=data, settings=CLIPPED | dict(settings), rounds=planned.rounds, cohort=cohort
    )
    private = None
    if way is not None:
        private = PrivateSums(stand_in(planned, way, cohort), seed=0)
    training = training_on(users, config, private)
    for number in range(1, planned.rounds + 1):
        training.run_round(number)
    per_user = training.measure(planned.rounds)
    if "accuracy" not in per_user:
        raise EngineError(f"the model {model} has no metric accuracy, by which the cost could be told")
    return overall(per_user["accuracy"], training.test)
