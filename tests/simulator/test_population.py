"""Populations of devices, and their weather."""

import hashlib

import numpy as np
import pandas as pd
import pytest

from coordinator.rules.states import RoundState
from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from simulator import datasets
from simulator.engine import Engine
from simulator.errors import DatasetError, EngineError
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.population import Population
from simulator.proofs import counted_cohort, worst_difference
from tests.acceptance.reconcile import reconcile
from tests.device_runtime.proxy import Weather, road_to


def test_devices_of_a_user_do_not_get_the_name_of_another():
    shard = {"x": np.zeros(3, np.float32)}
    assert Population.of(["a", "a.1"], [shard, shard]).spread(3).clients == ("a.1'", "a.2", "a.1")


def test_digits_are_the_same_for_one_seed():
    one, two = datasets.load("digits"), datasets.load("digits")
    assert len(one) == 75
    assert one.fields["x"].shape == (1797, 1, 8, 8)
    for name, array in one.fields.items():
        np.testing.assert_array_equal(array, two.fields[name])


def test_digits_are_those_of_scikit_learn():
    fields = datasets.load("digits").fields
    digest = hashlib.sha256(fields["x"].tobytes() + fields["y"].tobytes()).hexdigest()
    # Of the same population, made with load_digits() of scikit-learn 1.9.
    assert digest == "9a3e562f10fdc8ab12fa0d513903223bdb5e4c3e0411afe943ddb1c87bb013c8"


def test_held_out_users_are_whole_users_and_never_train():
    population = datasets.load("digits")
    train, test = population.split(0.2, seed=0)
    assert len(train) == 60
    assert len(test) == 15
    assert not set(train.clients) & set(test.clients)
    assert sum(train.sizes) + sum(test.sizes) == 1797


@pytest.mark.parametrize("count", [1, 2, 3, 7, 60])
def test_as_many_training_users_as_asked_for(count):
    train, test = datasets.users("digits", None, count)
    assert len(train) == count
    assert len(test) >= 1


def test_a_user_with_several_devices_has_every_example_on_one_of_them():
    users = datasets.load("digits", clients=4)
    spread = users.spread(10)
    first, second = users.clients[:2]
    assert spread.clients[:4] == (f"{first}.1", f"{first}.2", f"{first}.3", f"{second}.1")
    assert len(set(spread.clients)) == 10
    assert spread.sizes.sum() == users.sizes.sum()
    for name, array in users.shard(3).items():
        parts = [spread.shard(index)[name] for index in (8, 9)]
        np.testing.assert_array_equal(parts[0], array[0::2])
        np.testing.assert_array_equal(parts[1], array[1::2])
    with pytest.raises(DatasetError, match="clients without examples"):
        users.spread(2 * int(users.sizes.sum()))


def test_more_devices_than_users_leave_the_held_out_users_alone(data):
    train, held_out = datasets.users("wisdm", data, 40)
    assert len(train) == 40
    assert not {client.partition(".")[0] for client in train.clients} & set(held_out.clients)


def test_cohorts_follow_seed_and_round_and_hold_nobody_twice():
    population = datasets.load("digits")
    cohort = population.sample(20, seed=3, round_number=5)
    assert len(set(cohort)) == 20
    assert cohort == population.sample(20, seed=3, round_number=5)
    assert cohort != population.sample(20, seed=3, round_number=6)
    with pytest.raises(EngineError, match="cohort of 76 cannot be drawn from 75"):
        population.sample(76, 0, 1)


def test_wisdm_has_28_real_users_and_no_missing_values(data):
    population = datasets.load("wisdm", data)
    assert len(population) == 28
    assert population.sizes.sum() == 4357
    assert (population.sizes.min(), population.sizes.max()) == (64, 273)
    assert np.isfinite(population.fields["x"]).all()
    assert set(np.unique(population.fields["y"])) == set(range(6))


def test_mnist_is_partitioned_over_as_many_clients_as_asked(data):
    population = datasets.load("mnist_10k", data, 40)
    assert len(population) == 40
    assert population.fields["x"].shape == (10_000, 1, 28, 28)
    assert population.fields["x"].max() == 1


def test_unknown_absent_and_malformed_data_sets_are_named(tmp_path):
    with pytest.raises(DatasetError, match="digits, wisdm, omniglot, shakespeare, shakespeare_marks, mnist_10k"):
        datasets.load("imagenet")
    with pytest.raises(DatasetError, match="--data=DIR"):
        datasets.load("wisdm")
    with pytest.raises(DatasetError, match="holds no folder wisdm; name the folder that holds wisdm/"):
        datasets.load("wisdm", str(tmp_path))
    (tmp_path / "wisdm").mkdir()
    with pytest.raises(DatasetError, match=r"wisdm_ar_v1\.1\.npz does not exist"):
        datasets.load("wisdm", tmp_path)
    (tmp_path / "wisdm" / "wisdm_ar_v1.1.npz").write_bytes(b"not an archive")
    with pytest.raises(DatasetError, match="is not the data set it should be: it is no npz file"):
        datasets.load("wisdm", tmp_path)


FRAME = pd.DataFrame(
    {"who": ["b", "a", "b"], "h": [1.5, 2.0, 3.0], "w": [1, 2, 3], "ok": [True, False, True], "s": ["x", "y", "z"]}
)


def test_a_frame_is_a_population_with_its_users_in_their_order():
    users = Population.from_frame(FRAME, user="who", inputs=["h", "w"], target="ok")
    assert (users.clients, users.classes, users.sizes.tolist()) == (("b", "a"), 2, [2, 1])
    assert users.fields["x"].tolist() == [[1.5, 1], [3, 3], [2, 2]]
    assert users.fields["y"].tolist() == [1, 1, 0]
    nullable = FRAME.astype({"who": "category", "h": "Float64", "w": "Int64"})
    shaped = Population.from_frame(nullable, user="who", inputs=["h", "w"], target="h", shape=(1, 2))
    assert (shaped.shape, shaped.fields["x"].dtype, shaped.fields["y"].dtype) == ((1, 2), np.float32, np.float32)


def test_texts_of_a_target_are_numbered_and_rows_without_a_value_left_out():
    frame = pd.concat([FRAME, FRAME.assign(h=[np.nan, 1, 1], s=["a", None, "x"])])
    users = Population.from_frame(frame, user="who", inputs=["h", "w"], target="s", drop_missing=True)
    assert users.class_names == ("x", "y", "z")
    assert (users.classes, users.dropped, users.fields["y"].tolist()) == (3, 2, [0, 2, 0, 1])
    assert users.subset([0]).class_names == users.class_names
    with pytest.raises(DatasetError, match="each of which has all values"):
        Population.from_frame(FRAME.assign(h=np.nan), user="who", inputs=["h"], target="s", drop_missing=True)


def test_sparse_columns_and_users_of_any_type_are_read_as_they_are():
    dense = FRAME.assign(w=[0, 2, 0], ok=[0, 1, 0])
    sparse = dense.astype({"w": pd.SparseDtype("int64", 0), "ok": pd.SparseDtype("int64", 0)})
    users = Population.from_frame(sparse, user="who", inputs=["h", "w"], target="ok")
    assert users.fields["x"].tolist() == [[1.5, 0], [3, 0], [2, 2]]
    assert (users.fields["y"].dtype, users.fields["y"].tolist()) == (np.int64, [0, 0, 1])
    for who, names in {
        (2.0, 1.0, 2.0): ("2", "1"),
        (b"b", "ä".encode(), b"b"): ("b", "ä"),
        tuple(pd.to_datetime(["2026-01-02", "2026-01-01", "2026-01-02"])): (
            "2026-01-02 00:00:00",
            "2026-01-01 00:00:00",
        ),
    }.items():
        assert Population.from_frame(FRAME.assign(who=who), user="who", inputs=["h"], target="ok").clients == names


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"inputs": ["h", "v"]}, "the frame has no column 'v'; there are who, h, w, ok, s"),
        ({"user": "whom"}, "the frame has no column 'whom'"),
        ({"frame": pd.concat([FRAME, FRAME], axis=1)}, "the frame has 2 columns 'who'"),
        ({"inputs": ["s"]}, "column 's' is of type .*, not of numbers; make it numbers first"),
        ({"target": "s", "frame": FRAME.assign(s=["x", 1, "z"])}, r"for words, pandas.factorize\(frame\['s'\]\)\[0\]"),
        ({"frame": FRAME.astype({"h": object})}, "column 'h' is of type object, not of numbers"),
        ({"frame": FRAME.assign(h=[1, np.nan, 2])}, "column 'h' holds nan in row 1, which is no finite number"),
        ({"frame": FRAME.assign(h=[1, 1e300, 2])}, "column 'h' holds 1e[+]300 in row 1"),
        ({"frame": FRAME.assign(w=pd.array([1, 2, None]))}, "column 'w' holds <NA> in row 2"),
        ({"frame": FRAME.assign(who=["a", None, "b"])}, "column 'who' has no user in row 1"),
        (
            {"frame": FRAME.assign(who=pd.Categorical(["b", "a", "b"], ["a", "b", "c"]))},
            "user 'c' has no rows, one of 1 such",
        ),
        ({"frame": FRAME.assign(who=[1, "1", 1])}, "two clients are called '1'"),
        ({"frame": FRAME.assign(w=np.array([1, 2, 2**24 + 1]))}, "column 'w' holds 16777217 in row 2, a whole number"),
        (
            {"frame": FRAME.assign(h=[1, 2**24 + 1.0, 2])},
            "column 'h' holds 16777217.0 in row 1, .* float32 would round",
        ),
        (
            {"frame": FRAME.assign(ok=np.array([0, 1, 2**63], np.uint64))},
            "column 'ok' holds 9223372036854775808 in row 2; whole numbers are below",
        ),
        ({"frame": FRAME.assign(ok=[0.5, 1.7e9 + 1, 1])}, "column 'ok' holds 1700000001.0 in row 1, a whole number"),
        ({"frame": FRAME.assign(who=["a", "", "b"])}, "column 'who' has no user in row 1"),
        ({"frame": FRAME.assign(who=[1.0, 1.0, 1.5])}, "column 'who' holds 1.5 in row 2, which names no user"),
        ({"frame": FRAME.assign(who=[b"a", b"a", b"\xe4"])}, "column 'who' holds b'.xe4' in row 2"),
        ({"frame": FRAME.assign(who=pd.array(["1", 1.0, 2], object))}, "two clients are called '1'"),
        ({"shape": (3,)}, r"2 columns of inputs do not fill an example of shape \[3\]"),
        ({"frame": FRAME[:0]}, "the frame has no rows"),
        ({"frame": FRAME["h"]}, "the frame is of type Series; expected a DataFrame"),
    ],
)
def test_a_frame_that_is_no_population_is_named_in_a_line(given, words):
    arguments = {"frame": FRAME, "user": "who", "inputs": ["h", "w"], "target": "ok"} | given
    with pytest.raises(DatasetError, match=words) as refused:
        Population.from_frame(arguments.pop("frame"), **arguments)
    assert "\n" not in str(refused.value)


ALGORITHM, ROUNDS, DEVICES = {"batch_size": 5, "client_lr": 0.05}, 3, 5
STORM = {"cut_up": 0.06, "cut_down": 0.06, "flip_up": 0.04, "flip_down": 0.04, "twice": 0.1, "late": 0.1}


@pytest.mark.promise("Slow, cut, corrupt, repeated and reordered traffic changes no count")
def test_slow_cut_repeated_and_reordered_requests_change_no_count(coordinators, servers, tmp_path, capsys):
    users, _ = datasets.users("digits", None, DEVICES)
    model, algorithm = Model(load("logreg"), 0), create("fedavg", ALGORITHM)
    bundle = export_bundle(model, algorithm, tmp_path / "plan")
    settings = TaskSettings(
        population="p",
        goal=3,
        minimum=2,
        rounds=ROUNDS,
        over_selection=DEVICES / 3,
        selection_timeout_s=3.0,
        reporting_deadline_s=10.0,
        max_attempts=100,
    )
    with coordinators.local(tmp_path) as local, road_to(local.url) as road:
        store = local.store
        road.weather = Weather(1, latency_s=0.01, bytes_per_s=1e6, **STORM)
        task = store.register_task(bundle, settings).id
        config = FleetConfig(coordinator=road.url, population="p", folder=tmp_path / "devices", concurrency=DEVICES)
        summary = Fleet(config, users).run(servers=servers)
        numbers = [one.number for one in store.rounds(task) if one.state is RoundState.COMMITTED]
        cohorts = [counted_cohort(store, task, number, summary.clients) for number in numbers]
        models = [store.checkpoint(task, number)["params"] for number in numbers]
        found = reconcile(store, task, tmp_path / "devices", summary)
    with capsys.disabled():
        print(f"\nweather: {dict(road.weather.befell)}, {dict(summary.endings)}")
    assert numbers == list(range(1, ROUNDS + 1))
    assert not found.discrepancies
    assert worst_difference(Engine(model, algorithm, users, seed=0), users, cohorts, models) < 1e-5
    assert all(road.weather.befell[failure] for failure in STORM)
