import json
import stat
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedcore import signing
from fedcore.bundle import Bundle
from fedcore.errors import BadSignature, DigestMismatch, InvalidKey
from fedcore.plan import BlobRef, PlanSignature
from fedcore.signing import SigningKey, public_key, verify
from tests.fedcore.test_bundle import bundle, rewrite  # noqa: F401  # a fixture

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "signature.json").read_text())
PLAN, OTHER = BlobRef.of(b"plan"), BlobRef.of(b"another")


@pytest.fixture
def key(tmp_path):
    return SigningKey.new(tmp_path / "key.pem")


@pytest.mark.parametrize("vector", VECTORS)
def test_keys_messages_and_signatures_are_those_of_the_vectors(vector):
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(vector["private_key"])))
    plan = BlobRef.of(vector["plan"].encode())
    assert signing.message(plan).hex() == vector["message"]
    assert key.sign(plan) == PlanSignature(vector["signer"], vector["value"])
    verify(plan, PlanSignature(vector["signer"], vector["value"]))


def test_a_new_key_is_for_its_owner_alone_and_never_replaces_another(tmp_path):
    path = tmp_path / "key.pem"
    made = SigningKey.new(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    assert SigningKey.load(path).signer == made.signer
    with pytest.raises(FileExistsError):
        SigningKey.new(path)
    assert SigningKey.load(path).signer == made.signer


def test_a_signature_is_good_for_its_plan_and_its_signer_alone(key, tmp_path):
    signature = key.sign(PLAN)
    verify(PLAN, signature)
    with pytest.raises(BadSignature, match="muster plan sign"):
        verify(OTHER, signature)
    with pytest.raises(BadSignature):
        verify(PLAN, PlanSignature(SigningKey.new(tmp_path / "other.pem").signer, signature.value))


@pytest.mark.parametrize("change", [lambda v: v[:-1], lambda v: v + "=", lambda v: v + "\n", lambda v: "", str.lower])
def test_a_signature_in_another_spelling_is_refused(key, change):
    signature = key.sign(PLAN)
    with pytest.raises(BadSignature):
        verify(PLAN, msgspec.structs.replace(signature, value=change(signature.value)))


def test_unused_bits_of_a_value_must_be_zero(key):
    signature = key.sign(PLAN)
    # 64 bytes leave four unused bits in the last of 86 characters.
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet[alphabet.index(signature.value[-1]) + 1]
    with pytest.raises(BadSignature):
        verify(PLAN, msgspec.structs.replace(signature, value=signature.value[:-1] + last))


@pytest.mark.parametrize(
    "text", ["", "ed25519:", "ed25519:AAAA", "rsa:AAAA", "ed25519:" + "é" * 43, "ed25519:" + "+" * 43]
)
def test_what_is_no_public_key_is_named(text):
    with pytest.raises(InvalidKey, match="is not a public key"):
        public_key(text)


@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_that_holds_no_key_is_named(tmp_path, content):
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    with pytest.raises(InvalidKey, match=r"key\.pem .*`muster key new` makes one"):
        SigningKey.load(path)


def test_a_file_that_is_not_there_is_named_with_what_makes_it(tmp_path):
    path = tmp_path / "nosuch.pem"
    with pytest.raises(InvalidKey, match=rf"no file {path}; `muster key new --out {path}` makes a key"):
        SigningKey.load(path)


def test_a_key_of_another_kind_is_named(tmp_path):
    path = tmp_path / "key.pem"
    path.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(InvalidKey, match="not an Ed25519 key"):
        SigningKey.load(path)


def test_a_bundle_says_who_signed_it_also_when_it_was_signed_twice(bundle, key, tmp_path):  # noqa: F811
    assert (bundle.manifest.signature, bundle.signer) == (None, None)
    assert bundle.sign(SigningKey.new(tmp_path / "other.pem")).signer != key.signer
    assert Bundle(bundle.sign(key).folder).signer == key.signer


def test_a_signature_does_not_survive_a_change_of_the_plan(bundle, key):  # noqa: F811
    signed = bundle.sign(key)
    tampered = msgspec.structs.replace(signed.plan, name="evil").encode()
    ref = BlobRef.of(tampered)
    (signed.folder / "blobs" / ref.sha256).write_bytes(tampered)
    rewrite(signed, plan=msgspec.to_builtins(ref))
    with pytest.raises(BadSignature, match=ref.sha256[:12]):
        _ = Bundle(signed.folder).signer


def test_a_damaged_plan_is_not_signed(bundle, key):  # noqa: F811
    (bundle.folder / "blobs" / bundle.manifest.plan.sha256).write_bytes(b"{}")
    with pytest.raises(DigestMismatch):
        bundle.sign(key)
    assert Bundle(bundle.folder).signer is None
