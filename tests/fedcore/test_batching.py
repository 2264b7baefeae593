"""The order of examples and the noise of steps, against a Philox4x64-10 written here from its paper alone."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.batching import StreamKey, batches, noise, permutation
from fedcore.errors import PlanError
from fedcore.schedule import Loop

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
