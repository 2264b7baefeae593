"""The primitives under `secagg.keys` against Project Wycheproof's vectors: what `cryptography` must accept and refuse.

The vectors are those that apply to keys, nonces and lengths of SA1, without X25519's random multiplications. Also
without Ed25519 keys of small or mixed order, on which verifiers may differ: who enrols such a key lets others sign in
its place, as any corrupt device can.
"""

import json
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from secagg.errors import BadPoint
from secagg.keys import FIELD_PRIME, PairKey

KNOWN = json.loads((Path(__file__).parents[1] / "vectors" / "secagg" / "wycheproof.json").read_text())


def cases(name):
    return [pytest.param(*values, id=str(number)) for number, *values in KNOWN[name]]


@pytest.mark.parametrize(("private", "public", "shared", "_result", "low_order"), cases("x25519"))
def test_agreement_gives_the_secret_or_refuses_what_sa1_must(private, public, shared, _result, low_order):
    key, point = PairKey(bytes.fromhex(private)), bytes.fromhex(public)
    if low_order or int.from_bytes(point, "little") >= FIELD_PRIME:
        with pytest.raises(BadPoint):
            key.agree(point)
    else:
        assert key.agree(point).hex() == shared


@pytest.mark.parametrize(("signer", "message", "signature", "result"), cases("ed25519"))
def test_signatures_are_accepted_and_refused_as_they_should(signer, message, signature, result):
    def verify():
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        key.verify(bytes.fromhex(signature), bytes.fromhex(message))

    if result == "valid":
        verify()
    else:
        with pytest.raises((InvalidSignature, ValueError)):
            verify()


@pytest.mark.parametrize(("key", "nonce", "extra", "plain", "box", "result"), cases("aes_gcm"))
def test_boxes_open_and_do_not_as_they_should(key, nonce, extra, plain, box, result):
    key, nonce, extra, plain, box = map(bytes.fromhex, (key, nonce, extra, plain, box))
    if result == "valid":
        assert AESGCM(key).encrypt(nonce, plain, extra) == box
        assert AESGCM(key).decrypt(nonce, box, extra) == plain
    else:
        with pytest.raises(InvalidTag):
            AESGCM(key).decrypt(nonce, box, extra)


@pytest.mark.parametrize(("secret", "salt", "info", "size", "made", "_result"), cases("hkdf_sha256"))
def test_derivation_gives_what_it_should(secret, salt, info, size, made, _result):
    secret, salt, info = map(bytes.fromhex, (secret, salt, info))
    assert HKDF(SHA256(), size, salt, info).derive(secret).hex() == made
