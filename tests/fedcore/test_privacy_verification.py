"""Ledgers that no coordinator writes, and that would make ε too small: they are named, also when they are signed."""

import hashlib

import pytest

from fedcore.privacy.accounting import spent
from fedcore.privacy.certificate import CertifiedLedger, PrivacyCertificate, ledger_digest
from fedcore.privacy.settings import LedgerEntry, Noise, Privacy
from fedcore.privacy.verification import verify
from fedcore.signing import SigningKey

MODEL = b"a model"


@pytest.fixture
def wrong(tmp_path):
    """What is wrong with a ledger, (round, clip) of each row, that its coordinator signed; first words only."""
    key = SigningKey.new(tmp_path / "key.pem")

    def check(rows, after=None, **noise):
        privacy = Privacy(noise_multiplier=5.0, epsilon=100.0, delta=1e-6, users=1000, **noise)
        facts = {name: getattr(privacy, name) for name in Noise.__struct_fields__}
        ledger = tuple(LedgerEntry(**facts, round=number, clip=clip, devices=10) for number, clip in rows)
        certificate = PrivacyCertificate(
            task="t", round=after or rows[-1][0], model=hashlib.sha256(MODEL).hexdigest(), privacy=privacy,
            rounds=len(ledger), epsilon=spent(ledger, privacy.delta), ledger=ledger_digest(ledger),
        )  # fmt: skip
        signed = key.sign_statement(certificate)
        return [one.partition(":")[0] for one in verify(MODEL, CertifiedLedger(signed, ledger)).wrong]

    return check


def test_rounds_left_out_are_refused_where_their_distance_counts(wrong):
    assert wrong([(number, 1.0) for number in (1, 3, 5)], min_separation_rounds=2) == ["rounds"]


def test_rounds_without_devices_are_allowed_where_no_distance_counts(wrong):
    assert wrong([(number, 1.0) for number in (1, 3, 5)]) == []


@pytest.mark.parametrize("noise", [{"mechanism": "tree"}, {"mechanism": "banded", "bands": 2}])
def test_bounds_that_differ_are_refused_where_noise_is_taken_back(wrong, noise):
    separation = {"min_separation_rounds": noise.get("bands", 1)}
    assert wrong([(1, 1.0), (2, 2.0)], **noise, **separation) == ["clip"]
    assert wrong([(1, 2.0), (2, 2.0)], **noise, **separation) == []


def test_bounds_may_differ_where_each_round_has_noise_of_its_own(wrong):
    assert wrong([(1, 1.0), (2, 2.0)]) == []


def test_a_trained_model_without_noisy_sums_is_refused(wrong):
    assert wrong([], after=7) == ["rounds"]


def test_devices_drawn_by_chance_alone_are_not_believed(wrong):
    assert wrong([(1, 1.0)], sampling_probability=0.1) == ["sampling_probability"]
