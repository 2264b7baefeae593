import logging
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from device_runtime.errors import ExampleRefused, ExamplesError, StoreDamaged, StoreError
from device_runtime.examples import Collection, ExampleStore, Retention, open_examples
from device_runtime.session import run_session
from fedcore.plan import BlobRef, ExampleSpec, Field, Tokenizer

FIELDS = (Field("x", "float32", (2, 3)), Field("y", "int64", (), 10), Field("b", "uint8", (4,)))
SPEC = ExampleSpec(FIELDS)
EXAMPLE_BYTES = 6 * 4 + 8 + 4
DAY_S = 86_400.0


def example(label=1, **changed):
    return {"x": np.full((2, 3), label, np.float32), "y": label, "b": [0, 1, 2, 255]} | changed


def labels(store, collection="default"):
    return store.load(ExampleSpec(FIELDS, collection))["y"].tolist()


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    made = ExampleStore.open(tmp_path / "store", clock)
    made.declare(Collection("default", FIELDS))
    return made


def damage(store, start=100):
    """Overwrite all but the first bytes, as a failing disk does."""
    data = bytearray(store.path.read_bytes())
    data[start:] = b"\xff" * (len(data) - start)
    store.path.write_bytes(data)


def test_an_app_appends_what_a_session_loads(store, tmp_path):
    assert store.append("default", example(3)).added == 1
    assert store.append_all("default", [example(label) for label in (4, 5)]).added == 2
    source = open_examples(tmp_path / "store")
    assert source.counts() == {"default": 3}
    loaded = source.load(SPEC)
    assert [column.dtype.name for column in loaded.values()] == ["float32", "int64", "uint8"]
    np.testing.assert_array_equal(loaded["x"], np.array([3, 4, 5], np.float32)[:, None, None] * np.ones((2, 3)))
    assert loaded["y"].tolist() == [3, 4, 5]
    assert loaded["b"].tolist() == [[0, 1, 2, 255]] * 3
    assert open_examples(store.path).load(SPEC)["y"].tolist() == [3, 4, 5]


def test_numbers_lists_and_arrays_of_either_byte_order_are_the_same(store):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for x in (array, array.tolist(), array.astype(">f4"), [[0, 1, 2], [3, 4, 5]]):
        store.append("default", example(x=x))
    assert (store.load(SPEC)["x"] == array).all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": np.zeros((2, 3))}, r"field 'x' is float64\[2, 3\], not float32\[2, 3\]"),
        ({"x": np.zeros((3, 2), np.float32)}, r"field 'x' is float32\[3, 2\], not float32\[2, 3\]"),
        ({"x": [[1.0, 2.0, 3.0], [1.0]]}, "field 'x' is a list of lists of different lengths"),
        ({"x": [[1.0, 2.0, np.nan]] * 2}, "field 'x' holds an infinity, a NaN"),
        ({"x": [[1.0, 2.0, 1e300]] * 2}, "field 'x' holds an infinity, a NaN or a number beyond float32"),
        ({"y": 10}, "field 'y' holds a value outside 0 … 9"),
        ({"y": -1}, "field 'y' holds a value outside 0 … 9"),
        ({"y": 1.0}, r"field 'y' is float64\[\], not int64\[\]"),
        ({"y": "7"}, "field 'y' is <U1"),
        ({"y": object()}, "field 'y' is object"),
        ({"y": np.int32(1)}, r"field 'y' is int32\[\], not int64"),
        ({"y": True}, r"field 'y' is bool"),
        ({"b": [0, 1, 2, 256]}, "field 'b' holds a value outside 0 … 255"),
        ({"z": 1}, r"has the fields \['b', 'x', 'y'\], not \['b', 'x', 'y', 'z'\]"),
    ],
)
def test_what_no_plan_could_load_is_refused_by_field_and_nothing_is_added(store, changed, words):
    with pytest.raises(ExampleRefused, match=words):
        store.append_all("default", [example(), example(**changed)])
    assert store.counts() == {}


def test_a_missing_field_is_refused(store):
    with pytest.raises(ExampleRefused, match=r"not \['x', 'y'\]"):
        store.append("default", {"x": np.zeros((2, 3), np.float32), "y": 1})


def test_a_collection_is_declared_before_examples_are_added(store):
    with pytest.raises(ExampleRefused, match="no collection 'photos' was declared"):
        store.append("photos", example())


def test_a_declaration_stands_until_the_collection_is_deleted(store):
    store.declare(Collection("default", FIELDS))
    with pytest.raises(ExampleRefused, match=r"declared with x float32\[2, 3\], y int64\[\] below 10, .* not y int64"):
        store.declare(Collection("default", (Field("y", "int64"),)))
    store.delete("default")
    store.declare(Collection("default", (Field("y", "int64"),)))
    store.append("default", {"y": 11})


@pytest.mark.parametrize(
    ("collection", "words"),
    [
        (Collection("c", (Field("x", "float64"),)), "dtype"),
        (Collection("c", (Field("x", "float32", (-1,)),)), "shape"),
        (Collection("c", ()), "needs a name and fields"),
        (Collection("", FIELDS), "needs a name"),
        (Collection("c", (*FIELDS, Field("y", "int64"))), "names of their own"),
        (Collection("c", (Field("x", "float32", (), 3),)), "'x' of float32 cannot have 3"),
        (Collection("c", (Field("x", "uint8", (), 257),)), "'x' of uint8 cannot have 257"),
        (Collection("c", (Field("x", "uint8", (), 0),)), "'x' of uint8 cannot have 0"),
        (Collection("c", FIELDS, Retention(max_count=0)), "max_count"),
        (Collection("c", FIELDS, Retention(max_age_s=-1.0)), "max_age_s"),
        (Collection("c", FIELDS, Retention(max_bytes=EXAMPLE_BYTES - 1)), "below the 36 bytes of one example"),
    ],
)
def test_a_declaration_that_no_plan_could_use_is_refused(store, collection, words):
    with pytest.raises(ExampleRefused, match=words):
        store.declare(collection)
    assert [held.collection for held in store.holdings()] == ["default"]


def test_a_plan_that_wants_another_field_or_form_is_told_what_there_is(store):
    store.append("default", example())
    for field, words in [
        (Field("z", "float32"), r"no field 'z', it has \['b', 'x', 'y'\]"),
        (Field("x", "float32", (3, 2)), r"'x' holds float32\[2, 3\], the plan wants float32\[3, 2\]"),
        (Field("y", "int32"), r"'y' holds int64\[\], the plan wants int32"),
    ]:
        with pytest.raises(ExamplesError, match=words):
            store.load(ExampleSpec((field,)))


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(max_count=2), [3, 4]),
        (Retention(max_bytes=3 * EXAMPLE_BYTES + 1), [2, 3, 4]),
        (Retention(max_age_s=DAY_S), [3, 4]),
        (Retention(max_age_s=2.5 * DAY_S, max_count=3), [2, 3, 4]),
        (Retention(max_age_s=2.5 * DAY_S, max_count=9), [2, 3, 4]),
        (Retention(), [0, 1, 2, 3, 4]),
    ],
)
def test_at_insertion_the_oldest_examples_go(store, clock, retention, kept):
    store.declare(Collection("photos", FIELDS, retention))
    store.append("default", example(9), clock.now - 99 * DAY_S)
    # Inserted newest first: age decides, not the order of insertion.
    done = [store.append("photos", example(n), clock.now - (4 - n) * DAY_S) for n in (4, 3, 2, 1, 0)]
    assert sorted(labels(store, "photos")) == kept
    assert sum(one.removed for one in done) == 5 - len(kept)
    assert labels(store) == [9]


def test_a_long_text_among_short_ones_costs_its_own_bytes_alone(tmp_path, clock):
    text = Field("text", "uint8", (200_000,))
    made = ExampleStore.open(tmp_path / "texts", clock)
    made.declare(Collection("default", (text, FIELDS[1])))
    said = ["x" * 200_000, *["a short note about the train"] * 300, ""]
    made.append_all("default", [{"text": one, "y": place % 10} for place, one in enumerate(said)])
    assert made.path.stat().st_size < 400_000
    got = []
    wanted = structs.replace(text, dtype="int32", shape=(1,), tokenizer=Tokenizer(BlobRef.of(b""), 0))

    def tokenize(field, tokenizer, texts):
        got.extend(texts)
        return np.zeros((len(texts), 1), np.int32)

    tracemalloc.start()
    loaded = made.load(ExampleSpec((wanted, FIELDS[1])), tokenize=tokenize)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got == [one.encode() for one in said]
    assert loaded["y"].tolist() == [place % 10 for place in range(len(said))]
    assert peak < 5_000_000


def test_zeros_at_the_end_of_a_line_of_bytes_are_read_again(store):
    lines = [[0, 0, 0, 0], [0, 7, 0, 0], [1, 2, 3, 4]]
    store.append_all("default", [example(n, b=line) for n, line in enumerate(lines)])
    loaded = store.load(SPEC)
    assert (loaded["b"].dtype, loaded["b"].tolist()) == (np.uint8, lines)
    np.testing.assert_array_equal(loaded["x"][:, 0, 0], [0, 1, 2])


def test_a_batch_is_cut_to_what_is_kept(store):
    store.declare(Collection("photos", FIELDS, Retention(max_count=2)))
    done = store.append_all("photos", [example(n) for n in range(5)])
    assert (done.added, done.removed, labels(store, "photos")) == (5, 3, [3, 4])


def test_a_session_never_sees_what_has_become_too_old(store, clock):
    store.declare(Collection("default", FIELDS, Retention(max_age_s=DAY_S)))
    store.append("default", example(1))
    clock.now += 0.6 * DAY_S
    store.append("default", example(2))
    clock.now += 0.6 * DAY_S
    assert store.counts() == {"default": 1}
    clock.now += 0.3 * DAY_S
    assert labels(store) == [2]
    clock.now += 1.0 * DAY_S
    with pytest.raises(ExamplesError, match="no examples"):
        store.load(SPEC)


@pytest.mark.parametrize("given", [None, 10 * 365 * DAY_S])
def test_an_example_of_the_future_is_of_now_and_becomes_too_old(store, clock, given):
    """Whether the clock was ahead when it came, or its time was given so."""
    right = 1_800_000_000.0
    store.declare(Collection("default", FIELDS, Retention(max_age_s=DAY_S, max_count=3)))
    clock.now = right if given else right + 10 * 365 * DAY_S
    for n in range(3):
        store.append("default", example(n), None if given is None else right + given)
    clock.now = right
    assert store.count_recent("default", 1.0) == 3
    assert store.holdings()[0].newest == right
    clock.now += 60.0
    for n in (7, 8):
        store.append("default", example(n))
    assert sorted(labels(store)) == [2, 7, 8]
    clock.now = right + DAY_S + 1
    assert sorted(labels(store)) == [7, 8]


def test_a_clock_that_was_reset_makes_no_example_older(store, clock):
    clock.now = 1_800_000_000.0
    store.declare(Collection("default", FIELDS, Retention(max_age_s=DAY_S)))
    store.append("default", example(1))
    clock.now = 0.0
    assert labels(store) == [1]
    clock.now = 1_800_000_060.0
    assert labels(store) == [1]


def test_a_new_retention_replaces_the_old_one(store):
    store.append_all("default", [example(n) for n in range(5)])
    store.declare(Collection("default", FIELDS, Retention(max_count=1)))
    assert labels(store) == [4]


def test_holdings_tell_count_bytes_and_age(store, clock):
    store.declare(Collection("empty", FIELDS[:1], Retention(max_count=7)))
    store.append_all("default", [example(), example()], clock.now - 5)
    store.append("default", example())
    full, empty = store.holdings()
    assert (full.collection, full.examples, full.bytes) == ("default", 3, 3 * EXAMPLE_BYTES)
    assert (full.oldest, full.newest) == (clock.now - 5, clock.now)
    assert (empty.examples, empty.bytes, empty.oldest, empty.retention.max_count) == (0, 0, None, 7)
    assert full.fields == FIELDS


@pytest.mark.parametrize(
    ("arguments", "removed", "left"),
    [
        ({"collection": "default"}, 3, {"photos": 3}),
        ({"before": 2.0}, 4, {"default": 1, "photos": 1}),
        ({"collection": "photos", "before": 1.0}, 1, {"default": 3, "photos": 2}),
        ({}, 6, {}),
        ({"collection": "other"}, 0, {"default": 3, "photos": 3}),
    ],
)
def test_deletion_takes_what_was_asked_for_and_nothing_else(store, arguments, removed, left):
    store.declare(Collection("photos", FIELDS))
    for name in ("default", "photos"):
        for at in (0.0, 1.0, 2.0):
            store.append(name, example(), at)
    assert store.delete(**arguments) == removed
    assert store.counts() == left


def sealed_last(store):
    """The bytes of the last example as they lie in the file."""
    with closing(sqlite3.connect(store.path)) as connection:
        ((last,),) = connection.execute("SELECT data FROM examples ORDER BY id DESC LIMIT 1").fetchall()
    return last


def test_deleted_bytes_are_gone_from_the_file(store):
    store.append_all("default", [example()] * 500)
    size, last = store.path.stat().st_size, sealed_last(store)
    assert last in store.path.read_bytes()
    store.delete("default")
    assert last not in store.path.read_bytes()
    assert store.path.stat().st_size < size / 2


def test_what_retention_removes_is_gone_from_the_file(store):
    store.append_all("default", [example()] * 500)
    last = sealed_last(store)
    store.declare(Collection("default", FIELDS, Retention(max_count=1)))
    store.append("default", example())
    assert last not in store.path.read_bytes()


@pytest.mark.parametrize("at", [np.nan, np.inf, "now", 10**400, b"5", True])
def test_a_time_that_is_none_is_refused(store, at):
    with pytest.raises(ExampleRefused, match="of the time"):
        store.append("default", example(), at)


def test_a_masked_array_is_refused_as_its_masked_values_would_be_stored(store):
    masked = np.ma.masked_array(np.ones((2, 3), np.float32), mask=True)
    with pytest.raises(ExampleRefused, match="'x' is a masked array"):
        store.append("default", example(x=masked))


def test_an_age_without_end_is_refused_and_not_stored_as_no_limit(store):
    with pytest.raises(ExampleRefused, match="max_age_s"):
        store.retain("default", Retention(max_age_s=np.inf))


def test_only_the_owner_may_read_the_store(store):
    assert (store.path.stat().st_mode & 0o777, store.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_group_that_the_owner_let_in_may_go_on_after_damage(store):
    store.append_all("default", [example()] * 200)
    store.path.chmod(0o660)
    damage(store, 0)
    with pytest.raises(StoreDamaged):
        store.load(SPEC)
    assert store.path.stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize("start", [0, 100, 4096])
def test_a_damaged_store_is_kept_aside_and_an_app_goes_on(store, start, caplog):
    store.append_all("default", [example()] * 200)
    damage(store, start)
    bytes_before = store.path.read_bytes()
    app = ExampleStore.open(store.path.parent)
    app.declare(Collection("default", FIELDS))
    done = app.append("default", example(7))
    if done.put_aside is None:  # the end of the file can be written without a look at the damage
        with pytest.raises(StoreDamaged):
            app.load(SPEC)
        done = app.append("default", example(7))
    (kept,) = (path for path in store.path.parent.iterdir() if ".damaged-" in path.name)
    assert app.put_aside == kept
    assert done.put_aside == str(kept)
    assert kept.read_bytes()[start:][:3000] == bytes_before[start:][:3000]
    assert labels(app) == [7]
    assert [(record.levelno, str(kept) in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


def test_a_session_says_that_the_store_was_damaged_once(store):
    store.append_all("default", [example()] * 200)
    damage(store, 3 * 4096)
    with pytest.raises(StoreDamaged, match=r"kept aside, and a new one was made: .*\.damaged-") as caught:
        store.load(SPEC)
    assert caught.value.reason == "invalid-examples"
    assert ".damaged" not in caught.value.detail
    # The first page, which says what was declared, was whole.
    assert open_examples(store.path).counts() == {}
    store.append("default", example(5))
    assert labels(store) == [5]


def test_the_outcome_of_a_session_says_that_the_store_was_damaged(store, config):
    store.append_all("default", [example()] * 200)
    damage(store, 3 * 4096)
    outcome = run_session(replace(config, examples=store.path.parent))
    assert (outcome.outcome, outcome.reason) == ("failed", "invalid-examples")
    assert "kept aside" in outcome.detail


def test_a_damaged_file_that_another_process_replaced_is_left_alone(store, monkeypatch):
    store.append_all("default", [example()] * 200)
    damage(store)
    inodes = iter([1, 2])
    monkeypatch.setattr(store._database, "_inode", lambda: next(inodes))
    with pytest.raises(StoreDamaged):
        store.counts()
    assert {path.name for path in store.path.parent.iterdir()} == {"examples.db", "examples.db.key"}


def test_another_applications_database_is_refused_and_left_as_it_is(tmp_path):
    with sqlite3.connect(tmp_path / "examples.db") as connection:
        connection.execute("CREATE TABLE examples (id, collection, fields)")
    connection.close()
    before = (tmp_path / "examples.db").read_bytes()
    for use in (ExampleStore.open, lambda folder: open_examples(folder).load(SPEC)):
        with pytest.raises(ExamplesError, match="not an example store"):
            use(tmp_path)
    assert (tmp_path / "examples.db").read_bytes() == before


def test_a_folder_without_a_store_is_said_to_be_one(tmp_path):
    with pytest.raises(ExamplesError, match=f"{tmp_path.name}: a folder without an example store$"):
        open_examples(tmp_path)


def test_an_example_that_was_changed_is_named_by_its_index(store):
    store.append_all("default", [example(), example()])
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE examples SET data = x'00' WHERE id = 2")
    connection.close()
    with pytest.raises(ExamplesError, match="example 1 was changed, or sealed under another key"):
        store.load(SPEC)


def test_where_the_disk_ends_an_append_fails_and_what_was_there_stays(store):
    store.append("default", example(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.path.stat().st_size + 4096, limits[1]))
    try:
        with pytest.raises(StoreError, match="full or failing"):
            store.append_all("default", [example(2)] * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert labels(store) == [1]
    store.append("default", example(3))
    assert labels(store) == [1, 3]


def test_a_full_disk_is_said_and_loses_nothing(store, monkeypatch):
    store.append("default", example(1))
    connect = sqlite3.connect

    def full(*arguments, **options):
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 10")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with pytest.raises(StoreError, match="no space left: free some"):
            store.append_all("default", [example(2)] * 1000)
    assert labels(store) == [1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot be made: .*/file"):
        ExampleStore.open(tmp_path / "file" / "store")


@contextmanager
def unprivileged():
    """Without the right to overrule permissions, which the superuser has."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def read_only(clock):
    """A store in a folder that may be read and not written, with one example from the time 0."""
    with tempfile.TemporaryDirectory() as name:
        made = ExampleStore.open(Path(name), clock)
        made.declare(Collection("default", FIELDS))
        made.append("default", example(4), 0.0)
        for path in Path(name).iterdir():
            path.chmod(0o444)
        Path(name).chmod(0o555)
        yield made
        Path(name).chmod(0o755)


def test_a_store_that_may_not_be_written_is_still_read(read_only):
    with unprivileged():
        assert labels(open_examples(read_only.path.parent)) == [4]


def test_appending_where_nothing_may_be_written_says_so_and_loses_nothing(read_only):
    with unprivileged(), pytest.raises(StoreError, match="the file or its folder may not be written"):
        read_only.append("default", example())
    assert labels(read_only) == [4]


def test_what_is_too_old_is_not_read_where_it_cannot_be_removed(read_only):
    read_only.declare(Collection("default", FIELDS, Retention(max_age_s=read_only._clock() + 1)))
    read_only._clock.now += DAY_S
    with unprivileged(), pytest.raises(StoreError, match="may not be written"):
        read_only.load(SPEC)


OPEN = "from pathlib import Path\nfrom device_runtime.examples import ExampleStore"


def test_two_processes_append_at_once_and_nothing_is_lost(store):
    code = f"""{OPEN}
store = ExampleStore(Path({str(store.path)!r}))
input()
for n in range(100):
    store.append("default", {{"x": [[0.5] * 3] * 2, "y": 2, "b": [0] * 4}})
"""
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) for _ in range(2)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        child.communicate()
    assert [child.returncode for child in children] == [0, 0]
    assert store.counts() == {"default": 200}


def test_a_process_that_dies_while_it_appends_leaves_whole_appends(store):
    code = f"""{OPEN}
store = ExampleStore(Path({str(store.path)!r}))
while True:
    store.append_all("default", [{{"x": [[0.5] * 3] * 2, "y": 2, "b": [0] * 4}}] * 200)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        while not store.counts():
            time.sleep(0.01)
        child.kill()
    assert store.counts()["default"] % 200 == 0
    store.append("default", example())
