from __future__ import annotations

import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.states import OnDevice, Requires
from fedcore.conditions import StatedConditions

PLUGGED = StatedConditions(charging=True, idle=True, unmetered=True, battery=0.8, free_storage_mb=512)


def met(rules, stated=PLUGGED, version="0.3.1", memory_mb=2048):
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
