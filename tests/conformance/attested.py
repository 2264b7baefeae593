"""Scenarios of attestation: what a device that knows a secret proves to coordinator and authority, and when."""

import email.utils
import time

from fedcore.masking import session_number
from fedcore.signing import key_text
from fedcore.wire.messages import HeldCredential, SharedSecret, shared_secret_proof
from fedcore.wire.signatures import device_id
from secagg.keys import check_credential
from tests.conformance.device import SECRET
from tests.conformance.promises import ended, promise
from tests.conformance.secure import SAYS, TRUST, invite, said
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.test_secure import AUTHORITY, ROUND, invitation, issuing, public

WHY = "the proof was not made with the enrolment secret that is known here"


def proof(coordinator, device="d-0"):
    """The evidence of an enrolled device in the last request that it signed with its key."""
    return SharedSecret(shared_secret_proof(SECRET, coordinator.keys[device], coordinator.created[device]))


@promise("9", "a device proves to the coordinator that it knows the secret, for its key and this request", brief=True)
def is_attested_when_it_enrols(coordinator, device):
    theirs = time.time() + 20
    late = refusal("stale-signature", Date=email.utils.formatdate(theirs, usegmt=True))
    coordinator.faults["enrol"] = [late]
    ended(device.session(), "reported")
    (enrolment,) = coordinator.enrolments
    assert enrolment.attestation == proof(coordinator)
    assert abs(coordinator.created["d-0"] - theirs) < 15, "the proof is not of the request that was signed again"
    coordinator.faults["check-in"] = [refusal("unknown-device")]
    ended(device.session(), "reported")
    assert coordinator.enrolments[1].attestation == proof(coordinator, "d-1")


@promise("9", "a device proves to the authority that it knows the secret, for each credential anew", brief=True)
def is_attested_at_each_renewal(coordinator, device):
    invite(coordinator)
    proofs = []

    def issue(asked, key):
        proofs.append(asked.attestation == SharedSecret(shared_secret_proof(SECRET, key, coordinator.asked_at)))
        return issuing(lasts_s=-5 if coordinator.attempt == 1 else 3600)(asked, key)

    coordinator.issue, asked = issue, []
    for attempt in (1, 2, 3):
        coordinator.attempt, coordinator.invite = attempt, invitation(round=session_number(ROUND, attempt))
        coordinator.faults["secagg"] = [refusal("no-longer-needed")]
        ended(device.session(**TRUST), "not-needed")
        asked.append(len(proofs))
    assert all(proofs)
    assert 0 < asked[0] < asked[1] == asked[2], "a credential is renewed once it ended, and not before"


@promise("9", "a device whose owner names the authority is attested there, and enrols by its credential")
def is_attested_by_its_owners_authority(coordinator, device):
    invite(coordinator)
    owner = TRUST | {"authority": key_text(public(AUTHORITY)), "authority_url": coordinator.url}
    ended(device.session(**owner), "reported")
    (enrolment,), (asked,) = coordinator.enrolments, coordinator.issued
    coordinator.created["d-0"] = coordinator.asked_at
    assert (said(coordinator), asked.attestation) == (SAYS, proof(coordinator))
    assert isinstance(enrolment.attestation, HeldCredential)
    held = check_credential(public(AUTHORITY), enrolment.attestation.secagg, enrolment.attestation.credential, 0)
    assert held.device.hex() == device_id(coordinator.keys["d-0"])


@promise("9", "a device whose attestation is not taken ends its session by name, and says why on one line")
def is_attested_in_vain(coordinator, device):
    coordinator.faults["enrol"] = [refusal("not-attested", WHY)]
    in_vain(device.session())
    assert coordinator.calls == []
    invite(coordinator)
    coordinator.faults["credential"] = [refusal("not-attested", WHY)]
    in_vain(device.session(**TRUST))
    assert said(coordinator) == []


def in_vain(outcome):
    """Assert that a session ended as its attestation was refused."""
    ended(outcome, "failed", "not-attested")
    assert WHY in outcome["detail"]
    assert "\n" not in outcome["detail"]
