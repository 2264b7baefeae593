"""What holds for every algorithm, and how algorithms are made by name. Their equations are tested family by family."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedcore import algorithms
from fedcore.algorithms.algorithm import ServerStep, keeps_client_state
from fedcore.algorithms.check import check
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.mime_lite import MimeLite
from fedcore.algorithms.question import QUESTION
from fedcore.batching import StreamKey
from fedcore.errors import InvalidSetting, UnknownAlgorithm
from tests.fedcore.quadratics import gradient_oracle, mean_report, run_cohort, run_device, run_round
from tests.fedcore.references import LAYERS
from tests.fedcore.variants import VARIANTS

D, SEED = 5, 11


@pytest.fixture
def clients():
    rng = np.random.default_rng(5)
    return [rng.normal(3 * k, 1, (n, D)) for k, n in enumerate((6, 4, 9, 1))]


@pytest.fixture
def x0():
    return np.linspace(-1, 1, D)


def test_the_variants_cover_stateless_algorithms_of_one_trip_that_train():
    others = {name for name, one in algorithms.ALGORITHMS.items() if hasattr(one, "trips") or keeps_client_state(one())}
    others |= {name for name, one in algorithms.ALGORITHMS.items() if one.family in (EVALUATION, QUESTION)}
    assert {one.name for one in VARIANTS} == set(algorithms.ALGORITHMS) - others


def test_means_are_weighted_as_in_the_papers_by_default():
    uniform = {"fedprox", "localadaalter", "mime", "mimelite", "feddane", "dsvrg", "feddualavg", "fedbuff"}
    uniform |= {"scaffold", "feddyn", "fedpd", "fedrep", "evaluate", "compare", "personalisation", "question"}
    uniform |= {"heavyhitters"}
    found = {name for name, cls in algorithms.ALGORITHMS.items() if cls().weighting == "uniform"}
    assert found == uniform & set(algorithms.ALGORITHMS)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_it_keeps_the_contract(algorithm):
    check(algorithm)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(VARIANTS), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.randoms())
def test_the_order_of_clients_never_matters(algorithm, sizes, random):
    x0 = np.linspace(-1, 1, D)
    clients = [np.random.default_rng(k).normal(k, 1, (n, D)) for k, n in enumerate(sizes)]
    broadcast = algorithm.broadcast(algorithm.init(x0))
    reports = [run_device(algorithm, broadcast, a, StreamKey(SEED, 0, slot)) for slot, a in enumerate(clients)]
    order = random.sample(range(len(clients)), len(clients))
    forward = mean_report(algorithm, reports, sizes)
    shuffled = mean_report(algorithm, [reports[k] for k in order], [sizes[k] for k in order])
    for name, value in forward.items():
        np.testing.assert_allclose(shuffled[name], value, rtol=1e-12, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(VARIANTS), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_a_device_split_in_equal_halves_changes_nothing_by_examples(algorithm, sizes, data):
    x0 = np.linspace(-1, 1, D)
    whole_batch = dataclasses.replace(algorithm, batch_size=64, weighting="examples")
    clients = [np.random.default_rng(k).normal(k, 1, (n, D)) for k, n in enumerate(sizes)]
    at = data.draw(st.integers(0, len(clients) - 1))
    before, half, after = clients[:at], clients[at], clients[at + 1 :]
    state = whole_batch.init(x0)
    joined = run_round(whole_batch, state, [*before, np.concatenate([half, half]), *after], layers=LAYERS)
    split = run_round(whole_batch, state, [*before, half, half, *after], layers=LAYERS)
    for name, value in joined.items():
        np.testing.assert_allclose(split[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_no_function_writes_into_what_it_was_given(algorithm, x0, clients):
    state = algorithm.init(x0)
    broadcast = algorithm.broadcast(state)
    kept = [(value, value.copy()) for value in (*state.values(), *broadcast.values())]
    for value in (x0, *state.values(), *broadcast.values()):
        value.flags.writeable = False
    report = run_device(algorithm, broadcast, clients[0], StreamKey(SEED, 0, 0))
    for value in report.values():
        value.flags.writeable = False
    moved = algorithm.update(state, report)
    for value, before in kept:
        np.testing.assert_array_equal(value, before)
    assert np.abs(moved["params"] - x0).max() > 0


@pytest.mark.parametrize("algorithm", [one for one in VARIANTS if hasattr(one, "server_lr")], ids=repr)
def test_the_schedule_scales_the_server_learning_rate_alone(algorithm, x0, clients):
    state = run_round(algorithm, algorithm.init(x0), clients, SEED)
    report = run_device(algorithm, algorithm.broadcast(state), clients[1], StreamKey(SEED, 1, 0))
    halved = dataclasses.replace(algorithm, server_lr=algorithm.server_lr / 2).update(state, report)
    scaled = algorithm.update(state, report, ServerStep(lr_scale=0.5))
    for name, value in halved.items():
        np.testing.assert_array_equal(scaled[name], value)


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
    with pytest.raises(
        UnknownAlgorithm, match=r"'fedavgg'; did you mean fedavg\? there are fedavg, fedadam, mimelite, fedsgd"
    ):
        algorithms.create("fedavgg")


def test_an_unknown_setting_is_refused_and_the_known_ones_are_named():
    with pytest.raises(InvalidSetting, match=r"no setting 'lr'; did you mean client_lr\? there are client_lr, epochs"):
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
        ("optimizer", "sgd", "one of momentum, adam, adagrad"),
        ("weighting", "", "one of uniform, examples"),
    ],
)
def test_a_value_out_of_range_is_refused_and_what_is_allowed_is_named(setting, value, allowed):
    with pytest.raises(InvalidSetting, match=f"mimelite: {setting} must be {allowed}, not {value!r}"):
        algorithms.create("mimelite", {setting: value})
