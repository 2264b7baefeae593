"""What strangers send is read, or refused by an error of its own kind: never by another, and never for ever.

The messages of secure aggregation have such a test of their own (tests/secagg/test_messages.py).
"""

import functools
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest

from authority.errors import NotAttested
from coordinator.api.devices.reports import parse_report
from coordinator.api.openapi import EXAMPLES
from coordinator.errors import InvalidReport
from device_runtime.work import decode_unweighted
from fedcore import checkpoint
from fedcore.bundle import Bundle
from fedcore.errors import FedcoreError
from fedcore.params import VectorSpec
from fedcore.plan import Plan
from fedcore.release import LineageEntry, Release, ReleasedEvaluation, SumBounds, decode_entry, decode_release
from fedcore.wire import messages
from fedcore.wire.signatures import PublicKey, Signature, sha256_in
from tests.authority.test_apple import RECORDED, of_record, statement_of
from tests.coordinator.bundles import START, make_bundle, make_plan, report_body
from tests.damage import INPUTS, mutated, outcomes

pytestmark = pytest.mark.promise("Damaged messages, plans and reports are read, or refused by their own error")

STATEMENT, CHALLENGE = statement_of("production")
PLAN = make_plan()
LAYOUT = PLAN.report
DIGEST = "ab" * 32
BOUNDS = SumBounds(clip_norm=1.0, bits=16, max_examples=100, min_sum=8)
RELEASE = Release(
    population="phones",
    plan=DIGEST,
    checkpoint=DIGEST,
    bounds=BOUNDS,
    evaluation=ReleasedEvaluation(plan=DIGEST, bounds=BOUNDS, constants={"edges": DIGEST}),
    lineage="ed25519:" + "A" * 43,
    counter=3,
    expires_at=1_800_000_000,
)
ENTRY = LineageEntry(release=DIGEST, round=2, parent=DIGEST, checkpoint=DIGEST, params=DIGEST)
SIGNED = (
    'muster=("@method" "@authority" "content-digest");created=1760000000;expires=1760000300;nonce="bm9uY2U";'
    'keyid="9f86d081884c7d659a2feaa0c55ad015"',
    f"muster=:{'A' * 86}==:",
)


@functools.cache
def phones():
    with TemporaryDirectory() as folder:
        return of_record(Path(folder))


def apple_statement(data):
    phones().check(data, CHALLENGE, RECORDED["at"])


def headers(data):
    first, _, second = data.decode("latin-1").partition("\n")
    Signature.parse(first, second)


# name: (bytes, what reads them, the errors by which it refuses)
READERS = {
    **{
        kind.__name__: (messages.encode(example), functools.partial(messages.decode, kind=kind), FedcoreError)
        for kind, example in EXAMPLES.items()
    },
    "plan": (PLAN.encode(), Plan.decode, FedcoreError),
    "release": (msgspec.json.encode(RELEASE), lambda data: decode_release(data.decode("latin-1")), FedcoreError),
    "lineage entry": (msgspec.json.encode(ENTRY), lambda data: decode_entry(data.decode("latin-1")), FedcoreError),
    "signature": ("\n".join(SIGNED).encode(), headers, FedcoreError),
    "public key": (b"ed25519:" + b"A" * 43, lambda data: PublicKey.parse(data.decode("latin-1")), FedcoreError),
    "digest": (
        b"sha-256=:uU0nuZNNPgilLlLX2n2r+sSE7+N6U4DukIj3rOLvzek=:",
        lambda data: sha256_in(data.decode("latin-1")),
        FedcoreError,
    ),
    "statement of App Attest": (STATEMENT, apple_statement, NotAttested),
    "report": (report_body([1, 2, 3, 4], 1), lambda data: parse_report(memoryview(data), LAYOUT), InvalidReport),
    "kept report": (
        checkpoint.encode({"values": np.ones(LAYOUT.size - 1, np.float32)}),
        lambda data: decode_unweighted(data, LAYOUT),
        FedcoreError,
    ),
    "checkpoint": (
        checkpoint.encode({"params": START}),
        lambda data: checkpoint.decode(data, [VectorSpec("params", START.size)]),
        FedcoreError,
    ),
}


@pytest.mark.parametrize(("data", "read", "refusal"), READERS.values(), ids=READERS)
def test_damaged_input_is_read_or_refused_by_its_own_error(data, read, refusal):
    read(data)
    count = INPUTS // len(READERS)
    assert outcomes(data, read, refusal, count).total() == count


def test_damaged_manifest_is_read_or_refused_by_its_own_error(tmp_path):
    bundle = make_bundle(tmp_path)
    path = bundle.folder / "manifest.json"
    data, made = path.read_bytes(), random.Random(1)
    for _ in range(INPUTS // 100):
        path.write_bytes(mutated(data, made))
        try:
            for _ in Bundle(tmp_path).blobs():
                pass
        except FedcoreError:
            continue
