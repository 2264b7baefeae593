"""The enrolment authority over HTTP: whom it vouches for, and what its credentials say."""

import hashlib
import time
from pathlib import Path

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from authority.configuration import AuthorityConfig
from authority.errors import InvalidSettings, KeyMissing
from authority.service import AuthorityServer, issuer_of
from fedcore.errors import InvalidKey
from fedcore.signing import SucceedingKey, key_text
from fedcore.wire import messages
from fedcore.wire.messages import (
    IssuedCredential,
    RequestCredential,
    SharedSecret,
    Unattested,
    decode_problem,
    shared_secret_proof,
)
from fedcore.wire.signatures import PublicKey, Signer, device_id
from secagg.keys import check_credential, prove_possession
from tests.coordinator.devices import SignedBy
from tests.device_runtime.process import muster
from tests.servers import authority_serving

SECRET = b"a secret of the whole fleet"
DAY_S = 86_400


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A client of an authority that wants a secret, and the authority's public key."""
    folder = tmp_path_factory.mktemp("authority")
    key = SucceedingKey.new("authority")
    key.save(folder / "key")
    (folder / "secret").write_bytes(SECRET)
    config = AuthorityConfig(key=folder / "key", port=0, enrolment_secret_file=folder / "secret", credential_days=2)
    with authority_serving(config) as url, httpx2.Client(base_url=url, trust_env=False) as client:
        yield client, key.public


class Newcomer:
    """A device that asks for a credential; `at` is its time."""

    def __init__(self, at=None):
        self.device, self.secagg = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        self.at = int(time.time()) if at is None else at

    @property
    def key(self):
        return PublicKey.of(self.device).text

    @property
    def id(self):
        return self.secagg.public_key().public_bytes_raw()

    def request(self, **changes):
        about = hashlib.sha256(self.key.encode()).digest()
        given = {
            "attestation": SharedSecret(shared_secret_proof(SECRET, self.key, self.at)),
            "secagg": self.id,
            "possession": prove_possession(self.secagg, about, self.at),
        }
        return messages.encode(RequestCredential(**given | changes))

    def ask(self, client, content=None, **changes):
        signed = SignedBy(Signer(self.key, self.device), lambda: self.at)
        return client.post("/v1/credentials", content=content or self.request(**changes), auth=signed)


def refused(answer, slug):
    assert (decode_problem(answer.content).slug, answer.headers["muster-problem"]) == (slug, slug), answer.text


def test_a_device_gets_a_credential_for_its_key_and_its_id_and_a_time(authority):
    client, public = authority
    newcomer = Newcomer()
    issued = messages.decode(newcomer.ask(client).content, IssuedCredential)
    assert issued.authority.current == public
    found = check_credential(public, newcomer.id, issued.credential, newcomer.at)
    assert found.device.hex() == device_id(newcomer.key)
    assert 2 * DAY_S <= found.expires - newcomer.at <= 2 * DAY_S + 60


def test_a_key_that_the_device_does_not_hold_gets_no_credential(authority):
    client, _ = authority
    newcomer, other = Newcomer(), Newcomer()
    about = hashlib.sha256(newcomer.key.encode()).digest()
    refused(newcomer.ask(client, secagg=other.id), "not-attested")
    refused(newcomer.ask(client, possession=prove_possession(newcomer.secagg, about, newcomer.at - 1)), "not-attested")
    # The proof of another device, which it made for itself.
    stolen = messages.decode(other.request(), RequestCredential)
    refused(newcomer.ask(client, secagg=stolen.secagg, possession=stolen.possession), "not-attested")


@pytest.mark.security("its evidence, which is bound to the key and the moment")
def test_only_devices_that_know_the_secret_get_a_credential(authority):
    client, _ = authority
    newcomer, other = Newcomer(), Newcomer()
    wrong = SharedSecret(shared_secret_proof(b"the coordinator's own secret", newcomer.key, newcomer.at))
    of_another = SharedSecret(shared_secret_proof(SECRET, other.key, other.at))
    for evidence in (Unattested(), wrong, of_another):
        refused(newcomer.ask(client, attestation=evidence), "not-attested")


def test_a_request_must_be_signed_fresh_and_whole(authority):
    client, _ = authority
    newcomer = Newcomer()
    refused(client.post("/v1/credentials", content=newcomer.request()), "malformed-signature")
    refused(Newcomer(at=int(time.time()) - 400).ask(client), "stale-signature")
    refused(Newcomer(at=int(time.time()) + 60).ask(client), "stale-signature")
    for junk in (b"{", b"{}", b'{"version": 9}'):
        refused(newcomer.ask(client, content=junk), "malformed-message")
    refused(newcomer.ask(client, content=bytes(70_000)), "too-large")
    taken = SignedBy(Signer(newcomer.key, newcomer.device), lambda: newcomer.at)
    request = client.build_request("POST", "/v1/credentials", content=newcomer.request())
    next(taken.auth_flow(request))
    request.headers["content-length"] = "3"
    refused(
        client.send(httpx2.Request("POST", request.url, headers=request.headers, content=b"abc")), "digest-mismatch"
    )
    forged = Signer(newcomer.key, Ed25519PrivateKey.generate())
    answer = client.post("/v1/credentials", content=newcomer.request(), auth=SignedBy(forged))
    refused(answer, "forged-signature")
    assert client.get("/healthz").text == "ok\n"


def test_an_authority_does_not_start_with_a_missing_or_foreign_key(tmp_path):
    with pytest.raises(KeyMissing, match="new-key"):
        issuer_of(AuthorityConfig(key=tmp_path / "key"))
    assert not (tmp_path / "key").exists()
    SucceedingKey.new("server").save(tmp_path / "key")
    with pytest.raises(InvalidKey, match="authority"):
        issuer_of(AuthorityConfig(key=tmp_path / "key"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 65_536}, "port must be a whole number from 0 to 65,535, not 65536"),
        ({"credential_days": 0.0}, "credential_days must be a number of days from 0.01 to 366"),
        ({"tls_key": Path("key.pem")}, "tls_cert and tls_key go together"),
        ({"trusted_proxies": ("10.0.0.1/8",)}, "trusted_proxies: 10.0.0.1/8 has host bits set"),
        ({"allowed_origins": ("app.example",)}, "allowed_origins: 'app.example' is no origin"),
    ],
)
def test_a_wrong_setting_of_an_authority_is_named(tmp_path, given, words):
    SucceedingKey.new("authority").save(tmp_path / "key")
    with pytest.raises(InvalidSettings, match=words):
        AuthorityServer(AuthorityConfig(key=tmp_path / "key", accept_unattested=True, **given), print)


def test_a_rotated_key_is_led_to_by_the_one_before(tmp_path):
    before = muster("authority", "new-key", tmp_path / "key")["authority"]
    after = muster("authority", "rotate", tmp_path / "key")["authority"]
    succession = issuer_of(AuthorityConfig(key=tmp_path / "key", accept_unattested=True)).key.succession
    assert [key_text(key) for key in succession.keys] == [before, after]
    assert succession.follow("authority", succession.first) == succession.current
