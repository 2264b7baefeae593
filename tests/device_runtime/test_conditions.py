"""Conditions: how they are read, and when they let a device work."""

import itertools
import json
import math
import os
import time

import msgspec
import pytest

from device_runtime.conditions import Conditions, Requirements, constant, flapping, linux, trace
from device_runtime.errors import ConfigError
from tests.device_runtime.trees import BOARD, PHONE, PLUGGED_LAPTOP, grow

TICKS = os.sysconf("SC_CLK_TCK")
POWER = "sys/class/power_supply"
GOOD = Conditions(
    charging=True,
    idle=True,
    unmetered=True,
    battery=0.9,
    free_storage_bytes=10**9,
    free_memory_bytes=10**9,
    thermal_headroom_c=20.0,
)
STRICT = Requirements(
    charging=True,
    idle=True,
    unmetered=True,
    min_battery=0.5,
    min_free_storage_bytes=10**8,
    min_free_memory_bytes=10**8,
    min_thermal_headroom_c=5.0,
)


def clock_of(times):
    """A clock that shows these times, one at each look."""
    return iter(times).__next__


def read(root, files, **changed):
    """Conditions on a machine; free storage is this machine's and left out."""
    return msgspec.structs.replace(linux(grow(root, files), root)(), free_storage_bytes=None, **changed)


def test_a_laptop_tells_everything(tmp_path):
    assert read(tmp_path, PLUGGED_LAPTOP) == Conditions(
        charging=True,
        idle=True,
        unmetered=True,
        battery=0.79,
        free_memory_bytes=2_048_000_000,
        thermal_headroom_c=12.5,
    )


def test_what_a_phone_hides_is_unknown(tmp_path):
    assert read(tmp_path, PHONE) == Conditions(unmetered=False, free_memory_bytes=512_000_000, thermal_headroom_c=5.5)


def test_a_board_has_no_battery_and_no_thermal_limit(tmp_path):
    assert read(tmp_path, BOARD) == Conditions(charging=True, idle=False, free_memory_bytes=716_800_000)


def test_where_nothing_is_told_all_but_storage_is_unknown(tmp_path):
    assert linux(tmp_path, tmp_path)().free_storage_bytes > 0
    assert read(tmp_path, {}) == Conditions()


def test_this_machine_can_be_read():
    assert linux()().free_memory_bytes > 0


def test_free_storage_is_that_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert linux(tmp_path, tmp_path / "a" / "b")().free_storage_bytes > 0


@pytest.mark.parametrize(
    ("status", "online", "charging"),
    [
        ("Discharging", "1", False),
        ("Charging", "0", True),
        ("Not charging", "0", False),
        ("Full", "0", False),
        ("Full", "", True),
        ("Unknown", "", None),
    ],
)
def test_charging_is_what_the_battery_does_or_else_what_the_plug_says(tmp_path, status, online, charging):
    changed = {f"{POWER}/BAT0/status": status, f"{POWER}/AC/online": online}
    assert read(tmp_path, PLUGGED_LAPTOP | changed).charging is charging


@pytest.mark.parametrize("hint", ["wireless/status", "phy80211/index"])
def test_wireless_may_be_a_hotspot_so_nobody_knows_what_it_costs(tmp_path, hint):
    assert read(tmp_path, PLUGGED_LAPTOP | {f"sys/class/net/eth0/{hint}": "0"}).unmetered is None


def test_a_cable_by_usb_may_be_a_phone(tmp_path):
    grow(tmp_path, PLUGGED_LAPTOP | {"sys/bus/usb/name": "usb"})
    (tmp_path / "sys/class/net/eth0/device/subsystem").symlink_to(tmp_path / "sys/bus/usb")
    assert linux(tmp_path)().unmetered is None


def test_a_modem_is_metered(tmp_path):
    assert read(tmp_path, PLUGGED_LAPTOP | {"sys/class/net/eth0/uevent": "DEVTYPE=wwan\n"}).unmetered is False


def test_a_tunnel_hides_what_is_below(tmp_path):
    changed = {"proc/net/route": PLUGGED_LAPTOP["proc/net/route"].replace("eth0 0000", "tun0 0000")}
    assert read(tmp_path, PLUGGED_LAPTOP | changed | {"sys/class/net/tun0/type": "65534"}).unmetered is None


class Machine:
    """Two processors whose times pass when told."""

    def __init__(self, root):
        self.root = grow(root, PLUGGED_LAPTOP)
        self.busy, self.unused, self.own = 0.0, 0.0, 0.0
        self.source = linux(root, root)

    def idle_after(self, seconds, *, own, others, load):
        """Let time pass in which so many processors are used, and read."""
        self.own += own * seconds * TICKS
        self.busy += (own + others) * seconds * TICKS
        self.unused += (2 - own - others) * seconds * TICKS
        total = f"cpu  {self.busy:.0f} 0 0 {self.unused:.0f} 0 0 0 0 0 0\ncpu0 0\ncpu1 0\n"
        own_stat = f"1 (me) R {'0 ' * 10}{self.own:.0f} 0 0\n"
        grow(self.root, {"proc/stat": total, "proc/self/stat": own_stat, "proc/loadavg": f"{load} 0 0 1/1 1\n"})
        return self.source().idle


def test_training_itself_does_not_make_a_machine_busy(tmp_path):
    machine = Machine(tmp_path)
    assert machine.idle_after(0, own=0, others=0, load=0.1) is True
    assert machine.idle_after(10, own=2, others=0, load=2.0) is True
    assert machine.idle_after(10, own=1, others=1, load=2.0) is False


def test_idleness_holds_between_readings_in_quick_succession(tmp_path):
    machine = Machine(tmp_path)
    assert machine.idle_after(0, own=0, others=0, load=0.1) is True
    assert machine.idle_after(1, own=0, others=2, load=2.0) is True
    assert machine.idle_after(1, own=0, others=2, load=2.0) is False


def test_after_a_long_pause_the_load_average_decides_anew(tmp_path):
    machine = Machine(tmp_path)
    assert machine.idle_after(0, own=0, others=0, load=0.1) is True
    assert machine.idle_after(3600, own=0, others=0.1, load=2.0) is False


def test_requirements_that_hold_have_no_reasons():
    assert STRICT.unmet(GOOD) == ()
    assert Requirements().unmet(Conditions()) == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"charging": False}, "not charging"),
        ({"idle": False}, "in use"),
        ({"unmetered": False}, "the network is metered"),
        ({"battery": 0.2}, "battery 20 % is below 50 %"),
        ({"free_storage_bytes": 5 * 10**6}, "free storage 5 MB is below 100 MB"),
        ({"free_memory_bytes": 0}, "free memory 0 MB is below 100 MB"),
        ({"thermal_headroom_c": -1.0}, "thermal headroom -1 °C is below 5 °C"),
        ({"charging": None}, "unknown: charging or not"),
        ({"idle": None}, "unknown: in use or not"),
        ({"unmetered": None}, "unknown: network metered or not"),
        ({"battery": None}, "unknown: battery"),
        ({"thermal_headroom_c": None}, "unknown: thermal headroom"),
    ],
)
def test_what_does_not_hold_or_is_not_known_is_said_in_words(change, reason):
    changed = msgspec.structs.replace(GOOD, **change)
    assert STRICT.unmet(changed) == (reason,)
    assert Requirements().unmet(changed) == ()


def test_all_reasons_are_given_at_once():
    assert len(STRICT.unmet(Conditions())) == 7


def test_coordinator_is_told_battery_in_tenths_storage_in_powers_of_two():
    stated = msgspec.to_builtins(msgspec.structs.replace(GOOD, battery=0.8437, idle=None).stated())
    assert stated == {"charging": True, "idle": None, "unmetered": True, "battery": 0.8, "free_storage_mb": 512}


def test_a_trace_repeats(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([[10, {"charging": True}], [5, {"charging": False}]]))
    times = (0.0, 9.9, 10.0, 14.9, 15.0, 25.0, 1500.0)
    source = trace(path, clock_of(times))
    seen = [source().charging for _ in times]
    assert seen == [True, True, False, False, True, False, True]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "trace.json"),
        ("[", "trace.json"),
        ('[[1, {"chargin": true}]]', r"trace.json.*chargin"),
        ("[]", "no entries"),
        ("[[1, {}], [0, {}]]", "entry 1 of the trace lasts 0"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        trace(tmp_path / "trace.json")


def test_flapping_depends_on_seed_and_time_alone():
    times = [7.0 * i for i in range(300)]

    def readings(seed, order):
        source = flapping(seed, 60, 30, clock_of(order))
        return {time: source() for time in order}

    assert readings(1, times) == readings(1, times[::-1])
    assert readings(1, times) != readings(2, times)


def test_flapping_is_up_for_its_share_of_time_and_in_runs_of_its_length():
    times = range(0, 200_000, 5)
    source = flapping(3, 60, 30, clock_of(times))
    ups = [source().charging for _ in times]
    changes = sum(before != after for before, after in itertools.pairwise(ups))
    assert 0.6 < sum(ups) / len(ups) < 0.73
    assert 80 < 2 * 200_000 / changes < 105


@pytest.mark.parametrize("times", [(0, 1), (1, 0), (-1, 1)])
def test_flapping_wants_times_above_zero(times):
    with pytest.raises(ConfigError, match="above 0"):
        flapping(1, *times)


def test_a_constant_source_never_changes():
    assert constant(GOOD)() == GOOD == constant(GOOD)()


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Conditions, {"battery": 15}),
        (Conditions, {"battery": math.nan}),
        (Conditions, {"charging": "no"}),
        (Conditions, {"free_memory_bytes": -1}),
        (Conditions, {"thermal_headroom_c": math.inf}),
        (Requirements, {"min_battery": math.nan}),
        (Requirements, {"min_battery": 40}),
        (Requirements, {"charging": "yes"}),
        (Requirements, {"min_thermal_headroom_c": math.inf}),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(kind, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)


def test_a_battery_that_tells_nonsense_is_unknown_or_empty(tmp_path):
    for capacity, battery in (("nan", None), ("-3", 0.0), ("250", 1.0)):
        assert read(tmp_path, {f"{POWER}/B/type": "Battery", f"{POWER}/B/capacity": capacity}).battery == battery


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
