"""Data sets of a user's own: functions that return populations, and files of users' examples."""

import datetime
import decimal
import io
import json
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from export.errors import reason
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.errors import DatasetError
from simulator.population import Population
from simulator.simulation import Overrides, simulate

MODULE = """
import numpy as np
from simulator.population import Population

def users():
    shard = {"x": np.ones((4, 43), np.float32), "y": np.arange(4)}
    return Population.of([f"u{i}" for i in range(6)], [shard] * 6)

def broken():
    raise RuntimeError("no disk")

def nothing():
    return [1]

def bad():
    x = np.zeros((2, 3), np.float32)
    worse = x.copy()
    worse[1, 2] = np.nan
    return Population.of(["fine", "worse"], [{"x": x}, {"x": worse}])

def negative():
    return Population.of(["a", "b"], [{"y": np.array([0])}, {"y": np.array([3, -1])}])

def unequal():
    x, y = np.zeros((4, 3), np.float32), np.arange(4)
    return Population.of(["fine", "short"], [{"x": x, "y": y}, {"x": x, "y": y[:3]}])

def lacking():
    return Population.of(["fine", "lacks"], [{"x": np.zeros((2, 3)), "y": np.arange(2)}, {"x": np.zeros((2, 3))}])

def wide():
    return Population.of(["fine", "wide"], [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}])

def unnamed():
    return Population.of(["a", "b"], [{"x": np.zeros((2, 3))}])

def twice():
    return Population.of(["a", "b", "a"], [{"x": np.zeros((2, 3))}] * 3)

def huge():
    return Population.of(["a"], [{"y": np.array([0, 10**12])}])

def mixed():
    return Population.of(["a", "b"], [{"x": np.array([0.5])}, {"x": np.array([2**53 + 1])}])

def worded():
    return Population.of(["a"], [{"x": np.zeros((2, 3)), "y": np.array(["no", "yes"])}])

def beyond():
    return Population.of(["a"], [{"y": np.array([0, 7])}], classes=7)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working folder, by a name of its own in each test."""
    name = f"own_users_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def arrays(size, first=0):
    return {"x": np.full((size, 2, 3), first, np.float64), "y": np.arange(first, first + size, dtype=np.int16)}


def test_a_function_of_ones_own_gives_users_to_train_on(module):
    config = SimulationConfig(model="mlp", dataset=f"{module}:users", rounds=1, cohort=2, engine="torch", processes=1)
    result = simulate(config)
    assert (result.train_users, result.test_users) == (5, 1)
    assert result.parameters == 44 * 64 + 65 * 4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "cannot import data set .*:missing'.* read as package.module:function, since no file or folder"),
        ("broken", "fails with RuntimeError: no disk"),
        ("nothing", "returned list, expected simulator.population.Population"),
        ("bad", "field 'x' of client 'worse' holds a number that is not finite"),
        ("negative", "a label of client 'b' is -1; classes count from 0"),
        ("unequal", "the fields of client 'short' differ in length: x 4, y 3"),
        ("lacking", r"the fields of client 'lacks' are \['x'\], those of 'fine' \['x', 'y'\]"),
        ("wide", r"field 'x' of client 'wide' is \[4\] per example, that of 'fine' \[3\]"),
        ("unnamed", "there are 2 names of clients for 1 shards"),
        ("twice", "two clients are called 'a'; give each a name of its own"),
        ("huge", "a label is 1000000000000; classes count from 0, at most to 1048575"),
        ("mixed", "field 'x' of client 'b' is int64, that of 'a' float64; all need the same type"),
        ("worded", "client 'a': field 'y' holds texts, 'no' in row 0; labels are numbers"),
        ("beyond", "a label is 7, but there are 7 classes"),
    ],
)
def test_a_function_that_gives_no_population_is_refused(module, function, message):
    with pytest.raises(DatasetError, match=message):
        datasets.load(f"{module}:{function}")


def test_a_folder_with_a_file_for_each_user(tmp_path):
    for name, size in (("ann", 3), ("bob", 2)):
        np.savez(tmp_path / f"{name}.npz", **arrays(size))
    users = datasets.load(str(tmp_path))
    assert users.clients == ("ann", "bob")
    assert users.sizes.tolist() == [3, 2]
    assert (users.shape, users.classes) == ((2, 3), 3)
    assert (users.fields["x"].dtype, users.fields["y"].dtype) == (np.float32, np.int64)


def test_a_user_field_gathers_the_examples_of_all_files(tmp_path):
    owners = np.array(["ann", "bob", "ann"])
    np.savez(tmp_path / "1.npz", **arrays(3), user=owners)
    np.savez(tmp_path / "2.npz", **arrays(3, 7), user=owners)
    users = datasets.load(str(tmp_path))
    assert {name: users.shard(index)["y"].tolist() for index, name in enumerate(users.clients)} == {
        "ann": [0, 2, 7, 9],
        "bob": [1, 8],
    }
    assert datasets.load(str(tmp_path / "1.npz")).sizes.tolist() == [2, 1]


def test_parquet_holds_what_npz_holds(tmp_path):
    fields = arrays(4)
    columns = {"x": fields["x"].tolist(), "y": fields["y"], "flag": [True, False, True, True], "user": [5, 5, 6, 5]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    users = datasets.load(str(tmp_path / "all.parquet"))
    assert users.clients == ("5", "6")
    np.testing.assert_array_equal(users.shard(0)["x"], fields["x"][[0, 1, 3]])
    assert users.fields["flag"].tolist() == [1, 0, 1, 1]
    assert users.shape == (2, 3)


def test_files_of_one_user_can_be_dealt_out(tmp_path):
    np.savez(tmp_path / "me.npz", **arrays(40))
    alone = datasets.load(str(tmp_path))
    with pytest.raises(DatasetError, match="one client has no users to hold out; --partition deals"):
        alone.split(0.2, seed=0)
    assert len(datasets.load(str(tmp_path), clients=8, partition="dirichlet:0.3")) == 8


def save(folder, name, **fields):
    np.savez(folder / f"{name}.npz", **fields)


HEADER = b"\x93NUMPY\x01\x00\x10\x00"


def npy(shape):
    """The header of an array of that shape, without its numbers."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


def members(folder, **contents):
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"{name}.npy", content)


def parquet(folder, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, "is empty; it needs a file"),
        (lambda folder: (folder / "notes.tsv").write_text("a,b"), "holds 'notes.tsv', of another format; .*npz, "),
        (lambda folder: (folder / "a.npz").write_bytes(b"PK"), "a.npz is not the data set it should be"),
        (lambda folder: (folder / "a.parquet").write_bytes(b"PAR1"), "a.parquet is no Parquet file"),
        (lambda folder: save(folder, "a", y=np.array([object()])), "a.npz is .* it holds objects, not numbers"),
        (lambda folder: save(folder, "a", x=np.zeros((0, 3))), "a.npz holds no examples"),
        (lambda folder: save(folder, "a", x=np.zeros(3), y=np.zeros(2)), "row for each example, but .* x 3, y 2"),
        (
            lambda folder: save(folder, "a", x=np.zeros((2, 0))),
            r"'x' holds no numbers: an example has shape \[0\]",
        ),
        (lambda folder: save(folder, "a", x=np.full(2, 1e300)), "a.npz: field 'x' holds 1e[+]300 in row 0"),
        (lambda folder: save(folder, "a", user=np.array(["ann"])), "a.npz holds no examples"),
        (lambda folder: save(folder, "a", x=np.zeros(1), user=np.array([["b"]])), r"field 'user' has shape \[1, 1\]"),
        (lambda folder: (folder / "a.npz").mkdir(), "holds a folder, 'a.npz'"),
        (
            lambda folder: (folder / "a.npz").write_bytes(b""),
            "a.npz is not the data set it should be: it is no npz file",
        ),
        (lambda folder: members(folder, x=b"hello"), "a.npz is not the data set it should be: 'x' is no array"),
        (lambda folder: members(folder, x=npy((10**12, 3))), "a.npz is not the data set it should be"),
        (lambda folder: members(folder, x=npy((10**30,))), "a.npz is not the data set it should be: OverflowError"),
        (lambda folder: members(folder, x=HEADER + b"(" * 16), "a.npz is not the data set it should be: TokenError"),
        (lambda folder: parquet(folder, x=pyarrow.array([], pyarrow.list_(pyarrow.float32()))), "holds no examples"),
        (lambda folder: save(folder, "a", x=np.array([1j])), "field 'x' is complex128, neither numbers nor texts"),
        (lambda folder: save(folder, "a", x=np.array([1, np.nan])), "a.npz: field 'x' holds nan in row 1"),
        (
            lambda folder: (save(folder, "a", x=np.zeros(2)), save(folder, "b", x=np.zeros((2, 3)))),
            r"examples of 'b' are x float32\[3\], those of 'a' x float32\[\]",
        ),
        (lambda folder: parquet(folder, x=[1.0, None]), "column 'x' has 1 missing values, the first in row 1"),
        (lambda folder: parquet(folder, x=[[1.0], [1.0, 2.0]]), "has lists of 1 to 2 values; .* row 1 is the first"),
        (
            lambda folder: parquet(folder, x=[[[1.0], [2.0]], [[3.0], [None]]]),
            "column 'x' has 1 missing values, the first in row 1",
        ),
        (lambda folder: parquet(folder, x=[{"deep": 1}]), "column 'x' is struct<deep: int64>, neither numbers nor"),
        (
            lambda folder: parquet(
                folder, x=pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int8()))
            ),
            "column 'x' is map<string, int8.*, neither numbers nor texts",
        ),
        (lambda folder: parquet(folder, x=[decimal.Decimal("1.5")]), "column 'x' is decimal128.*, neither numbers"),
        (lambda folder: parquet(folder, x=[datetime.date(2026, 1, 1)]), "column 'x' is date32.*, neither numbers"),
        (lambda folder: parquet(folder, x=[b"image"]), "column 'x' is binary, neither numbers nor texts"),
        (lambda folder: parquet(folder, x=[1], label=["no"]), "field 'label' holds texts, 'no' in row 0; labels are"),
        (
            lambda folder: parquet(folder, y=pyarrow.array(["no", "yes"]).dictionary_encode()),
            "a.parquet: field 'y' holds texts",
        ),
        (lambda folder: save(folder, "a", x=np.zeros(2), y=np.array(["no", "yes"])), "a.npz: field 'y' holds texts"),
        (
            lambda folder: save(folder, "a", y=np.array([1, 2**63], np.uint64)),
            "a.npz: field 'y' holds 9223372036854775808 in row 1; whole numbers are below",
        ),
        (
            lambda folder: parquet(folder, x=pyarrow.array([[1], [2**64 - 1]], pyarrow.list_(pyarrow.uint64()))),
            "a.parquet: field 'x' holds 18446744073709551615 in row 1",
        ),
        (
            lambda folder: save(folder, "a", x=np.array([0.5, 2**24 + 1])),
            "'x' holds 16777217.0 in row 1, a whole number that float32 would round; save it as int64",
        ),
        (lambda folder: save(folder, "a", x=np.zeros(2), user=np.array([1.0, np.nan])), "'user' has no user in row 1"),
        (lambda folder: save(folder, "a", x=np.zeros(2), user=np.array(["ann", ""])), "'user' has no user in row 1"),
        (lambda folder: save(folder, "a", x=np.zeros(1), user=np.array([1.5])), "'user' holds 1.5 in row 0, which na"),
        (
            lambda folder: save(folder, "a", x=np.zeros(1), user=np.array([2**25], np.float32)),
            "'user' holds 33554432.0 in row 0",
        ),
        (
            lambda folder: save(folder, "a", x=np.zeros(2), user=np.array([b"b", b"\xe4"])),
            r"'user' holds b'\\xe4' in row",
        ),
        (lambda folder: save(folder, "a", x=np.zeros(1), user=np.zeros(1, "M8[D]")), r"'user' is datetime64\[D\]"),
        (lambda folder: parquet(folder, text=["fine", "zero\0"]), "the text of example 1 ends with a zero"),
    ],
)
def test_files_that_are_no_data_set_are_named(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(DatasetError, match=message):
        datasets.load(str(tmp_path))


@pytest.mark.parametrize(
    "owners",
    [
        np.array([7.0, 8.0, 7.0]),
        np.array([7, 8, 7], np.uint64),
        np.array(["7", "8", "7"]),
        np.array([b"7", b"8", b"7"]),
    ],
)
def test_a_user_has_one_name_whatever_the_type_of_the_field(tmp_path, owners):
    save(tmp_path, "a", x=np.arange(3), user=owners)
    parquet(tmp_path, x=[3, 4], user=[7, 8])
    users = datasets.load(str(tmp_path))
    assert users.clients == ("7", "8")
    assert users.fields["x"].tolist() == [0, 2, 3, 1, 4]


def test_names_of_users_keep_every_character(tmp_path):
    parquet(tmp_path, x=[1, 2, 3, 4], user=["ä", "a", "a\0", "a "])
    assert datasets.load(str(tmp_path)).clients == ("a", "a\0", "a ", "ä")
    save(tmp_path, "a", x=np.arange(2), user=np.array(["ä".encode(), b"b"]))
    assert datasets.load(str(tmp_path / "a.npz")).clients == ("b", "ä")
    parquet(tmp_path, x=[1, 2], user=["ä".encode(), b"b"])
    assert datasets.load(str(tmp_path / "a.parquet")).clients == ("b", "ä")


def test_an_index_of_pandas_is_no_field_unless_it_has_a_name(tmp_path):
    frame = pd.DataFrame({"user": ["ann", "bob"], "x": [1, 2]}, index=["p", "q"])
    frame.to_parquet(tmp_path / "a.parquet")
    assert list(datasets.load(str(tmp_path)).fields) == ["x"]
    frame.set_index("user").to_parquet(tmp_path / "a.parquet")
    assert datasets.load(str(tmp_path)).clients == ("ann", "bob")


def test_numbers_keep_their_values(tmp_path):
    kept = {
        "x": np.array([2**63 - 1, 2**53 + 1], np.uint64),
        "z": np.array([2.0**25, 1e300 / 1e270]),
        "h": np.array([0.5, -2], np.float16),
    }
    save(tmp_path, "a", **kept)
    fields = datasets.load(str(tmp_path)).fields
    assert fields["x"].tolist() == [2**63 - 1, 2**53 + 1]
    assert fields["z"].tolist() == [2.0**25, float(np.float32(1e30))]
    assert fields["h"].tolist() == [0.5, -2]


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(DatasetError, match="nowhere does not exist"):
        datasets.load(str(tmp_path / "nowhere"))


def test_a_path_with_a_colon_is_read_where_it_exists(tmp_path):
    (tmp_path / "co:lon").mkdir()
    np.savez(tmp_path / "co:lon" / "ann.npz", **arrays(3))
    assert datasets.load(str(tmp_path / "co:lon")).clients == ("ann",)


def test_a_column_that_is_there_twice_is_named(tmp_path):
    columns = pyarrow.Table.from_arrays([pyarrow.array([1.0])] * 2, names=["x", "x"])
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"a\.parquet has 2 columns 'x'"):
        datasets.load(str(tmp_path))


CSV = "who,heart,steps,age,did\n" + "".join(
    f"{who},{0.5 * row},{row},{row % 7},{('walk', 'run', 'sit')[row % 3]}\n"
    for row in range(12)
    for who in ("007", "7")
)
DID = datasets.Columns(user="who", inputs=("heart", "steps"), target="did")


def test_columns_of_a_table_are_named_and_its_texts_are_numbered(tmp_path):
    (tmp_path / "t.csv").write_text(CSV)
    frame = pd.read_csv(tmp_path / "t.csv", dtype={"who": str})
    frame.to_parquet(tmp_path / "t.parquet")
    np.savez(
        tmp_path / "t.npz", **{name: frame[name].to_numpy("U4" if name in ("who", "did") else None) for name in frame}
    )
    (tmp_path / "both").mkdir()
    frame[:10].to_csv(tmp_path / "both" / "1.csv", index=False)
    frame[10:].to_parquet(tmp_path / "both" / "2.parquet")
    expected = Population.from_frame(frame, user="who", inputs=["heart", "steps"], target="did")
    for name in ("t.csv", "t.parquet", "t.npz", "both"):
        users = datasets.load(str(tmp_path / name), columns=DID)
        assert (sorted(users.clients), users.class_names) == (["007", "7"], ("run", "sit", "walk")), name
        for client in users.clients:
            own, others = users.shard(users.clients.index(client)), expected.shard(expected.clients.index(client))
            assert own["x"].dtype == np.float32
            assert {field: array.tolist() for field, array in own.items()} == {
                field: array.tolist() for field, array in others.items()
            }, name
    every = datasets.load(str(tmp_path / "both"), columns=datasets.Columns(user="who", inputs=("did",), target="age"))
    assert every.kinds == {"text": "uint8[4]", "label": "int64[]"}


def saved(folder, table, features, parts=2):
    """A folder as `save_to_disk` of Hugging Face's datasets writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{part:05}-of-{parts:05}.arrow" for part in range(parts)]
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for part, name in enumerate(names):
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table[part * 10 : part * 10 + 10 if part < parts - 1 else None])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_data_set_that_was_saved_to_disk_keeps_the_names_of_its_classes(tmp_path):
    table = pyarrow.table({"who": ["a", "b"] * 12, "said": [f"text {row}" for row in range(24)], "stars": [0, 1] * 12})
    saved(tmp_path / "all" / "train", table, {"stars": {"names": ["bad", "fair", "good"], "_type": "ClassLabel"}})
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    columns = datasets.Columns(user="who", inputs=("said",), target="stars")
    users = datasets.load(str(tmp_path / "all" / "train"), columns=columns)
    assert (users.clients, users.classes, users.class_names) == (("a", "b"), 3, ("bad", "fair", "good"))
    assert users.fields["label"].tolist() == [0] * 12 + [1] * 12
    with pytest.raises(DatasetError, match="all holds the parts train of a data set; name one"):
        datasets.load(str(tmp_path / "all"), columns=columns)
    (tmp_path / "all" / "train" / "data-00001-of-00002.arrow").write_bytes(b"no")
    with pytest.raises(DatasetError, match="train is no data set of save_to_disk that can be read"):
        datasets.load(str(tmp_path / "all" / "train"), columns=columns)


def test_rows_that_lack_a_value_are_left_out_when_asked(tmp_path):
    (tmp_path / "t.csv").write_text(CSV + "7,,1,2,run\n,1,1,2,run\n7,nan,1,2,run\n7,1,1,2,\n7,1,1,,run\n")
    path = str(tmp_path / "t.csv")
    with pytest.raises(DatasetError, match=r"column 'who' has 1 missing values, the first in row 25; .*--drop-missing"):
        datasets.load(path, columns=DID)
    users = datasets.load(path, columns=replace(DID, drop_missing=True))
    assert (users.dropped, int(users.starts[-1]), len(users)) == (4, 25, 2)
    (tmp_path / "t.csv").write_text("who,heart,steps,did\na,,1,run\nb,1,1,\n")
    with pytest.raises(DatasetError, match="holds no examples: each of 2 rows lacks a value"):
        datasets.load(path, columns=replace(DID, drop_missing=True))


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        (CSV, {"user": "whom"}, "has no column 'whom'; did you mean who"),
        (CSV, {"inputs": ("heart", "step")}, "has no column 'step'; did you mean steps"),
        (
            CSV,
            {"inputs": ("heart", "did"), "target": "age"},
            "column 'did' holds texts beside other inputs; leave it out",
        ),
        (CSV.replace(",", ";"), {}, "has one column, 'who;heart;steps;age;did'; separate columns by commas"),
        ("a,a\n1,2\n", {}, "has 2 columns 'a'"),
        ("who,heart,steps,did\na,1,2\n", {}, "no CSV file that can be read"),
        (CSV.replace(",6,6,", ",16777217,6,"), {}, "holds 16777217 in row 12, a whole number"),
    ],
)
def test_a_table_that_is_not_as_its_columns_say_is_named(tmp_path, text, columns, words):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DatasetError, match=words) as refused:
        datasets.load(str(tmp_path / "t.csv"), columns=replace(DID, **columns))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"inputs": ("a",)}, "inputs needs target too"),
        ({"target": "a"}, "target needs inputs too"),
        ({"inputs": ("a", "b"), "target": "a"}, "column 'a' is named twice"),
    ],
)
def test_columns_that_do_not_go_together_are_named(columns, words):
    with pytest.raises(DatasetError, match=words):
        datasets.Columns(**columns)


def test_columns_are_of_files(module):
    with pytest.raises(DatasetError, match="digits has its fields; leave the columns of your own tables out"):
        datasets.load("digits", columns=DID)
    with pytest.raises(DatasetError, match="is a function, whose population has its fields"):
        datasets.load(f"{module}:users", columns=DID)


def test_what_others_say_is_one_short_line():
    assert reason(ValueError("x" * 300 + "\nmore")) == f"ValueError: {'x' * 200}…"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda shard: shard["x"].__setitem__((1, 2), np.nan), "users: field 'x' of client 'u3' holds a number that"),
        (lambda shard: shard["y"].__setitem__(0, -1), "users: a label of client 'u3' is -1"),
    ],
)
def test_users_that_are_given_are_checked(spoil, message):
    shards = [{"x": np.ones((4, 3), np.float32), "y": np.arange(4)} for _ in range(5)]
    spoil(shards[3])
    users = Population.of([f"u{number}" for number in range(5)], shards)
    with pytest.raises(DatasetError, match=message):
        simulate(SimulationConfig(model="logreg"), given=Overrides(users=users))


def test_a_result_says_how_many_reports_were_left_out():
    shards = [{"x": np.ones((4, 3), np.float32), "y": np.arange(4)} for _ in range(5)]
    whole = Population.of([f"u{number}" for number in range(5)], shards)
    trains = int(whole.split(0.2, seed=0)[0].clients[0][1:])
    shards[trains]["x"] *= np.float32(3e38)  # finite, but no loss of it is
    users = Population.of(whole.clients, shards)
    config = SimulationConfig(model="logreg", rounds=2, cohort=4, engine="torch", processes=1)
    assert (
        simulate(config, given=Overrides(users=whole)).excluded,
        simulate(config, given=Overrides(users=users)).excluded,
    ) == (0, 2)
