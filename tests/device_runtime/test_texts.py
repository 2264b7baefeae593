"""Texts become tokens before anything trains: as the library says, in both languages, or refused in one line."""

import functools
import json
import random
import subprocess
import sys
import unicodedata

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.errors import ExampleRefused, ExamplesError, PlanRefused
from device_runtime.examples import Collection, ExampleStore, open_examples
from device_runtime.texts import LoadedTokenizer, check
from device_runtime.trainer import InProcess, Limits, Texts
from fedcore.errors import PlanError
from fedcore.plan import BlobRef, ExampleSpec, Field, Plan, Tokenizer
from tests.device_runtime.kotlin import kotlin_command
from tests.device_runtime.linear import plan
from tests.device_runtime.node import command
from tests.sampled import sampled
from tests.tree import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "tokenizers.json").read_text())
FILES = {one["name"]: json.dumps(one["file"]).encode() for one in VECTORS["tokenizers"]}
WORD_PIECE = FILES["word_piece"]
STORED = Field("text", "uint8", (200,))


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
    chance = random.Random(7)
    words = [word for text in VECTORS["texts"] for word in text.split()]
    letters = [letter for text in VECTORS["texts"] for letter in text]
    kinds = [
        lambda: "".join(chance.choices(letters, k=chance.randint(1, 60))),
        lambda: " ".join(chance.choices(words, k=chance.randint(1, 30))),
        lambda: "".join(map(chr, chance.choices(EVERY, k=chance.randint(1, 30)))),
        lambda: "".join(chance.choices("ab cx", k=chance.randint(1, 20))),
        lambda: "".join(chance.choices([*ACCENTS, "a", "q", "ᄀ", "ᅡ"], k=chance.randint(1, 20))),
    ]
    return [chance.choice(kinds)() for _ in range(count)]


ALIKE = (
    range(0x3401, 0x4DB0),
    range(0x4E01, 0x9FF0),
    range(0xAC20, 0xD7A0),
    range(0xD800, 0xF8F0),
    range(0x20001, 0x32300),
)
EVERY = [code for code in range(1, 0x32500) if not any(code in some for some in ALIKE)] + [
    code for some in ALIKE for code in some[::200] if not 0xD800 <= code < 0xE000
]
"""Every character but for most of those that look alike to Unicode: Han, Hangul, and private ones."""
ACCENTS = [chr(code) for code in EVERY if unicodedata.combining(chr(code))]
SMALL = VECTORS["files"]["small"]
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPECIAL = {"[": {"id": "[", "ids": [1, 2], "tokens": ["b", "c"]}, "]": {"id": "]", "ids": [3], "tokens": ["d"]}}
BERT = ("clean_text", "handle_chinese_chars", "lowercase")


def piece(name):
    return {"SpecialToken": {"id": name, "type_id": 0}}


def template(*pieces):
    return {"type": "TemplateProcessing", "single": [*pieces], "pair": [], "special_tokens": SPECIAL}


def added(*tokens):
    return {"added_tokens": [FLAGS | {"id": 9 + place} | token for place, token in enumerate(tokens)]}


def pairs(merges, **more):
    vocab = {word: place for place, word in enumerate(dict.fromkeys([*"abcdefghi", *map("".join, merges)]))}
    return {"model": SMALL["model"] | {"vocab": vocab, "merges": merges} | more}


def pieces(**more):
    vocab = dict.fromkeys(["?", *"abcx", "ab", "abc", "##b", "##bc", "##c", "##a", *map(chr, range(0xC0, 0x250))])
    made = {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {"model": made | {"vocab": {word: place for place, word in enumerate(vocab)}} | more}


A = {"Sequence": {"id": "A", "type_id": 0}}
WORDS = {"pre_tokenizer": {"type": "BertPreTokenizer"}}
TAKEN = {
    **{
        f"{place} of {name}": json.loads(FILES[name]) | {"normalizer": {"type": place}}
        for place in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
        for name in ("qwen",)
    },
    **{
        f"BERT without {off}, accents {strip}": json.loads(WORD_PIECE)
        | {"normalizer": {"type": "BertNormalizer", **dict.fromkeys(BERT, True), off: False, "strip_accents": strip}}
        for off in BERT
        for strip in (None, True, False)
    },
    "no normalizer": json.loads(WORD_PIECE) | {"normalizer": None},
    "no pre-tokenizer": SMALL | pieces() | {"pre_tokenizer": None},
    "short words": SMALL | pieces(max_input_chars_per_word=3) | WORDS,
    "no prefix": SMALL | pieces(continuing_subword_prefix="") | WORDS,
    "digits": SMALL
    | pairs([["a", "b"]], unk_token="a")
    | {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
    "numbers": json.loads(FILES["gpt2"])
    | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, LEVEL]}},
    "bytes with a space": json.loads(FILES["gpt2"]) | {"pre_tokenizer": LEVEL | {"add_prefix_space": True}},
    "bytes of whole texts": json.loads(FILES["gpt2"]) | {"pre_tokenizer": LEVEL | {"use_regex": False}},
    "letters that are left out": SMALL | pairs([["a", "b"], ["ab", "c"], ["b", "c"]]),
    "unknown letters": SMALL | pairs([["a", "b"]], unk_token="i"),
    "unknown letters as one": SMALL | pairs([["a", "b"]], unk_token="i", fuse_unk=True),
    "unknown letters that merge": SMALL | pairs([["i", "i"], ["a", "i"]], unk_token="i"),
    "ways to one word": SMALL | pairs([["b", "c"], ["ab", "c"], ["a", "b"], ["a", "bc"], ["a", "a"], ["aa", "a"]]),
    "whole words": SMALL | pairs([["a", "b"], ["ab", "ab"]], ignore_merges=True, dropout=0.0) | WORDS,
    "an added token in a vocabulary": SMALL | pieces() | WORDS | added({"content": "ab", "id": 5}),
    "added tokens with spaces around": SMALL
    | pairs([])
    | added({"content": "ab", "lstrip": True}, {"content": "c", "rstrip": True, "id": 2}, {"content": "abc", "id": 10}),
    "added tokens of spaces": SMALL | pairs([]) | added({"content": "  "}, {"content": " "}, {"content": "x  a"}),
    "added tokens that are normalized": SMALL
    | pairs([])
    | {"normalizer": {"type": "NFKC"}}
    | added(
        {"content": "ﬁ", "normalized": True, "rstrip": True}, {"content": "ﬁx"}, {"content": "x", "normalized": True}
    ),
    "a template of several": SMALL
    | pairs([["a", "b"]])
    | {"post_processor": template(piece("["), piece("]"), A, piece("["))},
    "a template of nothing": SMALL | pairs([["a", "b"]]) | {"post_processor": template(A)},
    "BERT's ends": SMALL | pairs([]) | {"post_processor": {"type": "BertProcessing", "cls": ["b", 1], "sep": ["c", 2]}},
    "a template after bytes": SMALL
    | pairs([])
    | {"post_processor": {"type": "Sequence", "processors": [LEVEL, template(piece("]"), A), LEVEL]}},
}
"""Files of which each takes another way: every member of the table with every kind of value that devices take."""


def ids_of(words, files, texts):
    given = json.dumps({"files": files, "texts": texts})
    ran = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(params=["typescript", pytest.param("kotlin", marks=pytest.mark.long)])
def elsewhere(request):
    """Makes the tokens of files and texts in another language."""
    in_kotlin = request.param == "kotlin"
    return functools.partial(ids_of, kotlin_command("TokenizeKt") if in_kotlin else command("tests/tokenize.ts"))


@pytest.mark.parametrize("count", sampled((300, 10_000), (300,)))
def test_other_languages_give_the_same_tokens_of_many_texts(count, elsewhere):
    import tokenizers

    names, texts = [*FILES, *TAKEN], ["", *generated(count)]
    files = [*map(json.loads, FILES.values()), *TAKEN.values()]
    for name, file, found in zip(names, files, elsewhere(files, texts), strict=True):
        check(json.dumps(file).encode())
        read = tokenizers.Tokenizer.from_str(json.dumps(file))
        for text, ids in zip(texts, found, strict=True):
            assert read.encode(text).ids == ids, (name, text)


NAMED = ["word_piece", "NFKC of qwen", "qwen", "numbers", "NFD of qwen", "Lowercase of qwen"]


@pytest.mark.parametrize("name", sampled(NAMED, NAMED[:2]))
def test_other_languages_give_the_same_tokens_of_every_character(name, elsewhere):
    import tokenizers

    file = TAKEN[name] if name in TAKEN else json.loads(FILES[name])
    around = ["".join(f"a{chr(code)}\u0345\u0334 b" for code in EVERY[k : k + 50]) for k in range(0, len(EVERY), 50)]
    chance = random.Random(5)
    around += ["a" + "".join(chance.choices([*ACCENTS, "\u0903"], k=60)) for _ in range(100)]
    around.append("a" + "\u0301\u0323\u0344" * 60_000)  # which takes a minute where marks are put in order one by one
    read = tokenizers.Tokenizer.from_str(json.dumps(file))
    assert elsewhere([file], around) == [[read.encode(text).ids for text in around]]


def test_a_file_with_a_member_that_devices_do_not_know_is_refused():
    check(json.dumps(SMALL).encode())
    for one in VECTORS["files"]["refused"]:
        with pytest.raises(
            PlanRefused, match=r"its tokenizer has .*which devices do not know|what devices do not know: "
        ):
            check(json.dumps(one["file"]).encode())


@pytest.mark.parametrize(("normalizer", "contents"), [("Lowercase", ("The", "the")), ("NFC", ("e\u0301", "\xe9"))])
def test_added_tokens_of_one_normal_form_are_refused_in_all_languages(normalizer, contents, elsewhere):
    said = {"normalizer": {"type": normalizer}}
    alike, apart = (
        SMALL | pairs([]) | said | added(*({"content": one, "normalized": is_normalized} for one in contents))
        for is_normalized in (True, False)
    )
    check(data := json.dumps(alike).encode())
    with pytest.raises(PlanRefused, match="has an added token that normalises to nothing or to another one, which"):
        LoadedTokenizer(field(data=data), data, 0)
    with pytest.raises(AssertionError, match="an added token that normalises to nothing or to another one"):
        elsewhere([alike], [])
    elsewhere([apart], [])
    LoadedTokenizer(field(data=(data := json.dumps(apart).encode())), data, 0)


def test_a_tokenizer_that_gives_other_tokens_than_at_export_is_refused():
    wanted = field(data=WORD_PIECE)
    trial = (("fox", (2, 3)),)
    with pytest.raises(
        PlanRefused, match="does not load: 'fox' has other tokens here than where the plan was exported"
    ):
        LoadedTokenizer(replace(wanted, tokenizer=replace(wanted.tokenizer, trial=trial)), WORD_PIECE, 0)


def test_what_is_around_a_text_stays_where_the_text_repeats_it():
    data = json.dumps(SMALL | pairs([]) | {"post_processor": template(piece("["), A, piece("]"))}).encode()
    tokens = LoadedTokenizer(field(length=5, data=data), data, 0).tokens(["bcbcb"], 1)
    assert tokens.ids.tolist() == [[1, 2, 1, 2, 3]]
