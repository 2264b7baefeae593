import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

from secagg import masking
from secagg.masking import Mask, add_masks, add_masks_with
from tests.secagg import reference

MASKS = [Mask(bytes([i]) * 32, 1 if i % 3 else -1) for i in range(5)]


def words_of(size):
    return np.random.default_rng(size).integers(0, 2**64, size, dtype=np.uint64)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 500])
def test_masks_are_added_as_the_reference_adds_them(size):
    words = words_of(size)
    expected = reference.add_masks(words.tolist(), MASKS)
    add_masks(words, MASKS)
    assert words.tolist() == expected


def test_a_mask_and_its_inverse_leave_nothing():
    words = words_of(40_001)
    masked = words.copy()
    add_masks(masked, MASKS)
    assert not np.array_equal(masked, words)
    add_masks(masked, [Mask(mask.key, -mask.sign) for mask in MASKS])
    np.testing.assert_array_equal(masked, words)


@pytest.mark.parametrize("start", [2, 16_382, 16_384, 16_386, 19_998])
def test_any_slice_can_be_masked_by_itself(start):
    whole = words_of(40_001)
    part = whole[start:].copy()
    add_masks(whole, MASKS)
    add_masks(part, MASKS, start)
    np.testing.assert_array_equal(part, whole[start:])


def test_a_slice_that_starts_within_a_block_is_refused():
    with pytest.raises(ValueError, match="even word"):
        add_masks(words_of(4), MASKS, 1)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 16_385, 40_001])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_division_gives_the_same_bits(size, parts):
    words = words_of(size)
    divided = words.copy()
    add_masks(words, MASKS)
    with ThreadPoolExecutor(2) as executor:
        add_masks_with(executor, parts, divided, MASKS)
    np.testing.assert_array_equal(divided, words)


def test_processes_give_the_same_bits():
    words = words_of(40_001)
    divided = words.copy()
    add_masks(words, MASKS)
    with ProcessPoolExecutor(2) as executor:
        add_masks_with(executor, 2, divided, MASKS)
    np.testing.assert_array_equal(divided, words)


def test_more_masks_than_fit_into_a_batch_are_all_added(monkeypatch):
    words = words_of(9)
    expected = reference.add_masks(words.tolist(), MASKS)
    monkeypatch.setattr(masking, "BATCH", 2)
    add_masks(words, MASKS)
    assert words.tolist() == expected


@pytest.mark.parametrize("value", [0, 1, 2**64 - 1])
def test_masked_words_look_uniform_with_any_content(value):
    words = np.full(100_000, value, np.uint64)
    add_masks(words, [Mask(os.urandom(32), 1), Mask(os.urandom(32), -1)])
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    # 255 degrees of freedom: mean 255, standard deviation 22.6; the chance to be 7 of them above is below 10^-9.
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 7 * 22.6
    assert np.unique(words).size == words.size
