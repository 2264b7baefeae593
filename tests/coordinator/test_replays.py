"""Which signatures are taken, on a clock that only the test moves."""

import pytest
from hypothesis import given, strategies as st

from coordinator.api.authentication import AHEAD_S, LruCache, Replays
from coordinator.errors import ReplayedSignature, Unavailable
from fedcore.errors import MalformedSignature, StaleSignature
from fedcore.wire.signatures import WINDOW_S, Signature

pytestmark = pytest.mark.security("Every request of a device is signed, and refused by name")

NOW = 1_700_000_000.0
ALWAYS = float("-inf")


def signature(created=NOW, nonce="n", keyid="d", lasts=WINDOW_S):
    created = int(created)
    return Signature(covered=(), created=created, expires=created + lasts, nonce=nonce, keyid=keyid, text="", value=b"")


def take(replays, one, now=NOW, since=ALWAYS, steady=None):
    """Take a signature, on a clock that nobody set unless the steady one says something else."""
    one.check_time(now)
    replays.remember(one.created, replays.demand_new(one, since, now, now if steady is None else steady))


@pytest.mark.parametrize("created", [NOW - WINDOW_S + 1, NOW - 10, NOW, NOW + 1])
def test_a_signature_of_the_last_five_minutes_is_taken_once(created):
    replays, one = Replays(10), signature(created)
    take(replays, one)
    with pytest.raises(ReplayedSignature):
        take(replays, one)
    take(replays, signature(created, nonce="m"))
    take(replays, signature(created, keyid="e"))


@pytest.mark.parametrize("created", [NOW - WINDOW_S - 1, NOW + 2, 0])
def test_a_signature_of_another_time_is_stale(created):
    with pytest.raises(StaleSignature):
        signature(created).check_time(NOW)


def test_a_signature_that_has_expired_or_is_good_for_too_long_is_refused():
    with pytest.raises(StaleSignature, match="expired"):
        signature(NOW - 20, lasts=20).check_time(NOW)
    for lasts in (-1, WINDOW_S + 1):
        with pytest.raises(MalformedSignature):
            signature(lasts=lasts).check_time(NOW)


def test_request_an_earlier_process_may_have_taken_is_refused():
    replays = Replays(10)
    replays.begin(NOW + 0.25, NOW + 0.25)
    for created in (NOW - 10, NOW, NOW + 1):
        with pytest.raises(StaleSignature) as caught:
            take(replays, signature(created), NOW + 0.5, since=NOW - 1000)
        assert NOW + 0.5 + caught.value.after_s == NOW + 2
    take(replays, signature(NOW + 2), NOW + 2, since=NOW - 1000)


def test_a_device_that_enrolled_since_is_taken_at_once():
    replays = Replays(10)
    replays.begin(NOW + 0.25, NOW + 0.25)
    take(replays, signature(NOW), NOW + 0.5, since=NOW + 0.3)


def test_requests_beyond_the_memory_of_replays_are_turned_away():
    replays = Replays(3)
    for number in range(3):
        take(replays, signature(nonce=str(number)))
    with pytest.raises(Unavailable):
        take(replays, signature(nonce="3"))
    with pytest.raises(ReplayedSignature):
        take(replays, signature(nonce="0"))
    later = NOW + WINDOW_S + 1
    take(replays, signature(later), later)


@given(st.lists(st.tuples(st.integers(-20, 40), st.integers(0, 3), st.integers(-320, 3)), max_size=200))
def test_nothing_is_taken_twice_however_time_passes_and_clocks_are_set(requests):
    replays, taken, now = Replays(1000), set(), NOW
    for passes, nonce, age in requests:
        now += passes
        one = signature(now + age, nonce=str(nonce))
        try:
            take(replays, one, now)
        except (StaleSignature, ReplayedSignature):
            continue
        assert (one.created, one.nonce) not in taken
        taken.add((one.created, one.nonce))
        assert now - WINDOW_S <= one.created <= now + AHEAD_S


def test_signature_that_grew_old_during_key_lookup_is_refused():
    replays, one = Replays(10), signature(NOW - WINDOW_S + 1)
    take(replays, one)
    one.check_time(NOW)
    with pytest.raises(StaleSignature):
        replays.demand_new(one, ALWAYS, NOW + 2, NOW + 2)


def test_forgotten_signature_is_stale_after_the_clock_is_set_back():
    replays, one = Replays(2), signature(NOW)
    take(replays, one)
    ahead = NOW + 3600
    take(replays, signature(ahead), ahead)
    with pytest.raises(StaleSignature) as caught:
        take(replays, one, NOW + 0.5)
    assert caught.value.after_s == 0.5
    take(replays, signature(NOW + 1), NOW + 1)


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_clock_that_is_set_right_after_the_start_refuses_nobody(ahead_s):
    replays = Replays(10)
    replays.begin(NOW + ahead_s, steady=0.0)
    take(replays, signature(NOW + ahead_s + 9), NOW + ahead_s + 9, since=0.0, steady=9.0)
    # Ten seconds after the start the clock is set right.
    take(replays, signature(NOW + 10), NOW + 10, since=0.0, steady=10.0)
    take(replays, signature(NOW + 20), NOW + 20, since=0.0, steady=20.0)
    # An hour later it shows what it showed at the start.
    later = NOW + 3600 + 20
    take(replays, signature(later), later, since=0.0, steady=3620.0)


@pytest.mark.parametrize("set_by_s", [-3600, -200, -2, 0, 2, 3600])
def test_request_of_an_earlier_process_is_refused_however_clocks_go(set_by_s):
    replays = Replays(10)
    replays.begin(NOW, steady=0.0)
    for age in (1, 10, 299):
        for clock_then in (NOW, NOW + set_by_s):
            old = signature(clock_then - age)
            with pytest.raises(StaleSignature):
                take(replays, old, NOW + set_by_s + 0.5, since=0.0, steady=0.5)


def test_clock_that_was_ahead_for_long_refuses_nobody_once_it_is_right():
    replays, ahead = Replays(100), NOW + 3600
    for passed in range(0, 1200, 60):
        take(replays, signature(ahead + passed), ahead + passed)
    right = NOW + 1200
    take(replays, signature(right), right)
    with pytest.raises(StaleSignature):
        take(replays, signature(ahead), ahead + 100)
    with pytest.raises(ReplayedSignature):
        take(replays, signature(ahead + 1140), ahead + 1140)


def test_times_of_forgotten_signatures_are_kept_for_a_day():
    replays = Replays(10)
    for day in range(5):
        take(replays, signature(NOW + day * 86_400), NOW + day * 86_400)
    assert len(replays._forgotten) <= 2


def test_the_oldest_that_nobody_asked_for_is_forgotten_first():
    recent = LruCache(2)
    assert [recent.put(key, key) for key in "ab"] == ["a", "b"]
    assert recent.get("a") == "a"
    recent.put("c", "c")
    assert [recent.get(key) for key in "abc"] == ["a", None, "c"]
