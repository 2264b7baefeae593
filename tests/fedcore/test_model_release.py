"""Model releases: their statement, its signature, and what is no release."""

from __future__ import annotations

import json

import msgspec
import pytest

from fedcore.errors import BadRelease, BadSignature
from fedcore.model_release import ModelRelease, check_model_name, decode_model_release
from fedcore.plan import BlobRef
from fedcore.release import Release
from fedcore.signing import SigningKey, verified

RELEASE = ModelRelease(
    population="phones",
    name="keyboard",
    number=3,
    plan=BlobRef.of(b"plan"),
    parameters=BlobRef.of(b"parameters"),
    counter=1,
    evaluation={"evaluate.accuracy": 0.93},
)


@pytest.fixture
def key(tmp_path):
    return SigningKey.new(tmp_path / "release.key")


def test_a_signed_release_of_a_model_is_read_as_it_was_written(key):
    assert verified(key.sign_statement(RELEASE), ModelRelease) == RELEASE


def test_an_altered_release_of_a_model_is_refused(key):
    signed = key.sign_statement(RELEASE)
    with pytest.raises(BadSignature, match="model release"):
        verified(msgspec.structs.replace(signed, text=signed.text.replace('"number":3', '"number":4')), ModelRelease)


def test_a_model_release_is_not_a_release_for_secure_rounds(key):
    with pytest.raises(BadSignature):
        verified(key.sign_statement(RELEASE), Release)


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"number": 0}, {"name": "Key board"}, {"name": "a\n"}, {"plan": "x"}, {"counter": -1}],
    ids=str,
)
def test_what_is_no_model_release_is_refused(change):
    members = json.loads(msgspec.json.encode(RELEASE)) | change
    with pytest.raises(BadRelease):
        decode_model_release(json.dumps(members))


@pytest.mark.parametrize("name", ["", "-a", "a/b", "..", "A", "a" * 65, "ä", "a\n"])
def test_names_that_no_model_may_have_are_refused(name):
    with pytest.raises(BadRelease, match="no name of a model"):
        check_model_name(name)


def test_names_of_models_are_short_and_plain():
    for name in ("keyboard", "k", "7", "a_b-c", "a" * 64):
        check_model_name(name)
