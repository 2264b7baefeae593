import json
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from secagg import keys, masking
from secagg.errors import BadCiphertext, BadPoint, BadSignature
from secagg.keys import PairKey
from tests.secagg import reference

KNOWN = json.loads((Path(__file__).parents[1] / "vectors" / "secagg" / "known_answers.json").read_text())
P = 2**255 - 19
# Every encoding of a point of low order on Curve25519 and its twist, also those that are not reduced.
ORDER_8 = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
LOW_ORDER = [value.to_bytes(32, "little") for value in (0, 1, P - 1, P, P + 1, *ORDER_8)]


def vectors(name):
    return [
        {field: value if isinstance(value, int) else bytes.fromhex(value) for field, value in vector.items()}
        for vector in KNOWN[name]["vectors"]
    ]


@pytest.mark.parametrize("known", vectors("x25519"))
def test_agreement_is_that_of_rfc_7748(known):
    # A u-coordinate with its highest bit set is masked there and refused here.
    if known["u"][31] & 0x80:
        with pytest.raises(BadPoint):
            PairKey(known["scalar"]).agree(known["u"])
    reduced = known["u"][:31] + bytes([known["u"][31] & 0x7F])
    assert PairKey(known["scalar"]).agree(reduced) == known["output"]


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_refused(point):
    with pytest.raises(BadPoint):
        keys.check_point(point)


@pytest.mark.parametrize("known", vectors("hkdf_sha256"))
def test_derivation_is_that_of_rfc_5869(known):
    assert HKDF(SHA256(), known["length"], known["salt"], known["info"]).derive(known["ikm"]) == known["okm"]


def test_a_session_key_is_hkdf_of_sid_purpose_and_parties():
    secret, sid = bytes(range(32)), bytes(range(32, 64))
    info = b"muster.secagg.v1.box\0" + bytes([5, 0, 0, 0, 1, 1, 0, 0])
    assert keys.derive(secret, sid, "box", 5, 257) == reference.hkdf(secret, sid, info)


@pytest.mark.parametrize("known", vectors("ed25519"))
def test_signatures_are_those_of_rfc_8032(known):
    key = Ed25519PrivateKey.from_private_bytes(known["private"])
    assert key.public_key().public_bytes_raw() == known["public"]
    assert key.sign(known["message"]) == known["signature"]


def test_a_signature_is_good_only_for_its_purpose_context_and_body():
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    own, context = key.public_key().public_bytes_raw(), bytes(32)
    signature = keys.sign(key, "masked", context, b"body")
    assert key.sign(b"muster.secagg.v1.masked\0" + context + b"body") == signature
    keys.verify(own, signature, "masked", context, b"body")
    for changed in (("result", context, b"body"), ("masked", b"\1" * 32, b"body"), ("masked", context, b"bodies")):
        with pytest.raises(BadSignature):
            keys.verify(own, signature, *changed)
    with pytest.raises(BadSignature):
        keys.verify(b"\xff" * 32, signature, "masked", context, b"body")


@pytest.mark.parametrize("known", vectors("aes_256_ctr"))
def test_streams_are_those_of_nist_and_rfc_3686(known):
    encryptor = Cipher(AES256(known["key"]), CTR(known["counter"])).encryptor()
    assert encryptor.update(known["plaintext"]) == known["ciphertext"]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 257])
def test_a_stream_is_aes_of_the_counters_from_zero(size):
    key = bytes(range(32))
    assert masking.stream(key, size).tolist() == reference.keystream(key, size)


@pytest.mark.parametrize("known", vectors("aes_256_gcm"))
def test_boxes_are_gcm_of_nist(known):
    box = AESGCM(known["key"]).encrypt(known["nonce"], known["plaintext"], known["aad"])
    assert box == known["ciphertext"] + known["tag"]


@pytest.mark.security("alters, swaps, replays or reflects boxes")
def test_a_box_opens_only_with_its_key_session_and_direction():
    key, sid = bytes(range(32)), bytes(32)
    box = keys.seal(key, b"shares", sid, 3, 4)
    assert keys.open_box(key, box, sid, 3, 4) == b"shares"
    assert AESGCM(key).decrypt(bytes(12), box, sid + bytes([3, 0, 0, 0, 4, 0, 0, 0])) == b"shares"
    wrong = [
        (key, box, sid, 4, 3), (key, box, b"\1" * 32, 3, 4), (bytes(32), box, sid, 3, 4), (key, box[:-1], sid, 3, 4),
        *((key, box[:place] + bytes([box[place] ^ 1]) + box[place + 1 :], sid, 3, 4) for place in range(len(box))),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(BadCiphertext) as caught:
            keys.open_box(*arguments)
        assert caught.value.culprits == (arguments[3],)


def test_a_shared_mask_key_has_the_same_public_key_for_any_free_bits():
    for raw in (bytes(32), b"\xff" * 32, np.arange(32, dtype=np.uint8).tobytes()):
        key = PairKey(raw)
        assert key.secret < 2**255
        assert PairKey(key.secret.to_bytes(32, "little")).public == key.public
