from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from coordinator.rules.selection import Capabilities, Needs, draw, unfit
from coordinator.rules.states import Requires
from device_runtime.capabilities import stated_examples
from fedcore.conditions import StatedConditions

PLUGGED = StatedConditions(charging=True)
NEEDS = Needs(frozenset({"onnx", "executorch"}), "photos", 5)


def wanted_by(offers, device):
    tasks = {needs.collection: needs for needs in offers}
    reason, formats = unfit(tasks, {task: needs.unmet_by("a", device) for task, needs in tasks.items()})
    assert reason == ("unsupported-format" if formats else "not-eligible")
    return set(formats)


@pytest.mark.parametrize(
    ("formats", "examples", "met"),
    [
        ({"onnx"}, {"photos": 5}, True),
        ({"onnx"}, {"photos": 4}, True),  # rounded down: it may hold 5
        ({"onnx"}, {"photos": 2}, False),
        ({"onnx"}, {"default": 50}, False),
        ({"tflite"}, {"photos": 50}, False),
        (set(), {}, False),
    ],
)
def test_device_needs_a_format_and_enough_examples_of_the_collection(formats, examples, met):
    assert (not NEEDS.unmet_by("a", Capabilities(frozenset(formats), examples))) is met


@pytest.mark.parametrize(
    ("formats", "examples", "wanted"),
    [
        ({"tflite"}, {"photos": 5}, {"onnx", "executorch"}),
        ({"tflite"}, {"photos": 5, "words": 1}, {"onnx", "executorch", "coreml"}),
        ({"onnx"}, {"words": 1}, {"coreml"}),
        ({"tflite"}, {"photos": 2}, set()),
        ({"onnx"}, {"photos": 2}, set()),
    ],
)
def test_formats_wanted_are_of_tasks_the_device_has_examples_for(formats, examples, wanted):
    offers = [NEEDS, Needs(frozenset({"coreml"}), "words", 1)]
    assert wanted_by(offers, Capabilities(frozenset(formats), examples)) == wanted


@given(st.integers(0, 2**40), st.integers(1, 2**31))
def test_no_device_with_enough_examples_is_rejected_for_its_rounding(held, least):
    needs = Needs(frozenset({"onnx"}), "photos", least)
    obstacle = needs.unmet_by("a", Capabilities(frozenset({"onnx"}), stated_examples({"photos": held})))
    if held >= least:
        assert obstacle == ""
    if 2 * held < least:
        assert obstacle == "examples"


def test_formats_are_wanted_of_devices_alone_that_meet_the_rules():
    picky = Needs(frozenset({"onnx"}), "photos", 5, Requires(charging=True))
    charging, unknown = (Capabilities(frozenset(), {"photos": 5}, conditions=c) for c in (PLUGGED, StatedConditions()))
    assert wanted_by([picky], charging) == {"onnx"}
    assert wanted_by([picky], unknown) == set()


def test_draw_is_uniform_over_the_waiting():
    source = random.Random(1)
    drawn = Counter(name for _ in range(4000) for name in draw("abcd", 2, source))
    assert all(abs(count - 2000) < 150 for count in drawn.values())


def test_draw_repeats_with_its_source():
    assert draw(range(100), 10, random.Random(3)) == draw(range(100), 10, random.Random(3))
