"""Texts become tokens before anything trains: as the library says, in both languages, or refused in one line."""

import json
import os
import random
import subprocess
import sys
import unicodedata

import msgspec
import numpy as np
import pytest

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.errors import ExampleRefused, ExamplesError, PlanRefused
from device_runtime.examples import Collection, ExampleStore, open_examples
from device_runtime.texts import Texts
from device_runtime.trainer import InProcess, Limits
from fedcore.errors import PlanError
from fedcore.plan import BlobRef, ExampleSpec, Field, Plan, Tokenizer
from tests.device_runtime.linear import plan
from tests.device_runtime.node import command
from tests.tree import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "tokenizers.json").read_text())
FILES = {one["name"]: json.dumps(one["file"]).encode() for one in VECTORS["tokenizers"]}
WORD_PIECE = FILES["word_piece"]
STORED = Field("text", "uint8", (200,))
COUNT = 10_000 if "MUSTER_LONG" in os.environ else 300


@pytest.fixture(autouse=True, scope="module")
def library():
    pytest.importorskip("tokenizers")


def field(length=8, high=1000, padding=0, data=WORD_PIECE):
    return Field("text", "int32", (length,), high, Tokenizer(BlobRef.of(data), padding))


def stored(folder, *texts):
    store = ExampleStore.open(folder)
    store.declare(Collection("default", (STORED,)))
    store.append_all("default", [{"text": text} for text in texts])
    return store


def tokens(source, wanted, data=WORD_PIECE):
    texts = Texts({BlobRef.of(data): data}.__getitem__, InProcess(OnnxRuntime()), Limits(10**9, 60.0), lambda: True)
    return source.load(ExampleSpec((wanted,)), tokenize=texts.tokenize)["text"], texts.cut


@pytest.mark.parametrize("one", VECTORS["tokenizers"], ids=list(FILES))
def test_the_vectors_are_what_the_library_gives(one):
    import tokenizers

    read = tokenizers.Tokenizer.from_str(json.dumps(one["file"]))
    assert [read.encode(text).ids for text in VECTORS["texts"]] == one["ids"]


def test_a_store_of_texts_gives_tokens_and_counts_those_cut(tmp_path):
    wanted, index = field(length=8), VECTORS["texts"].index("")
    found, cut = tokens(stored(tmp_path, "", VECTORS["texts"][0]), wanted)
    start = VECTORS["tokenizers"][0]["ids"][0]
    assert found.tolist() == [VECTORS["tokenizers"][0]["ids"][index] + [0] * 6, [*start[:7], 3]]
    assert cut == 1


def test_an_npz_file_of_texts_gives_the_same_tokens(tmp_path):
    rows = [text.encode().ljust(200, b"\0") for text in VECTORS["texts"][:11]]
    np.savez(tmp_path / "x.npz", text=np.array([np.frombuffer(row, np.uint8) for row in rows]))
    from_store, _ = tokens(stored(tmp_path / "store", *VECTORS["texts"][:11]), field(64))
    from_file, _ = tokens(open_examples(tmp_path / "x.npz"), field(64))
    assert np.array_equal(from_store, from_file)


def test_tokens_that_an_app_made_itself_stay_as_they_are(tmp_path):
    np.savez(tmp_path / "x.npz", text=np.arange(16, dtype=np.int32).reshape(2, 8))
    assert tokens(open_examples(tmp_path / "x.npz"), field())[0].tolist() == np.arange(16).reshape(2, 8).tolist()


@pytest.mark.parametrize(
    ("wanted", "data", "row", "error", "message"),
    [
        (field(), WORD_PIECE, b"\xff", ExamplesError, "field 'text' of example 0 is not text in UTF-8"),
        (field(high=4), WORD_PIECE, b"fox", PlanRefused, "the model knows those below 4"),
        (field(padding=2), WORD_PIECE, b"fox", PlanRefused, "gives token 2, which is the field's padding"),
        (field(length=2), WORD_PIECE, b"fox", PlanRefused, "room for 2 tokens, and its tokenizer adds 2"),
        (field(data=b"{}"), b"{}", b"fox", PlanRefused, "the tokenizer of field 'text' does not load"),
    ],
)
def test_what_gives_no_tokens_is_refused_in_one_line(wanted, data, row, error, message, tmp_path):
    np.savez(tmp_path / "x.npz", text=np.frombuffer(row, np.uint8)[None])
    with pytest.raises(error, match=message) as caught:
        tokens(open_examples(tmp_path / "x.npz"), wanted, data)
    assert "\n" not in str(caught.value)


def test_without_the_library_a_text_is_refused_and_the_extra_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(PlanRefused, match=r"needs a tokenizer here: pip install 'muster-fl\[text\]'"):
        tokens(stored(tmp_path, "fox"), field())


@pytest.mark.parametrize("text", ["a" * 201, "ends\0", "half \ud800"])
def test_a_text_that_the_store_cannot_hold_is_refused(text, tmp_path):
    with pytest.raises(ExampleRefused, match="field 'text' is a text"):
        stored(tmp_path, text)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Field("text", "int64", (8,), 9, field().tokenizer), r"tokens are int32\[length\]"),
        (Field("text", "int32", (), 9, field().tokenizer), r"tokens are int32\[length\]"),
        (Field("text", "int32", (8,), None, field().tokenizer), "the vocabulary as high"),
        (field(padding=1000), "padded with 1000; tokens are below 1000"),
    ],
)
def test_a_plan_whose_field_is_no_text_is_refused(wanted, message):
    data = json.loads(plan().encode())
    data["examples"]["fields"] = [msgspec.to_builtins(wanted)]
    with pytest.raises(PlanError, match=message):
        Plan.decode(json.dumps(data).encode())


def generated(count):
    """Texts of characters whose class has not changed since Unicode 3.2, so that all tables agree on them."""
    chance, before = random.Random(7), unicodedata.ucd_3_2_0.category
    letter_of = [chr(code) for code in range(1, 0x20000) if not 0xD800 <= code < 0xE000]
    old = [one for one in letter_of if before(one) == unicodedata.category(one) != "Cn"]
    words = [word for text in VECTORS["texts"] for word in text.split()]
    letters = [letter for text in VECTORS["texts"] for letter in text]
    kinds = [
        lambda: "".join(chance.choices(letters, k=chance.randint(1, 60))),
        lambda: " ".join(chance.choices(words, k=chance.randint(1, 30))),
        lambda: "".join(chance.choices(old, k=chance.randint(1, 30))),
    ]
    return [chance.choice(kinds)() for _ in range(count)]


@pytest.mark.parametrize("name", FILES)
def test_typescript_gives_the_same_tokens_of_many_texts(name):
    import tokenizers

    texts, read = generated(COUNT), tokenizers.Tokenizer.from_str(FILES[name].decode())
    given = json.dumps({"file": json.loads(FILES[name]), "texts": texts})
    ran = subprocess.run(command("tests/tokenize.ts"), input=given, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [read.encode(text).ids for text in texts]
