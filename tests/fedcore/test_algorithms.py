"""Each algorithm against a second writing of its equations, in NumPy float64, on quadratics.

F_i(x) is the mean of ½‖x − a‖² over the client's examples a, so the gradient of a batch at y is y − mean(batch). The
references share no code with `fedcore.algorithms`.
"""

import dataclasses

import numpy as np
import pytest

from fedcore import algorithms
from fedcore.algorithms.algorithm import ServerStep
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.mime_lite import MimeLite
from fedcore.batching import StreamKey, permutation
from fedcore.errors import InvalidSetting, UnknownAlgorithm
from tests.fedcore.quadratics import gradient_oracle, mean_report, run_cohort, run_device, run_round

D, BATCH, EPOCHS, SEED = 5, 4, 2, 11
VARIANTS = [
    FedAvg(client_lr=0.2, epochs=EPOCHS, batch_size=BATCH),
    FedAvg(client_lr=0.2, server_lr=0.7, epochs=EPOCHS, batch_size=BATCH, weighting="uniform"),
    FedAdam(client_lr=0.2, epochs=EPOCHS, batch_size=BATCH),
    FedAdam(client_lr=0.2, server_lr=0.5, beta1=0.5, tau=0.1, epochs=EPOCHS, batch_size=BATCH, weighting="uniform"),
    MimeLite(client_lr=0.3, epochs=EPOCHS, batch_size=BATCH),
    MimeLite(client_lr=0.3, server_lr=0.5, epochs=EPOCHS, batch_size=BATCH, weighting="examples"),
    MimeLite(optimizer="adam", client_lr=0.02, epochs=EPOCHS, batch_size=BATCH),
]


@pytest.fixture
def clients():
    rng = np.random.default_rng(5)
    return [rng.normal(3 * k, 1, (n, D)) for k, n in enumerate((6, 4, 9, 1))]


@pytest.fixture
def x0():
    return np.linspace(-1, 1, D)


def ordered_batches(examples, slot, round):
    for epoch in range(EPOCHS):
        order = permutation(StreamKey(SEED, round, slot), 0, epoch, len(examples))
        for start in range(0, len(examples), BATCH):
            yield examples[order[start : start + BATCH]]


def reference_weights(algorithm, clients):
    weights = np.array([len(a) for a in clients] if algorithm.weighting == "examples" else [1] * len(clients), float)
    return weights / weights.sum()


def reference_mean_delta(algorithm, x, clients, round):
    total = np.zeros_like(x)
    for slot, (p, examples) in enumerate(zip(reference_weights(algorithm, clients), clients, strict=True)):
        y = x
        for batch in ordered_batches(examples, slot, round):
            y = y - algorithm.client_lr * (y - batch.mean(0))
        total += p * (y - x)
    return total


def reference_fedavg(algorithm, x, clients, rounds):
    for round in range(rounds):
        x = x + algorithm.server_lr * reference_mean_delta(algorithm, x, clients, round)
    return {"params": x}


def reference_fedadam(algorithm, x, clients, rounds):
    m, v = np.zeros_like(x), np.full_like(x, algorithm.tau * algorithm.tau)
    for round in range(rounds):
        delta = reference_mean_delta(algorithm, x, clients, round)
        m = algorithm.beta1 * m + (1 - algorithm.beta1) * delta
        v = algorithm.beta2 * v + (1 - algorithm.beta2) * delta * delta
        x = x + algorithm.server_lr * m / (np.sqrt(v) + algorithm.tau)
    return {"params": x, "m": m, "v": v}


def reference_mimelite(algorithm, x, clients, rounds):
    b1, b2, adam = algorithm.beta1, algorithm.beta2, algorithm.optimizer == "adam"
    m, v = np.zeros_like(x), np.full_like(x, algorithm.initial_v)
    for round in range(rounds):
        divisor = np.sqrt(v) + algorithm.epsilon if adam else 1.0
        delta, c = np.zeros_like(x), np.zeros_like(x)
        for slot, (p, examples) in enumerate(zip(reference_weights(algorithm, clients), clients, strict=True)):
            y = x
            for batch in ordered_batches(examples, slot, round):
                y = y - algorithm.client_lr * (b1 * m + (1 - b1) * (y - batch.mean(0))) / divisor
            delta += p * (y - x)
            c += p * (x - examples.mean(0))
        x = x + algorithm.server_lr * delta
        m, v = b1 * m + (1 - b1) * c, b2 * v + (1 - b2) * c * c
    return {"params": x, "m": m} | ({"v": v} if adam else {})


REFERENCES = {"fedavg": reference_fedavg, "fedadam": reference_fedadam, "mimelite": reference_mimelite}


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_five_rounds_agree_with_the_equations(algorithm, x0, clients):
    state = algorithm.init(x0)
    for round in range(5):
        state = run_round(algorithm, state, clients, SEED, round)
    expected = REFERENCES[algorithm.name](algorithm, x0, clients, 5)
    assert set(state) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_the_order_of_clients_does_not_matter(algorithm, x0, clients):
    broadcast = algorithm.broadcast(algorithm.init(x0))
    reports = [run_device(algorithm, broadcast, a, StreamKey(SEED, 0, slot)) for slot, a in enumerate(clients)]
    counts = [len(a) for a in clients]
    forward, backward = mean_report(algorithm, reports, counts), mean_report(algorithm, reports[::-1], counts[::-1])
    for name, value in forward.items():
        np.testing.assert_allclose(backward[name], value, rtol=1e-12)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_client_split_in_two_halves_changes_nothing_by_example_weights(algorithm, x0, clients):
    whole_batch = dataclasses.replace(algorithm, batch_size=64, weighting="examples")
    half, others = clients[0], clients[1:]
    state = whole_batch.init(x0)
    joined = run_round(whole_batch, state, [np.concatenate([half, half]), *others])
    split = run_round(whole_batch, state, [half, half, *others])
    for name, value in joined.items():
        np.testing.assert_allclose(split[name], value, rtol=1e-12)


def test_one_client_as_two_counts_twice_under_uniform_weights(x0, clients):
    algorithm = FedAvg(client_lr=0.2, batch_size=64, weighting="uniform")
    joined = run_round(algorithm, {"params": x0}, [np.concatenate([clients[0]] * 2), clients[1]])
    split = run_round(algorithm, {"params": x0}, [clients[0], clients[0], clients[1]])
    assert np.abs(joined["params"] - split["params"]).max() > 0.01


def test_fedavg_of_one_full_batch_step_is_a_gradient_step_on_all(x0, clients):
    state = run_round(FedAvg(client_lr=0.25, batch_size=64), {"params": x0}, clients)
    gradient = x0 - np.concatenate(clients).mean(0)
    np.testing.assert_allclose(state["params"], x0 - 0.25 * gradient, rtol=1e-12)


def test_fedavg_with_full_batches_contracts_to_the_closed_form(x0, clients):
    state = run_round(FedAvg(client_lr=0.25, epochs=6, batch_size=64), {"params": x0}, clients)
    mean = np.concatenate(clients).mean(0)
    np.testing.assert_allclose(state["params"], mean + 0.75**6 * (x0 - mean), rtol=1e-12)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_no_function_writes_into_what_it_was_given(algorithm, x0, clients):
    state = algorithm.init(x0)
    broadcast = algorithm.broadcast(state)
    kept = {name: value.copy() for name, value in (state | broadcast).items()}
    for value in (x0, *state.values(), *broadcast.values()):
        value.flags.writeable = False
    report = run_device(algorithm, broadcast, clients[0], StreamKey(SEED, 0, 0))
    for value in report.values():
        value.flags.writeable = False
    moved = algorithm.update(state, report)
    for name, value in kept.items():
        np.testing.assert_array_equal(state[name], value)
    assert np.abs(moved["params"] - x0).max() > 0


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_the_schedule_scales_the_server_learning_rate_alone(algorithm, x0, clients):
    state = run_round(algorithm, algorithm.init(x0), clients, SEED)
    report = run_device(algorithm, algorithm.broadcast(state), clients[1], StreamKey(SEED, 1, 0))
    halved = dataclasses.replace(algorithm, server_lr=algorithm.server_lr / 2).update(state, report)
    scaled = algorithm.update(state, report, ServerStep(lr_scale=0.5))
    for name, value in halved.items():
        np.testing.assert_array_equal(scaled[name], value)


def test_fedadam_is_not_the_adam_of_optimizer_libraries(x0):
    algorithm = FedAdam(server_lr=0.1)
    state, corrected = algorithm.init(x0), x0
    m, v = np.zeros(D), np.zeros(D)
    for t, size in enumerate((1.0, -0.5, 0.25), 1):
        state = algorithm.update(state, {"delta": np.full(D, size)})
        m, v = 0.9 * m + 0.1 * size, 0.99 * v + 0.01 * size**2
        corrected = corrected + 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + algorithm.tau)
    assert np.abs(state["params"] - corrected).min() > 0.01


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_mimelite_moves_its_optimizer_by_gradients_at_the_old_model(optimizer, x0, clients):
    states = []
    for epochs, client_lr in ((1, 0.01), (7, 0.2)):
        algorithm = MimeLite(optimizer=optimizer, client_lr=client_lr, epochs=epochs, batch_size=BATCH)
        states.append(run_round(algorithm, algorithm.init(x0), clients, SEED))
    gradient = np.mean([x0 - a.mean(0) for a in clients], 0)
    for state in states:
        np.testing.assert_allclose(state["m"], 0.1 * gradient, rtol=1e-12)
        if optimizer == "adam":
            np.testing.assert_allclose(state["v"], 0.99 * 1e-4 + 0.01 * gradient**2, rtol=1e-12)
    assert np.abs(states[0]["params"] - states[1]["params"]).max() > 0.01


def test_mimelite_steps_with_the_optimizer_state_held_fixed(x0):
    algorithm = MimeLite(client_lr=0.5, epochs=3, batch_size=2)
    broadcast = {"params": x0, "m": np.full(D, 2.0)}
    report = run_device(algorithm, broadcast, np.repeat(x0[None], 2, 0), StreamKey(SEED, 0, 0))
    y = x0
    for _ in range(3):
        y = y - 0.5 * (0.9 * 2.0 + 0.1 * (y - x0))
    np.testing.assert_allclose(report["delta"], y - x0, rtol=1e-12)
    np.testing.assert_allclose(report["gradient"], 0, atol=1e-15)


def test_the_full_batch_gradient_weighs_a_short_batch_by_its_size(x0, clients):
    algorithm = MimeLite(batch_size=BATCH)
    examples = clients[2]  # nine examples in batches of four: the last batch holds one
    report = run_device(algorithm, algorithm.broadcast(algorithm.init(x0)), examples, StreamKey(SEED, 0, 0))
    np.testing.assert_allclose(report["gradient"], x0 - examples.mean(0), rtol=1e-12)
    of_batches = np.mean([x0 - examples[start : start + BATCH].mean(0) for start in (0, 4, 8)], 0)
    assert np.abs(report["gradient"] - of_batches).max() > 1e-3


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_a_cohort_at_once_is_a_loop_over_its_clients(algorithm, x0):
    examples_KND = np.random.default_rng(8).normal(size=(3, 7, D))
    state = run_round(algorithm, algorithm.init(x0), list(examples_KND), SEED)
    broadcast = algorithm.broadcast(state)
    together = run_cohort(algorithm, broadcast, examples_KND, lambda k: StreamKey(SEED, 1, k))
    for k, examples in enumerate(examples_KND):
        alone = run_device(algorithm, broadcast, examples, StreamKey(SEED, 1, k))
        assert set(alone) == set(together)
        for name, value in alone.items():
            assert together[name][k].shape == value.shape
            np.testing.assert_allclose(together[name][k], value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_float32_stays_float32(algorithm, x0, clients):
    x = x0.astype(np.float32)
    state = algorithm.init(x)
    broadcast = algorithm.broadcast(state)
    examples, mask = clients[0].astype(np.float32), np.ones(len(clients[0]), np.float32)
    carries = {
        stage.name: stage.step(stage.begin(broadcast), broadcast, gradient_oracle(examples, mask))
        for stage in algorithm.passes
    }
    report = algorithm.report(broadcast, carries)
    for vectors in (state, *carries.values(), report, algorithm.update(state, report)):
        assert {str(value.dtype) for value in vectors.values()} == {"float32"}


@pytest.mark.parametrize(("name", "cls"), [("fedavg", FedAvg), ("fedadam", FedAdam), ("mimelite", MimeLite)])
def test_an_algorithm_is_made_by_name_with_its_defaults(name, cls):
    assert algorithms.create(name) == cls()
    assert algorithms.create(name, {"client_lr": "0.5", "epochs": "3"}) == cls(client_lr=0.5, epochs=3)


def test_an_unknown_algorithm_is_refused_and_the_known_ones_are_named():
    with pytest.raises(UnknownAlgorithm, match=r"'fedavgg'; did you mean fedavg\? there are fedavg, fedadam, mimelite"):
        algorithms.create("fedavgg")


def test_an_unknown_setting_is_refused_and_the_known_ones_are_named():
    with pytest.raises(InvalidSetting, match="fedavg has no setting 'lr'; there are client_lr, server_lr, epochs"):
        algorithms.create("fedavg", {"lr": 0.1})


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("client_lr", 0, "a number above 0"),
        ("client_lr", "inf", "a number above 0"),
        ("client_lr", "nan", "a number above 0"),
        ("client_lr", "fast", "a number above 0"),
        ("beta1", 1.0, "a number from 0 to below 1"),
        ("beta1", -0.1, "a number from 0 to below 1"),
        ("epochs", 0, "a whole number from 1 to 1048576"),
        ("epochs", 2.5, "a whole number from 1 to 1048576"),
        ("batch_size", 10**11, "a whole number from 1 to 1048576"),
        ("epochs", True, "a whole number from 1 to 1048576"),
        ("optimizer", "sgd", "one of momentum, adam"),
        ("weighting", "", "one of uniform, examples"),
    ],
)
def test_a_value_out_of_range_is_refused_and_what_is_allowed_is_named(setting, value, allowed):
    with pytest.raises(InvalidSetting, match=f"mimelite: {setting} must be {allowed}, not {value!r}"):
        algorithms.create("mimelite", {setting: value})
