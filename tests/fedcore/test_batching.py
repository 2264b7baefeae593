"""Which examples are trained on, in which order, and until when."""

import hashlib
import json
import math
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedcore.batching import HoldOut, StreamKey, batches, is_held_out, noise, permutation
from fedcore.errors import PlanError
from fedcore.plan import ExampleSpec, Field, Plan
from fedcore.schedule import Loop
from tests.fedcore.test_plan import changed, make_plan
from tools.make_device_vectors import PATH

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS, NOISE = (json.loads((FOLDER / name).read_text()) for name in ("order.json", "noise.json"))
KEY = StreamKey(seed=7, round=3, slot=2)
LOOPS = st.builds(
    Loop,
    batch_size=st.integers(1, 9),
    epochs=st.integers(1, 4),
    steps=st.none() | st.integers(1, 12),
    shuffle=st.booleans(),
)
M64 = 2**64 - 1


def philox4x64_10(counter, key):
    """Four 64-bit words. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & M64, (k[1] + 0xBB67AE8584CAA73B) & M64]
    return c


def stream_by_the_specification(label, numbers, count):
    tag = label + b"".join(n.to_bytes(8, "little") for n in numbers)
    key = struct.unpack("<QQ", hashlib.sha256(tag).digest()[:16])
    return [word for i in range(-(-count // 4)) for word in philox4x64_10((i + 1, 0, 0, 0), key)][:count]


def order_by_the_specification(seed, round, slot, pass_index, epoch, examples):
    words = stream_by_the_specification(b"muster.order.v1", (seed, round, slot, pass_index, epoch), examples)
    return sorted(range(examples), key=words.__getitem__)


def noise_by_the_specification(seed, round, slot, pass_index, step, size):
    words = stream_by_the_specification(b"muster.noise.v1", (seed, round, slot, pass_index, step), -(-size // 2))
    halves = [half for word in words for half in (word % 2**32, word >> 32)]
    return [half - 2**32 if half >= 2**31 else half for half in halves[:size]]


def test_the_philox_here_gives_the_known_answers_of_its_authors():
    # kat_vectors of Random123: philox4x64 10 rounds.
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox4x64_10((0, 0, 0, 0), (0, 0)) == zeros
    assert philox4x64_10((M64,) * 4, (M64,) * 2) == ones


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_order_follows_the_specification_and_its_published_vectors(vector):
    seed, round, slot, pass_index, epoch = (vector[name] for name in ("seed", "round", "slot", "pass", "epoch"))
    order = permutation(StreamKey(seed, round, slot), pass_index, epoch, vector["examples"])
    assert order.tolist() == vector["order"]
    assert order_by_the_specification(seed, round, slot, pass_index, epoch, vector["examples"]) == vector["order"]


@pytest.mark.parametrize("vector", NOISE, ids=str)
def test_noise_follows_the_specification_and_its_published_vectors(vector):
    seed, round, slot, pass_index, step = (vector[name] for name in ("seed", "round", "slot", "pass", "step"))
    drawn = noise(StreamKey(seed, round, slot), pass_index, step, vector["size"])
    assert (drawn.dtype, drawn.tolist()) == (np.int32, vector["noise"])
    assert noise_by_the_specification(seed, round, slot, pass_index, step, vector["size"]) == vector["noise"]


@pytest.mark.security("The noise of a secure round is keyed by a secret of the device")
def test_a_secret_enters_the_noise_and_not_the_order():
    secret = bytes(range(32))
    hidden, known = StreamKey(7, 3, 2, secret), StreamKey(7, 3, 2)
    words = stream_by_the_specification(b"muster.noise.v1" + secret, (7, 3, 2, 0, 5), 4)
    assert noise(hidden, 0, 5, 8).astype("<i4").tobytes() == b"".join(word.to_bytes(8, "little") for word in words)
    assert permutation(hidden, 0, 1, 40).tolist() == permutation(known, 0, 1, 40).tolist()


def test_every_part_of_the_key_changes_the_order():
    keys = [(7, 3, 2, 0, 0), (8, 3, 2, 0, 0), (7, 4, 2, 0, 0), (7, 3, 1, 0, 0), (7, 3, 2, 1, 0), (7, 3, 2, 0, 1)]
    orders = {tuple(permutation(StreamKey(*key[:3]), key[3], key[4], 40)) for key in keys}
    assert len(orders) == len(keys)


@given(loop=LOOPS, examples=st.integers(0, 30))
def test_every_sweep_visits_every_example_once_under_mask_one(loop, examples):
    steps = list(batches(loop, examples, KEY, 0))
    assert len(steps) == loop.step_count(examples)
    visited = np.concatenate([indices[mask == 1] for indices, mask in steps]) if steps else np.zeros(0, np.int64)
    for start in range(0, len(visited), max(examples, 1)):
        sweep = visited[start : start + examples]
        assert len(set(sweep)) == len(sweep)
        if len(sweep) == examples:
            assert set(sweep) == set(range(examples))


@given(loop=LOOPS, examples=st.integers(1, 30))
def test_every_batch_is_full_and_padding_follows_real_examples(loop, examples):
    for indices, mask in batches(loop, examples, KEY, 0):
        real = int(mask.sum())
        assert indices.shape == mask.shape == (loop.batch_size,)
        assert (indices.dtype, mask.dtype) == (np.int64, np.float32)
        assert 1 <= real <= loop.batch_size
        assert mask.tolist() == [1.0] * real + [0.0] * (loop.batch_size - real)
        assert (indices[real:] == indices[0]).all()


def test_a_sweep_ends_with_its_short_batch_and_the_next_begins_afresh():
    masks = [mask.sum() for _, mask in batches(Loop(batch_size=4, epochs=2), 6, KEY, 0)]
    assert masks == [4, 2, 4, 2]


def test_steps_cap_all_epochs_together_and_do_not_extend_them():
    assert Loop(batch_size=4, epochs=2, steps=3).step_count(6) == 3
    assert Loop(batch_size=4, epochs=2, steps=99).step_count(6) == 4
    assert len(list(batches(Loop(batch_size=4, epochs=2, steps=3), 6, KEY, 0))) == 3


def test_without_shuffling_examples_come_in_the_order_of_the_store():
    steps = list(batches(Loop(batch_size=2, shuffle=False), 5, KEY, 0))
    assert [indices.tolist() for indices, _ in steps] == [[0, 1], [2, 3], [4, 4]]


def test_every_epoch_has_its_own_order():
    first, second = batches(Loop(batch_size=30, epochs=2), 30, KEY, 0)
    assert first[0].tolist() != second[0].tolist()


def test_no_examples_give_no_batches():
    assert list(batches(Loop(batch_size=4), 0, KEY, 0)) == []


@pytest.mark.parametrize("name", ["batch_size", "epochs", "steps"])
def test_a_loop_that_does_nothing_is_refused_by_name(name):
    with pytest.raises(PlanError, match=f"{name} must be at least 1, not 0"):
        Loop(**({"batch_size": 1} | {name: 0}))


IDS = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(10_000)]
FIELDS = (Field("x", "float32", (2, 3)), Field("y", "int64"))
CODES = {"float32": "f", "int64": "q", "int32": "i", "uint8": "B"}


def examples(count=2000):
    rng = np.random.default_rng(3)
    return {"x": rng.normal(size=(count, 2, 3)).astype(np.float32), "y": rng.integers(0, 10, count)}


def spec_of(share, side="train", fields=FIELDS, collection="default"):
    return ExampleSpec(fields, collection, HoldOut(share, side))


def within_three_sigma(held_out, share, count):
    return abs(held_out - share * count) <= 3 * math.sqrt(share * (1 - share) * count)


def device_by_the_specification(population, device):
    tag = b"muster.hold-out.device.v1" + bytes(1) + population.encode() + bytes(1) + device.encode()
    return struct.unpack(">Q", hashlib.sha256(tag).digest()[:8])[0] / 2**64


def kept_by_the_specification(spec, columns, count):
    kept = []
    for place in range(count):
        tag = b"muster.hold-out.example.v1" + bytes(1) + spec.collection.encode() + bytes(1)
        for field in spec.fields:
            values = np.asarray(columns[field.name][place]).ravel().tolist()
            tag += struct.pack(f"<{len(values)}{CODES[field.dtype]}", *values)
        held_out = struct.unpack(">Q", hashlib.sha256(tag).digest()[:8])[0] / 2**64 < spec.hold_out.share
        kept += [place] * (held_out == (spec.hold_out.side == "held-out"))
    return kept


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_a_share_of_the_devices_is_held_out(share):
    held_out = [device for device in IDS if is_held_out("phones", device, share)]
    assert within_three_sigma(len(held_out), share, len(IDS))
    assert held_out == [device for device in IDS if device_by_the_specification("phones", device) < share]


def test_a_smaller_share_of_the_devices_is_within_a_larger_one():
    shares = [{device for device in IDS if is_held_out("phones", device, share)} for share in (0, 0.05, 0.1, 0.2, 0.7)]
    assert not shares[0]
    assert all(smaller < larger for smaller, larger in pairwise(shares))


def test_two_populations_hold_out_devices_independently():
    phones, tablets = ({one for one in IDS if is_held_out(name, one, 0.3)} for name in ("phones", "tablets"))
    assert within_three_sigma(len(phones & tablets), 0.09, len(IDS))


def test_a_share_of_the_examples_is_held_out():
    kept = spec_of(0.2).kept(examples())
    assert within_three_sigma(np.count_nonzero(~kept), 0.2, len(kept))
    assert (spec_of(0.2, "held-out").kept(examples()) == ~kept).all()
    assert not (spec_of(0.1, "held-out").kept(examples()) & kept).any()  # 10 % is within 20 %


@pytest.mark.parametrize("vector", json.loads(PATH.read_text())["hold_outs"], ids=str)
def test_examples_are_held_out_as_the_specification_says(vector):
    given = vector["examples"]
    fields = tuple(Field(one["name"], one["dtype"], tuple(one["shape"])) for one in given["fields"])
    columns = {
        field.name: np.frombuffer(bytes.fromhex(vector["columns"][field.name]), field.dtype).reshape(-1, *field.shape)
        for field in fields
    }
    spec = ExampleSpec(fields, given["collection"], HoldOut(**given["hold_out"]))
    assert np.flatnonzero(spec.kept(columns)).tolist() == vector["kept"]
    assert kept_by_the_specification(spec, columns, vector["count"]) == vector["kept"]


def test_an_example_stays_on_its_side_wherever_it_is_stored():
    columns, mixed = examples(200), np.random.default_rng(1).permutation(200)
    kept = spec_of(0.5).kept(columns)
    assert (spec_of(0.5).kept({name: column[mixed] for name, column in columns.items()}) == kept[mixed]).all()
    strided = {
        name: np.repeat(column, 2, axis=0)[::2].astype(column.dtype.newbyteorder(">"))
        for name, column in columns.items()
    }
    assert (spec_of(0.5).kept(strided) == kept).all()


def test_collection_and_order_of_fields_change_who_is_held_out():
    columns = examples(200)
    kept = [
        spec.kept(columns).tolist()
        for spec in (spec_of(0.5), spec_of(0.5, collection="b"), spec_of(0.5, fields=FIELDS[::-1]))
    ]
    assert kept[0] != kept[1] != kept[2] != kept[0]


def test_a_plan_without_a_hold_out_runs_on_all_examples():
    assert ExampleSpec(FIELDS).kept(examples(7)).tolist() == [True] * 7


def test_fields_without_values_are_hashed_too():
    spec = spec_of(0.5, fields=(Field("x", "float32", (0,)),))
    assert len(set(spec.kept({"x": np.zeros((5, 0), np.float32)}).tolist())) == 1
    assert spec.kept({"x": np.zeros((0, 0), np.float32)}).tolist() == []


@pytest.mark.parametrize("share", [1, 1.2, -0.1, math.nan, math.inf])
def test_a_share_that_cannot_be_is_refused_by_name(share):
    with pytest.raises(PlanError, match=r"hold_out_examples must be a number, at least 0 and below 1, not"):
        HoldOut.asked(share, on_held_out=False)


def test_no_plan_runs_on_held_out_examples_where_none_are():
    with pytest.raises(PlanError, match="on_held_out_examples must be left out without hold_out_examples"):
        HoldOut.asked(0.0, on_held_out=True)
    assert HoldOut.asked(0, on_held_out=False) is None
    assert HoldOut.asked(0.25, on_held_out=True) == HoldOut(0.25, "held-out")


@pytest.mark.parametrize(
    "hold_out", [{"share": 1}, {"share": 0}, {"share": -0.1}, {"share": 0.1, "side": "both"}, {"side": "train"}, 0.2]
)
def test_a_plan_with_a_hold_out_that_cannot_be_is_malformed(hold_out):
    members = json.loads(make_plan().encode())["examples"]
    with pytest.raises(PlanError, match="malformed plan"):
        Plan.decode(changed(examples=members | {"hold_out": hold_out}))
    assert Plan.decode(changed(examples=members | {"hold_out": None})) == make_plan()
    good = Plan.decode(changed(examples=members | {"hold_out": {"share": 0.2}}))
    assert good.examples.hold_out == HoldOut(0.2, "train")


SIGTERM_HERE = "os.kill(os.getpid(), signal.SIGTERM)"
PROGRAM = """
import os, signal, time, weakref
from fedcore.private_files import exit_on_sigterm
class Held:
    def __del__(self):
        {destructor}
exit_on_sigterm(7)
try:
    held = Held()
    watched = weakref.ref(held, lambda gone: {callback})
    del held
    {body}
    time.sleep(10)
    print("deaf")
finally:
    print("released")
"""


@pytest.mark.parametrize("place", ["body", "destructor", "callback"])
def test_sigterm_ends_a_process_wherever_it_comes(place):
    program = PROGRAM.format(**{"body": "pass", "destructor": "pass", "callback": None} | {place: SIGTERM_HERE})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "released\n", "")
