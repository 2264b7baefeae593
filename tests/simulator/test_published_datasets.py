"""Published data sets, from small files in the layouts of TFF and LEAF."""

import json
import sqlite3
from contextlib import closing

import h5py
import numpy as np
import pytest

from simulator import datasets
from simulator.datasets.bundled import END, START, UNKNOWN, tokens
from simulator.datasets.tff import example_class, fields_of
from simulator.errors import DatasetError

TABLES = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
"""
KINDS = {"f": "float_list", "i": "int64_list", "u": "int64_list", "S": "bytes_list"}
generator = np.random.default_rng(0)


def emnist(size):
    pixels = generator.random((size, 28, 28), np.float32)
    return {"pixels": pixels, "label": generator.integers(0, 62, size).astype(np.int32)}


def cifar(size):
    return {
        "image": generator.integers(0, 256, (size, 32, 32, 3)).astype(np.uint8),
        "label": generator.integers(0, 100, (size, 1)),
        "coarse_label": generator.integers(0, 20, (size, 1)),
    }


def snippets(*texts):
    return {"snippets": np.array([text.encode() for text in texts])}


def sentences(*texts):
    return {"tokens": np.array([text.encode() for text in texts]), "score": np.arange(len(texts))}


def write_hdf5(folder, splits):
    """A file for each split: {file: {client: fields}}."""
    folder.mkdir(exist_ok=True)
    for name, clients in splits.items():
        with h5py.File(folder / name, "w") as file:
            for client, fields in clients.items():
                for field, array in fields.items():
                    texts = array.dtype.kind == "S"
                    kind = h5py.string_dtype() if texts else array.dtype
                    file.create_dataset(f"examples/{client}/{field}", data=array, dtype=kind)


def write_sqlite(path, splits):
    """One file: {split: {client: fields}}."""
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(TABLES)
        for split, clients in splits.items():
            for client, fields in clients.items():
                rows = [serialized(fields, row) for row in range(len(next(iter(fields.values()))))]
                connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", [(split, client, row) for row in rows])
                connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, len(rows)))


def serialized(fields, row):
    example = example_class()()
    for name, array in fields.items():
        values = getattr(example.features.feature[name], KINDS[array.dtype.kind]).value
        values.extend(np.atleast_1d(array[row]).ravel().tolist())
    return example.SerializeToString()


def write(data, folder, splits, form):
    """The same clients in either layout. splits: {(HDF5 file, split in SQLite): clients}, and the SQLite file."""
    files, database = splits
    if form == "hdf5":
        write_hdf5(data / folder, {file: clients for (file, _), clients in files.items()})
    else:
        write_sqlite(data / folder / database, {split: clients for (_, split), clients in files.items()})


both_layouts = pytest.mark.parametrize("form", ["hdf5", "sqlite"])


@both_layouts
def test_writers_of_federated_emnist_have_the_examples_of_both_splits(tmp_path, form):
    train, test = {"f2": emnist(3), "f1": emnist(2)}, {"f1": emnist(1)}
    files = {("fed_emnist_train.h5", "all_train"): train, ("fed_emnist_test.h5", "all_test"): test}
    write(tmp_path, "federated_emnist", (files, "emnist_all.sqlite"), form)
    writers = datasets.load("federated_emnist", tmp_path)
    assert writers.clients == ("f1", "f2")
    assert (writers.sizes.tolist(), writers.shape, writers.classes) == ([3, 3], (1, 28, 28), 62)
    np.testing.assert_array_equal(writers.shard(0)["y"], [*train["f1"]["label"], *test["f1"]["label"]])
    np.testing.assert_array_equal(writers.shard(1)["x"][:, 0], train["f2"]["pixels"])
    assert len(datasets.load("federated_emnist", tmp_path, clients=1)) == 1
    with pytest.raises(DatasetError, match="has 2 users; to deal"):
        datasets.load("federated_emnist", tmp_path, clients=3)


@both_layouts
def test_clients_of_cifar100_in_two_splits_are_two(tmp_path, form):
    train, test = {"0": cifar(4), "1": cifar(4)}, {"0": cifar(2)}
    files = {("fed_cifar100_train.h5", "train"): train, ("fed_cifar100_test.h5", "test"): test}
    write(tmp_path, "cifar100", (files, "cifar100.sqlite"), form)
    clients = datasets.load("cifar100", tmp_path)
    assert (len(clients), clients.shape, clients.classes) == (3, (3, 32, 32), 100)
    first = clients.shard(next(index for index, name in enumerate(clients.clients) if name.endswith("train/0")))
    np.testing.assert_allclose(first["x"][2, 1], train["0"]["image"][2, :, :, 1] / 255, rtol=1e-6)
    np.testing.assert_array_equal(first["coarse"], train["0"]["coarse_label"][:, 0])
    assert len(datasets.load("cifar100", tmp_path, 2, "pachinko")) == 2


@both_layouts
def test_roles_of_tffs_shakespeare_speak_in_windows(tmp_path, form):
    files = {
        ("shakespeare_train.h5", "train"): {"LEAR": snippets("Blow, winds!", "No, no, no life!")},
        ("shakespeare_test.h5", "test"): {"LEAR": snippets("Howl")},
    }
    write(tmp_path, "tff_shakespeare", (files, "shakespeare.sqlite"), form)
    roles = datasets.load("tff_shakespeare", tmp_path)
    assert (roles.shape, roles.classes) == ((80,), 90)
    stream = tokens(["Blow, winds!", "No, no, no life!", "Howl"])
    np.testing.assert_array_equal(roles.fields["x"][0, : len(stream) - 1], stream[:-1])


@both_layouts
def test_sentences_of_stack_overflow_become_words_by_frequency(tmp_path, form):
    files = {
        ("stackoverflow_train.h5", "train"): {
            "7": sentences("the cat the", " ".join(["cat"] * 30)),
            "8": sentences("a"),
        },
        ("stackoverflow_held_out.h5", "heldout"): {"10": sentences("the")},
    }
    write(tmp_path, "stackoverflow", (files, "stackoverflow.sqlite"), form)
    with pytest.raises(DatasetError, match=r"stackoverflow\.word_count does not exist"):
        datasets.load("stackoverflow", tmp_path)
    (tmp_path / "stackoverflow" / "stackoverflow.word_count").write_text("the 90\ncat 12\n")
    users = datasets.load("stackoverflow", tmp_path)
    assert (users.clients, users.shape, users.classes) == (("10", "7", "8"), (20,), 10_004)
    unknown, start, end = 10_001, 10_002, 10_003
    of_7, of_8 = users.shard(1), users.shard(2)
    assert of_7["x"][0].tolist() == [start, 1, 2, 1, end] + [0] * 15
    assert of_7["y"].tolist() == [[1, 2, 1, end] + [0] * 16, [2] * 20]
    assert of_8["y"][0, :2].tolist() == [unknown, end]
    assert len(datasets.load("stackoverflow", tmp_path, clients=2)) == 2


def leaf(**users):
    sizes = [len(user["y"]) for user in users.values()]
    return {"users": list(users), "num_samples": sizes, "user_data": users}


def test_writers_of_leaf_have_the_examples_of_train_and_test(tmp_path):
    def writer(*labels):
        return {"x": [[label / 62] * 784 for label in labels], "y": list(labels)}

    for place, content in (("train", leaf(f1=writer(1, 61), f2=writer(3))), ("test", leaf(f1=writer(5)))):
        folder = tmp_path / "leaf_femnist" / place
        folder.mkdir(parents=True)
        (folder / "all_data_0.json").write_text(json.dumps(content))
    writers = datasets.load("leaf_femnist", tmp_path)
    assert (writers.clients, writers.shape, writers.classes) == (("f1", "f2"), (1, 28, 28), 62)
    assert sorted(writers.shard(0)["y"]) == [1, 5, 61]


def test_characters_of_leafs_shakespeare_follow_each_other(tmp_path):
    text = "Now is the winter of our discontent made glorious summer by this sun of York; and"
    folder = tmp_path / "leaf_shakespeare"
    folder.mkdir()
    (folder / "all.json").write_text(json.dumps(leaf(GLOUCESTER={"x": [text[:80]], "y": [text[80]]})))
    shard = datasets.load("leaf_shakespeare", tmp_path).shard(0)
    spoken = tokens([text])[1:-1]
    np.testing.assert_array_equal(shard["x"][0], spoken[:-1])
    np.testing.assert_array_equal(shard["y"][0], spoken[1:])
    assert not {START, END, UNKNOWN} & set(spoken)


def damaged_leaf(content):
    def write(data):
        (data / "leaf_femnist").mkdir()
        (data / "leaf_femnist" / "a.json").write_text(json.dumps(content))

    return write


def database_of(content):
    def write(data):
        write_sqlite(data / "federated_emnist" / "emnist_all.sqlite", {"all_train": {}})
        with closing(sqlite3.connect(data / "federated_emnist" / "emnist_all.sqlite")) as connection, connection:
            connection.execute("INSERT INTO client_metadata VALUES ('f1', 'all_train', 1)")
            connection.execute("INSERT INTO examples VALUES ('all_train', 'f1', ?)", (content,))

    return write


def hdf5_of(**fields):
    return lambda data: write_hdf5(data / "federated_emnist", {"fed_emnist_train.h5": {"f1": fields}})


def clients_without_groups(data):
    (data / "federated_emnist").mkdir()
    with h5py.File(data / "federated_emnist" / "fed_emnist_train.h5", "w") as file:
        file["examples/f1"] = np.arange(3)


def binary_vocabulary(data):
    (data / "stackoverflow").mkdir()
    (data / "stackoverflow" / "stackoverflow.word_count").write_bytes(b"\xff\xfe")


def text_as_database(data):
    (data / "federated_emnist").mkdir()
    (data / "federated_emnist" / "emnist_all.sqlite").write_text("no database" * 100)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        (
            "federated_emnist",
            lambda data: (data / "federated_emnist").mkdir(),
            "holds neither emnist_all.sqlite nor fed_emnist_train.h5 or",
        ),
        ("federated_emnist", text_as_database, "emnist_all.sqlite is not in TFF's layout"),
        ("federated_emnist", database_of(b"\x07"), "client 'f1' in all_train are not in TFF's .*no tf.train.Example"),
        ("federated_emnist", database_of(serialized({"label": np.zeros(1)}, 0)), "not in TFF's .*pixels"),
        (
            "federated_emnist",
            lambda data: write_sqlite(data / "federated_emnist" / "emnist_all.sqlite", {}),
            "holds no clients in all_train, all_test",
        ),
        (
            "federated_emnist",
            lambda data: write_hdf5(data / "federated_emnist", {"fed_emnist_train.h5": {"f1": {"label": np.ones(3)}}}),
            "fed_emnist_train.h5 is not in TFF's layout, examples/<client>/<field>",
        ),
        (
            "federated_emnist",
            lambda data: write_hdf5(
                data / "federated_emnist",
                {"fed_emnist_train.h5": {"f1": {"pixels": np.ones((3, 10)), "label": np.ones(3)}}},
            ),
            "client 'f1': ValueError: cannot reshape",
        ),
        (
            "federated_emnist",
            lambda data: write_hdf5(
                data / "federated_emnist", {"fed_emnist_train.h5": {"f1": emnist(1) | {"label": np.array([62])}}}
            ),
            "a label is 62, but there are 62 classes",
        ),
        (
            "federated_emnist",
            hdf5_of(**emnist(3) | {"label": np.full(3, 1.5)}),
            "federated_emnist: client 'f1': a label is float64, not whole numbers",
        ),
        ("federated_emnist", hdf5_of(**emnist(3) | {"label": np.arange(2)}), "client 'f1' differ in length: x 3, y 2"),
        (
            "federated_emnist",
            hdf5_of(**emnist(1) | {"pixels": np.full((1, 28, 28), np.nan)}),
            "federated_emnist: field 'x' of client 'f1' holds a number that is not finite",
        ),
        (
            "federated_emnist",
            clients_without_groups,
            "'federated_emnist' in .* cannot be read: ValueError: Field names",
        ),
        ("federated_emnist", database_of("text"), "'federated_emnist' in .* cannot be read: TypeError: expected bytes"),
        ("stackoverflow", binary_vocabulary, "data set 'stackoverflow' in .* cannot be read: UnicodeDecodeError"),
        (
            "leaf_femnist",
            damaged_leaf(leaf(f1={"x": [[0.5] * 784], "y": [2**63]})),
            "data set 'leaf_femnist' in .* cannot be read: OverflowError",
        ),
        ("leaf_femnist", lambda data: (data / "leaf_femnist").mkdir(), "holds no .json, nor do train/ and test/"),
        ("leaf_femnist", damaged_leaf({"users": ["f1"]}), "a.json is not in LEAF's layout: .*num_samples"),
        (
            "leaf_femnist",
            damaged_leaf({"users": ["f1"], "num_samples": [2], "user_data": {"f1": {"x": [[0.5] * 784], "y": [1]}}}),
            "user 'f1' has 1 x and 1 y, not 2",
        ),
        ("leaf_femnist", damaged_leaf(leaf(f1={"x": [[0.5]], "y": [1]})), "a.json is not in LEAF's layout: .*reshape"),
        ("leaf_femnist", damaged_leaf(leaf()), "there are no clients"),
    ],
)
def test_files_of_another_layout_are_named(tmp_path, name, write, message):
    write(tmp_path)
    with pytest.raises(DatasetError, match=message):
        datasets.load(name, tmp_path)


def images(**changes):
    return {
        "x": np.zeros((5, 28, 28)),
        "y": np.zeros(5, int),
        "writer": np.arange(5),
        "alphabet": np.zeros(5),
    } | changes


def windows(**changes):
    return {"x": np.zeros((5, 43)), "y": np.zeros(5, int), "user": np.arange(5)} | changes


@pytest.mark.parametrize(
    ("file", "arrays", "message"),
    [
        ("wisdm/wisdm_ar_v1.1", windows(x=np.zeros(5)), "data set 'wisdm' in .* cannot be read: TypeError"),
        ("wisdm/wisdm_ar_v1.1", windows(y=np.zeros(4, int)), "data set 'wisdm' in .* cannot be read: IndexError"),
        ("wisdm/wisdm_ar_v1.1", windows(x=np.full((5, 43), "a")), "cannot be read: ValueError: could not convert"),
        ("wisdm/wisdm_ar_v1.1", windows(y=np.full(5, 1.5)), "wisdm: field 'y' is float64, not whole numbers"),
        ("wisdm/wisdm_ar_v1.1", windows(y=np.full(5, -1)), "wisdm: a label of client 'wisdm-0' is -1"),
        ("omniglot/omniglot_writers_28", images(x=np.zeros((5, 20, 20))), "'omniglot' in .* cannot reshape array"),
        (
            "omniglot/omniglot_writers_28",
            images(y=np.zeros(3, int)),
            "data set 'omniglot' in .* cannot be read: IndexError",
        ),
        ("omniglot/omniglot_writers_28", images(writer=np.array(list("abcde"))), "cannot be read: ValueError"),
        ("mnist_10k/mnist_10k", images(x=np.zeros((5, 28))), "'mnist_10k' in .* cannot reshape array"),
        ("mnist_10k/mnist_10k", images(y=np.zeros(4, int)), "fields of client 'everybody' differ in length: x 5, y 4"),
    ],
)
def test_arrays_of_a_wrong_form_are_named(tmp_path, file, arrays, message):
    (tmp_path / file).parent.mkdir()
    np.savez(tmp_path / f"{file}.npz", **arrays)
    with pytest.raises(DatasetError, match=message):
        datasets.load(file.partition("/")[0], tmp_path)


def test_an_example_of_tensorflow_is_read_from_its_bytes():
    # By hand, from the encoding of protobuf: features, an entry, its key "a", its value, an int64_list, packed values.
    data = bytes.fromhex("0a0e 0a0c 0a0161 1207 1a05 0a03 03ac02")
    assert fields_of(data)["a"].tolist() == [3, 300]
