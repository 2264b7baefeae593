"""FedDualAvg: averages of duals, and models that stay sparse."""

import numpy as np
import pytest

from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_dual_avg import FedDualAvg
from tests.fedcore.quadratics import run_round
from tests.fedcore.references import COHORTS, D, check, mean_over, ordered_batches, problems, start
from tests.fedcore.variants import DUAL_AVERAGING

PROBLEMS = problems()


def threshold(z, size):
    return np.array([np.sign(value) * max(abs(value) - size, 0.0) for value in z])


def feddualavg(algorithm, problem, x):
    z, eta_c, eta_s, steps = x, algorithm.client_lr, algorithm.server_lr, algorithm.steps
    for r in range(len(COHORTS)):

        def delta(slot, examples, z=z, r=r):
            dual = z
            for k, batch in enumerate(ordered_batches(examples, slot, r, algorithm.batch_size, steps, steps)):
                model = threshold(dual, algorithm.l1 * (eta_s * eta_c * r * steps + eta_c * k))
                dual = dual - eta_c * problem.gradient(model, batch)
            return dual - z

        z = z + eta_s * mean_over(algorithm, problem, r, delta)
    size = eta_s * eta_c * len(COHORTS) * steps
    return {"params": threshold(z, algorithm.l1 * size), "dual": z, "s": size}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("algorithm", DUAL_AVERAGING, ids=repr)
def test_five_rounds_agree_with_the_paper(algorithm, problem):
    check(algorithm, problem, feddualavg)


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_without_the_l1_term_it_is_uniform_fedavg(server_lr):
    clients = [np.random.default_rng(k).normal(k, 1, (6, D)) for k in range(3)]
    dual = FedDualAvg(l1=0.0, client_lr=0.2, server_lr=server_lr, steps=6, batch_size=2)
    averaging = FedAvg(client_lr=0.2, server_lr=server_lr, epochs=2, batch_size=2, weighting="uniform")
    ours, theirs = dual.init(start()), averaging.init(start())
    for number in range(4):
        ours = run_round(dual, ours, clients, 2, number)
        theirs = run_round(averaging, theirs, clients, 2, number)
        np.testing.assert_allclose(ours["params"], theirs["params"], rtol=1e-12)


def test_it_reaches_the_sparse_optimum_of_the_composite_loss():
    """The minimum of ½‖x − a‖² + l1 ‖x‖₁ is the soft threshold of a."""
    clients = [np.repeat([centre], 4, 0) for centre in ([2.0, 0.1, -1.0, 0.0, 0.3], [1.0, -0.1, -2.0, 0.2, 0.3])]
    algorithm = FedDualAvg(l1=0.5, client_lr=0.1, steps=5, batch_size=4)
    state = algorithm.init(start())
    for number in range(200):
        state = run_round(algorithm, state, clients, 0, number)
    np.testing.assert_allclose(state["params"], [1.0, 0, -1.0, 0, 0], atol=1e-2)
    assert (state["params"] == 0).sum() == 3
