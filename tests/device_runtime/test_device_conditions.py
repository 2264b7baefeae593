"""`muster device run --require --conditions`: a real device process whose conditions change while it works."""

import json
import time

import pytest

UP, DOWN = {"charging": True, "battery": 0.8}, {"charging": False, "battery": 0.3}


def lasting(folder, seconds):
    """A trace that is good for so many seconds from now, and bad for years."""
    (folder / "trace.json").write_text(json.dumps([[time.monotonic() + seconds, UP], [1e9, DOWN]]))
    return "--conditions", str(folder / "trace.json")


@pytest.mark.parametrize(
    ("require", "detail"),
    [
        (["charging"], "not charging"),
        (["charging,min_battery=0.5", "idle"], "not charging; unknown: in use or not; battery 30 % is below 50 %"),
    ],
)
def test_what_is_required_and_does_not_hold_keeps_the_device_at_home(world, require, detail):
    world.create()
    options = [word for text in require for word in ("--require", text)]
    outcome = world.once(*options, *lasting(world.folder, 0), code=75)
    assert (outcome["outcome"], outcome["reason"], outcome["detail"]) == ("not-now", "conditions", detail)
    assert world.road.calls == []


def test_what_is_required_and_holds_lets_the_device_work(world):
    world.create()
    outcome = world.once("--require", "charging, min_battery=0.8", *lasting(world.folder, 3600), code=0)
    assert outcome["outcome"] == "reported"


def test_conditions_of_this_machine_are_the_default(world):
    world.create()
    assert world.once("--require", "min_free_memory_bytes=1", code=0)["outcome"] == "reported"
    outcome = world.once("--require", "min_free_memory_bytes=1e15", code=75)
    assert outcome["detail"].startswith("free memory ")


def test_conditions_that_fail_during_training_end_it(world):
    world.create("long")
    with world.start("--once", "--require", "charging", *lasting(world.folder, 5)) as device:
        out, _ = device.communicate(timeout=30)
    outcome = json.loads(out)
    assert (outcome["outcome"], outcome["reason"], outcome["detail"].rpartition(": ")[2]) == (
        "aborted",
        "conditions",
        "not charging",
    )
    assert device.returncode == 75
    assert world.rounds()[0]["abort_reasons"] == {"conditions": 1}
    assert world.road.reports == []


def test_download_ended_by_conditions_is_resumed_by_a_later_session(world):
    world.create()
    world.road.slow_s, world.road.piece = 0.2, 10  # so that all the time goes into the first blob
    with world.start("--once", "--require", "charging", *lasting(world.folder, 6)) as device:
        out, _ = device.communicate(timeout=30)
    outcome = json.loads(out)
    assert (outcome["outcome"], outcome["reason"]) == ("aborted", "conditions")
    (partial,) = (world.state / "blobs").glob("*.download")
    size = partial.stat().st_size
    world.road.slow_s = 0.0
    assert world.once(code=0)["outcome"] == "reported"
    assert f"bytes={size}-" in world.road.ranges


KNOWN = (
    "there are charging, idle, unmetered, min_battery, min_free_storage_bytes, min_free_memory_bytes, "
    "min_thermal_headroom_c"
)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("chargin", f"there is no 'chargin'; did you mean charging? {KNOWN}"),
        ("min_battery=30", "min_battery must be a number from 0 to 1, not 30"),
        ("min_battery", "min_battery must be a number from 0 to 1, not True"),
        ("", f"there is no ''; {KNOWN}"),
    ],
)
def test_wrong_requirement_is_a_usage_error_with_what_may_be(world, words, part):
    with world.start("--require", words) as device:
        _, err = device.communicate(timeout=30)
    assert device.returncode == 2
    said = " ".join(err.split())
    assert part in said


def test_a_trace_that_is_none_is_named(world):
    trace = world.folder / "trace.json"
    trace.write_text('[[60, {"charged": true}]]')
    with world.start("--conditions", str(trace)) as device:
        _, err = device.communicate(timeout=30)
    assert device.returncode == 1
    assert "charged" in err
