"""Checkpoints as deltas to the one that a device holds: a device asks for them, and does without."""

import numpy as np
import pytest

from device_runtime.session import run_session
from fedcore import checkpoint
from fedcore.checkpoint import delta_between
from tests.device_runtime import linear
from tests.device_runtime.coordinator import status

MOVED = linear.PARAMS * np.float32(1.001)


@pytest.fixture
def second(coordinator, config):
    """Have a first session, and another checkpoint for the next; its delta's address, and its bytes."""
    assert run_session(config).outcome == "reported"
    before = coordinator.checkpoint
    coordinator.offer(linear.plan(), linear.graphs(), {"params": MOVED})
    address = f"{coordinator.checkpoint.sha256}/deltas/{before.sha256}"
    return address, delta_between(checkpoint.encode({"params": linear.PARAMS}), checkpoint.encode({"params": MOVED}))


def fetched(coordinator):
    """Downloads of the last session."""
    calls = coordinator.calls
    last = len(calls) - calls[::-1].index("check-in")
    return [call for call in calls[last:] if call in ("blob", "delta")]


def kept(config):
    return {path.name for path in (config.state / "blobs").iterdir() if not path.suffix}


def test_a_newer_checkpoint_comes_as_a_delta(coordinator, config, second):
    address, coordinator.blobs[second[0]] = second
    outcome = run_session(config)
    assert (outcome.outcome, fetched(coordinator)) == ("reported", ["delta"])
    before = address.rpartition("/")[2]
    assert coordinator.checkpoint.sha256 in kept(config)
    assert before not in kept(config)


def test_the_same_checkpoint_is_not_fetched_again(coordinator, config):
    assert [run_session(config).outcome for _ in range(2)] == ["reported"] * 2
    assert fetched(coordinator) == []


@pytest.mark.parametrize("answer", ["none", "damaged"])
def test_without_a_good_delta_the_checkpoint_comes_whole(coordinator, config, second, answer):
    if answer == "damaged":
        coordinator.blobs[second[0]] = second[1][:-1]
    outcome = run_session(config)
    assert (outcome.outcome, fetched(coordinator)[-1]) == ("reported", "blob")
    assert len(fetched(coordinator)) == 2


@pytest.mark.security("Everything that is fetched is checked against its size and SHA-256")
def test_a_delta_as_long_as_the_checkpoint_ends_the_session(coordinator, config, second):
    coordinator.blobs[second[0]] = bytes(coordinator.checkpoint.size)
    outcome = run_session(config)
    assert (outcome.outcome, fetched(coordinator)) == ("failed", ["delta"])
    assert "the delta is as long as the blob" in outcome.detail


@pytest.mark.parametrize("damage", ["gone", "changed", "nonsense"])
def test_a_damaged_cache_costs_a_download_and_nothing_else(coordinator, config, second, damage):
    address, coordinator.blobs[second[0]] = second
    folder = config.state / "blobs"
    if damage == "nonsense":
        (last,) = folder.glob("*.last")
        last.write_bytes(b"../\xff")
    elif damage == "gone":
        (folder / address.rpartition("/")[2]).unlink()
    else:
        (folder / address.rpartition("/")[2]).write_bytes(bytes(coordinator.checkpoint.size))
    assert run_session(config).outcome == "reported"
    assert fetched(coordinator) == (["delta", "blob"] if damage == "changed" else ["blob"])


def test_a_delta_that_cannot_be_had_now_is_asked_for_again(coordinator, config, second):
    _, coordinator.blobs[second[0]] = second
    coordinator.faults["delta"] = [status(503)]
    outcome = run_session(config)
    assert (outcome.outcome, fetched(coordinator)) == ("reported", ["delta"] * 2)
