"""Messages of the device protocol, as JSON, and problem documents. Spec: docs/spec/wire.md.

Unknown fields are ignored, so a newer peer may add some; an unknown `version` is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from fedcore.conditions import ConditionRules, StatedConditions
from fedcore.errors import WireError
from fedcore.labels import Labels, Target, check_labels
from fedcore.plan import BlobRef, PlanSignature
from fedcore.release import LogProof, Signed
from fedcore.schedule import LONGEST_REPORTING_S
from fedcore.signing import MODEL_NAME, Key, Succession
from fedcore.validation import LONGEST_SENTENCE, UNDECODABLE, Count, decoder

DOMAIN = b"muster.attestation.v1\0"
CHALLENGE_DOMAIN = b"muster.attestation-challenge.v1\0"


def shared_secret_proof(secret: bytes, key: str, created: int) -> bytes:
    """32 bytes that prove knowledge of the secret, for a public key (its text) at a time (seconds since 1970)."""
    return hmac.digest(secret, DOMAIN + f"{key}\0{created}".encode(), hashlib.sha256)


def attestation_challenge(key: str, created: int) -> bytes:
    """32 bytes that name a public key (its text) and a time (seconds since 1970), for a phone's platform to attest."""
    return hashlib.sha256(CHALLENGE_DOMAIN + f"{key}\0{created}".encode()).digest()


WIRE_VERSION = 1
T = TypeVar("T")
LONGEST_NAME = 200
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
ShortName = Annotated[str, msgspec.Meta(min_length=1, max_length=50)]
MOST_COLLECTIONS, MOST_NAMES, MOST_TASKS = 64, 16, 256
"""The most that a device may name: collections, formats or protocols, and tasks that it is willing to do."""
ShortNames = Annotated[tuple[ShortName, ...], msgspec.Meta(max_length=MOST_NAMES)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
MOST_CERTIFICATES = 6
MOST_TOKEN = 200
"""The longest chain of certificates, with leaf and root. Phones have up to five."""
Certificate = Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
RoundNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
AttemptNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
"""Bounds under which round and attempt make one number of 63 bits (`fedcore.masking.session_number`)."""
CredentialBytes = Annotated[bytes, msgspec.Meta(min_length=88, max_length=88)]

RejectionReason = Literal[
    "no-task", "not-eligible", "unsupported-format", "resting", "not-selected", "superseded", "too-early",
    "shutting-down",
]  # fmt: skip
"""The reason for which a device gets no work now. The meaning of each: docs/spec/wire.md §3."""

AbortReason = Literal[
    "invalid-examples", "too-few-examples", "non-finite-report", "plan-refused", "runtime-failed", "conditions",
    "secagg-refused", "already-revealed",
]  # fmt: skip
"""The reason for which a device gives up an assignment. The meaning of each: docs/spec/wire.md §6."""


class RetryWindow(msgspec.Struct, frozen=True):
    """When to come back: a time drawn uniformly between the two, in seconds from now.

    Raises ValueError unless 0 <= min_s <= max_s, both finite; decoded, that is a WireError.
    """

    min_s: float
    max_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.min_s <= self.max_s < math.inf:
            raise ValueError(f"a retry window needs finite 0 <= min_s <= max_s, not {self.min_s:g} and {self.max_s:g}")


class Unattested(msgspec.Struct, frozen=True, tag="none", tag_field="kind"):
    """An attestation that proves nothing."""


class SharedSecret(msgspec.Struct, frozen=True, tag="shared-secret", tag_field="kind"):
    """A proof that the device knows a secret that its coordinator knows (`fedcore.wire.messages`)."""

    proof: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class AndroidKey(msgspec.Struct, frozen=True, tag="android-key", tag_field="kind"):
    """An Android Key Attestation: certificates in DER, leaf first. The leaf's challenge names the request."""

    chain: Annotated[tuple[Certificate, ...], msgspec.Meta(min_length=2, max_length=MOST_CERTIFICATES)]


class AppAttest(msgspec.Struct, frozen=True, tag="app-attest", tag_field="kind"):
    """A statement of Apple's App Attest: an attestation object in CBOR. Its clientDataHash names the request."""

    statement: Annotated[bytes, msgspec.Meta(min_length=1, max_length=16384)]


class HeldCredential(msgspec.Struct, frozen=True, tag="credential", tag_field="kind"):
    """A credential of the coordinator's enrolment authority, and the secure-aggregation key that it certifies."""

    secagg: Key
    credential: CredentialBytes


Attestation = Unattested | SharedSecret | AndroidKey | AppAttest
"""The evidence that an enrolment authority accepts. The meaning of each: docs/spec/wire.md §9."""

AttestationEvidence = Attestation | HeldCredential
"""The evidence that a coordinator accepts."""


class Enrol(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/devices`: the signer of this request wants to be a device."""

    version: int = WIRE_VERSION
    attestation: AttestationEvidence


class SecaggParties(msgspec.Struct, frozen=True):
    """The parties of a coordinator's secure rounds: the server's public key, the authority's, and its URL."""

    server: Succession
    authority: Key
    authority_url: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]


class Enrolled(msgspec.Struct, frozen=True):
    """The id that the device signs with from now on. Without `secagg` the coordinator has no secure rounds."""

    device: Name
    secagg: SecaggParties | None = None


class RequestCredential(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/credentials`, at an enrolment authority: the signer wants a credential for its key `secagg`.

    `possession`: the proof that it holds that key's private half (`secagg.keys`).
    """

    version: int = WIRE_VERSION
    attestation: Attestation
    secagg: Key
    possession: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class IssuedCredential(msgspec.Struct, frozen=True):
    """The credential, as devices show it to the coordinator and to their peers, and the authority's succession."""

    credential: CredentialBytes
    authority: Succession


class RequestBeacon(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/beacons`, at an enrolment authority: the signer, a coordinator, wants the beacon of a roster.

    `invitation`: M0 of the session. `roster`: the hashes of the roster's leaves, 32 bytes each, joined. `neighbours`,
    `shares`: its parameters k and t.
    """

    version: int = WIRE_VERSION
    invitation: bytes
    roster: bytes
    neighbours: Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]
    shares: Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]


class DrawnBeacon(msgspec.Struct, frozen=True):
    """The beacon, as M2 carries it."""

    beacon: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class StatedCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities that a device states.

    `runtime` and `version` name the device runtime, `engine` what runs graphs; `formats` are those of graphs that it
    executes, `secagg` the protocols of secure aggregation that it speaks. `keeps_vectors`: whether it runs plans of
    devices that keep vectors between rounds. `memory_mb` is the machine's memory in MiB,
    rounded down to a power of two; None when it is not known.
    """

    runtime: Name
    version: Name
    engine: Name
    formats: ShortNames
    secagg: ShortNames = ()
    keeps_vectors: bool = False
    memory_mb: Count | None = None


Versions: TypeAlias = Annotated[
    dict[
        Annotated[str, msgspec.Meta(pattern=rf"^{MODEL_NAME}$(?!\n)")], Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    ],
    msgspec.Meta(max_length=MOST_NAMES),
]
"""Numbers of versions by models' names."""


class CheckIn(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/populations/{population}/checkins`: a device is willing.

    `examples` are counts by collection, each rounded down to a power of two. `models` are the versions of released
    models that the device has, by name, and `refused` those that it refused last; absent when there are none. `token`
    is that of its last rejection in this population. `labels` are those that its owner lets it tell; absent when there
    are none.
    """

    version: int = WIRE_VERSION
    capabilities: StatedCapabilities
    examples: Annotated[dict[Name, Count], msgspec.Meta(max_length=MOST_COLLECTIONS)]
    conditions: StatedConditions | None = None
    models: Versions | UnsetType = UNSET
    refused: Versions | UnsetType = UNSET
    token: Annotated[str, msgspec.Meta(max_length=MOST_TOKEN)] | UnsetType = UNSET
    labels: Labels | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.labels is not UNSET:
            check_labels(self.labels)


class Offer(ConditionRules, frozen=True, kw_only=True, omit_defaults=True):
    """A task that a device may wait for, and the rules that the device itself checks first.

    The rules are about its conditions, `min_examples` in `collection`, and `min_recent_examples` of them that are no
    older than `max_example_age_s`; None is any age.
    """

    task: str
    collection: str
    min_examples: Count = 0
    min_recent_examples: Count = 0
    max_example_age_s: float | None = None


class Accepted(msgspec.Struct, frozen=True, omit_defaults=True, tag="accepted", tag_field="outcome"):
    """The device may wait in this session for an assignment of one of `offers`; `retry`: when to come back after it."""

    session: str
    offers: tuple[Offer, ...] = ()
    retry: RetryWindow | None = None


class Willing(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sessions/{session}/assignments`: the offered tasks that the device waits for."""

    version: int = WIRE_VERSION
    tasks: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_TASKS)]


class Rejected(msgspec.Struct, frozen=True, omit_defaults=True, tag="rejected", tag_field="outcome"):
    """There is no work for the device now.

    `token` goes with the device's next check-in, and is opaque. `formats`: with `unsupported-format`, those that would
    get it work.
    """

    reason: RejectionReason
    retry: RetryWindow
    token: Annotated[str, msgspec.Meta(max_length=MOST_TOKEN)] = ""
    formats: tuple[str, ...] = ()


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="assigned", tag_field="outcome"):
    """`POST /v1/sessions/{session}/assignments`: one device's part in one round.

    `seed`, `round` and `slot` key every random number of the session but the noise of a secure round; `report_within_s`
    counts from the answer, so a device's clock does not matter. `plan_signature` is there when the plan was signed;
    `minimum` is the number of reports below which the round does not count. `secagg` is the invitation to a secure
    aggregation, M0 of SA1: with it the report leaves the device masked or not at all, `server` shows the key that
    signed it, and the signed `release` comes, with the signed `lineage` of every checkpoint but the first and the proof
    that it is in the `log` (`fedcore.release`). `over_selected`: more devices have the assignment than reports are
    needed. `lost_after_s`: for how long the device may be silent before the round goes on without it. `purpose`: what
    the task is for, as its operator tells the devices' owners, if anything. `target`: the task's expression on labels,
    which only text is compared with.
    """

    version: int = WIRE_VERSION
    assignment: str
    task: str
    round: RoundNumber
    attempt: AttemptNumber
    slot: Count
    seed: Count
    plan: BlobRef
    checkpoint: BlobRef
    report_within_s: Annotated[float, msgspec.Meta(le=LONGEST_REPORTING_S)]
    plan_signature: PlanSignature | None = None
    minimum: Count | None = None
    secagg: bytes | None = None
    release: Signed | None = None
    lineage: Signed | None = None
    log: LogProof | None = None
    server: Succession | None = None
    over_selected: bool = False
    lost_after_s: Seconds | None = None
    purpose: Annotated[str, msgspec.Meta(max_length=LONGEST_SENTENCE)] | UnsetType = UNSET
    target: Target | UnsetType = UNSET


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """`PUT /v1/assignments/{assignment}/report`: the report was counted, once. A replay gets the same bytes."""

    assignment: str
    task: str
    round: int
    sha256: str


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/assignments/{assignment}/outcome`: what became of the round that an assignment was for.

    counted: whether it was committed with the device's report in it; None as long as that is open. over: whether the
    task has ended, so that nothing that was kept for it is needed any more.
    """

    counted: bool | None
    over: bool


class Abort(msgspec.Struct, frozen=True):
    """`POST /v1/assignments/{assignment}:abort`: the device gives up, and why."""

    reason: AbortReason


class ReleasedModel(msgspec.Struct, frozen=True):
    """`GET /v1/populations/{population}/models/{name}`: the version that this device is to use, as it was released."""

    release: Signed


CheckInAnswer = Accepted | Rejected
AssignmentAnswer = Assignment | Rejected

_STRUCTS = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
_KINDS: tuple[Any, ...] = (*_STRUCTS, CheckInAnswer, AssignmentAnswer)
_DECODERS = {kind: decoder(kind) for kind in _KINDS}


def encode(message: msgspec.Struct) -> bytes:
    """JSON bytes of a message."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """A message from JSON; `kind` is one of this module's. Raises WireError, saying which field is wrong."""
    try:
        message: T = _DECODERS[kind].decode(data)
    except UNDECODABLE as error:
        raise WireError(str(error)) from error
    version = getattr(message, "version", WIRE_VERSION)
    if version != WIRE_VERSION:
        raise WireError(f"message version {version} is unknown here; this side speaks version {WIRE_VERSION}")
    return message


# Problem types: every error over HTTP is an RFC 9457 document of one of them. Spec: docs/spec/wire.md §7.


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
