"""Decoders take exactly what encoders give. MUSTER_FUZZ=1000000 asks for that many inputs per message."""

import random
import re
from pathlib import Path

import pytest

from secagg import encoding, errors, messages
from secagg.client_state import ClientStage, ClientState, Peer
from tests.damage import INPUTS, outcomes
from tests.secagg.cohort import invitation

pytestmark = pytest.mark.promise("Damaged messages, plans and reports are read, or refused by their own error")

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "secagg.md"
SID = bytes(range(32))
N = 13
NEAR = (4, 1, 12)
U1 = frozenset({0, 1, 4, 9})


def some(size, seed=0):
    return random.Random(seed).randbytes(size)


DEVICE = messages.Advertise(some(32, 1), some(32, 2), some(32, 3), some(64, 4), some(88, 5))
ENTRIES = tuple(messages.RosterEntry(position, DEVICE, some(128, position)) for position in NEAR)
SIGNED = {1: (some(32), some(64)), 4: (some(32, 1), some(64, 1))}
PEERS = (Peer(4, some(32), 5, 6), Peer(1, some(32, 1), 7, 8))
KEPT = ClientState(SID, 1, N, 2, 2, 0, U1, PEERS, ClientStage.REVEALED, frozenset({0, 4}))

# name: (bytes, decoder, what the decoded value encodes to)
CASES = {
    "M0": (
        invitation(n_max=100).body() + some(64),
        messages.Invite.decode,
        lambda found: found[0].body() + found[1],
    ),
    "M1": (DEVICE.encode(SID), lambda data: messages.Advertise.decode(data, SID), lambda found: found.encode(SID)),
    "M2": (
        messages.Roster(N, 3, 2, some(32), some(64, 1), 7, some(128), ENTRIES).encode(SID),
        lambda data: messages.Roster.decode(data, SID, 20),
        lambda found: found.encode(SID),
    ),
    "M3": (
        messages.Shares(some(32), tuple(some(80, i) for i in range(3))).encode(SID),
        lambda data: messages.Shares.decode(data, SID, 3),
        lambda found: found.encode(SID),
    ),
    "M4": (
        messages.Deliver(U1, {4: some(80), 1: some(80, 1)}).encode(SID, N),
        lambda data: messages.Deliver.decode(data, SID, N, NEAR),
        lambda found: found.encode(SID, N),
    ),
    "M5": (
        messages.Complaints(frozenset({1})).encode(SID, N),
        lambda data: messages.Complaints.decode(data, SID, N),
        lambda found: found.encode(SID, N),
    ),
    "M6": (
        messages.Included(U1).encode(SID, N),
        lambda data: messages.Included.decode(data, SID, N),
        lambda found: found.encode(SID, N),
    ),
    "M7": (
        messages.Masked(some(40), some(64)).encode(SID),
        lambda data: messages.Masked.decode(data, SID, 5),
        lambda found: found.encode(SID),
    ),
    "M8": (
        messages.Survivors(U1).encode(SID, N),
        lambda data: messages.Survivors.decode(data, SID, N),
        lambda found: found.encode(SID, N),
    ),
    "M9": (
        messages.Confirm(some(64)).encode(SID),
        lambda data: messages.Confirm.decode(data, SID),
        lambda found: found.encode(SID),
    ),
    "M10": (
        messages.Confirmations(SIGNED).encode(SID),
        lambda data: messages.Confirmations.decode(data, SID),
        lambda found: found.encode(SID),
    ),
    "M11": (
        messages.Unmask({1: (0, 2**256 - 1), 4: (1, 3)}).encode(SID),
        lambda data: messages.Unmask.decode(data, SID),
        lambda found: found.encode(SID),
    ),
    "M12": (
        messages.SessionResult(1, some(32), some(32, 1), some(64)).encode(SID),
        lambda data: messages.SessionResult.decode(data, SID),
        lambda found: found.encode(SID),
    ),
    "kept": (KEPT.encode(), ClientState.decode, lambda found: found.encode()),
}


def exact(decode, encode):
    """A decoder whose values encode to the very bytes that they come from."""

    def read(data):
        assert encode(decode(data)) == data

    return read


CASE = pytest.mark.parametrize(("data", "decode", "encode"), CASES.values(), ids=CASES)


@CASE
def test_what_was_encoded_is_decoded(data, decode, encode):
    assert encode(decode(data)) == data


@CASE
def test_every_truncation_and_every_byte_too_many_is_refused(data, decode, encode):
    for wrong in (*(data[:size] for size in range(len(data))), data + b"\0"):
        with pytest.raises(errors.Malformed):
            decode(wrong)


@pytest.mark.parametrize(("data", "decode", "encode"), [CASES[name] for name in CASES if name != "kept"])
def test_another_kind_version_or_session_is_refused_by_name(data, decode, encode):
    with pytest.raises(errors.Malformed, match="instead of"):
        decode(bytes([data[0] ^ 16]) + data[1:])
    with pytest.raises(errors.UnsupportedSuite, match="version 2"):
        decode(data[:1] + b"\2" + data[2:])
    if data[0]:
        with pytest.raises(errors.WrongSession):
            decode(data[:2] + b"\xff" + data[3:])


@CASE
def test_decoders_refuse_damage_by_typed_errors_only(data, decode, encode):
    assert outcomes(data, exact(decode, encode), errors.SecaggError, INPUTS).total() == INPUTS


def test_messages_have_the_names_and_senders_of_the_specification():
    rows = re.findall(r"^\| M(\d+) (\w+) \| (device|server) \|", SPEC.read_text(), re.MULTILINE)
    assert {int(number): name.upper() for number, name, _ in rows} == {
        one.value: one.name for one in encoding.MessageType
    }
    assert [int(number) for number, _, sender in rows if sender == "device"] == list(encoding.DEVICE_MESSAGES)


def test_a_message_says_its_type_in_its_first_byte():
    assert [encoding.MessageType.of(data) for data, _, _ in list(CASES.values())[:-1]] == list(encoding.MessageType)
    for wrong in (b"", b"\x0d", b"\xff\1"):
        with pytest.raises(errors.Malformed, match="does not exist"):
            encoding.MessageType.of(wrong)


def test_a_bitmap_counts_from_the_least_bit_and_has_no_others():
    assert encoding.bitmap(frozenset({0, 9}), 10) == bytes([1, 2])
    assert encoding.read_bitmap(bytes([1, 2]), 10) == {0, 9}
    with pytest.raises(errors.Malformed):
        encoding.read_bitmap(bytes([1, 4]), 10)
    assert encoding.read_bitmap(b"", 0) == frozenset()


@pytest.mark.parametrize("change", [{"mode": 2}, {"w_max": 0}])
def test_an_invitation_to_nothing_that_exists_is_refused(change):
    with pytest.raises(errors.Malformed):
        messages.Invite.decode(invitation(**change).body() + bytes(64))


def test_a_suite_that_is_unknown_is_refused():
    data = invitation().body()
    with pytest.raises(errors.UnsupportedSuite, match="suite 9"):
        messages.Invite.decode(data[:2] + b"\x09" + data[3:] + bytes(64))
