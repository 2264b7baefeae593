"""Examples of every message and header field, for the OpenAPI documents."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from fedcore.conditions import StatedConditions
from fedcore.model_release import ModelRelease
from fedcore.plan import BlobRef
from fedcore.release import Signed
from fedcore.succession import Succession
from fedcore.wire.messages import (
    Abort,
    Accepted,
    Assignment,
    CheckIn,
    Enrol,
    Enrolled,
    Offer,
    Receipt,
    Rejected,
    ReleasedModel,
    RetryWindow,
    SecaggParties,
    Settled,
    StatedCapabilities,
    Unattested,
    Willing,
)
from fedcore.wire.problems import PROBLEM_FIELD

_DIGEST = "sha-256=:uU0nuZNNPgilLlLX2n2r+sSE7+N6U4DukIj3rOLvzek=:"
_PLAN = BlobRef("b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9", 4711)
_SESSION, _ASSIGNMENT, _TASK = "1f8e2c40.Yx0hB1o4Qm8", "1f8e2c40.kq3Zp7vR2sA", "5d41402abc4b2a76"
_DEVICE = "9f86d081884c7d659a2feaa0c55ad015"
_RETRY = RetryWindow(5.0, 30.0)
_KEY = hashlib.sha256(b"a public key").digest()

_MODEL = ModelRelease(
    population="phones",
    name="keyboard",
    number=2,
    plan=_PLAN,
    parameters=BlobRef(_PLAN.sha256, 80_000),
    counter=1,
    evaluation={"evaluate.accuracy": 0.91},
)
_SIGNED = Signed(
    msgspec.json.encode(_MODEL, order="sorted").decode(),
    "ed25519:6kqSy9eyp6CXFEWAvFgE7a8F7nzi5VvRFb1xBPmXgSg",
    "bSL8yxCfFzqTbJXq2vXw9Pj1VwQb1mH4mK9Zr1m0b3xWcYtq8n2n7Q3kE5s6u4JrS0aQdKp3yXb9c1h2f7ZzBg",
)

EXAMPLES: dict[type[msgspec.Struct], msgspec.Struct] = {
    Enrol: Enrol(attestation=Unattested()),
    Enrolled: Enrolled(_DEVICE, SecaggParties(Succession(_KEY), _KEY, "https://authority.example")),
    CheckIn: CheckIn(
        capabilities=StatedCapabilities(
            runtime="muster",
            version="0.1.0",
            engine="onnxruntime 1.31.0",
            formats=("onnx",),
            secagg=("SA1",),
            memory_mb=4096,
            keeps_vectors=True,
        ),
        examples={"default": 32},
        conditions=StatedConditions(charging=True, idle=True, battery=0.8, free_storage_mb=16384),
        models={"keyboard": 2},
        refused={"keyboard": 3},
    ),
    Accepted: Accepted(_SESSION, (Offer(task=_TASK, collection="default", min_examples=20, charging=True),), _RETRY),
    Rejected: Rejected("no-task", _RETRY),
    Willing: Willing(tasks=(_TASK,)),
    Assignment: Assignment(
        assignment=_ASSIGNMENT,
        task=_TASK,
        round=3,
        attempt=1,
        slot=7,
        seed=0,
        plan=_PLAN,
        checkpoint=BlobRef(_PLAN.sha256, 80_000),
        report_within_s=600.0,
        minimum=20,
        purpose="This task teaches a model to read digits.",
    ),
    Receipt: Receipt(assignment=_ASSIGNMENT, task=_TASK, round=3, sha256=_PLAN.sha256),
    Settled: Settled(counted=True, over=False),
    Abort: Abort("plan-refused"),
    ReleasedModel: ReleasedModel(_SIGNED),
}
"""An example of each message."""

_SHA256 = r"^sha-256=:[A-Za-z0-9+/]{43}=:$"
_NUMBER = r"^[0-9]{1,15}$"
_WAIT = r"^wait=[0-9]{1,9}$"
_TAG = r'^"[0-9a-f]{64}"$'


class Field(NamedTuple):
    """A header field: its meaning, an example, and the pattern of its values."""

    meaning: str
    example: str
    pattern: str


FIELDS = {
    "Content-Digest": Field("SHA-256 of the body (RFC 9530); signed", _DIGEST, _SHA256),
    "Prefer": Field("how many seconds the answer may be held back (RFC 7240)", "wait=30", _WAIT),
    "Preference-Applied": Field("how long it was at most", "wait=30", _WAIT),
    "Range": Field("the bytes that are wanted", "bytes=1000-", r"^bytes=[0-9]*-[0-9]*$"),
    "If-Range": Field("only of the blob with this ETag", f'"{_PLAN.sha256}"', _TAG),
    "If-None-Match": Field("not if the device has it", f'"{_PLAN.sha256}"', _TAG),
    "ETag": Field("the digest", f'"{_PLAN.sha256}"', _TAG),
    "Content-Range": Field("which bytes these are", "bytes 1000-4710/4711", r"^bytes [0-9]+-[0-9]+/[0-9]+$"),
    "Upload-Offset": Field("bytes of the report that have arrived", "1000", _NUMBER),
    "Upload-Length": Field("bytes of the whole report", "4711", _NUMBER),
    "Upload-Complete": Field("whether nothing comes after it; in an answer, whether it was counted", "?1", r"^\?[01]$"),
    "Repr-Digest": Field("SHA-256 of the whole report (RFC 9530); signed", _DIGEST, _SHA256),
    PROBLEM_FIELD: Field("the name of the problem's type, for HEAD too", "unknown-device", r"^[a-z-]+$"),
}
"""Header fields by name."""
