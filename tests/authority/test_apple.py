"""App Attest: a device of Apple's with the app gets in, and who only says so does not; and what a phone once said."""

import base64
import datetime as dt
import hashlib
import json
import random
from dataclasses import replace

import cbor2
import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from authority.attestation import DEVELOPMENT, PRODUCTION, ApplePhones, Attestation
from authority.configuration import AuthorityConfig
from authority.errors import BadAndroidFile, BadAppleFile, NotAttested
from fedcore.signing import SucceedingKey
from fedcore.wire import messages
from fedcore.wire.messages import AppAttest, IssuedCredential, attestation_challenge
from tests.authority.android import Maker, tlv
from tests.authority.apple import APP, Apple, authenticator, encoded, key_id
from tests.authority.test_android import AT, CHALLENGE, KEY, NOW, ROUNDS, damaged
from tests.authority.test_service import Newcomer, refused
from tests.servers import authority_serving
from tests.tree import ROOT

pytestmark = pytest.mark.security("there is a real one with the app behind a key")

RECORDED = json.loads((ROOT / "tests" / "vectors" / "app_attest.json").read_text())


@pytest.fixture(scope="module")
def apple():
    return Apple(AT)


@pytest.fixture
def phones(apple, tmp_path):
    """The check of an authority with the default settings."""
    return ApplePhones.load(apple.settings(tmp_path))


def of_record(folder, **changes):
    """The check of an authority that takes the recorded app, by Apple's own root."""
    (folder / "root.pem").write_text(RECORDED["root"])
    given = {"roots": "root.pem", "app": RECORDED["app"]} | changes
    (folder / "apple.toml").write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items()))
    return ApplePhones.load(folder / "apple.toml")


def statement_of(name):
    """A recorded statement, and its clientDataHash."""
    found = {field: base64.b64decode(RECORDED[name][field]) for field in ("attestation", "challenge")}
    return found["attestation"], hashlib.sha256(found["challenge"]).digest()


# --- what a phone said


@pytest.mark.parametrize(("name", "changes"), [("production", {}), ("development", {"development": True})])
def test_what_a_phone_once_said_is_taken_under_apples_root(tmp_path, name, changes):
    of_record(tmp_path, **changes).check(*statement_of(name), RECORDED["at"])


@pytest.mark.parametrize(
    ("name", "changes", "at", "why"),
    [
        ("development", {}, 0, "environment b'appattestdevelop'"),
        ("production", {"app": "V8H6LQ9448.io.uebelacker.Another"}, 0, "app"),
        ("production", {}, 86_400 * 365, "no root that is known"),
        ("production", {}, -86_400 * 3, "no root that is known"),
    ],
)
def test_what_a_phone_once_said_is_for_that_app_and_time(tmp_path, name, changes, at, why):
    with pytest.raises(NotAttested, match=why):
        of_record(tmp_path, **changes).check(*statement_of(name), RECORDED["at"] + at)


def test_what_a_phone_once_said_is_for_that_challenge_and_root(apple, phones, tmp_path):
    statement, challenge = statement_of("production")
    with pytest.raises(NotAttested, match="challenge"):
        of_record(tmp_path).check(statement, statement_of("development")[1], RECORDED["at"])
    with pytest.raises(NotAttested, match="no root that is known"):
        phones.check(statement, challenge, RECORDED["at"])


def test_damage_to_what_a_phone_once_said_is_refused(tmp_path):
    phones, source = of_record(tmp_path), random.Random(16)
    whole, challenge = statement_of("production")
    same = cbor2.loads(whole)
    for _ in range(ROUNDS):
        other = damaged(whole, source)
        try:
            phones.check(other, challenge, RECORDED["at"])
        except NotAttested:
            continue
        found = cbor2.loads(other)  # the receipt is for Apple's servers alone
        assert (found["authData"], found["attStmt"]["x5c"]) == (same["authData"], same["attStmt"]["x5c"])


# --- what others say


def test_a_device_with_the_app_is_taken(apple, phones, tmp_path):
    phones.check(apple.statement(CHALLENGE), CHALLENGE, NOW)
    lenient = ApplePhones.load(apple.settings(tmp_path, development=True))
    for environment in (PRODUCTION, DEVELOPMENT):
        lenient.check(apple.statement(CHALLENGE, environment=environment), CHALLENGE, NOW)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"app": f"{APP}2"}, "app"),
        ({"counter": 1}, "used before"),
        ({"environment": DEVELOPMENT}, "environment b'appattestdevelop'"),
        ({"environment": bytes(16)}, "environment"),
        ({"of": bytes(32)}, "another key"),
        ({"of": bytes(31)}, "too early|another key"),
        ({"of": bytes(33)}, "another key"),
    ],
)
def test_a_device_that_says_anything_else_is_refused(apple, phones, said, why):
    with pytest.raises(NotAttested, match=why):
        phones.check(apple.statement(CHALLENGE, **said), CHALLENGE, NOW)


def test_a_statement_for_another_key_or_time_is_refused(apple, phones):
    attestation = Attestation(False, apples=phones)
    evidence = AppAttest(apple.statement(CHALLENGE))
    assert attestation.check(evidence, KEY, NOW) == "app-attest"
    for key, created in ((f"{KEY}2", NOW), (KEY, NOW + 1)):
        with pytest.raises(NotAttested, match="challenge"):
            attestation.check(evidence, key, created)
    with pytest.raises(NotAttested, match="no iOS device"):
        Attestation(True, b"a secret of the whole fleet").check(evidence, KEY, NOW)


def test_a_challenge_may_be_hashed_as_its_text(apple, phones):
    phones.check(apple.statement(hashlib.sha256(CHALLENGE.hex().encode()).digest()), CHALLENGE, NOW)
    for said in (CHALLENGE.hex().encode(), hashlib.sha256(CHALLENGE).digest(), hashlib.sha256(b"0" * 64).digest()):
        with pytest.raises(NotAttested, match="challenge"):
            phones.check(apple.statement(said), CHALLENGE, NOW)


def test_a_statement_under_another_root_or_out_of_time_is_refused(apple, phones):
    for statement, days in ((Apple(AT).statement(CHALLENGE), 0), *((apple.statement(CHALLENGE), n) for n in (-3, 31))):
        with pytest.raises(NotAttested, match="no root that is known"):
            phones.check(statement, CHALLENGE, NOW + days * 86_400)


def test_an_attested_key_cannot_vouch_for_a_device(apple, phones):
    key, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    data = authenticator(key_id(own))
    attested = apple.leaf(key, data, CHALLENGE)
    below = replace(apple, at=AT)
    object.__setattr__(below, "devices", attested)
    made = below.leaf(own, data, CHALLENGE)
    with pytest.raises(NotAttested, match="no root that is known"):
        phones.check(encoded(made.der, attested.der, data=data), CHALLENGE, NOW)
    with pytest.raises(NotAttested, match="no attestation object"):
        phones.check(encoded(made.der, attested.der, apple.devices.der, apple.root.der, data=data), CHALLENGE, NOW)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"extension": None}, "no nonce"),
        ({"extension": b"junk"}, "cannot be read"),
        ({"extension": tlv(0x30, tlv(0x04, bytes(32)))}, "cannot be read"),
    ],
)
def test_a_certificate_that_is_none_of_app_attest_is_refused(apple, phones, changes, why):
    key = ec.generate_private_key(ec.SECP256R1())
    data = authenticator(key_id(key))
    leaf = apple.leaf(key, data, CHALLENGE, **changes)
    with pytest.raises(NotAttested, match=why):
        phones.check(encoded(leaf.der, apple.devices.der, data=data), CHALLENGE, NOW)


@pytest.mark.parametrize(
    "statement",
    [
        b"",
        b"junk",
        cbor2.dumps([]),
        cbor2.dumps({"fmt": "apple-appattest"}),
        cbor2.dumps(cbor2.CBORTag(35, "(a+)+")),
        cbor2.dumps({"fmt": cbor2.CBORTag(4, [2**31, 1]), "attStmt": {"x5c": [b"", b""]}, "authData": b""}),
        b"\x9b" + b"\xff" * 8,
        b"\x5b" + b"\x7f" * 8,
        b"\x81" * 16_000,
        encoded(b"junk", b"junk", data=bytes(100)),
        encoded(b"junk", data=bytes(100)),
        encoded(b"junk", b"junk", data=bytes(100), fmt="packed"),
    ],
)
def test_what_is_no_statement_is_refused(phones, statement):
    with pytest.raises(NotAttested):
        phones.check(statement, CHALLENGE, NOW)


def test_a_certificate_of_another_kind_of_key_is_refused(apple, phones):
    data = authenticator(bytes(32))
    leaf = apple.leaf(ed25519.Ed25519PrivateKey.generate(), data, CHALLENGE)
    with pytest.raises(NotAttested, match="none of App Attest"):
        phones.check(encoded(leaf.der, apple.devices.der, data=data), CHALLENGE, NOW)


def test_authenticator_data_that_end_too_early_are_refused(apple, phones):
    key = ec.generate_private_key(ec.SECP256R1())
    for data in (b"", authenticator(key_id(key))[:86]):
        leaf = apple.leaf(key, data, CHALLENGE)
        with pytest.raises(NotAttested, match="too early"):
            phones.check(encoded(leaf.der, apple.devices.der, data=data), CHALLENGE, NOW)


# --- files and services


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"app": "org.example.keyboard"}, "app"),
        ({"roots": "nothing.pem"}, "nothing.pem"),
        ({"roots": "apple.toml"}, "apple.toml"),
        ({"develop": True}, "develop"),
    ],
)
def test_a_file_of_ios_devices_that_is_wrong_is_named_with_the_reason(apple, tmp_path, changes, why):
    with pytest.raises(BadAppleFile, match=why):
        ApplePhones.load(apple.settings(tmp_path, **changes))


def test_play_integrity_is_refused_where_it_is_asked_for_with_the_reason(tmp_path):
    with pytest.raises(BadAndroidFile, match=r"play_integrity .*no verdict .*Android Key Attestation"):
        Attestation.of(False, None, Maker(AT).settings(tmp_path, play_integrity="keys.json"))


def test_an_ios_device_gets_a_credential_and_no_other_does(tmp_path):
    SucceedingKey.new("authority").save(tmp_path / "key")
    apple = Apple(dt.datetime.now(dt.UTC))
    config = AuthorityConfig(key=tmp_path / "key", port=0, apple_file=apple.settings(tmp_path))
    newcomer, other = Newcomer(), Newcomer()
    evidence = AppAttest(apple.statement(attestation_challenge(newcomer.key, newcomer.at)))
    with authority_serving(config) as url, httpx2.Client(base_url=url, trust_env=False) as client:
        answer = newcomer.ask(client, attestation=evidence)
        assert answer.status_code == 200, answer.text
        messages.decode(answer.content, IssuedCredential)
        refused(other.ask(client, attestation=evidence), "not-attested")
