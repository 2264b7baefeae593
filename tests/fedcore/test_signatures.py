"""Signed requests against RFC 9421's own examples, our vectors, and an independent implementation."""

import base64
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_der_public_key
from http_message_signatures import (
    HTTPMessageSigner,
    HTTPMessageVerifier,
    HTTPSignatureKeyResolver,
    algorithms,
)
from hypothesis import given, settings, strategies as st

from fedcore.errors import ForgedSignature, InvalidKey, MalformedSignature, WireError
from fedcore.wire import signatures

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "requests.json").read_text())
ED25519 = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
P256 = ec.derive_private_key(7, ec.SECP256R1())
KEYS = pytest.mark.parametrize("key", [ED25519, P256], ids=["ed25519", "p256"])


def request(method="PUT", target="/v1/assignments/a%2Fb/report?x=1", body=b"report", **fields):
    given = {"content-digest": signatures.content_digest(body)} | fields if body else fields
    return signatures.SignableRequest(method, "Fl.example.org:8443", target, given.get)


def parsed(headers):
    return signatures.Signature.parse(headers["Signature-Input"], headers["Signature"])


# --- RFC 9421, appendix B


def rfc_key(text):
    return signatures.PublicKey.parse(
        signatures.PublicKey.of(_Public(load_der_public_key(base64.b64decode(text)))).text
    )


class _Public:
    """What `PublicKey.of` asks of a private key."""

    def __init__(self, key):
        self.public_key = lambda: key


def test_the_ed25519_example_of_the_rfc_verifies():  # B.2.6, with the key of B.1.4
    values = [
        ("date", "Tue, 20 Apr 2021 02:07:55 GMT"),
        ("@method", "POST"),
        ("@path", "/foo"),
        ("@authority", "example.com"),
        ("content-type", "application/json"),
        ("content-length", "18"),
    ]
    names = " ".join(f'"{name}"' for name, _ in values)
    base = signatures.signature_base(values, f'({names});created=1618884473;keyid="test-key-ed25519"')
    value = base64.b64decode("wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw==")
    private = Ed25519PrivateKey.from_private_bytes(base64.b64decode("n4Ni+HpISpVObnQMW0wOhCKROaIKqKtW/2ZYb2p9KcU="))
    assert signatures.sign(private, base) == value
    key = rfc_key("MCowBQYDK2VwAyEAJrQLj5P/89iXES9+vFgrIy29clF9CC/oPPsw3c5D0bs=")
    assert key.text == signatures.PublicKey.of(private).text
    key.check(value, base)
    with pytest.raises(ForgedSignature):
        key.check(value, base + b" ")


def test_the_p256_example_of_the_rfc_verifies():  # B.2.4, with the key of B.1.3
    digest = "mEWXIS7MaLRuGgxOBdODa3xqM1XdEvxoYhvlCFJ41QJgJc4GTsPp29l5oGX69wWdXymyU0rjJuahq4l5aGgfLQ=="
    values = [
        ("@status", "200"),
        ("content-type", "application/json"),
        ("content-digest", f"sha-512=:{digest}:"),
        ("content-length", "23"),
    ]
    names = " ".join(f'"{name}"' for name, _ in values)
    base = signatures.signature_base(values, f'({names});created=1618884473;keyid="test-key-ecc-p256"')
    value = base64.b64decode("wNmSUAhwb5LxtOtOpNa6W5xj067m5hFrj0XQ4fvpaCLx0NKocgPquLgyahnzDnDAUy5eCdlYUEkLIj+32oiasw==")
    key = rfc_key(
        "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEqIVYZVLCrPZHGHjP17CTW0/+D9Lfw0EkjqF7xB4FivAxzic30tMM4GF+hR6Dxh71Z50VGGdldkkDXZCnTNnoXQ=="
    )
    assert key.algorithm == "ecdsa-p256-sha256"
    key.check(value, base)
    with pytest.raises(ForgedSignature):
        key.check(value, base + b" ")


# --- our own vectors


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_the_vectors_hold(vector):
    assert outcome(vector) == vector["outcome"]


def outcome(vector):
    """What becomes of a vector: good, or the name of the error."""
    about = signatures.SignableRequest(vector["method"], vector["host"], vector["target"], vector["fields"].get)
    try:
        found = signatures.Signature.parse(vector["signature_input"], vector["signature"])
        assert signatures.signature_base(about.values(found.covered), found.text).decode() == vector["base"]
        found.check(about, signatures.PublicKey.parse(vector["key"]))
    except WireError as error:
        return type(error).__name__
    return "good"


# --- an independent implementation


class Keys(HTTPSignatureKeyResolver):
    def __init__(self, key):
        self.key = key

    def resolve_public_key(self, key_id):
        return self.key.public_key()

    def resolve_private_key(self, key_id):
        return self.key


class Message:
    """A request as the other implementation wants it."""

    def __init__(self, method, authority, target, headers):
        self.method, self.url, self.headers = method, f"https://{authority}{target}", dict(headers)


def algorithm_of(key):
    return algorithms.ED25519 if isinstance(key, Ed25519PrivateKey) else algorithms.ECDSA_P256_SHA256


NAMES = st.text(st.characters(categories=["Ll", "Lu", "Nd"], max_codepoint=126), min_size=1, max_size=20)


@KEYS
@settings(max_examples=25)
@given(method=st.sampled_from(["GET", "PUT", "POST", "PATCH"]), name=NAMES, query=NAMES | st.just(""), body=st.binary())
def test_what_we_sign_another_implementation_verifies(key, method, name, query, body):
    target = f"/v1/blobs/{name}%20{'?' if query else ''}{query}"
    fields = {"content-digest": signatures.content_digest(body)} if body else {}
    headers = signatures.Signer("device-1", key).headers(
        signatures.SignableRequest(method, "fl.example.org", target, fields.get), int(datetime.now(UTC).timestamp())
    )
    message = Message(method, "fl.example.org", target, fields | headers)
    verifier = HTTPMessageVerifier(signature_algorithm=algorithm_of(key), key_resolver=Keys(key))
    (result,) = verifier.verify(message, require_components=signatures.COVERED)
    assert result.parameters["keyid"] == "device-1"


@KEYS
@settings(max_examples=25)
@given(method=st.sampled_from(["GET", "PUT", "POST", "PATCH"]), name=NAMES, query=NAMES | st.just(""), body=st.binary())
def test_what_another_implementation_signs_we_verify(key, method, name, query, body):
    target = f"/v1/blobs/{name}%20{'?' if query else ''}{query}"
    message = Message(
        method, "fl.example.org", target, {"content-digest": signatures.content_digest(body)} if body else {}
    )
    signer = HTTPMessageSigner(signature_algorithm=algorithm_of(key), key_resolver=Keys(key))
    covered = (*signatures.COVERED, *(("content-digest",) if body else ()))
    signer.sign(
        message,
        key_id="device-1",
        created=datetime.fromtimestamp(1_700_000_000, UTC),
        expires=datetime.fromtimestamp(1_700_000_300, UTC),
        nonce="abc",
        include_alg=False,
        use_existing_digest=bool(body),
        covered_component_ids=covered,
    )
    found = parsed(message.headers)
    assert (found.covered, found.keyid, found.nonce) == (covered, "device-1", "abc")
    assert (found.created, found.expires) == (1_700_000_000, 1_700_000_300)
    found.check(
        signatures.SignableRequest(method, "fl.example.org", target, message.headers.get), signatures.PublicKey.of(key)
    )


# --- what must not pass


@KEYS
@pytest.mark.parametrize(
    "changed",
    [
        request(method="POST"),
        request(target="/v1/assignments/a%2Fb/report"),
        request(target="/v1/assignments/a/b/report?x=1"),
        request(target="/v1/assignments/other/report?x=1"),
        request(body=b"Report"),
        signatures.SignableRequest("PUT", "evil.example.org", request().target, request().field),
    ],
)
def test_a_signature_is_for_one_request_alone(key, changed):
    found = parsed(signatures.Signer("d", key).headers(request(), 1_700_000_000))
    found.check(request(), signatures.PublicKey.of(key))
    with pytest.raises(ForgedSignature):
        found.check(changed, signatures.PublicKey.of(key))


@KEYS
def test_a_signature_is_of_one_key_alone(key):
    found = parsed(signatures.Signer("d", key).headers(request(), 1_700_000_000))
    for other in (Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())):
        with pytest.raises(ForgedSignature):
            found.check(request(), signatures.PublicKey.of(other))


def test_every_signature_has_a_nonce_of_its_own():
    nonces = {parsed(signatures.Signer("d", ED25519).headers(request(), 1_700_000_000)).nonce for _ in range(100)}
    assert len(nonces) == 100


GOOD = signatures.Signer("d", ED25519).headers(request(), 1_700_000_000)


@pytest.mark.parametrize(
    ("input_", "value"),
    [
        ("", ""),
        ("device=()", GOOD["Signature"]),
        (GOOD["Signature-Input"], ""),
        (GOOD["Signature-Input"], "other" + GOOD["Signature"].removeprefix("device")),
        (GOOD["Signature-Input"], "device=:!!!!:"),
        (GOOD["Signature-Input"], "device=:AAA:"),
        (GOOD["Signature-Input"] + ", second=()", GOOD["Signature"]),
        (GOOD["Signature-Input"].replace('"@method"', '"@method" "@method"'), GOOD["Signature"]),
        (GOOD["Signature-Input"].replace('"@method"', '"@method";req'), GOOD["Signature"]),
        (GOOD["Signature-Input"].replace('"@method" ', '"@method"  '), GOOD["Signature"]),
        (GOOD["Signature-Input"].replace("created=", "created=-"), GOOD["Signature"]),
        (GOOD["Signature-Input"].replace("created=", "created=1.5;was="), GOOD["Signature"]),
        (GOOD["Signature-Input"].replace(";nonce=", ";once="), GOOD["Signature"]),
        (GOOD["Signature-Input"] + ";created=1", GOOD["Signature"]),
        (GOOD["Signature-Input"] + "\n", GOOD["Signature"]),
        (GOOD["Signature-Input"] + ';alg="ed25519"', GOOD["Signature"]),
        (GOOD["Signature-Input"] + ";tag", GOOD["Signature"]),
        (GOOD["Signature-Input"].replace('keyid="d"', f'keyid="{"d" * 3000}"'), GOOD["Signature"]),
        (GOOD["Signature-Input"].replace('keyid="d"', 'keyid="é"'), GOOD["Signature"]),
    ],
    # Not the texts: their nonce is another in each process, and tests would have other names in each worker.
    ids=map(str, range(19)),
)
def test_a_signature_that_is_not_of_the_protocols_form_is_refused(input_, value):
    with pytest.raises(MalformedSignature):
        signatures.Signature.parse(input_, value)


@given(st.text(), st.text())
def test_no_text_makes_the_parser_fail_in_another_way(input_, value):
    with pytest.raises(MalformedSignature):
        signatures.Signature.parse(f"device={input_}", f"device=:{value}:")


def test_signature_over_missing_or_non_text_fields_is_refused():
    found = parsed(GOOD)
    for other in (request(body=b""), request(**{"content-digest": "sha-256=:é:"})):
        with pytest.raises(MalformedSignature):
            found.check(other, signatures.PublicKey.of(ED25519))


@KEYS
def test_a_key_comes_back_from_its_text(key):
    text = signatures.PublicKey.of(key).text
    assert signatures.PublicKey.parse(text).text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ed25519",
        "ed25519:",
        "ed25519:AAAA",
        "ed25519:" + "A" * 43 + "=",
        "rsa:" + "A" * 43,
        "ecdsa-p256-sha256:" + "A" * 43,
        signatures.PublicKey.of(P256).text[:-4] + "AAAA",
        "ed25519:é",
    ],
)
def test_what_is_no_key_is_refused(text):
    with pytest.raises(InvalidKey):
        signatures.PublicKey.parse(text)


def test_another_curve_is_refused():
    with pytest.raises(InvalidKey, match="secp384r1"):
        signatures.PublicKey.of(ec.generate_private_key(ec.SECP384R1()))


def test_a_digest_is_read_as_rfc_9530_writes_it():
    digest = hashlib.sha256(b"x").digest()
    header = f"sha-512=:AAAA:, {signatures.content_digest(b'x')}"
    assert (signatures.sha256_in(header), signatures.sha256_in(signatures.content_digest(b"x"))) == (digest, digest)
    for other in (None, "", "sha-256=:short:", "sha-256=AAAA", "md5=:AAAA:"):
        assert signatures.sha256_in(other) is None
