"""Which devices are taken: eligibility and selection."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from coordinator.errors import InvalidTask
from coordinator.rules.selection import Capabilities, Needs, draw, unfit
from coordinator.rules.states import OnDevice, Requires
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


PLUGGED_IN = StatedConditions(charging=True, idle=True, unmetered=True, battery=0.8, free_storage_mb=512)


def met(rules, stated=PLUGGED_IN, version="0.3.1", memory_mb=2048):
    return not rules.unmet_by(version, memory_mb, stated)


@pytest.mark.parametrize("name", ["charging", "idle", "unmetered"])
def test_condition_that_is_wanted_must_be_said_to_hold(name):
    rules = Requires(**{name: True})
    for value, holds in ((True, True), (False, False), (None, False)):
        assert met(rules, StatedConditions(**{name: value})) is holds
    assert met(Requires(), StatedConditions())


@pytest.mark.parametrize(
    ("rules", "stated", "holds"),
    [
        (Requires(min_battery=0.8), {"battery": 0.8}, True),
        (Requires(min_battery=0.8), {"battery": 0.7}, False),
        (Requires(min_battery=0.0), {}, False),
        (Requires(min_free_storage_bytes=512 << 20), {"free_storage_mb": 512}, True),
        (Requires(min_free_storage_bytes=(512 << 20) + 1), {"free_storage_mb": 512}, False),
        (Requires(min_free_storage_bytes=1), {}, False),
    ],
)
def test_amount_that_is_wanted_must_be_said_and_reached(rules, stated, holds):
    assert met(rules, StatedConditions(**stated)) is holds


def test_memory_that_is_not_said_is_not_enough():
    rules = Requires(min_memory_bytes=2 << 30)
    assert [met(rules, memory_mb=memory) for memory in (2048, 1024, None)] == [True, False, False]


@pytest.mark.parametrize(
    ("least", "version", "new"),
    [
        ("0.3", "0.3.0", True),
        ("0.3.0", "0.3", True),
        ("0.3", "0.10.1", True),
        ("0.10", "0.9.9", False),
        ("0.3", "0.3.1.dev4+g12", True),
        ("1", "", False),
        ("1", "unknown", False),
    ],
)
def test_versions_compare_by_their_numbers(least, version, new):
    assert met(Requires(min_version=least), version=version) is new


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Requires(min_battery=1.5), "min_battery must be a number from 0 to 1, not 1.5"),
        (lambda: Requires(min_free_storage_bytes=-1), "min_free_storage_bytes"),
        (lambda: Requires(min_memory_bytes=-1), "min_memory_bytes"),
        (lambda: Requires(min_version="new"), "min_version must be numbers with points between, .* not 'new'"),
        (lambda: Requires(min_version="1" * 101), "min_version must be .* in 100 characters at most"),
        (lambda: OnDevice(min_examples=-1), "min_examples"),
        (lambda: OnDevice(max_example_age_s=60.0), "min_examples must be at least 1 with max_example_age_s"),
        (lambda: OnDevice(min_examples=1, max_example_age_s=float("nan")), "max_example_age_s"),
    ],
)
def test_rule_that_nobody_could_mean_is_refused_by_name(make, named):
    with pytest.raises(InvalidTask, match=named):
        make()
