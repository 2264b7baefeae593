"""The sum is exact, with any devices gone at any step; below a threshold there is none."""

from concurrent.futures import ProcessPoolExecutor
from itertools import chain, combinations, product

import numpy as np
import pytest

from secagg.client import Reply
from secagg.errors import BadVector, BelowThreshold, DuplicateUpload, OutOfOrder, TooFewNeighbours
from secagg.messages import ACTIVE, HONEST, Invite, Masked
from secagg.packing import PackedSegment, word_count
from secagg.parameters import GraphParameters
from secagg.session import MaskedSum, no_words
from tests.secagg.cohort import EXACT, Cohort, dimension, integers, invitation

pytestmark = pytest.mark.security("honest devices: leave at any time")

SMALL = invitation(mode=HONEST, segments=(PackedSegment(3, 16, 8, 0.0, 255.0),), min_sum=2)


def complete(t):
    return lambda n: GraphParameters(n, n - 1, t)


def enough(sizes, n, t, min_sum):
    """Whether a complete graph of those who came to M1, M3, … can end in a sum; sizes count who is left."""
    joined, shared, opened, uploaded, confirmed, revealed = sizes
    if joined < max(min_sum, t + 1) or min(shared, opened, uploaded) < min_sum:
        return False
    # A survivor's own share is nobody's, so t others must be there; a dropped device has all survivors.
    return min(opened, uploaded, confirmed, revealed) - 1 >= t or (
        min(opened, uploaded, confirmed) - 1 >= t and revealed >= t + 1
    )


def check(n, t, invite, gone):
    """Run a session in which `gone` leave at each message, and compare with what must come out."""
    slots = range(10, 10 + n)
    vectors = integers(slots, dimension(invite), n)
    cohort = Cohort(n, invite, complete(t), vectors=vectors, weights={slot: slot for slot in slots})
    gone = [[slots[place] for place in places] for places in gone]
    left, sizes = n, []
    for stage in gone:
        left -= len(stage)
        sizes.append(left)
    if not enough(sizes, n, t, invite.min_sum):
        with pytest.raises((BelowThreshold, TooFewNeighbours)):
            cohort.run(gone)
        if not enough([*sizes[:5], sizes[4]], n, t, invite.min_sum):
            assert not cohort.revealed
        return False
    found = cohort.run(gone)
    summed = [slot for slot in slots if slot not in chain(*gone[:4])]
    assert (found.total.devices, found.total.weight, found.culprits) == (len(summed), sum(summed), frozenset())
    np.testing.assert_array_equal(found.total.sums, cohort.total(summed))
    return True


def subsets(n):
    return chain.from_iterable(combinations(range(n), size) for size in range(n + 1))


@pytest.mark.parametrize("stage", [0, 1, 2, 3, 5])
def test_every_set_of_seven_may_leave_at_every_stage(stage):
    outcomes = [check(7, 4, SMALL, [() if place != stage else missing for place in range(6)]) for missing in subsets(7)]
    assert outcomes.count(True) == 29  # with four of six shares, two may leave


def test_every_mix_of_stages_among_four_devices():
    outcomes = []
    for leaves in product((1, 2, 3, 5, None), repeat=4):
        gone = [tuple(place for place in range(4) if leaves[place] == stage) for stage in range(6)]
        outcomes.append(check(4, 2, SMALL, gone))
    assert 0 < outcomes.count(True) < len(outcomes)


@pytest.mark.parametrize("stage", range(6))
def test_every_set_of_five_may_leave_at_every_stage_of_active_mode(stage):
    invite = invitation(mode=ACTIVE, segments=SMALL.segments, min_sum=2)
    for missing in subsets(5):
        check(5, 3, invite, [() if place != stage else missing for place in range(6)])


@pytest.mark.parametrize(
    ("n", "mode", "seed"), [(8, 1, 0), (20, 1, 1), (64, 0, 2), (65, 0, 3), (100, 1, 4), (200, 0, 5)]
)
def test_random_devices_leave_a_real_cohort_at_random_stages(n, mode, seed):
    made = np.random.default_rng(seed)
    vectors = integers(range(10, 10 + n), 5, seed)
    cohort = Cohort(n, invitation(mode=mode, min_sum=n // 2), vectors=vectors)
    leaving = made.choice(list(cohort.clients), max(n // 12, 1), replace=False).tolist()
    stages = made.integers(0, 6, len(leaving)).tolist()
    gone = [[slot for slot, at in zip(leaving, stages, strict=True) if at == stage] for stage in range(6)]
    found = cohort.run(gone)
    summed = [slot for slot in cohort.clients if slot not in chain(*gone[:4])]
    assert found.total.devices == len(summed)
    np.testing.assert_array_equal(found.total.sums, sum(vectors[slot].astype(np.float64) for slot in summed))


@pytest.mark.security("The coordinator sees each report … unless the task asks for secure aggregation")
@pytest.mark.security("Nothing else about a vector: weights, metrics and indicators are inside the mask")
@pytest.mark.parametrize("value", [0, 255])
def test_an_upload_looks_uniform_with_any_content(value):
    segment = PackedSegment(100_000, 21, 8, 0.0, 255.0)
    same = dict.fromkeys(range(10, 14), np.full(segment.size, value, "f4"))
    cohort = Cohort(4, invitation(segments=(segment,)), complete(2), vectors=same)
    cohort.upload(cohort.share(cohort.advertise()))
    counts = np.bincount(np.frombuffer(cohort.replies[10].message[34:-64], np.uint8), minlength=256)
    expected = counts.sum() / 256
    # 255 degrees of freedom; the chance to be 7 standard deviations above the mean is below 10^-9.
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 7 * 22.6


@pytest.mark.parametrize("size", [0, 1, 7, 10_001])
def test_vectors_of_every_length_are_summed(size):
    cohort = Cohort(4, invitation(segments=(PackedSegment(size, 21, 8, 0.0, 255.0),)), complete(2))
    np.testing.assert_array_equal(cohort.run().total.sums, cohort.total(cohort.clients))


def test_segments_with_their_own_ranges_are_summed_each_by_its_rule():
    segments = (
        PackedSegment(4, 32, 20, -2.0, 2.0, norm=3.0, weighted=True), PackedSegment(1, 8, 1, 0.0, 1.0),
        PackedSegment(2, 24, 16, 0.0, 65535.0),
    )  # fmt: skip
    vectors = {slot: np.array([1, -1, 0.5, 0, slot % 2, 60_000, slot], np.float32) for slot in range(10, 15)}
    invite, weights = invitation(segments=segments, n_max=8, w_max=9), {slot: slot - 9 for slot in vectors}
    found = Cohort(5, invite, complete(3), vectors=vectors, weights=weights).run()
    assert found.total.weight == 1 + 2 + 3 + 4 + 5
    np.testing.assert_allclose(found.total.sums[:4], [15, -15, 7.5, 0], atol=5 * 9 * segments[0].step)
    assert found.total.sums[4:].tolist() == [2, 300_000, 60]


def test_the_server_may_divide_the_work_among_processes():
    cohort = Cohort(9, invitation(segments=(PackedSegment(10_001, 21, 8, 0.0, 255.0),)))
    survivors = cohort.upload(cohort.share(cohort.advertise()), without=(11,))
    cohort.reveal(cohort.confirm(survivors))
    with ProcessPoolExecutor(2) as executor:
        found = cohort.unmask(executor, 3)
    np.testing.assert_array_equal(found.total.sums, cohort.total(survivors))


def test_groups_of_a_divided_cohort_are_sessions_of_their_own_and_add_up():
    cohort = Cohort(20, invitation(n_max=10, min_sum=8))
    together = cohort.server
    cohort.answer(dict.fromkeys(cohort.clients, together.invitation))
    found = []
    for cohort.server in together.divide([range(11, 20), range(20, 30)]):
        cohort.server.advance()
        rosters = cohort.server.advance().messages
        survivors = cohort.upload(cohort.share(rosters), without=(12,))
        cohort.reveal(cohort.confirm(survivors))
        found.append(cohort.unmask())
    total = found[0].total + found[1].total
    assert [one.total.devices for one in found] == [8, 10]
    np.testing.assert_array_equal(total.sums, cohort.total(slot for slot in cohort.clients if slot not in {10, 12}))
    with pytest.raises(OutOfOrder):
        together.receive(10, cohort.client(10).receive(together.invitation).message)


def test_everyone_gets_a_signed_receipt_of_the_same_sum():
    cohort = Cohort(8, invitation(segments=EXACT))
    found = cohort.run(((), (), (), (12,), (), ()))
    results = cohort.server.results()
    ends = [cohort.clients[slot].receive(message) for slot, message in results.items() if slot != 12]
    assert ends == [Reply(done=True)] * 7
    told = {cohort.clients[slot].result for slot in results if slot != 12}
    assert [(result.summed, result.aggregate_hash) for result in told] == [(True, found.digest)]


def test_below_its_threshold_a_session_ends_with_a_signed_abort():
    cohort = Cohort(8)
    deliveries, client = cohort.share(cohort.advertise()), cohort.clients[14]
    with pytest.raises(BelowThreshold):
        cohort.upload(deliveries, without=(10, 11, 12, 13))
    with pytest.raises(OutOfOrder):
        assert client.result.summed
    client.receive(cohort.server.results()[14])
    assert (client.result.summed, client.result.aggregate_hash) == (False, bytes(32))


def test_what_devices_send_and_get_is_as_small_as_the_specification_says():
    cohort = Cohort(8)
    roster = cohort.advertise()[10]
    assert len(cohort.server.invitation) == 130 + 35 * len(cohort.invite.segments) + 64
    assert Invite.decode(cohort.server.invitation)[0] == cohort.invite
    assert len(roster) == 34 + 12 + 96 + 4 + 96 + 7 * (4 + 248 + 96)
    assert len(cohort.client(11).receive(cohort.server.invitation).message) == 34 + 248
    assert len(cohort.clients[10].receive(roster).message) == 34 + 32 + 7 * 80


def test_a_sum_that_was_made_in_parts_has_the_bits_of_one():
    """Every vector is opened and added where it comes, by a host of three places, and the parts are merged."""
    cohort = Cohort(12, invitation(min_sum=8))
    messages = cohort.open(cohort.share(cohort.advertise()))
    uploads = {slot: cohort.clients[slot].receive(message).message for slot, message in messages.items() if slot != 12}
    server, parts = cohort.server, [({}, MaskedSum(no_words(word_count(cohort.invite.segments)))) for _ in range(2)]
    for number, (slot, upload) in enumerate(uploads.items()):
        if number % 3 == 2:
            server.receive(slot, upload)
        else:
            expected = server.expected(slot)
            signatures, part = parts[number % 3]
            part.add(expected.position, masked := expected.open(upload))
            signatures[slot] = masked.signature
    for signatures, part in parts:
        server.merge(signatures, part.words)
        with pytest.raises(DuplicateUpload):
            server.merge(signatures, part.words)
    words = sum(np.frombuffer(Masked.decode(one, cohort.sid, part.words.size).words, "<u8") for one in uploads.values())
    np.testing.assert_array_equal(server._masked.words, words)
    cohort.reveal(cohort.confirm(server.advance().messages))
    found = cohort.unmask()
    assert found.total.devices == len(uploads) == 11
    np.testing.assert_array_equal(found.total.sums, cohort.total(uploads))


def test_a_part_of_another_size_phase_or_device_is_refused_whole():
    cohort = Cohort(9, invitation(min_sum=8))
    size = word_count(cohort.invite.segments)
    with pytest.raises(OutOfOrder):
        cohort.server.expected(10)
    cohort.open(cohort.share(cohort.advertise()))
    for error, signatures, words in (
        (BadVector, {10: bytes(64)}, np.ones(size + 1, np.uint64)),
        (OutOfOrder, {10: bytes(64), 99: bytes(64)}, np.ones(size, np.uint64)),
    ):
        with pytest.raises(error):
            cohort.server.merge(signatures, words)
    assert (cohort.server._masked.signatures, cohort.server._masked.words.any()) == ({}, False)


def test_no_device_is_sent_what_it_would_refuse_for_want_of_neighbours():
    """Of nine devices six must be neighbours of each; with six there each has five."""
    silent = (10, 11, 12)
    for stage in (1, 2, 3, 4):
        cohort = Cohort(9)
        gone = [silent if number == stage else () for number in range(6)]
        with pytest.raises(BelowThreshold):
            cohort.run(gone)
        assert not cohort.revealed
