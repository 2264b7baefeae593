"""Deltas between checkpoints: exact, shorter, and refused when they are damaged or would be too long."""

from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fedcore import checkpoint
from fedcore.deltas import applied, delta_between
from fedcore.errors import DeltaError
from fedcore.plan import BlobRef


def moved(share, seed=0):
    """A checkpoint, and another whose values moved by so small a share."""
    rng = np.random.default_rng(seed)
    params = rng.normal(size=5000).astype(np.float32)
    after = params * (1 + share * rng.normal(size=5000)).astype(np.float32)
    return checkpoint.encode({"params": params}), checkpoint.encode({"params": after})


@pytest.mark.parametrize(("share", "most"), [(0, 0.01), (1e-5, 0.4), (1e-3, 0.6), (1e-1, 0.9)])
def test_a_delta_is_shorter_the_less_moved_and_exact(share, most):
    before, after = moved(share)
    delta = delta_between(before, after)
    assert len(delta) < most * len(after)
    assert applied(delta, before, BlobRef.of(after)) == after


@given(pair=st.integers(0, 40).flatmap(lambda size: st.tuples(*[st.binary(min_size=size, max_size=size)] * 2)))
def test_any_two_blobs_of_one_length_have_a_delta(pair):
    before, after = pair
    assert applied(delta_between(before, after), before, BlobRef.of(after)) == after


def test_blobs_of_two_lengths_have_none():
    with pytest.raises(DeltaError, match="no delta between blobs of 3 and 4 bytes"):
        delta_between(b"abc", b"abcd")


def test_a_delta_to_another_base_or_target_is_refused():
    before, after = moved(1e-3)
    delta = delta_between(before, after)
    with pytest.raises(DeltaError, match="leads elsewhere"):
        applied(delta, after, BlobRef.of(after))
    with pytest.raises(DeltaError, match="leads elsewhere"):
        applied(delta, before, BlobRef.of(before))
    with pytest.raises(DeltaError, match="a delta to a blob of"):
        applied(delta, before[:-4], BlobRef.of(after))


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_delta_is_refused(place, bit, cut):
    before, after = moved(1e-3)
    delta = bytearray(delta_between(before, after))
    place %= len(delta)
    if cut:
        del delta[place:]
    else:
        delta[place] ^= 1 << bit
    with suppress(DeltaError):  # a few bits mean nothing
        assert applied(bytes(delta), before, BlobRef.of(after)) == after


@given(data=st.binary(max_size=60))
def test_any_bytes_are_refused_as_a_delta(data):
    before, after = moved(1e-3)
    with pytest.raises(DeltaError):
        applied(data, before, BlobRef.of(after))


@pytest.mark.parametrize("told", [True, False], ids=["says its length", "does not say its length"])
def test_a_delta_that_decompresses_to_too_much_is_refused(told):
    before, after = moved(1e-3)
    writer = zstandard.ZstdCompressor(write_content_size=told)
    stream = writer.compressobj()
    bomb = writer.compress(bytes(1 << 26)) if told else stream.compress(bytes(1 << 26)) + stream.flush()
    assert len(bomb) < 1 << 16
    with pytest.raises(DeltaError, match="when it is decompressed"):
        applied(bomb, before, BlobRef.of(after))
    double = delta_between(before, after)
    with pytest.raises(DeltaError):
        applied(double + double, before, BlobRef.of(after))
