"""Audits of private training: near the claim with the noise that is claimed, far above it without."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcore.errors import PrivacyError
from fedcore.privacy.accounting import Deployment, matrix, spent, ways
from fedcore.privacy.settings import Noise
from muster.app import app
from simulator.audit import Canaries, accuracy_of, audit, estimate, lower_bound
from simulator.configuration import PrivateTraining, SimulationConfig
from simulator.errors import EngineError

DELTA = 1e-5


def config(**private):
    return SimulationConfig(
        model="logreg",
        rounds=16,
        cohort=8,
        settings={"weighting": "uniform", "clip_norm": 0.5},
        privacy=PrivateTraining(epsilon=3.0, delta=DELTA, **private),
    )


@pytest.mark.parametrize(
    "private", [{}, {"mechanism": "tree"}, {"mechanism": "banded", "bands": 4, "min_separation_rounds": 4}]
)
def test_an_audit_is_near_the_claim_with_noise_and_far_above_without(private):
    found, silent = audit(config(**private), 600), audit(config(**private), 600, noisy=False)
    assert found.claimed == pytest.approx(3.0, rel=1e-3)
    assert found.holds
    assert 0.4 * found.claimed < found.estimate < 1.5 * found.claimed
    assert 0 < found.lower_bound < found.claimed
    assert not silent.holds
    assert silent.lower_bound > silent.claimed
    assert silent.estimate > 5 * silent.claimed


def test_canaries_are_orthogonal_reports_of_unit_length():
    canaries = Canaries(7, 40, rounds=6, separation=3, seed=2)
    everything = np.zeros((7, 40))
    for one in range(7):
        canaries.included[:] = np.arange(7) == one
        everything[one] = canaries.added(1)
    np.testing.assert_allclose(everything @ everything.T, np.eye(7), atol=1e-12)
    assert [bool(np.any(canaries.added(number))) for number in range(1, 7)] == [True, False, False] * 2


def test_guesses_of_an_exact_mechanism_bound_it_from_below():
    random = np.random.default_rng(5)
    included = random.random(2000) < 0.5
    for moved in (0.5, 1.5, 3.0):
        scores = random.normal(size=2000) + moved * included
        claimed = spent([Noise(noise_multiplier=1 / moved)], DELTA)
        middle, least = estimate(scores, included, DELTA)
        assert least < claimed == pytest.approx(middle, rel=0.2)
        assert 0 < lower_bound(scores, included, DELTA)[0] < claimed
    assert lower_bound(random.normal(size=2000), included, DELTA)[0] < 0.2


def test_an_audit_refuses_what_it_cannot_see_through():
    with pytest.raises(EngineError, match="places of their own"):
        audit(config(), 651)
    with pytest.raises(EngineError, match="without Poisson"):
        audit(SimulationConfig(model="logreg"), 100)


def test_the_noise_of_a_plan_is_that_of_the_matrix():
    found = {way.mechanism: way for way in ways(Deployment(100_000, 50, 48, 4.0, 1e-6, 16))}
    for way in found.values():
        noise = Noise(
            noise_multiplier=way.noise_multiplier,
            mechanism=way.mechanism,
            bands=way.bands,
            min_separation_rounds=16,
        )
        assert spent([noise] * 48, 1e-6) == pytest.approx(4.0, rel=1e-3)
        inverse_TT = np.linalg.inv(matrix(noise, 48))
        assert way.round_noise == pytest.approx(way.noise_multiplier * np.linalg.norm(inverse_TT[-1]) / 50)
        assert way.model_noise == pytest.approx(way.noise_multiplier * np.linalg.norm(inverse_TT.sum(0)) / 50)
    assert found["banded"].model_noise < found["tree"].model_noise < found["gaussian"].model_noise


def test_noise_costs_accuracy_the_more_the_smaller_the_cohort():
    planned = [Deployment(100_000, cohort, 15, 4.0, 1e-6) for cohort in (20, 200_00)]
    little, much = (
        accuracy_of(one, ways(one)[-1], "logreg", "digits", None, {"client_lr": 0.3}) for one in reversed(planned)
    )
    without = accuracy_of(planned[0], None, "logreg", "digits", None, {"client_lr": 0.3})
    assert much + 0.2 < little
    assert little == pytest.approx(without, abs=0.1)


def privacy(*words):
    return CliRunner().invoke(app, ["privacy", *words], catch_exceptions=False).stdout


def test_a_plan_and_an_audit_on_the_command_line():
    planned = ["--population", "1000000", "--cohort", "1000", "--rounds", "100", "--epsilon", "4"]
    found = json.loads(privacy("plan", *planned, "--json"))
    assert [way["mechanism"] for way in found["ways"]] == ["gaussian", "tree"]
    shown = privacy("plan", *planned, "--min-separation-rounds", "8")
    assert "--privacy mechanism=banded --privacy bands=8" in shown
    private = ["--canaries", "200", "--rounds", "4", "--privacy", "epsilon=2", "--privacy", "delta=1e-5"]
    assert json.loads(privacy("audit", *private, "--json"))["canaries"] == 200


def test_a_plan_that_no_noise_can_keep_is_refused():
    with pytest.raises(PrivacyError, match="delta must be below"):
        ways(Deployment(1000, 10, 10, 4.0, 0.01))
