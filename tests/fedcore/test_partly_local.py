"""Parameters that stay on clients: nothing of them is in a report, and a model says where they are."""

import numpy as np
import pytest

from fedcore.algorithms import create, settings_of
from fedcore.algorithms.check import check
from fedcore.algorithms.facts import for_model
from fedcore.batching import StreamKey
from fedcore.errors import InvalidSetting, SchemaError
from fedcore.params import ParamSchema, TensorSpec
from tests.fedcore.quadratics import run_passes

NAMES = ("fedper", "fedrep")
TENSORS = tuple(
    TensorSpec(name, shape) for name, shape in (("body", (2,)), ("head.w", (2, 1)), ("head.b", (1,)), ("s", ()))
)
SCHEMA = ParamSchema(TENSORS, ("head.w", "head.b"))
D = SCHEMA.size
AT = slice(2, 5)


def fitted(name, **settings):
    return for_model(create(name, settings), ("loss",), SCHEMA)


def after_a_round(algorithm, x, own, examples):
    """What a client reports and keeps."""
    received = algorithm.broadcast(algorithm.init(x)) | {"own": own}
    carries = run_passes(algorithm, received, examples, StreamKey(1, 1, 0))
    return algorithm.report(received, carries), algorithm.keep(received, carries)["own"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_no_bit_of_a_local_parameter_is_in_a_report(name, optimizer):
    algorithm = fitted(name, client_optimizer=optimizer, batch_size=3)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, own, examples = (rng.normal(0, 9, size).astype(np.float32) for size in (D, 3, (7, D)))
        report, kept = after_a_round(algorithm, x, own, examples)
        assert set(report) == {"delta"}
        local = report["delta"][AT]
        assert local.tobytes() == bytes(local.nbytes)  # a product with 0 would keep signs
        assert (kept != own).all()
        assert report["delta"][:2].all()
        assert report["delta"][5]


@pytest.mark.parametrize("name", NAMES)
def test_the_server_never_moves_what_stays_on_clients(name):
    algorithm, state = fitted(name), {"params": np.arange(D, dtype=np.float64)}
    moved = algorithm.update(state, {"delta": np.ones(D)})["params"]  # noise and codecs put something everywhere
    np.testing.assert_array_equal(moved - state["params"], [1, 1, 0, 0, 0, 1])


@pytest.mark.parametrize("name", NAMES)
def test_training_starts_with_what_the_client_kept(name):
    algorithm, x = fitted(name), np.zeros(D)
    examples = np.zeros((4, D))
    near, far = (after_a_round(algorithm, x, own, examples)[1] for own in (np.full(3, 0.1), np.full(3, 10.0)))
    np.testing.assert_allclose(far, 100 * near)
    np.testing.assert_array_equal(algorithm.init_client(np.arange(D))["own"], [2, 3, 4])


def test_fedrep_trains_the_body_under_the_trained_head():
    algorithm, rng = fitted("fedrep", head_epochs=2, epochs=3), np.random.default_rng(1)
    x, own, examples = rng.normal(size=D), rng.normal(size=3), rng.normal(size=(7, D))
    received = algorithm.broadcast(algorithm.init(x)) | {"own": own}
    carries = run_passes(algorithm, received, examples, StreamKey(1, 1, 0))
    head, trained = carries["head"]["params"], carries["train"]["params"]
    np.testing.assert_array_equal(np.delete(head, AT), np.delete(x, AT))
    np.testing.assert_array_equal(trained[AT], head[AT])
    assert [stage.loop.epochs for stage in algorithm.passes] == [2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_the_places_come_from_the_model_and_make_it_again(name):
    algorithm = fitted(name)
    assert algorithm.local == "2..5"
    assert create(name, settings_of(algorithm)) == algorithm
    assert for_model(algorithm, ("loss",), SCHEMA) == algorithm
    check(algorithm)  # whose model is smaller


@pytest.mark.parametrize(
    ("name", "schema", "settings", "says"),
    [
        ("fedper", ParamSchema(TENSORS), {}, r"this model names none: choose some of body, .* as --local='s'"),
        ("fedrep", SCHEMA, {"local": "0..2"}, r"local is 0..2, and the model's is 2..5; leave it out"),
        ("fedavg", SCHEMA, {}, r"shares all parameters, and of this model head.w, head.b stay on clients: take fedper"),
        ("fedavg", SCHEMA, {"clip_norm": 1, "weighting": "uniform"}, "shares all parameters"),
        ("evaluate", SCHEMA, {}, "shares all parameters"),
    ],
)
def test_an_algorithm_that_does_not_suit_the_model_is_refused(name, schema, settings, says):
    with pytest.raises(InvalidSetting, match=f"{name} .*{says}|{name}: {says}"):
        for_model(create(name, settings), ("loss",), schema)


@pytest.mark.parametrize("text", ["", "3", "3..3", "4..2", "0..2,1..3", "-1..2", "a..b", "0..1..2"])
def test_ranges_that_make_no_sense_are_refused(text):
    with pytest.raises(InvalidSetting, match=r"fedper: local must be ranges of the flat vector, such as 2816..3206"):
        create("fedper", {"local": text})


def test_ranges_that_touch_are_written_as_one():
    assert create("fedper", {"local": "0..2,2..4,5..6"}).local == "0..4,5..6"


def test_a_schema_refuses_local_parameters_that_it_cannot_have():
    with pytest.raises(SchemaError, match=r"does not have: \['tail'\]; there are \['body', 'head.w', 'head.b', 's'\]"):
        ParamSchema(TENSORS, ("tail",))
    with pytest.raises(SchemaError, match="all parameters are local, so nothing would be shared: leave one out"):
        ParamSchema(TENSORS, tuple(tensor.name for tensor in TENSORS))


def test_what_stays_on_clients_changes_no_vector():
    assert SCHEMA.digest == ParamSchema(TENSORS).digest
    assert SCHEMA.local_ranges == (slice(2, 4), slice(4, 5))
