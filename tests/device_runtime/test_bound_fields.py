"""A coordinator that lies in one field of a secure round: of an assignment, or of an invitation (docs/spec/wire.md §8).

The same lies to devices in any language: tests/conformance/secure.py.
"""

import hashlib
from dataclasses import replace

import msgspec
import pytest

from device_runtime.permission.policy import Policy
from device_runtime.session import run_session
from fedcore import checkpoint
from fedcore.codecs import Subsample
from fedcore.masking import layout_hash
from fedcore.plan import BlobRef
from secagg import keys
from secagg.parameters import LEAST_COHORT
from tests.device_runtime import linear
from tests.device_runtime.test_noisy_rounds import NOISY, noisy, noisy_segment  # noqa: F401 - a fixture
from tests.device_runtime.test_secure import (
    BOUNDS,
    SEGMENTS,
    SERVER,
    TRUSTING,
    Aggregator,
    config,  # noqa: F401 - a fixture
    descent,
    invitation,
    refused,
    releasing,
    secure,  # noqa: F401 - a fixture
    segments_of,
    terms,
)

SEED = linear.KEY.seed
CODED = linear.plan(codecs=(Subsample(1),))
"""A plan of whose mean segments one value of three travels, as seed and round say."""
KEYED = {"layout_hash": layout_hash(CODED.report, SEED), "segments": segments_of(CODED.report)}


def offer_coded(coordinator):
    """Have a coordinator that invites to secure rounds offer the coded plan, whose release names its seed."""
    coordinator.offer(CODED, linear.graphs(), {"params": linear.PARAMS})
    coordinator.invite, coordinator.release = invitation(**KEYED), releasing(seed=SEED)
    coordinator.aggregate = Aggregator(terms(coordinator.plan, coordinator.checkpoint, **KEYED)).answer


@pytest.fixture
def coded(secure):  # noqa: F811
    offer_coded(secure)
    return secure


def test_a_device_whose_codecs_have_the_released_seed_takes_part(coded, config):  # noqa: F811
    assert run_session(config).outcome == "reported"


@pytest.mark.security("invites to an old round, another model, another layout or codec key")
def test_codecs_under_another_seed_than_the_rest_are_in_no_sum(coded, config):  # noqa: F811
    """Where the rest send a value that is 0, its own would be alone (tests/simulator/test_keys_of_codecs.py)."""
    coded.lies = {"seed": SEED + 1, "release": releasing(seed=SEED + 1)(coded.plan, coded.checkpoint)}
    refused(coded, config, "ModelMismatch")


@pytest.mark.security("signs the population, the plan, the first checkpoint, and how sums are made")
@pytest.mark.parametrize("released", [{}, {"seed": SEED + 1}])
def test_a_seed_of_codecs_that_is_not_released_is_refused(coded, config, released):  # noqa: F811
    coded.release = releasing(**released)
    refused(coded, config, "another seed than the released one")


def test_without_codecs_any_seed_and_slot_give_a_report_that_adds_up(secure, config):  # noqa: F811
    secure.aggregate = Aggregator(terms(secure.plan, secure.checkpoint)).answer
    secure.lies = {"seed": 2**63 - 1, "slot": 2**63 - 1}
    assert run_session(config).outcome == "reported"


def another_plan(coordinator):
    other = linear.plan(train=linear.SWEEP).encode()
    coordinator.blobs[BlobRef.of(other).sha256] = other
    return {"plan": BlobRef.of(other), "release": releasing()(BlobRef.of(other), coordinator.checkpoint)}


def another_checkpoint(coordinator):
    other = BlobRef.of(checkpoint.encode({"params": linear.PARAMS + 1}))
    return {"checkpoint": other, "release": releasing()(coordinator.plan, other)}


def another_release(**bounds):
    return lambda coordinator: {
        "release": releasing(bounds=msgspec.structs.replace(BOUNDS, **bounds))(coordinator.plan, coordinator.checkpoint)
    }


@pytest.mark.security("signs the population, the plan, the first checkpoint, and how sums are made")
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda _: {"task": "t-2"}, "another task or round"),
        (lambda coordinator: {"round": 2, "lineage": descent(coordinator, 2)}, "another task or round"),
        (lambda _: {"attempt": 2}, "another task or round"),
        (another_plan, "ModelMismatch"),
        (another_checkpoint, "ModelMismatch"),
        (another_release(clip_norm=2.0), "segments are not those"),
        (another_release(bits=19), "segments are not those"),
        (another_release(max_examples=99), "greatest weight is 100"),
        (another_release(min_sum=9), "over 8 devices, the release demands 9"),
        (another_release(noise_multiplier=0.5, honest=1), "number of examples"),
        (another_release(target="region = eu"), "for any device, and the release is for devices with region = eu"),
        (lambda _: {"target": "region = us"}, "for devices with region = us, and the release is for any device"),
        (lambda _: {"release": None}, "signers"),
        (lambda _: {"server": None}, "does not show"),
    ],
)
def test_an_assignment_that_is_not_of_its_invitation_is_refused(secure, config, lie, words):  # noqa: F811
    secure.aggregate = Aggregator(terms(secure.plan, secure.checkpoint)).answer
    secure.lies = lie(secure)
    found = run_session(config)
    assert (found.outcome, found.steps, secure.said, secure.reports) == ("aborted", 0, [], [])
    assert words in found.detail


@pytest.mark.security("a device's min_cohort is held against that number")
def test_an_invitation_counts_and_not_what_the_assignment_says_of_it(secure, config):  # noqa: F811
    """`minimum` is for rounds in the clear: what devices are in a sum M0 says."""
    secure.lies = {"minimum": 1000}
    demanding = replace(config, policy=Policy(min_cohort=LEAST_COHORT + 1, signers=TRUSTING.signers))
    refused(secure, demanding, "this device insists on 9")


@pytest.mark.security("A device whose policy says require_secure_aggregation takes no part in such a task")
def test_an_assignment_without_its_invitation_gets_nothing_in_clear(secure, config):  # noqa: F811
    secure.lies = {"secagg": None}
    demanding = replace(config, policy=Policy(require_secure_aggregation=True, signers=TRUSTING.signers))
    found = run_session(demanding)
    assert (found.outcome, found.reason, secure.reports) == ("aborted", "plan-refused", [])
    assert "require_secure_aggregation" in found.detail


@pytest.mark.security("signs the population, the plan, the first checkpoint, and how sums are made")
@pytest.mark.security("Muster's device takes only those of the signed release")
@pytest.mark.parametrize("field", ["size", "in_bits", "low", "high", "norm", "weighted", "noise"])
def test_every_field_of_a_segment_follows_from_plan_and_release(secure, config, field):  # noqa: F811
    first = SEGMENTS[0]
    other = {"weighted": False, "low": -2.0, "high": 2.0, "norm": 2.0, "noise": 1, "in_bits": 19, "size": 4}[field]
    secure.invite = invitation(segments=(replace(first, **{field: other}), *SEGMENTS[1:]))
    refused(secure, config, "0 is one of the steps" if field == "noise" else "segments are not those")


def test_fields_have_room_for_the_sum(secure, config):  # noqa: F811
    for changes in ({"segments": (replace(SEGMENTS[0], field_bits=20), *SEGMENTS[1:])}, {"n_max": 1 << 20}):
        secure.invite = invitation(**changes)
        refused(secure, config, "HeadroomError")


def test_an_invitation_of_another_suite_is_refused(secure, config):  # noqa: F811
    made = terms(secure.plan, secure.checkpoint)
    other = made.body()[:2] + b"\2" + made.body()[3:]
    secure.invite = lambda *_: other + keys.sign(SERVER, "invite", keys.NO_CONTEXT, hashlib.sha256(other).digest())
    refused(secure, config, "UnsupportedSuite")


@pytest.mark.parametrize("n_max", [LEAST_COHORT - 1, 0])
def test_a_roster_too_small_to_hide_in_is_refused(secure, config, n_max):  # noqa: F811
    secure.invite = invitation(n_max=n_max)
    refused(secure, config, "PolicyViolation")


@pytest.mark.security("min_sum less those that may be corrupt")
def test_a_roster_too_large_for_the_released_noise_is_refused(noisy, config):  # noqa: F811
    """The release counts on 4 honest devices of 8, as 4 of a roster of 20 may be corrupt; of 25, 5 may be."""
    noisy.invite = invitation(**noisy.changes, segments=(noisy_segment(noisy.layout),), n_max=25)
    refused(noisy, config, "from 4 devices, and a sum over 8 of a roster of up to 25 may have 3 honest ones")
