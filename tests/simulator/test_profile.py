"""Fleet profiles: what they may say, what is drawn from them, and that all of it is drawn by seed."""

import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from device_runtime.conditions import Conditions, Requirements
from simulator.errors import ProfileError
from simulator.fleet.faults import PlannedFailure
from simulator.fleet.fork_servers import HERE
from simulator.fleet.profile import Kind, assign_kinds, equal_kinds, load_profile

EXAMPLES = Path(__file__).parents[2] / "examples"


def write(folder, text):
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("fleet-*.toml")), ids=lambda path: path.stem)
def test_the_example_profiles_are_profiles(path):
    kinds = load_profile(path)
    assert len(kinds) > 1
    for kind in kinds:
        kind.draw_device(random.Random(0)).source(0.0)()


def test_a_profile_says_what_its_kinds_are(tmp_path):
    (tmp_path / "day.json").write_text('[[60, {"charging": true}]]')
    old, new = load_profile(
        write(
            tmp_path,
            """
            [[kind]]
            name = "old"
            weight = 3
            bandwidth = [10_000, 20_000]
            slow_down = 4
            clock_skew_s = -30
            silence = 0.25
            drop_out = 0.5
            drop_out_step = 7
            conditions = { trace = "day.json" }
            requirements = { charging = true, min_battery = 0.2 }

            [[kind]]
            name = "new"
            """,
        )
    )
    assert new == Kind(name="new", arch=HERE, backend="onnxruntime")
    device = old.draw_device(random.Random(1))
    assert 10_000 <= device.bandwidth <= 20_000
    assert (device.slow_down, device.clock_skew_s) == (4.0, -30.0)
    assert device.requirements == Requirements(charging=True, min_battery=0.2)
    # The trace is found wherever the devices run.
    assert Path(device.conditions.trace) == tmp_path / "day.json"
    assert device.source(0.0)() == Conditions(charging=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "kind"),
        ("kind = []", "kind"),
        ("[[kind]]", "kind 1: .*`name`"),
        ("[[kind]]\nname='a'\n[[kinds]]\nname='b'", "`kinds`"),
        ("[[kind]]\nname='a'\nbandwith=1", "kind 'a': .*`bandwith`; did you mean bandwidth. there are name, weight, "),
        ("[[kind]]\nname='a'\nbackend='coreml'", "backend = 'coreml': there are onnxruntime"),
        ("[[kind]]\nname='a'\narch='z80'", "arch = 'z80': there are "),
        ("[[kind]]\nname='a'\nsilence=1\n[[kind]]\nname='b'\ndrop_out=1", "nobody ever reports"),
        (
            "[[kind]]\nname='a'\nconditions={constant={charging=false}}\nrequirements={charging=true}",
            "never meet .*: not charging",
        ),
        ("[[kind]]\nname='a'\nconditions={flapping={up_s=inf,down_s=1}}", "not inf and 1.0 seconds"),
        ("[[kind]]\nname='a'\nbandwidth='fast'", r"bandwidth"),
        ("[[kind]]\nname='a'\nbandwidth=0", r"bandwidth = 0: it must be at least 1 "),
        ("[[kind]]\nname='a'\nbandwidth=[9, 3]", r"bandwidth = \[9, 3\]: the least comes first"),
        ("[[kind]]\nname='a'\nbandwidth=1e-320", "bandwidth = 9.99989e-321: it must be at least 1 "),
        ("[[kind]]\nname='a'\nclock_skew_s=1e300", "at most 1e"),
        ("[[kind]]\nname='a'\nslow_down=0.5", r"slow_down = 0.5: it must be at least 1"),
        ("[[kind]]\nname='a'\nslow_down=inf", r"slow_down = inf: it must be a finite number"),
        ("[[kind]]\nname='a'\nweight=0", r"weight = 0: it must be at least 1e-06"),
        ("[[kind]]\nname='a'\nweight=nan", r"weight = nan: it must be a finite number"),
        ("[[kind]]\nname='a'\nclock_skew_s=inf", r"clock_skew_s = inf"),
        ("[[kind]]\nname='a'\nsilence=1.5", r"silence"),
        (
            "[[kind]]\nname='a'\nsilence=0.6\ndrop_out=0.5",
            r"silence = 0.6, drop_out = 0.5 and drop_out_secagg = 0.0 are more than 1",
        ),
        ("[[kind]]\nname='a'\ndrop_out_step=0", r"drop_out_step = 0: it must be at least 1"),
        ("[[kind]]\nname='a'\nrequirements={charging=true}", "requirements never hold without conditions"),
        ("[[kind]]\nname='a'\nrequirements={charged=true}", "`charged`"),
        ("[[kind]]\nname='a'\nconditions={}", "one of constant, trace, flapping"),
        ("[[kind]]\nname='a'\nconditions={constant={}, trace='x'}", "one of constant, trace, flapping"),
        ("[[kind]]\nname='a'\nconditions={constant={chargin=true}}", "`chargin`"),
        ("[[kind]]\nname='a'\nconditions={flapping={up_s=1, down_s=0}}", "not 1.0 and 0.0 seconds"),
        ("[[kind]]\nname='a'\nconditions={trace='nowhere.json'}", "nowhere.json cannot be used"),
        ("[[kind]]\nname='a'\nlabels=['region=eu']", "label 'region=eu' is not like region=eu:0.3"),
        ("[[kind]]\nname='a'\nlabels=['Region=eu:1']", "label 'Region': a name has 1 to 32 of a-z, 0-9 and _"),
        (
            "[[kind]]\nname='a'\nlabels=['region=eu:1.5']",
            "label region=eu: its share must be a number from 0 to 1, not",
        ),
        ("[[kind]]\nname='a'\nlabels=['region=eu:most']", "label region=eu: its share must be .* not most"),
        (
            "[[kind]]\nname='a'\nlabels=['ring=a:0.6', 'ring=b:0.5']",
            "label ring: its shares are 1.1 together, more than",
        ),
        ("[[kind]]\nname='a'\nlabels=['ring=a:0.1', 'ring=a:0.2']", "label ring=a is given twice"),
        (f"[[kind]]\nname='a'\nlabels={[f'n{n}=v:1' for n in range(17)]}", "17 labels are too many"),
        ("[[kind]]\nname='a'\n[[kind]]\nname='a'", "two kinds have the name 'a'"),
        ("[[kind]", "fleet.toml"),
    ],
)
def test_what_a_profile_gets_wrong_is_named(tmp_path, text, words):
    with pytest.raises(ProfileError, match=words):
        load_profile(write(tmp_path, text))


def test_a_profile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"nowhere\.toml"):
        load_profile(tmp_path / "nowhere.toml")


def test_kinds_are_assigned_by_weight_and_evenly_mixed():
    kinds = [Kind(name="a", weight=5), Kind(name="b", weight=3), Kind(name="c", weight=2)]
    names = [kind.name for kind in assign_kinds(kinds, 40)]
    assert Counter(names) == {"a": 20, "b": 12, "c": 8}
    assert all(Counter(names[start : start + 10]) == {"a": 5, "b": 3, "c": 2} for start in range(0, 40, 10))


def test_equal_kinds_alternate_and_the_backend_changes_first():
    kinds = equal_kinds(("x", "y"), ("m", "n"))
    assert [kind.name for kind in assign_kinds(kinds, 6)] == ["x m", "x n", "y m", "y n", "x m", "x n"]


def test_the_same_seed_draws_the_same_device_and_the_same_failures():
    kind = Kind(name="a", bandwidth=(1e3, 1e6), slow_down=(1, 9), clock_skew_s=(-9, 9), silence=0.3, drop_out=0.3)
    assert kind.draw_device(random.Random("7 alice")) == kind.draw_device(random.Random("7 alice"))
    assert kind.draw_device(random.Random("7 alice")) != kind.draw_device(random.Random("7 bob"))
    failures = [[kind.draw_failure(random.Random(f"{seed} alice {n}")) for n in range(20)] for seed in (7, 7, 8)]
    assert failures[0] == failures[1] != failures[2]


def test_failures_come_as_often_as_the_profile_says():
    kind = Kind(name="a", silence=0.2, drop_out=0.1, drop_out_step=(2, 4))
    failures = [kind.draw_failure(random.Random(f"0 a {number}")) for number in range(5000)]
    assert 900 < sum(failure.silent for failure in failures) < 1100
    deaths = Counter(failure.dies_after for failure in failures if failure.dies_after is not None)
    assert set(deaths) == {2, 3, 4}
    assert 425 < deaths.total() < 575
    assert not any(failure.silent and failure.dies_after for failure in failures)
    assert Kind(name="b").draw_failure(random.Random(0)) == PlannedFailure()


def test_labels_are_drawn_by_their_shares_and_change_no_other_draw():
    labels = ("region=eu:0.3", "region=us:0.5", "ring=beta:1", "none=at:0")
    plain, kind = Kind(name="a", slow_down=(1, 9)), Kind(name="a", slow_down=(1, 9), labels=labels)
    drawn = [kind.draw_device(random.Random(f"0 {number}")) for number in range(2000)]
    assert drawn == [kind.draw_device(random.Random(f"0 {number}")) for number in range(2000)]
    regions = Counter(device.labels.get("region") for device in drawn)
    assert all(abs(regions[value] - 2000 * share) < 90 for value, share in {"eu": 0.3, "us": 0.5, None: 0.2}.items())
    assert {device.labels["ring"] for device in drawn} == {"beta"}
    assert not any("none" in device.labels for device in drawn)
    assert drawn[7].slow_down == plain.draw_device(random.Random("0 7")).slow_down


def test_bandwidth_is_drawn_evenly_over_orders_of_magnitude():
    kind = Kind(name="a", bandwidth=(1e3, 1e7))
    drawn = [kind.draw_device(random.Random(seed)).bandwidth for seed in range(1000)]
    assert 0.5e5 < statistics.median(drawn) < 2e5
