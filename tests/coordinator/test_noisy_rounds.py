"""Rounds with noise, and the trial that rounding passes."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import msgspec
import numpy as np
import pytest

from coordinator.errors import InvalidTask, Refusal
from coordinator.rules.private_sums import ReportBytes, device_noise, packed_segments, report_bytes
from coordinator.rules.release import check_rounding, moved_by, rounding
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import PrivacyBudget, Secagg, TaskSettings
from fedcore.algorithms import ALGORITHMS, create
from fedcore.privacy.accounting import calibrated, spent
from fedcore.privacy.settings import Noise
from tests.coordinator.bundles import START, make_plan, make_private_bundle
from tests.coordinator.conftest import Desk, unmask_at_once
from tests.coordinator.test_left_out import OTHERS, fails
from tests.coordinator.test_secure import NAMES, PHASES, SECURE, Device, run
from tests.coordinator.test_secure_groups import NAMES as MANY, groups_of

SIZE, CLIP, BITS = 400, 2.0, 12
SECAGG = Secagg(clip_norm=CLIP, bits=BITS, phase_s=5.0)
BUDGET = {"epsilon": 30.0, "delta": 1e-6, "users": 1000}


def promise(rounds, **changes):
    noise = Noise(noise_multiplier=1.0, mechanism="distributed")
    multiplier = calibrated(noise, rounds, BUDGET["epsilon"], BUDGET["delta"])
    return PrivacyBudget(**BUDGET | {"mechanism": "distributed", "noise_multiplier": multiplier} | changes)


def noisy(rounds=2, **changes):
    """Settings of a task whose budget lasts for so many rounds."""
    return {"goal": 8, "minimum": 8, "rounds": 9, "secagg": SECAGG, "privacy": promise(rounds)} | changes


@pytest.fixture
def private(tmp_path):
    return make_private_bundle(tmp_path / "private", SIZE, clip_norm=CLIP)


def train(desk, plan, delta_D, names=NAMES):
    devices = [Device(desk, given, delta_D, plan=plan) for given in desk.assign(*names)]
    run(devices)
    return devices


def test_a_model_moves_by_the_mean_and_the_noise_of_devices(store, register, desk, private):
    task = register(private, **noisy())
    before, delta_D = np.resize(START, SIZE), np.full(SIZE, CLIP / math.sqrt(SIZE), np.float32)
    [*_, device] = train(desk, private.plan, delta_D)
    settings = store.task(task).settings
    [segment] = packed_segments(private.plan.report, settings.sum_bounds, 8)
    deviation = math.sqrt(8 * segment.noise) * segment.step / 8
    noise_D = store.checkpoint(task, 1)["params"] - before - delta_D
    # 400 values: the chi-square of their sum of squares is within 5 of its standard deviations.
    assert abs((noise_D**2).sum() / deviation**2 - SIZE) < 5 * math.sqrt(2 * SIZE)
    # Every sum has the promised noise, even without the two devices that may be corrupt.
    promised = settings.privacy.noise_multiplier * math.sqrt(segment.most_square) * segment.step
    assert deviation * 8 * math.sqrt(6 / 8) >= promised > settings.privacy.noise_multiplier * CLIP
    assert device.result().summed


@pytest.mark.security("A sum of an attempt that came to nothing is in no model and in no row")
def test_a_sum_that_came_to_nothing_is_in_no_model_and_in_no_row(store, register, private):
    outcomes = iter((fails, unmask_at_once))

    def unmask(work):
        return next(outcomes)(work)

    desk = Desk(store, unmask=unmask)
    task = register(private, **noisy(), selection_timeout_s=30.0)
    before, along_D = np.resize(START, SIZE), np.full(SIZE, 1 / math.sqrt(SIZE), np.float32)
    train(desk, private.plan, CLIP * along_D)
    train(desk, private.plan, -CLIP * along_D, OTHERS)
    assert [(one.number, one.attempt, one.state.value) for one in store.rounds(task)] == [
        (1, 1, "abandoned"), (1, 2, "committed")
    ]  # fmt: skip
    with store.database.reading() as records:
        assert [(one.round, one.devices) for one in records.ledger.entries(task)] == [(1, 8)]
    [segment] = packed_segments(private.plan.report, store.task(task).settings.sum_bounds, 8)
    deviation = math.sqrt(8 * segment.noise) * segment.step / 8
    assert 5 * deviation < CLIP
    assert abs((store.checkpoint(task, 1)["params"] - before) @ along_D + CLIP) < 5 * deviation


@pytest.mark.parametrize("leaves", ["gives up", "vanishes"])
def test_a_device_of_a_group_that_failed_rests_as_if_its_sum_had_counted(store, register, private, leaves):
    outcomes = iter((fails, unmask_at_once))

    def unmask(work):
        return next(outcomes)(work)

    desk = Desk(store, unmask=unmask)
    secagg = dataclasses.replace(SECAGG, group_size=16, phase_s=30.0)
    several = {"goal": 24, "minimum": 12, "over_selection": 1.0, "secagg": secagg}
    task = register(private, **noisy(privacy=promise(9)) | several, min_separation_rounds=3)
    devices = [Device(desk, given, np.zeros(SIZE, np.float32), plan=private.plan) for given in desk.assign(*MANY)]
    run(devices, PHASES[:1])
    unlucky, lucky = groups_of(devices)
    run(devices, PHASES[1:5])
    run(unlucky, PHASES[5:])  # their sum is known to the coordinator, and not used
    desk.turn()
    if leaves == "gives up":
        with contextlib.suppress(Refusal):
            desk.give_up(unlucky[0].given)
    else:
        desk.live(5.5, *(device.given for device in devices if device is not unlucky[0]), step_s=0.3)
    run(lucky, PHASES[5:])
    desk.turn()
    assert [one.state.value for one in store.rounds(task)] == ["committed"]
    (name,) = {one.device for one in store.cohort(task, 1) if one.id == unlucky[0].given.assignment}
    assert desk.arrive(name).reason == "resting"
    desk.driver.drain()
    desk.turn()
    assert Desk(store).arrive(name).reason == "resting"


def test_noise_of_devices_spends_the_budget_and_ends_the_task(store, register, desk, private):
    task = register(private, **noisy(rounds=2))
    for _ in range(2):
        train(desk, private.plan, np.zeros(SIZE, np.float32))
    with store.database.reading() as records:
        entries = records.ledger.entries(task)
    assert [(one.round, one.mechanism, one.clip, one.devices) for one in entries] == [
        (number, "distributed", CLIP, 8) for number in (1, 2)
    ]
    assert spent(entries, BUDGET["delta"]) <= BUDGET["epsilon"]
    assert store.task(task).state is TaskState.COMPLETED
    assert store.history(task)[-1].cause == "privacy-budget-spent"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secagg": dataclasses.replace(SECAGG, bits=20), "privacy": promise(2, noise_multiplier=60.0)}, "fewer bits"),
        ({"over_selection": 100.0, "secagg": dataclasses.replace(SECAGG, group_size=500)}, "may be corrupt"),
    ],
)
def test_noise_that_devices_cannot_add_is_refused(register, private, changes, why):
    with pytest.raises(InvalidTask, match=why):
        register(private, **noisy() | changes)


def test_noise_of_devices_needs_uniform_weights(register):
    with pytest.raises(InvalidTask, match="uniform"):
        register(**noisy())


def test_the_noise_of_devices_is_said_in_words():
    settings = TaskSettings(population="p", **noisy())
    layout = msgspec.structs.replace(make_plan(SIZE).report, weighting="uniform")
    said = device_noise(layout, settings)
    assert "enough with 5 honest ones in a sum" in said
    assert "wraps around with a chance below 2^-40" in said
    assert device_noise(layout, dataclasses.replace(settings, privacy=None)) == ""


def test_bytes_of_a_report_are_said_masked_and_in_clear():
    settings = TaskSettings(population="p", goal=16, over_selection=1.0, rounds=1, secagg=Secagg(bits=3))
    layout = make_plan(SIZE).report
    whole = 4 * layout.size
    in_clear = report_bytes(layout, dataclasses.replace(settings, secagg=None))
    assert in_clear == ReportBytes(whole, whole)
    # Seven bits hold the sum of sixteen values of three: nine of them in a word. Metrics, and two words, come on top.
    masked = report_bytes(layout, settings)
    assert 8 * -(-SIZE // 9) < masked.sent < 8 * -(-SIZE // 9) + 100
    assert ReportBytes(1_000, 500).words == "1,000 bytes, 2.0 times larger than 500 in float32"
    assert masked.words == f"{masked.sent:,} bytes, {whole / masked.sent:.1f} times smaller than {whole:,} in float32"


PARAMETERS = 60_000
STEP = 2 * 10 / (2**20 - 1)  # of clip_norm 10 in 20 bits


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_bears_the_rounding_with_its_own_settings(name):
    check_rounding(create(name), STEP, 8, PARAMETERS)
    assert moved_by(create(name), rounding(STEP, 8), PARAMETERS) < 0.1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedadam", {"tau": 1e-8}),
        ("fedyogi", {"tau": 1e-8}),
        ("localadaalter", {"initial_b": 1e-3, "epsilon": 1e-3}),
        ("fedavg", {"client_lr": 1e-5}),
    ],
)
def test_an_algorithm_that_the_rounding_ruins_is_refused_with_the_numbers(name, settings):
    with pytest.raises(
        InvalidTask,
        match=rf"to 3\.4e-06 \(steps of 1\.9e-05 by clip_norm and bits, 8 devices\).* trial of {name} .*Lower",
    ):
        check_rounding(create(name, settings), STEP, 8, PARAMETERS)


def test_an_algorithm_of_ones_own_that_divides_by_squares_is_refused():
    name = "examples.custom_algorithm:FedAgree"
    custom = create(name, None, ["examples.custom_algorithm"])
    with pytest.raises(InvalidTask, match="times as far as training does"):
        check_rounding(custom, STEP, 8, PARAMETERS)
    check_rounding(custom, STEP / 1000, 8, PARAMETERS)


def test_less_rounding_moves_a_model_less():
    found = [moved_by(create("fedavg"), rounding(step, 8), PARAMETERS) for step in (STEP, STEP / 10, STEP / 100)]
    assert found[0] == pytest.approx(10 * found[1]) == pytest.approx(100 * found[2])


def test_a_task_is_held_to_the_trial_only_where_its_rounds_are_secure(register):
    ruined = dataclasses.replace(SECURE["secagg"], bits=2, clip_norm=1e4)
    with pytest.raises(InvalidTask, match="secure aggregation rounds every mean"):
        register(**SECURE | {"secagg": ruined})
    register(**{name: value for name, value in SECURE.items() if name != "secagg"})
