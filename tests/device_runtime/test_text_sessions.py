"""Sessions of devices in Python and TypeScript whose examples are texts: what they count, and what they refuse."""

import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import to_builtins

from device_runtime.sandbox.process import Sandbox
from device_runtime.session import run_session
from fedcore.plan import BlobRef, Field, Tokenizer
from tests.device_runtime import linear
from tests.device_runtime.coordinator import report_of
from tests.device_runtime.node import device_words, sessions
from tests.device_runtime.test_texts import WORD_PIECE

FIELDS = linear.plan().examples.fields


@pytest.fixture(autouse=True, scope="module")
def library():
    pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def node():
    with sessions() as run:
        yield run


def columns_of(texts):
    """Ten examples of a line, with these texts, one after the other and again."""
    width = max(map(len, texts), default=0) + 1
    rows = np.array([np.frombuffer(text.ljust(width, b"\0"), np.uint8) for text in texts])
    return {**linear.examples(10), "text": np.resize(rows, (10, width))}


@pytest.fixture(params=["python", "node"])
def session(request, coordinator, config, tmp_path, node):
    """Runs a session of a device of either kind with these texts; a policy may be given."""

    def run(texts, **policy):
        if request.param == "node":
            return node(device_words(tmp_path / "node", coordinator.url, "phones", columns_of(texts), **policy))
        np.savez(config.examples, **columns_of(texts))
        return to_builtins(run_session(replace(config, trainer=Sandbox)))

    return run


def offer(coordinator, data=WORD_PIECE, length=8, high=1000):
    """The linear plan, with a field of texts that its graphs do not read."""
    text = Field("text", "int32", (length,), high, Tokenizer(BlobRef.of(data), 0))
    coordinator.offer(linear.plan(fields=(*FIELDS, text)), linear.graphs(), {"params": linear.PARAMS})
    coordinator.blobs[BlobRef.of(data).sha256] = data


def test_texts_that_are_cut_are_counted_and_trained_on(session, coordinator, examples):
    offer(coordinator)
    outcome = session([b"a, b. c! d? e; f: g", b"fox"])
    assert (outcome["outcome"], outcome["examples"], outcome["cut"]) == ("reported", 10, 5)
    np.testing.assert_allclose(coordinator.reports[0], report_of(examples), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("offered", "text", "reason", "words"),
    [
        ({}, b"\xff", "invalid-examples", "of example 1 is not text in UTF-8"),
        (
            {"high": 4},
            b"fox",
            "plan-refused",
            "the model knows those below 4: export it with the tokenizer that it was",
        ),
        ({"length": 2}, b"fox", "plan-refused", "room for 2 tokens, and its tokenizer adds 2 to every text: export it"),
        ({"data": json.dumps({"version": "1.0"}).encode()}, b"fox", "plan-refused", "does not load"),
    ],
)
def test_bad_texts_and_tokenizers_end_the_session_in_one_line(session, coordinator, offered, text, reason, words):
    offer(coordinator, **offered)
    outcome = session([b"", text])
    assert (outcome["outcome"], outcome["reason"]) == ("aborted", reason), outcome
    assert words in outcome["detail"]
    assert "\n" not in outcome["detail"]
    assert [abort.reason for abort in coordinator.aborts] == [reason]
    assert coordinator.reports == []
