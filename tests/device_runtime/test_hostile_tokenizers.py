"""A tokenizer of a hostile signer works in a process of its own: whatever it does there is an outcome."""

import copy
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from device_runtime.errors import DeadlinePassed, ExamplesError, PlanRefused, RuntimeFailed
from device_runtime.permission.policy import PlanLimits, Policy
from device_runtime.sandbox.process import Sandbox
from device_runtime.session import run_session
from device_runtime.texts import TextColumn
from device_runtime.trainer import Limits
from fedcore.plan import BlobRef, Field, Tokenizer
from tests.device_runtime.test_sandbox import WIDE, children
from tests.device_runtime.test_text_sessions import columns_of, offer
from tests.device_runtime.test_texts import FILES, VECTORS


@pytest.fixture(autouse=True, scope="module")
def library():
    pytest.importorskip("tokenizers")


def column(name, texts, **parts):
    """Texts for a tokenizer with other parts than it has."""
    data = json.dumps(copy.deepcopy(json.loads(FILES[name])) | parts).encode()
    field = Field("text", "int32", (8,), 1000, Tokenizer(BlobRef.of(data), 9))
    return TextColumn(field, data, 9, np.array(texts, object))


def replacing(pattern, content, times=1):
    one = {"type": "Replace", "pattern": {"String": pattern}, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [one] * times}}


def model(name, **parts):
    return {"model": json.loads(FILES[name])["model"] | parts}


def splitting(expression):
    pattern = {"Regex": expression}
    return {"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}}


SLOW = model("word_piece", max_input_chars_per_word=1000)
"""A word of n letters takes a time of n³, up to a thousand of them."""
SLOW_TEXT = (b"ab" * 499 + b" ") * 400


def test_tokens_from_the_sandbox_are_those_of_the_vectors():
    texts = [text.encode() for text in VECTORS["texts"][:5]]
    sandbox = Sandbox("onnxruntime")
    tokens = sandbox.tokenize(column("word_piece", texts), WIDE, lambda: True)
    whole = [
        ids[:7] + ids[-1:] if len(ids) > 8 else ids + [9] * (8 - len(ids)) for ids in VECTORS["tokenizers"][0]["ids"]
    ]
    assert tokens.ids.tolist() == whole[:5]
    assert tokens.cut == sum(len(ids) > 8 for ids in VECTORS["tokenizers"][0]["ids"][:5])
    assert sandbox.cpu_s > 0.05, "the CPU time of the other process counts"
    assert children() == []


@pytest.mark.security("run in a process of their own … no key of the device … no file and no connection")
@pytest.mark.security("The same sandbox makes tokens of texts")
@pytest.mark.parametrize(
    ("name", "text", "parts", "error", "words"),
    [
        (
            "qwen",
            b"a" * 4000 + b"c",
            splitting("(a+)+$"),
            PlanRefused,
            "does not load: its tokenizer has a group that rep",
        ),
        ("qwen", b"a", splitting("(" * 5000 + "a" + ")" * 5000), PlanRefused, "does not load: .* is too long"),
        ("qwen", b"a" * 9, replacing("a", "a" * 99, 9), PlanRefused, "does not load: .*Invalid value 'Replace'"),
        ("qwen", b"a", model("qwen", merges=[["a", "zz"]]), PlanRefused, "does not load: .*zz.* out of vocabulary"),
        (
            "qwen",
            b"a",
            model("qwen", vocab={}, merges=[], unk_token="b"),
            PlanRefused,
            "at the text of example 0: Unk token",
        ),
        ("qwen", b"a b c " * 1_000_000, {}, RuntimeFailed, "the process of the tokenizer died"),
        ("word_piece", b"\xff", {}, ExamplesError, "of example 0 is not text in UTF-8"),
    ],
)
def test_a_hostile_tokenizer_is_an_error_of_one_line(name, text, parts, error, words):
    with pytest.raises(error, match=words) as caught:
        Sandbox("onnxruntime").tokenize(column(name, [text], **parts), Limits(400_000_000, 60.0), lambda: True)
    assert "\n" not in str(caught.value)
    assert children() == []


def test_a_tokenizer_gets_no_more_time_than_the_policy_allows(coordinator, config):
    slow = column("word_piece", [SLOW_TEXT], **SLOW)
    offer(coordinator, slow.file)
    np.savez(config.examples, **columns_of([slow.texts[0]]))
    policy = Policy(plan=PlanLimits(compute_seconds=1.0))
    outcome = run_session(replace(config, policy=policy, trainer=Sandbox))
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert "against plan.compute_seconds of this device's policy" in outcome.detail


def test_a_tokenizer_that_runs_on_is_stopped_when_the_device_must():
    until = time.monotonic() + 1.0
    with pytest.raises(DeadlinePassed, match="stopped in the process of the tokenizer"):
        Sandbox("onnxruntime").tokenize(
            column("word_piece", [SLOW_TEXT], **SLOW), WIDE, lambda: time.monotonic() < until
        )
    assert children() == []


def test_training_gets_the_time_that_making_tokens_left():
    assert Limits(7, 5.0).after(2.0) == Limits(7, 3.0)
    assert Limits(7, 5.0).after(9.0) == Limits(7, 0.0)
