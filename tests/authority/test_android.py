"""Android Key Attestation: a phone with the app gets in, and who only says so does not."""

import datetime as dt
import json
import random

import httpx2
import pytest

from authority.attestation import AndroidPhones, Attestation
from authority.configuration import AuthorityConfig
from authority.errors import BadAndroidFile, NotAttested
from fedcore.errors import WireError
from fedcore.signing import SucceedingKey
from fedcore.wire import messages
from tests.authority import android
from tests.authority.test_service import Newcomer, refused
from tests.servers import authority_serving

pytestmark = pytest.mark.security("there is a real one with the app behind a key")

ROUNDS = 2000
NOW = 1_800_000_000
AT = dt.datetime.fromtimestamp(NOW, dt.UTC)
KEY = "ed25519:a-key-of-requests"
CHALLENGE = messages.attestation_challenge(KEY, NOW)


@pytest.fixture(scope="module")
def maker():
    return android.Maker(AT)


@pytest.fixture
def phones(maker, tmp_path):
    """The check of an authority with the default settings."""
    return AndroidPhones.load(maker.settings(tmp_path))


def test_a_phone_with_the_app_is_taken(maker, phones):
    phones.check(maker.chain(CHALLENGE), CHALLENGE, NOW)
    phones.check(maker.chain(CHALLENGE)[:2], CHALLENGE, NOW)  # the root is known here and need not be sent


@pytest.mark.parametrize(
    ("described", "why"),
    [
        ({"level": android.SOFTWARE}, "security level is 00"),
        ({"keymaster_level": android.SOFTWARE}, "security level is 00"),
        ({"level": 9}, "security level is 09"),
        ({"locked": False}, "boot loader"),
        ({"state": android.SELF_SIGNED}, "boot loader"),
        ({"state": android.UNVERIFIED}, "boot loader"),
        ({"root_of_trust_in_software": True}, "0 entries of the tag bf8540"),
        ({"package": "org.example.other"}, "app"),
        ({"signer": bytes(32)}, "app"),
    ],
)
def test_a_phone_in_another_state_or_with_another_app_is_refused(maker, phones, described, why):
    with pytest.raises(NotAttested, match=why):
        phones.check(maker.chain(CHALLENGE, **described), CHALLENGE, NOW)


@pytest.mark.security("its evidence, which is bound to the key and the moment")
def test_evidence_for_another_key_or_another_time_is_refused(maker, phones):
    attestation = Attestation(False, phones=phones)
    evidence = messages.AndroidKey(maker.chain(CHALLENGE))
    assert attestation.check(evidence, KEY, NOW) == "android-key"
    for key, created in ((f"{KEY}2", NOW), (KEY, NOW + 1)):
        with pytest.raises(NotAttested, match="challenge"):
            attestation.check(evidence, key, created)
    with pytest.raises(NotAttested, match="no Android phone"):
        Attestation(True, b"a secret of the whole fleet").check(evidence, KEY, NOW)


def test_a_challenge_may_be_given_as_its_text(maker, phones):
    phones.check(maker.chain(CHALLENGE.hex().encode()), CHALLENGE, NOW)
    for text in (CHALLENGE.hex().upper(), CHALLENGE.hex()[:-1], bytes(32).hex()):
        with pytest.raises(NotAttested, match="challenge"):
            phones.check(maker.chain(text.encode()), CHALLENGE, NOW)


def test_a_chain_to_another_root_is_refused(maker, phones):
    stranger = android.Maker(AT)
    leaf, phone, root = stranger.chain(CHALLENGE)
    for chain in ((leaf, phone, root), (leaf, phone, maker.root.der), (leaf, maker.phone.der, maker.root.der)):
        with pytest.raises(NotAttested, match="no root that is known"):
            phones.check(chain, CHALLENGE, NOW)


@pytest.mark.parametrize("days", [-3, 31])
def test_a_chain_before_or_after_its_time_is_refused(maker, phones, days):
    with pytest.raises(NotAttested, match="no root that is known"):
        phones.check(maker.chain(CHALLENGE), CHALLENGE, NOW + days * 86_400)


def through(maker, **changes):
    """A chain with one more certificate in its middle, made with `changes`."""
    given = {"at": AT} | changes
    middle = android.certify("middle", maker.phone, **given)
    leaf = android.certify("leaf", middle, at=AT, ca=False, extension=android.Described(CHALLENGE).der)
    return leaf.der, middle.der, maker.phone.der


def test_every_certificate_of_a_chain_must_be_one_that_may_sign(maker, phones):
    phones.check(through(maker), CHALLENGE, NOW)
    for wrong in ({"ca": False}, {"may_sign": False}, {"ends": AT - android.DAY}):
        with pytest.raises(NotAttested, match="no root that is known"):
            phones.check(through(maker, **wrong), CHALLENGE, NOW)


def test_an_attested_key_cannot_vouch_for_a_phone(maker, phones):
    chain = through(maker, extension=android.Described(bytes(32)).der)
    with pytest.raises(NotAttested, match="itself that of an attested key"):
        phones.check(chain, CHALLENGE, NOW)


def test_a_leaf_without_a_description_of_its_key_is_refused(maker, phones):
    leaf = android.certify("leaf", maker.phone, at=AT, ca=False)
    with pytest.raises(NotAttested, match="no description"):
        phones.check((leaf.der, maker.phone.der), CHALLENGE, NOW)


def test_revoked_certificates_are_refused_wherever_they_are(maker, tmp_path):
    chain = maker.chain(CHALLENGE)
    numbers = maker.phone.certificate.serial_number, maker.root.certificate.serial_number
    for number, serial in [(one, text) for one in numbers for text in (f"{one:x}", f"{one}")]:
        (tmp_path / "status.json").write_text(json.dumps({"entries": {serial: {"status": "REVOKED"}}}))
        phones = AndroidPhones.load(maker.settings(tmp_path, revoked="status.json"))
        with pytest.raises(NotAttested, match=f"{number:x} is revoked"):
            phones.check(chain, CHALLENGE, NOW)


def test_an_operator_may_ask_for_more_or_for_less(maker, tmp_path):
    strict = AndroidPhones.load(maker.settings(tmp_path, security_level="strongbox"))
    strict.check(maker.chain(CHALLENGE, level=android.STRONGBOX, keymaster_level=android.STRONGBOX), CHALLENGE, NOW)
    with pytest.raises(NotAttested, match="less than strongbox"):
        strict.check(maker.chain(CHALLENGE), CHALLENGE, NOW)
    lenient = AndroidPhones.load(maker.settings(tmp_path, verified_boot=False))
    lenient.check(maker.chain(CHALLENGE, locked=False), CHALLENGE, NOW)


def test_a_chain_that_is_too_long_is_no_message(maker):
    certificate = maker.root.der
    for chain in ((certificate,) * (messages.MOST_CERTIFICATES + 1), (certificate,), (certificate, bytes(5000))):
        body = messages.encode(messages.Enrol(attestation=messages.AndroidKey(chain)))
        with pytest.raises(WireError):
            messages.decode(body, messages.Enrol)


def test_damaged_certificates_are_refused_and_nothing_else(maker, phones):
    source = random.Random(14)
    whole = maker.chain(CHALLENGE)
    for number in range(ROUNDS):
        chain = list(whole)
        chain[number % 2] = damaged(whole[number % 2], source)
        if tuple(chain) != whole:
            with pytest.raises(NotAttested):
                phones.check(chain, CHALLENGE, NOW)


def test_damaged_descriptions_are_refused_unless_they_say_what_must_be(maker, phones):
    source = random.Random(15)
    whole = android.Described(CHALLENGE).der
    for _ in range(ROUNDS):
        described = damaged(whole, source)
        leaf = android.certify("leaf", maker.phone, at=AT, ca=False, extension=described)
        try:
            phones.check((leaf.der, maker.phone.der), CHALLENGE, NOW)
        except NotAttested:
            continue
        assert CHALLENGE in described
        assert android.SIGNER in described
        assert android.PACKAGE.encode() in described


def damaged(data, source):
    """Bytes with a few changed, taken out or put in."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(changed))
        match source.randrange(3):
            case 0:
                changed[at] = source.randrange(256)
            case 1:
                del changed[at : at + source.randint(1, 8)]
            case 2:
                changed[at:at] = source.randbytes(source.randint(1, 8))
    return bytes(changed)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"signer": "12"}, "signer"),
        ({"security_level": "software"}, "software"),
        ({"verified_bot": False}, "verified_bot"),
        ({"revoked": "nothing.json"}, "nothing.json"),
        ({"revoked": "roots.pem"}, "roots.pem is no list"),
        ({"roots": "android.toml"}, "android.toml"),
    ],
)
def test_a_file_of_phones_that_is_wrong_is_named_with_the_reason(maker, tmp_path, changes, why):
    with pytest.raises(BadAndroidFile, match=why):
        AndroidPhones.load(maker.settings(tmp_path, **changes))
    with pytest.raises(BadAndroidFile, match="missing"):
        AndroidPhones.load(tmp_path / "missing.toml")


def test_a_phone_gets_a_credential_over_http_and_no_other_device_does(tmp_path):
    SucceedingKey.new("authority").save(tmp_path / "key")
    maker = android.Maker(dt.datetime.now(dt.UTC))
    config = AuthorityConfig(key=tmp_path / "key", port=0, android_file=maker.settings(tmp_path))
    newcomer, other = Newcomer(), Newcomer()
    evidence = messages.AndroidKey(maker.chain(messages.attestation_challenge(newcomer.key, newcomer.at)))
    with authority_serving(config) as url, httpx2.Client(base_url=url, trust_env=False) as client:
        answer = newcomer.ask(client, attestation=evidence)
        assert messages.decode(answer.content, messages.IssuedCredential).credential
        refused(other.ask(client, attestation=evidence), "not-attested")
        refused(other.ask(client), "not-attested")
        later = Newcomer(at=newcomer.at - 1)
        later.device = newcomer.device
        refused(later.ask(client, attestation=evidence), "not-attested")
        junk = messages.RequestCredential(
            attestation=messages.AndroidKey((b"junk",) * 2), secagg=other.id, possession=bytes(64)
        )
        refused(other.ask(client, content=messages.encode(junk)), "not-attested")
