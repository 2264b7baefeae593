"""Algorithms of two trips against a second writing of their equations, in NumPy float64, on ragged linear regression.

F_i(x) is the mean of ½(aᵀx − b)² over the client's rows (a, b): unlike on quadratics with one Hessian, gradients of two
batches differ by more than a constant. Every round draws its own cohort. The references share no code with
`fedcore.algorithms`.
"""

import dataclasses

import numpy as np
import pytest

from fedcore.algorithms import create
from fedcore.algorithms.algorithm import ServerStep, trips_of, with_carries
from fedcore.batching import StreamKey, batches, permutation
from tests.fedcore.quadratics import regression_oracle, run_device

D, BATCH, EPOCHS, SEED, STEPS = 5, 4, 2, 11, 7
SIZES = (6, 4, 9, 1, 13)
MIMES = [("mime", {"optimizer": optimizer}) for optimizer in ("sgd", "momentum", "adam", "adagrad")]
VARIANTS = [
    *MIMES,
    ("mime", {"optimizer": "adam", "weighting": "examples", "server_lr": 0.5, "beta1": 0.5, "initial_v": 0.1}),
    ("feddane", {}),
    ("feddane", {"mu": 0.7, "weighting": "examples", "server_lr": 0.5}),
    ("dsvrg", {"steps": STEPS}),
    ("dsvrg", {"steps": STEPS, "batch_size": 3, "weighting": "examples", "server_lr": 0.5}),
    ("fsvrg", {}),
    ("fsvrg", {"epochs": EPOCHS, "batch_size": 3, "weighting": "uniform", "server_lr": 0.5}),
]


def made(name, settings):
    usual = {"client_lr": 0.05 if name != "fsvrg" else 0.5}
    if name in {"mime", "feddane"}:
        usual |= {"epochs": EPOCHS, "batch_size": BATCH}
    if name == "mime":
        usual |= {"initial_v": 0.5}
    return create(name, usual | settings)


@pytest.fixture
def clients():
    """Rows (a, b) of every client, (n_i, D + 1)."""
    rng = np.random.default_rng(5)
    return [np.column_stack([rng.normal(0, 1, (n, D)), rng.normal(k, 1, n)]) for k, n in enumerate(SIZES)]


@pytest.fixture
def x0():
    return np.linspace(-1, 1, D)


def gradient(rows, x):
    a, b = rows[:, :-1], rows[:, -1]
    return a.T @ (a @ x - b) / len(rows)


# --- the algorithms, driven as the contract's docstring says


def device(trip, broadcast, rows, key):
    return run_device(trip, broadcast, rows, key, regression_oracle)


def run(algorithm, x, clients, cohorts, step=ServerStep()):
    """The state after a round of each cohort, which are lists of clients."""
    state, trips = algorithm.init(x), trips_of(algorithm)
    for number, cohort in enumerate(cohorts):
        trip = trips[number % len(trips)]
        broadcast = trip.broadcast(state)
        reports = [
            device(trip, broadcast, clients[client], StreamKey(SEED, number, slot))
            for slot, client in enumerate(cohort)
        ]
        p = shares(algorithm, clients, cohort)
        mean = {name: sum(w * one[name] for w, one in zip(p, reports, strict=True)) for name in reports[0]}
        state = trip.update(state, mean, step)
    return state


# --- the equations once more


def shares(algorithm, clients, cohort):
    weights = np.array([len(clients[one]) if algorithm.weighting == "examples" else 1 for one in cohort], float)
    return weights / weights.sum()


def sweeps(rows, number, slot, index, size, epochs):
    for epoch in range(epochs):
        order = permutation(StreamKey(SEED, number, slot), index, epoch, len(rows))
        for start in range(0, len(rows), size):
            yield rows[order[start : start + size]]


def moved_mean(algorithm, clients, cohort, x, local):
    return sum(
        p * (local(clients[client], slot) - x)
        for slot, (p, client) in enumerate(zip(shares(algorithm, clients, cohort), cohort, strict=True))
    )


def gathered(algorithm, clients, cohort, x):
    p = shares(algorithm, clients, cohort)
    return sum(w * gradient(clients[client], x) for w, client in zip(p, cohort, strict=True))


def reference_mime(algorithm, x, clients, cohorts):
    b1, b2, kind = algorithm.beta1, algorithm.beta2, algorithm.optimizer
    m, v = np.zeros(D), np.full(D, algorithm.initial_v)
    for number in range(0, len(cohorts), 2):
        c = gathered(algorithm, clients, cohorts[number], x)

        def local(rows, slot, *, x=x, m=m, v=v, c=c, number=number + 1):
            y = x
            for batch in sweeps(rows, number, slot, 0, BATCH, EPOCHS):
                u = gradient(batch, y) - gradient(batch, x) + c
                u = b1 * m + (1 - b1) * u if kind in ("momentum", "adam") else u
                y = y - algorithm.client_lr * (u / (np.sqrt(v) + algorithm.epsilon) if kind[:2] == "ad" else u)
            return y

        x = x + algorithm.server_lr * moved_mean(algorithm, clients, cohorts[number + 1], x, local)
        m = b1 * m + (1 - b1) * c
        v = v + c * c if kind == "adagrad" else b2 * v + (1 - b2) * c * c
    s = {"sgd": {}, "momentum": {"m": m}, "adam": {"m": m, "v": v}, "adagrad": {"v": v}}[kind]
    return {"params": x, "gradient": c} | s


def reference_feddane(algorithm, x, clients, cohorts):
    for number in range(0, len(cohorts), 2):
        g = gathered(algorithm, clients, cohorts[number], x)

        def local(rows, slot, *, x=x, g=g, number=number + 1):
            y, own = x, gradient(rows, x)
            for batch in sweeps(rows, number, slot, 1, BATCH, EPOCHS):
                y = y - algorithm.client_lr * (gradient(batch, y) + g - own + algorithm.mu * (y - x))
            return y

        x = x + algorithm.server_lr * moved_mean(algorithm, clients, cohorts[number + 1], x, local)
    return {"params": x, "gradient": g}


def reference_dsvrg(algorithm, x, clients, cohorts):
    for number in range(0, len(cohorts), 2):
        c = gathered(algorithm, clients, cohorts[number], x)

        def local(rows, slot, *, x=x, c=c, number=number + 1):
            w, drawn = x, sweeps(rows, number, slot, 0, algorithm.batch_size, 100)
            for batch, _ in zip(drawn, range(STEPS), strict=False):
                w = w - algorithm.client_lr * (gradient(batch, w) - gradient(batch, x) + c)
            return w

        x = x + algorithm.server_lr * moved_mean(algorithm, clients, cohorts[number + 1], x, local)
    return {"params": x, "gradient": c}


def reference_fsvrg(algorithm, x, clients, cohorts):
    for number in range(0, len(cohorts), 2):
        c = gathered(algorithm, clients, cohorts[number], x)

        def local(rows, slot, *, x=x, c=c, number=number + 1):
            w, h = x, algorithm.client_lr / len(rows)
            for batch in sweeps(rows, number, slot, 1, algorithm.batch_size, algorithm.epochs):
                w = w - h * (gradient(batch, w) - gradient(batch, x) + c)
            return w

        x = x + algorithm.server_lr * moved_mean(algorithm, clients, cohorts[number + 1], x, local)
    return {"params": x, "gradient": c}


REFERENCES = {
    "mime": reference_mime,
    "feddane": reference_feddane,
    "dsvrg": reference_dsvrg,
    "fsvrg": reference_fsvrg,
}


def cohorts_of(rounds, size=3):
    rng = np.random.default_rng(3)
    return [rng.permutation(len(SIZES))[:size].tolist() for _ in range(rounds)]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_six_rounds_of_partial_cohorts_agree_with_the_equations(name, settings, x0, clients):
    algorithm, cohorts = made(name, settings), cohorts_of(6)
    found, expected = run(algorithm, x0, clients, cohorts), REFERENCES[name](algorithm, x0, clients, cohorts)
    assert set(found) == set(expected)
    assert np.abs(found["params"] - x0).max() > 0.05
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-12, atol=1e-13, err_msg=key)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_the_first_trip_moves_nothing_but_the_gathered_gradient(name, settings, x0, clients):
    algorithm = made(name, settings)
    before, after = algorithm.init(x0), run(algorithm, x0, clients, [[0, 2]])
    assert {key for key in after if not np.array_equal(after[key], before[key])} == {"gradient"}
    np.testing.assert_allclose(after["gradient"], gathered(algorithm, clients, [0, 2], x0), rtol=1e-12)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_both_trips_keep_the_names_and_shapes_of_the_state(name, settings, x0, clients):
    algorithm = made(name, settings)
    shapes = {key: value.shape for key, value in algorithm.init(x0).items()}
    for rounds in (1, 2):
        state = run(algorithm, x0, clients, cohorts_of(rounds))
        assert {key: value.shape for key, value in state.items()} == shapes


def test_mime_by_sgd_with_full_batches_is_feddane_at_mu_zero(x0, clients):
    settings = {"client_lr": 0.05, "epochs": 5, "batch_size": 64}
    cohorts = [one for cohort in cohorts_of(4) for one in (cohort, cohort)]
    mime = run(create("mime", settings | {"optimizer": "sgd"}), x0, clients, cohorts)
    dane = run(create("feddane", settings | {"mu": 0.0}), x0, clients, cohorts)
    np.testing.assert_allclose(mime["params"], dane["params"], rtol=1e-12)


def test_mime_and_feddane_differ_on_batches(x0, clients):
    settings = {"client_lr": 0.05, "epochs": 5, "batch_size": BATCH}
    mime = run(create("mime", settings | {"optimizer": "sgd"}), x0, clients, cohorts_of(2))
    dane = run(create("feddane", settings), x0, clients, cohorts_of(2))
    assert np.abs(mime["params"] - dane["params"]).max() > 1e-3


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_the_optimum_is_a_fixed_point_for_the_whole_population(name, settings, clients):
    algorithm = made(name, settings)
    p = np.sqrt(shares(algorithm, clients, range(len(clients))) / np.array(SIZES))
    weighted = np.concatenate([root * rows for root, rows in zip(p, clients, strict=True)])
    optimum = np.linalg.lstsq(weighted[:, :-1], weighted[:, -1], rcond=None)[0]
    everybody = list(range(len(clients)))
    state = run(algorithm, optimum, clients, [everybody] * 2)
    np.testing.assert_allclose(state["gradient"], 0, atol=1e-12)
    # FedDane adds a correction to the gradient of a batch, whose noise stays; the others subtract that noise.
    if name != "feddane":
        np.testing.assert_allclose(state["params"], optimum, atol=1e-12)


def test_mime_reaches_the_optimum_of_clients_that_differ_fedavg_does_not(x0, clients):
    pooled = [np.concatenate([rows] * (30 // len(rows) + 1))[:30] for rows in clients]
    stacked = np.concatenate(pooled)
    optimum = np.linalg.lstsq(stacked[:, :-1], stacked[:, -1], rcond=None)[0]
    settings = {"client_lr": 0.05, "epochs": 5, "batch_size": 64}
    everybody = [list(range(len(clients)))]
    mime = run(create("mime", settings | {"optimizer": "sgd"}), x0, pooled, everybody * 400)
    averaged = run(create("fedavg", settings), x0, pooled, everybody * 400)
    assert np.abs(mime["params"] - optimum).max() < 1e-6
    assert np.abs(averaged["params"] - optimum).max() > 1e-3


def test_mimes_optimizer_moves_once_for_two_trips_by_gradients_at_x(x0, clients):
    states = [
        run(made("mime", {"optimizer": "adam", "epochs": epochs}), x0, clients, [[0, 1], [2, 3]]) for epochs in (1, 7)
    ]
    c = (gradient(clients[0], x0) + gradient(clients[1], x0)) / 2
    for state in states:
        np.testing.assert_allclose(state["m"], 0.1 * c, rtol=1e-12)
        np.testing.assert_allclose(state["v"], 0.99 * 0.5 + 0.01 * c * c, rtol=1e-12)
    assert np.abs(states[0]["params"] - states[1]["params"]).max() > 1e-3


def test_dsvrg_takes_as_many_steps_however_many_examples(x0, clients):
    second = made("dsvrg", {"steps": STEPS}).trips[1]
    assert [second.passes[0].loop.step_count(n) for n in SIZES] == [STEPS] * len(SIZES)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_the_order_of_clients_in_a_cohort_does_not_matter(name, settings, x0, clients):
    algorithm = made(name, settings | {"batch_size": 64})
    forward, backward = run(algorithm, x0, clients, [[0, 1, 2]] * 4), run(algorithm, x0, clients, [[2, 0, 1]] * 4)
    for key, value in forward.items():
        np.testing.assert_allclose(backward[key], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "settings"), [one for one in VARIANTS if one[0] in {"mime", "feddane"}])
def test_a_client_split_in_two_halves_changes_nothing_by_examples(name, settings, x0, clients):
    algorithm = made(name, settings | {"batch_size": 64, "weighting": "examples"})
    half, other = clients[0], clients[1]
    joined = run(algorithm, x0, [np.concatenate([half, half]), other], [[0, 1]] * 4)
    split = run(algorithm, x0, [half, other], [[0, 0, 1]] * 4)
    for key, value in joined.items():
        np.testing.assert_allclose(split[key], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_the_schedule_scales_the_server_learning_rate(name, settings, x0, clients):
    algorithm, cohorts = made(name, settings), cohorts_of(2)
    scaled = run(algorithm, x0, clients, cohorts, ServerStep(lr_scale=0.5))
    halved = run(dataclasses.replace(algorithm, server_lr=algorithm.server_lr / 2), x0, clients, cohorts)
    for key, value in halved.items():
        np.testing.assert_array_equal(scaled[key], value)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_a_cohort_at_once_is_a_loop_over_its_clients(name, settings, x0, clients):
    algorithm, rows = made(name, settings), clients[4][:9]
    cohort = [rows, rows[::-1], rows * 2]
    state = run(algorithm, x0, clients, cohorts_of(1))
    trip = trips_of(algorithm)[1]
    broadcast = trip.broadcast(state)
    carries = {}
    for index, stage in enumerate(trip.passes):
        received = with_carries(broadcast, carries)
        carry = {
            key: np.repeat(value[None], 3, 0) if value.ndim == 1 else value
            for key, value in stage.begin(received).items()
        }
        schedules = [batches(stage.loop, 9, StreamKey(SEED, 1, slot), index) for slot in range(3)]
        for steps in zip(*schedules, strict=True):
            rows_KBD = np.stack([own[indices] for own, (indices, _) in zip(cohort, steps, strict=True)])
            mask_KB = np.stack([mask for _, mask in steps]).astype(np.float64)
            carry = stage.step(carry, received, regression_oracle(rows_KBD, mask_KB))
        carries[stage.name] = carry
    together = trip.report(broadcast, carries)
    for slot, own in enumerate(cohort):
        alone = device(trip, broadcast, own, StreamKey(SEED, 1, slot))
        for key, value in alone.items():
            np.testing.assert_allclose(together[key][slot], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_no_function_writes_into_what_it_was_given(name, settings, x0, clients):
    algorithm = made(name, settings)
    state = algorithm.init(x0)
    x0.flags.writeable = False
    for number, trip in enumerate(algorithm.trips):
        broadcast = trip.broadcast(state)
        for value in (*state.values(), *broadcast.values()):
            value.flags.writeable = False
        report = device(trip, broadcast, clients[0], StreamKey(SEED, number, 0))
        for value in report.values():
            value.flags.writeable = False
        state = trip.update(state, report)
    assert np.abs(state["params"] - x0).max() > 0
