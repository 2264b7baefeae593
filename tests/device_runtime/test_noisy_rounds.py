"""A device in secure rounds with noise: which it takes part in, and what it sends there."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from device_runtime.permission.policy import Policy
from device_runtime.session import run_session
from fedcore.masking import fixed_points, layout_hash
from fedcore.plan import Plan
from secagg import masking
from secagg.packing import PackedSegment, field_bits, with_noise
from secagg.parameters import least_honest
from tests.device_runtime import linear
from tests.device_runtime.test_secure import (
    BOUNDS,
    RELEASE,
    Aggregator,
    attempt,
    config,  # noqa: F401 - a fixture
    invitation,
    refused,
    releasing,
    secure,  # noqa: F401 - a fixture
    terms,
)

N_MAX = 20
NOISY = msgspec.structs.replace(BOUNDS, bits=10, noise_multiplier=0.5, honest=least_honest(BOUNDS.min_sum, N_MAX))


def noisy_segment(layout, multiplier=NOISY.noise_multiplier, honest=None):
    """The segment that release and layout demand, or one with other noise."""
    one = fixed_points(layout, NOISY)[0]
    plain = PackedSegment(one.size, 32, one.bits, one.low, one.high, one.norm, one.weighted)
    return with_noise(plain, multiplier, honest or NOISY.honest)


def offer_noisy(coordinator):
    """Have a coordinator offer a round of uniform weights whose release asks for noise; the terms of its invitation."""
    plan = linear.plan()
    uniform: Plan = msgspec.structs.replace(plan, report=msgspec.structs.replace(plan.report, weighting="uniform"))
    coordinator.offer(uniform, linear.graphs(), {"params": linear.PARAMS})
    coordinator.release, coordinator.layout = releasing(bounds=NOISY), uniform.report
    coordinator.changes = {"w_max": 1, "layout_hash": layout_hash(uniform.report, linear.KEY.seed)}
    changes = {**coordinator.changes, "segments": (noisy_segment(uniform.report),)}
    coordinator.invite = invitation(**changes)
    return changes


@pytest.fixture
def noisy(secure):  # noqa: F811
    offer_noisy(secure)
    return secure


@pytest.mark.security("every sum is noised before the server sees it, each group's too")
def test_all_means_are_noised_together_and_no_metrics_are_sent(noisy, config):  # noqa: F811
    segment = noisy_segment(noisy.layout)
    assert segment.size == 2 * linear.D
    aggregator = Aggregator(terms(noisy.plan, noisy.checkpoint, **noisy.changes, segments=(segment,)))
    sums = []
    settle = aggregator.server.settle
    aggregator.server.settle = lambda found: (sums.append(found.total), settle(found))
    noisy.aggregate = aggregator.answer
    assert run_session(config).outcome == "reported"
    [total] = sums
    assert (total.devices, total.weight, total.sums.size) == (9, 9, segment.size)
    # The other eight report zeros, so that what is beyond one report is noise.
    beyond = np.abs(total.sums).max() / segment.step
    assert 0 < beyond < segment.most + masking.noise_bound(9 * segment.noise, segment.size)


@pytest.mark.security("With noise of devices the release holds them to it")
@pytest.mark.parametrize(
    ("segment", "named"),
    [
        (lambda layout: replace(noisy_segment(layout), noise=0), "segments are not those"),
        (lambda layout: noisy_segment(layout, multiplier=0.49), "segments are not those"),
        (lambda layout: noisy_segment(layout, honest=9), "segments are not those"),
        (lambda layout: replace(noisy_segment(layout), noise=(1 << 26) + 1), "fewer bits"),
        (
            lambda layout: replace(noisy_segment(layout), field_bits=field_bits(noisy_segment(layout), N_MAX) - 1),
            "bits",
        ),
    ],
)
def test_an_invitation_with_other_noise_than_released_is_refused(noisy, config, segment, named):  # noqa: F811
    noisy.invite = invitation(**noisy.changes, segments=(segment(noisy.layout),))
    refused(noisy, config, named)


def test_a_round_with_noise_that_weighs_by_examples_is_refused(secure, config):  # noqa: F811
    secure.release = releasing(bounds=NOISY)
    secure.invite = invitation(segments=(noisy_segment(linear.plan().report),))
    refused(secure, config, "number of examples")


@pytest.mark.parametrize(
    "lie", [{"bits": 0}, {"bits": 1}, {"bits": 21}, {"noise_multiplier": -1.0}, {"noise_multiplier": 1e300}]
)
def test_a_release_whose_numbers_make_no_steps_is_refused(noisy, config, lie):  # noqa: F811
    noisy.release = releasing(bounds=msgspec.structs.replace(NOISY, **lie))
    found = run_session(config)
    assert (found.outcome, found.reason) == ("aborted", "plan-refused")
    assert next(iter(lie)) in found.detail


@pytest.mark.parametrize(("least", "outcome"), [(0.5, "reported"), (0.51, "aborted")])
def test_an_owner_can_demand_noise(noisy, config, least, outcome):  # noqa: F811
    segment = noisy_segment(noisy.layout)
    noisy.aggregate = Aggregator(terms(noisy.plan, noisy.checkpoint, **noisy.changes, segments=(segment,))).answer
    found = run_session(replace(config, policy=Policy(signers=(RELEASE.signer,), min_noise_multiplier=least)))
    assert found.outcome == outcome
    assert outcome == "reported" or "noise of 0.5, the least allowed is 0.51" in found.detail


@pytest.mark.security("Once it has sent its masked report it joins no other attempt at the round")
@pytest.mark.parametrize(("number", "outcome"), [(3, "reported"), (7, "aborted"), (9, "aborted")])
def test_a_device_gives_its_noisy_report_to_one_attempt(noisy, config, number, outcome):  # noqa: F811
    """Others can open a sum that it is in; each further one, with other noise, would say more of its report."""
    changes = {**noisy.changes, "segments": (noisy_segment(noisy.layout),)}
    assert attempt(noisy, config, 1, said_before=number, **changes).outcome == "aborted"
    again = attempt(noisy, config, 2, **changes)
    assert (again.outcome, again.reason) == (outcome, "" if outcome == "reported" else "already-revealed")


def test_an_owner_who_demands_noise_takes_part_in_no_round_in_clear(coordinator, config):  # noqa: F811
    found = run_session(replace(config, policy=Policy(min_noise_multiplier=0.1)))
    assert (found.outcome, found.reason) == ("aborted", "plan-refused")
    assert "min_noise_multiplier" in found.detail
    assert coordinator.reports == []
