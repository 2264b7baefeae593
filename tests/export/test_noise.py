"""Dropout and random numbers: those of docs/spec/plan.md §2.2, written a second time, and evenly spread."""

import hashlib
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from export.errors import InvalidModel
from export.rewrites import KeyedNoise

ROWS, PLACES = 400, 500
NOISE = np.random.default_rng(4).integers(-(2**31), 2**31, ROWS).astype(np.int32)


def mixed(noise, turn, place, rounds):
    start = int.from_bytes(hashlib.sha256(b"muster.dropout.v1 %d" % turn).digest()[:4], "little")
    x = (noise + start + place * 2654435769) % 2**32
    for _ in range(rounds):
        x = x * (2 * x + 1) % 2**32
    return x - 2**32 if x >= 2**31 else x


def uniform(noise, turn, place):
    return max(mixed(noise, turn, place, 4) / 2**32 + 0.5, 2**-32)


def test_values_are_dropped_and_drawn_as_the_specification_says():
    x = torch.ones(2, 3, 2)
    with KeyedNoise(torch.from_numpy(NOISE[:2])) as drawn:
        dropped = functional.dropout(x, 0.3)
        first, normal = torch.rand_like(x), torch.randn_like(x)
    assert drawn.turns == 4
    for row, noise in enumerate(NOISE[:2].tolist()):
        for place in range(6):
            kept = mixed(noise, 1, place, 2) >= round(0.3 * 2**32) - 2**31
            assert dropped[row].flatten()[place] == pytest.approx(kept / 0.7)
            assert first[row].flatten()[place] == pytest.approx(uniform(noise, 2, place), rel=1e-6)
            length = math.sqrt(-2 * math.log(uniform(noise, 3, place)))
            expected = length * math.cos(2 * math.pi * uniform(noise, 4, place))
            assert normal[row].flatten()[place] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("dropout", "shape"),
    [(functional.dropout1d, (5,)), (functional.dropout2d, (5, 4)), (functional.dropout3d, (2, 5, 4))],
)
def test_whole_channels_are_dropped_as_the_specification_says(dropout, shape):
    x = torch.rand(2, 6, *shape) + 1
    with KeyedNoise(torch.from_numpy(NOISE[:2])) as drawn:
        dropped = dropout(x, 0.4)
    assert drawn.turns == 1
    for row, noise in enumerate(NOISE[:2].tolist()):
        for channel in range(6):
            kept = mixed(noise, 1, channel, 2) >= round(0.4 * 2**32) - 2**31
            torch.testing.assert_close(dropped[row, channel], x[row, channel] * kept / 0.6)
    with KeyedNoise(None):
        torch.testing.assert_close(dropout(x, 0.4), x)


def test_random_numbers_are_uniform_normal_and_independent():
    x = torch.empty(ROWS, PLACES)
    with KeyedNoise(torch.from_numpy(NOISE)):
        u, v, z = torch.rand_like(x), torch.rand_like(x), torch.randn_like(x).double()
    n = x.numel()
    counts, _, _ = np.histogram2d(u.flatten(), v.flatten(), 20, [[0, 1], [0, 1]])
    assert ((counts - n / 400) ** 2 / (n / 400)).sum() < 399 + 5 * math.sqrt(2 * 399)
    moments = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}
    for power, (mean, variance) in moments.items():
        assert abs((z**power).mean() - mean) < 5 * math.sqrt(variance / n)
    for neighbours in (z[:, 1:] * z[:, :-1], z[1:] * z[:-1]):
        assert abs(neighbours.mean()) < 5 / math.sqrt(neighbours.numel())


def test_without_noise_draws_are_their_means_and_shapes_need_a_batch():
    x = torch.ones(3, 2)
    with KeyedNoise(None):
        assert torch.randn_like(x).eq(0).all()
        assert torch.rand_like(x).eq(0.5).all()
    with KeyedNoise(torch.from_numpy(NOISE)), pytest.raises(InvalidModel, match="first axis is not the batch"):
        torch.randn_like(x)
