"""Algorithms whose clients keep vectors, against a second writing of their equations, over partial cohorts in float64.

The clients hold linear regressions of different curvature, F_i(x) = mean of ½ (⟨a, x⟩ − b)², so that local steps drift
apart. The references share no code with `fedcore.algorithms`.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import ServerStep, keeps_client_state, with_carries
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_dyn import FedDyn
from fedcore.algorithms.fed_pd import FedPD
from fedcore.algorithms.fed_per import FedPer
from fedcore.algorithms.fed_rep import FedRep
from fedcore.algorithms.scaffold import Scaffold
from fedcore.batching import StreamKey, permutation
from tests.fedcore.quadratics import run_passes

D, BATCH, EPOCHS, SEED = 4, 4, 2, 3
COHORTS = [[0, 1, 2, 3, 4], [3, 1], [4, 2, 0], [2], [1, 3, 4, 0]]


@pytest.fixture
def clients():
    """Rows (a, b) of five clients with different numbers of examples."""
    rng = np.random.default_rng(2)
    return [
        rng.normal(size=(n, D + 1)) * np.linspace(0.5, 1 + k / 4, D + 1) + k / 4 for k, n in enumerate((6, 4, 9, 1, 5))
    ]


@pytest.fixture
def x0():
    return np.linspace(-1, 1, D)


def least_squares(rows_BD, mask_B):
    def grad(x):
        a, b = rows_BD[:, :-1], rows_BD[:, -1]
        residual = (a @ x - b) * mask_B
        return (0.5 * residual @ residual / mask_B.sum())[None], residual @ a / mask_B.sum(), mask_B.sum(keepdims=True)

    return grad


def run(algorithm, x, clients, cohorts):
    """State and client states after rounds of `cohorts`, as the contract's docstring says."""
    state, kept = algorithm.init(x), [algorithm.init_client(x) for _ in clients]
    for number, cohort in enumerate(cohorts):
        reports = []
        for slot, k in enumerate(cohort):
            received = algorithm.broadcast(state) | kept[k]
            carries = run_passes(algorithm, received, clients[k], StreamKey(SEED, number, slot), least_squares)
            reports.append(algorithm.report(received, carries))
            kept[k] = algorithm.keep(received, carries)
        mean = {name: sum(report[name] for report in reports) / len(cohort) for name in reports[0]}
        state = algorithm.update(state, mean, ServerStep(len(cohort), participation=len(cohort) / len(clients)))
    return state, kept


def gradient(rows, x):
    a, b = rows[:, :-1], rows[:, -1]
    return a.T @ (a @ x - b) / len(rows)


def optimum(clients):
    """The minimum of the uniform mean of all F_i."""
    hessian = np.mean([rows[:, :-1].T @ rows[:, :-1] / len(rows) for rows in clients], 0)
    return np.linalg.solve(hessian, np.mean([rows[:, :-1].T @ rows[:, -1] / len(rows) for rows in clients], 0))


def local_batches(rows, number, slot, epochs=EPOCHS, index=0):
    for epoch in range(epochs):
        order = permutation(StreamKey(SEED, number, slot), index, epoch, len(rows))
        yield from (rows[order[start : start + BATCH]] for start in range(0, len(rows), BATCH))


def reference_scaffold(algorithm, x, clients, cohorts):
    total, c, c_i, lr = len(clients), np.zeros(D), np.zeros((len(clients), D)), algorithm.client_lr
    for number, cohort in enumerate(cohorts):
        moved, changed = np.zeros(D), np.zeros(D)
        for slot, i in enumerate(cohort):
            y, steps = x.copy(), 0
            for batch in local_batches(clients[i], number, slot):
                y -= lr * (gradient(batch, y) - c_i[i] + c)
                steps += 1
            after = gradient(clients[i], x) if algorithm.option == "I" else c_i[i] - c + (x - y) / (steps * lr)
            moved += y - x
            changed += after - c_i[i]
            c_i[i] = after
        x = x + algorithm.server_lr / len(cohort) * moved
        c = c + changed / total
    return {"params": x, "c": c}, {"c_i": c_i}


def reference_feddyn(algorithm, x, clients, cohorts):
    total, h, gradients = len(clients), np.zeros(D), [np.zeros(D) for _ in clients]
    for number, cohort in enumerate(cohorts):
        reached = []
        for slot, i in enumerate(cohort):
            y = x.copy()
            for batch in local_batches(clients[i], number, slot):
                y -= algorithm.client_lr * (gradient(batch, y) - gradients[i] + algorithm.alpha * (y - x))
            gradients[i] = gradients[i] - algorithm.alpha * (y - x)
            reached.append(y)
        h = h - algorithm.alpha / total * sum(y - x for y in reached)
        x = sum(reached) / len(cohort) - h / algorithm.alpha
    return {"params": x, "h": h}, {"l_i": gradients}


def reference_fedpd(algorithm, x, clients, cohorts):
    """Algorithm 1 with Oracle I: the steps of round r begin at x_i^r, where the client's own last ones ended."""
    duals, own = [np.zeros(D) for _ in clients], [x.copy() for _ in clients]
    for number, cohort in enumerate(cohorts):
        proposals = []
        for slot, i in enumerate(cohort):
            for batch in local_batches(clients[i], number, slot):
                pull = (own[i] - x) / algorithm.eta
                own[i] = own[i] - algorithm.client_lr * (gradient(batch, own[i]) + duals[i] + pull)
            duals[i] = duals[i] + (own[i] - x) / algorithm.eta
            proposals.append(own[i] + algorithm.eta * duals[i])
        x = sum(proposals) / len(cohort)
    return {"params": x}, {"dual": duals, "own": own}


def reference_partly_local(algorithm, x, clients, cohorts):
    """FedPer, and FedRep with its sweeps over the heads first; `LOCAL` are the places of the head."""
    body, lr = [place for place in range(D) if place not in LOCAL], algorithm.client_lr
    own, x = [x[LOCAL].copy() for _ in clients], x.copy()
    for number, cohort in enumerate(cohorts):
        moved = np.zeros(len(body))
        for slot, i in enumerate(cohort):
            y = x.copy()
            y[LOCAL] = own[i]
            if algorithm.name == "fedrep":
                for batch in local_batches(clients[i], number, slot, algorithm.head_epochs):
                    y[LOCAL] -= lr * gradient(batch, y)[LOCAL]
            trained, index = (body, 1) if algorithm.name == "fedrep" else (range(D), 0)
            for batch in local_batches(clients[i], number, slot, index=index):
                y[trained] -= lr * gradient(batch, y)[trained]
            own[i] = y[LOCAL]
            moved += y[body] - x[body]
        x[body] += algorithm.server_lr / len(cohort) * moved
    return {"params": x}, {"own": own}


LOCAL = [0, 2, 3]
REFERENCES = {
    "scaffold": reference_scaffold,
    "feddyn": reference_feddyn,
    "fedpd": reference_fedpd,
    "fedper": reference_partly_local,
    "fedrep": reference_partly_local,
}
VARIANTS = [
    Scaffold(client_lr=0.05, batch_size=BATCH, epochs=EPOCHS),
    Scaffold(client_lr=0.05, server_lr=0.6, batch_size=BATCH, epochs=EPOCHS, option="I"),
    FedDyn(client_lr=0.05, alpha=0.4, batch_size=BATCH, epochs=EPOCHS),
    FedPD(client_lr=0.05, eta=2.5, batch_size=BATCH, epochs=EPOCHS),
    FedPer(client_lr=0.05, local="0..1,2..4", server_lr=0.6, batch_size=BATCH, epochs=EPOCHS, weighting="uniform"),
    FedRep(client_lr=0.05, local="0..1,2..4", batch_size=BATCH, epochs=EPOCHS, head_epochs=3),
]


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_rounds_of_partial_cohorts_agree_with_the_equations(algorithm, x0, clients):
    state, kept = run(algorithm, x0, clients, COHORTS)
    expected, expected_kept = REFERENCES[algorithm.name](algorithm, x0, clients, COHORTS)
    assert (set(state), set(kept[0])) == (set(expected), set(expected_kept))
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-12, atol=1e-13, err_msg=name)
    for name, value in expected_kept.items():
        np.testing.assert_allclose([client[name] for client in kept], value, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_what_a_client_was_given_stays_as_it_was(algorithm, x0, clients):
    state, kept = run(algorithm, x0, clients, COHORTS[:1])
    received = algorithm.broadcast(state) | kept[2]
    before = {name: value.copy() for name, value in received.items()}
    for value in received.values():
        value.flags.writeable = False
    carries = run_passes(algorithm, received, clients[2], StreamKey(SEED, 1, 0), least_squares)
    report, keeps = algorithm.report(received, carries), algorithm.keep(received, carries)
    for name, value in before.items():
        np.testing.assert_array_equal(received[name], value)
    for name, value in keeps.items():
        assert not np.shares_memory(value, received[name])
        assert value.shape == received[name].shape
    assert all(value.shape == (D,) for value in report.values())


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_client_states_in_float32_stay_float32(algorithm, x0, clients):
    x = x0.astype(np.float32)
    received = algorithm.broadcast(algorithm.init(x)) | algorithm.init_client(x)
    rows, mask = clients[0].astype(np.float32), np.ones(len(clients[0]), np.float32)
    carries = {}
    for stage in algorithm.passes:
        known = with_carries(received, carries)
        carries[stage.name] = stage.step(stage.begin(known), known, least_squares(rows, mask))
    for vectors in (
        received,
        *carries.values(),
        algorithm.report(received, carries),
        algorithm.keep(received, carries),
    ):
        assert {str(value.dtype) for value in vectors.values()} == {"float32"}


@pytest.mark.parametrize(
    "algorithm",
    [
        Scaffold(client_lr=0.05, batch_size=64, epochs=5, option="I"),
        Scaffold(client_lr=0.05, batch_size=64, epochs=5),
        FedDyn(client_lr=0.05, alpha=0.4, batch_size=64, epochs=5),
        FedPD(client_lr=0.05, eta=2.5, batch_size=64, epochs=5),
    ],
    ids=repr,
)
def test_drift_is_corrected_up_to_the_optimum_of_all_clients(algorithm, x0, clients):
    state, _ = run(algorithm, x0, clients, [[0, 1, 2, 3, 4]] * 150)
    np.testing.assert_allclose(state["params"], optimum(clients), rtol=0, atol=5e-4)


def test_fedavg_drifts_and_stays_off_the_optimum_of_all_clients(x0, clients):
    fedavg, x = FedAvg(client_lr=0.05, batch_size=64, epochs=5), x0
    for _ in range(150):
        before = x
        carries = [run_passes(fedavg, {"params": x}, rows, StreamKey(SEED, 0, 0), least_squares) for rows in clients]
        x = np.mean([carry["train"]["params"] for carry in carries], 0)
    assert np.abs(x - before).max() < 1e-4
    assert np.abs(x - optimum(clients)).max() > 0.01


def test_the_mean_of_all_control_variates_stays_that_of_the_server(x0, clients):
    for option in ("I", "II"):
        state, kept = run(Scaffold(client_lr=0.05, batch_size=BATCH, option=option), x0, clients, COHORTS)
        np.testing.assert_allclose(state["c"], np.mean([client["c_i"] for client in kept], 0), rtol=1e-12)


def test_k_of_scaffold_is_the_steps_that_the_client_took(x0, clients):
    algorithm = Scaffold(client_lr=0.05, batch_size=BATCH)
    _, kept = run(algorithm, x0, clients, [[0, 1, 2, 3, 4]])
    for k, steps in enumerate((2, 1, 3, 1, 2)):
        y, key = x0, StreamKey(SEED, 0, k)
        order = permutation(key, 0, 0, len(clients[k]))
        for start in range(0, len(clients[k]), BATCH):
            y = y - 0.05 * gradient(clients[k][order[start : start + BATCH]], y)
        np.testing.assert_allclose(kept[k]["c_i"], (x0 - y) / (steps * 0.05), rtol=1e-12)


def test_feddyn_and_fedpd_are_one_where_all_clients_solve_their_problems(x0, clients):
    def ends(cohorts, **local):
        dyn, dyn_kept = run(FedDyn(client_lr=0.05, alpha=0.4, **local), x0, clients, cohorts)
        pd, pd_kept = run(FedPD(client_lr=0.05, eta=1 / 0.4, **local), x0, clients, cohorts)
        duals = [ours["l_i"] + theirs["dual"] for ours, theirs in zip(dyn_kept, pd_kept, strict=True)]
        return np.abs(dyn["params"] - pd["params"]).max(), np.abs(duals).max()

    everybody = [[0, 1, 2, 3, 4]] * 4
    assert max(ends(everybody, batch_size=64, epochs=1500)) < 1e-9
    assert min(ends(everybody, batch_size=BATCH)) > 1e-3  # a few steps depend on where they begin
    assert ends(COHORTS, batch_size=64, epochs=1500)[0] > 1e-3


def test_h_of_feddyn_is_the_mean_of_what_all_clients_keep(x0, clients):
    state, kept = run(FedDyn(client_lr=0.05, alpha=0.4, batch_size=BATCH), x0, clients, COHORTS)
    np.testing.assert_allclose(state["h"], np.mean([client["l_i"] for client in kept], 0), rtol=1e-11)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
@settings(max_examples=10, deadline=None)
@given(st.permutations(range(5)), st.integers(1, 5))
def test_the_order_of_clients_in_a_cohort_never_matters(algorithm, order, size):
    rng, x0 = np.random.default_rng(2), np.linspace(-1, 1, D)
    clients = [rng.normal(size=(n, D + 1)) for n in (6, 4, 9, 1, 5)]
    whole_batch = dataclasses.replace(algorithm, batch_size=64)
    drawn, by_number = [order[:size]] * 2, [sorted(order[:size])] * 2
    (state, kept), (expected, expected_kept) = (run(whole_batch, x0, clients, one) for one in (drawn, by_number))
    for ours, theirs in zip([state, *kept], [expected, *expected_kept], strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedpd", "fedrep"])
def test_means_over_clients_with_state_are_uniform(name):
    assert create(name).weighting == "uniform"


def test_every_algorithm_with_client_state_has_a_reference():
    assert {name for name, algorithm in ALGORITHMS.items() if keeps_client_state(algorithm())} == set(REFERENCES)
