"""Problem types: every error over HTTP is an RFC 9457 document of one of them. Spec: docs/spec/wire.md §7."""

from __future__ import annotations

import msgspec

from fedcore.decoding import UNDECODABLE, decoder
from fedcore.errors import WireError
from fedcore.wire.messages import RetryWindow

PROBLEM_TYPE = "application/problem+json"
PROBLEM_FIELD = "Muster-Problem"
"""The header field that names an answer's problem type, as an answer to HEAD has no document."""
URN = "urn:muster:problem:"


class ProblemKind(msgspec.Struct, frozen=True):
    """A registered type: its HTTP status and its title."""

    status: int
    title: str


PROBLEMS = {
    "malformed-message": ProblemKind(400, "The request is not a message of this protocol"),
    "unsigned": ProblemKind(401, "The request is not signed"),
    "malformed-signature": ProblemKind(401, "The signature is not of the form that this protocol has"),
    "unknown-device": ProblemKind(401, "No device has this key id; enrol"),
    "forged-signature": ProblemKind(401, "The signature was not made by this device's key over this request"),
    "stale-signature": ProblemKind(401, "The signature is too old, too new or expired by the coordinator's clock"),
    "replayed-signature": ProblemKind(401, "A request with this signature's nonce came before"),
    "device-revoked": ProblemKind(403, "The operator of this coordinator has revoked this device"),
    "not-attested": ProblemKind(403, "The attestation is not taken here"),
    "beacon-refused": ProblemKind(403, "The authority does not draw this beacon"),
    "foreign-session": ProblemKind(403, "The session is another device's"),
    "foreign-assignment": ProblemKind(403, "The assignment is another device's"),
    "unknown-resource": ProblemKind(404, "There is nothing at this address"),
    "method-not-allowed": ProblemKind(405, "This address does not take this method"),
    "unknown-population": ProblemKind(404, "No population has this name"),
    "unknown-session": ProblemKind(404, "The session does not exist or has ended; check in again"),
    "unknown-assignment": ProblemKind(404, "No assignment has this id"),
    "unknown-blob": ProblemKind(404, "No blob has this digest"),
    "no-model": ProblemKind(404, "There is no version of the model for this device"),
    "conflicting-report": ProblemKind(409, "Another report was already accepted for this assignment"),
    "mismatching-offset": ProblemKind(409, "The part does not begin where the last one ended"),
    "no-longer-needed": ProblemKind(410, "The round no longer needs this report"),
    "too-stale": ProblemKind(410, "The report starts from a model that is too old by now"),
    "too-large": ProblemKind(413, "The body is larger than this address accepts"),
    "range-not-satisfiable": ProblemKind(416, "The requested range lies outside the blob"),
    "digest-mismatch": ProblemKind(422, "The body does not have the digest that Content-Digest names"),
    "invalid-report": ProblemKind(422, "The body is not a report of this assignment's layout"),
    "unusable-message": ProblemKind(422, "The secure aggregation cannot use this message"),
    "too-many-requests": ProblemKind(429, "This device, or its address, has asked too often; try again later"),
    "internal": ProblemKind(500, "The coordinator failed; nothing was counted"),
    "unavailable": ProblemKind(503, "The coordinator cannot serve this now; try again"),
}


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem document; `detail` says what happened and what to do."""

    type: str
    title: str
    status: int
    detail: str
    retry: RetryWindow | None = None

    @property
    def slug(self) -> str:
        """The registered name, without the URN prefix."""
        return self.type.removeprefix(URN)


_PROBLEM = decoder(Problem)


def decode_problem(data: bytes) -> Problem:
    """A problem document from JSON. Raises WireError when the data is not one."""
    try:
        return _PROBLEM.decode(data)
    except UNDECODABLE as error:
        raise WireError(str(error)) from error


def problem(slug: str, detail: str, retry: RetryWindow | None = None) -> Problem:
    """A problem document of a registered type."""
    kind = PROBLEMS[slug]
    return Problem(URN + slug, kind.title, kind.status, detail, retry)
