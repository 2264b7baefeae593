"""Keys: signatures, released models, and private files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedcore import signing
from fedcore.bundle import Bundle
from fedcore.errors import BadRelease, BadSignature, DigestMismatch, InvalidKey, NotWritten
from fedcore.plan import BlobRef, PlanSignature
from fedcore.private_files import write_private, write_whole
from fedcore.release import Release
from tests.fedcore.test_plan import (
    bundle as bundle,  # noqa: PLC0414 - a fixture
    rewrite,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "signature.json").read_text())
PLAN, OTHER = BlobRef.of(b"plan"), BlobRef.of(b"another")


@pytest.fixture
def key(tmp_path):
    return signing.SigningKey.new(tmp_path / "key.pem")


@pytest.mark.parametrize("vector", VECTORS)
def test_keys_messages_and_signatures_are_those_of_the_vectors(vector):
    key = signing.SigningKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(vector["private_key"])))
    plan = BlobRef.of(vector["plan"].encode())
    assert signing.message(plan).hex() == vector["message"]
    assert key.sign(plan) == PlanSignature(vector["signer"], vector["value"])
    signing.verify(plan, PlanSignature(vector["signer"], vector["value"]))


def test_a_new_key_is_for_its_owner_alone_and_never_replaces_another(tmp_path):
    path = tmp_path / "key.pem"
    made = signing.SigningKey.new(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    assert signing.SigningKey.load(path).signer == made.signer
    with pytest.raises(FileExistsError):
        signing.SigningKey.new(path)
    assert signing.SigningKey.load(path).signer == made.signer


def test_a_signature_is_good_for_its_plan_and_its_signer_alone(key, tmp_path):
    signature = key.sign(PLAN)
    signing.verify(PLAN, signature)
    with pytest.raises(BadSignature, match="muster plan sign"):
        signing.verify(OTHER, signature)
    with pytest.raises(BadSignature):
        signing.verify(PLAN, PlanSignature(signing.SigningKey.new(tmp_path / "other.pem").signer, signature.value))


@pytest.mark.parametrize("change", [lambda v: v[:-1], lambda v: v + "=", lambda v: v + "\n", lambda v: "", str.lower])
def test_a_signature_in_another_spelling_is_refused(key, change):
    signature = key.sign(PLAN)
    with pytest.raises(BadSignature):
        signing.verify(PLAN, msgspec.structs.replace(signature, value=change(signature.value)))


def test_unused_bits_of_a_value_must_be_zero(key):
    signature = key.sign(PLAN)
    # 64 bytes leave four unused bits in the last of 86 characters.
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet[alphabet.index(signature.value[-1]) + 1]
    with pytest.raises(BadSignature):
        signing.verify(PLAN, msgspec.structs.replace(signature, value=signature.value[:-1] + last))


@pytest.mark.parametrize(
    "text", ["", "ed25519:", "ed25519:AAAA", "rsa:AAAA", "ed25519:" + "é" * 43, "ed25519:" + "+" * 43]
)
def test_what_is_no_public_key_is_named(text):
    with pytest.raises(InvalidKey, match="is not a public key"):
        signing.public_key(text)


@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_that_holds_no_key_is_named(tmp_path, content):
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    with pytest.raises(InvalidKey, match=r"key\.pem .*`muster key new` makes one"):
        signing.SigningKey.load(path)


def test_a_file_that_is_not_there_is_named_with_what_makes_it(tmp_path):
    path = tmp_path / "nosuch.pem"
    with pytest.raises(InvalidKey, match=rf"no file {path}; `muster key new --out {path}` makes a key"):
        signing.SigningKey.load(path)


def test_a_key_of_another_kind_is_named(tmp_path):
    path = tmp_path / "key.pem"
    path.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(InvalidKey, match="not an Ed25519 key"):
        signing.SigningKey.load(path)


def test_a_bundle_says_who_signed_it_also_when_it_was_signed_twice(bundle, key, tmp_path):
    assert (bundle.manifest.signature, bundle.signer) == (None, None)
    assert bundle.sign(signing.SigningKey.new(tmp_path / "other.pem")).signer != key.signer
    assert Bundle(bundle.sign(key).folder).signer == key.signer


def test_a_signature_does_not_survive_a_change_of_the_plan(bundle, key):
    signed = bundle.sign(key)
    tampered = msgspec.structs.replace(signed.plan, name="evil").encode()
    ref = BlobRef.of(tampered)
    (signed.folder / "blobs" / ref.sha256).write_bytes(tampered)
    rewrite(signed, plan=msgspec.to_builtins(ref))
    with pytest.raises(BadSignature, match=ref.sha256[:12]):
        _ = Bundle(signed.folder).signer


def test_a_damaged_plan_is_not_signed(bundle, key):
    (bundle.folder / "blobs" / bundle.manifest.plan.sha256).write_bytes(b"{}")
    with pytest.raises(DigestMismatch):
        bundle.sign(key)
    assert Bundle(bundle.folder).signer is None


RELEASE = signing.ModelRelease(
    population="phones",
    name="keyboard",
    number=3,
    plan=BlobRef.of(b"plan"),
    parameters=BlobRef.of(b"parameters"),
    counter=1,
    evaluation={"evaluate.accuracy": 0.93},
)


@pytest.fixture
def model_key(tmp_path):
    return signing.SigningKey.new(tmp_path / "release.key")


def test_a_signed_release_of_a_model_is_read_as_it_was_written(model_key):
    assert signing.verified(model_key.sign_statement(RELEASE), signing.ModelRelease) == RELEASE


def test_an_altered_release_of_a_model_is_refused(model_key):
    signed = model_key.sign_statement(RELEASE)
    with pytest.raises(BadSignature, match="model release"):
        signing.verified(
            msgspec.structs.replace(signed, text=signed.text.replace('"number":3', '"number":4')), signing.ModelRelease
        )


def test_a_model_release_is_not_a_release_for_secure_rounds(model_key):
    with pytest.raises(BadSignature):
        signing.verified(model_key.sign_statement(RELEASE), Release)


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"number": 0}, {"name": "Key board"}, {"name": "a\n"}, {"plan": "x"}, {"counter": -1}],
    ids=str,
)
def test_what_is_no_model_release_is_refused(change):
    members = json.loads(msgspec.json.encode(RELEASE)) | change
    with pytest.raises(BadRelease):
        signing.decode_model_release(json.dumps(members))


@pytest.mark.parametrize("name", ["", "-a", "a/b", "..", "A", "a" * 65, "ä", "a\n"])
def test_names_that_no_model_may_have_are_refused(name):
    with pytest.raises(BadRelease, match="no name of a model"):
        signing.check_model_name(name)


def test_names_of_models_are_short_and_plain():
    for name in ("keyboard", "k", "7", "a_b-c", "a" * 64):
        signing.check_model_name(name)


MAKERS = {"succession": lambda path: signing.SucceedingKey.new("server").save(path), "signing": signing.SigningKey.new}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_file_of_a_key_and_its_name_are_on_the_disk(tmp_path, monkeypatch, maker):
    path, synced, fsync = tmp_path / "key", [], os.fsync

    def noted(handle):
        fsync(handle)
        synced.append((os.fstat(handle).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", noted)
    MAKERS[maker](path)
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


@pytest.mark.parametrize("maker", MAKERS)
def test_what_a_killed_process_left_keeps_nobody_from_a_key(tmp_path, maker):
    target, stale = tmp_path / "target", tmp_path / f"key.{os.getpid()}"
    target.write_text("untouched")
    stale.symlink_to(target)
    MAKERS[maker](tmp_path / "key")
    assert target.read_text() == "untouched"
    assert {one.name for one in tmp_path.iterdir()} == {"key", "target", stale.name}


def test_a_private_file_is_replaced_only_when_told(tmp_path):
    path = tmp_path / "file"
    write_private(path, b"first")
    with pytest.raises(FileExistsError) as refused:
        write_private(path, b"second")
    assert (refused.value.filename, path.read_bytes()) == (str(path), b"first")
    write_private(path, b"second", replace=True)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"second", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_for_others_is_replaced_whole_with_the_usual_mode(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"first")
    usual = path.stat().st_mode
    write_whole(path, b"second")
    assert (path.read_bytes(), path.stat().st_mode) == (b"second", usual)
    with pytest.raises(NotWritten, match=r"missing/file cannot be written: No such file or directory$"):
        write_whole(tmp_path / "missing" / "file", b"third")
    assert list(tmp_path.iterdir()) == [path]
