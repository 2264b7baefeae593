"""The issuer of credentials: it attests a device, checks that the device holds its key, and signs. Pure: time is an
argument.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from authority.attestation import Attestation
from authority.errors import NotAttested
from fedcore.succession import SucceedingKey
from fedcore.wire.messages import IssuedCredential, RequestCredential
from fedcore.wire.signatures import device_id
from secagg.credentials import check_possession, issue
from secagg.errors import BadSignature


@dataclass(frozen=True, slots=True)
class Issuer:
    """The authority's key, the evidence that it accepts, and the validity of its credentials, in seconds."""

    key: SucceedingKey
    attestation: Attestation
    lasting_s: int

    def issue(self, request: RequestCredential, key: str, created: int, now: float) -> IssuedCredential:
        """The credential of the device that signs with `key` (as text), which signed this request at `created`.

        Raises NotAttested, also when the device does not prove that it holds the key that it names.
        """
        self.attestation.check(request.attestation, key, created)
        try:
            check_possession(request.secagg, request.possession, hashlib.sha256(key.encode()).digest(), created)
        except BadSignature as error:
            raise NotAttested("the proof of possession is not one of the key for secure aggregation") from error
        device = bytes.fromhex(device_id(key))
        return IssuedCredential(
            issue(self.key.private, request.secagg, device, int(now) + self.lasting_s), self.key.succession
        )
