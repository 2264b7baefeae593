"""Write the vectors of tokenizers: small ones of each kind that devices know, and the tokens of texts in many scripts.

    python -m tools.make_tokenizer_vectors

The vocabularies are trained anew, so a run may change them all. tests/device_runtime/test_texts.py holds the library to
the file, device_runtime/js/tests/texts.test.ts the runtime in TypeScript.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from device_runtime.texts import unknown_in
from export.huggingface.weights import as_devices_know

PATH = Path(__file__).parents[1] / "tests" / "vectors" / "tokenizers.json"
TEXTS = (
    "The quick brown fox jumps over the lazy dog, isn't it? I've 12,345 reasons!",
    "Быстрая лиса прыгает, ёлка и Йод",
    "η γρήγορη αλεπού, Ώρα ΣΊΣΥΦΟΣ σίσυφος",
    "מהירה השועל בְּרֵאשִׁית",
    "السريع الثعلب مُحَمَّد ١٢٣",
    "तेज़ भूरी लोमड़ी क्षि",
    "快速的棕色狐狸跳过懒狗。",
    "すばやい茶色の狐 カタカナ ﾊﾝｶｸ が が",
    "빠른 갈색 여우가 한국어",
    "สุนัขจิ้งจอกสีน้ำตาล",
    "გამარჯობა საქართველო",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 😀 ❤️ ☃",
    "ﬁ Å Å é é ½ ① ℌ İstanbul ı ß ẞ ǅ ſ",
    "tab\tnew\nline\r\n nbsp\u00a0 zwsp\u200b zwj\u200d bom\ufeff soft\u00ad bell\x07 x\u2028y\u0085z",
    "don't DON'T we'll you're 'ſ   spaces  ",
    "[CLS] hello [SEP] <|endoftext|> x <mask> [MASK]",
    "$5.00 €3 a+b=c x^2 `q` ~z |w| <t>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒳 𠀀𠮷",
    "　全角　ＡＢＣ",
    "a" * 120,
    "   ",
    "",
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEP_SEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TAKEN = [
    QWEN, O200K, DEEP_SEEK,
    "a|ab|abc", "abc|ab|a", "(?:e|er|re)o?n", "o{2}", "[a-e]{2,}", "[a-z]{2,3}e?", "t(?=h)", "t(?!h).", "(the|The|a)? ",
    r"\d+", r"\D", r"[\d\p{L}]+", ".+", r"\s+", r"[\s,.]+", r"\.|\-|\!", r"(?i:THE|qu)", "(e)(?:r| )?", "",
    "a*|b", r"\p{Lu}\P{Lu}*", "(?:|a)b?", "(?=b)(?!c)", "e*(?!r)", r"[a\-c]+", "[^-a-]+", "[&t]", r"[\]\[]", "]|}",
    r"\/", "(?i:sk|k's)", r"\p{C}+", r"[\p{Lt}\p{Nl}]", "x{0}", "(?:)",
]  # fmt: skip
"""Expressions of known tokenizers, and one of each kind that devices know."""
REFUSED = [
    "(a+)+b", "(?:a|aa){2,}b", "(?:a|b)*", "(?!a)*b", "a+?b", "a{2}?", "a*+", "^a", "a$", r"a\b", r"\Aa", r"(a)\1",
    r"\p{Han}", r"\p{^L}", "(?<=a)b",
    "(?>a)b", "(?i)a", "(?i:[ab])", r"(?i:a\s)", "(?i:(a))", "(?i:.)", "(?=ab)", "(?!a|b)", "(?!a+)b", "[a[bc]]",
    "[a-z&&[aeiou]]", r"[\S]", r"\w", "a{,3}", "a{300}", "a" * 2001, "[]a]", "[^]a]", "[--a]", "[a-c-e]", r"[\d-a]",
    r"[a-\d]", "a{2,1}", r"\p{Lx}", r"\p{L&}", "(?i:ss)", "(?i:office)", "(?i:é)", "(?i:a+)", "*a", "(|*a)", "a**",
    "(?=a)", "b|(?!a)", "(?:(?=a)|b)?", "(?=a)?", "b(?!a)?", "(?!)", "(?=a", "\\", r"\x41", "[[:alpha:]]", "[",
    "(" * 101 + "a" + ")" * 101,
]  # fmt: skip


SPLIT = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {"x": {"id": "x", "ids": [2], "tokens": ["x"]}}}
A = {"Sequence": {"id": "A", "type_id": 0}}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
PAIR = {"type": "BertProcessing", "cls": ["x", 2], "sep": ["y", 3]}
MODEL_REFUSED = [
    ("type", "WordLevel"), ("type", "Unigram"), ("unk_token", 3), ("x", 1), ("vocab", {"a": 0, "b": 0}),
    ("vocab", {"a": -1}), ("vocab", {"a": 0.5}), ("vocab", {"a": 1 << 24}), ("vocab", ["a"]),
]  # fmt: skip
BPE_REFUSED = [
    ("byte_fallback", True), ("dropout", 0.1), ("dropout", 1), ("continuing_subword_prefix", "##"),
    ("end_of_word_suffix", "</w>"), ("merges", ["a b"]), ("fuse_unk", None), ("ignore_merges", None),
]  # fmt: skip
REFUSED_AT: list[tuple[str, Any]] = [
    *((place, value) for place in ("truncation", "padding", "decoder") for value in ({}, {"type": "ByteLevel"})),
    ("version", "2.0"), ("x", 1), ("normalizer", {"type": "StripAccents"}), ("normalizer", {"type": "Nmt"}),
    ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}), ("normalizer", REPLACE),
    ("normalizer", {"type": "Prepend", "prepend": "a"}), ("normalizer", {"type": "Precompiled"}),
    ("normalizer", {"type": "ByteLevel"}), ("normalizer", {"type": "NFC", "x": 1}), ("normalizer", BERT),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}]}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 17}), ("normalizer", {}),
    *(("pre_tokenizer", {"type": kind}) for kind in ("Whitespace", "WhitespaceSplit", "UnicodeScripts")),
    ("pre_tokenizer", {"type": "CharDelimiterSplit", "delimiter": "a"}), ("pre_tokenizer", {"type": "Digits"}),
    ("pre_tokenizer", {"type": "FixedLength", "length": 2}),
    ("pre_tokenizer", {"type": "Punctuation", "behavior": "Isolated"}),
    ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}),
    *(("pre_tokenizer", {**SPLIT, "behavior": f"{kind}"}) for kind in (
        "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")),
    ("pre_tokenizer", {**SPLIT, "invert": True}), ("pre_tokenizer", {**SPLIT, "pattern": {"String": "a"}}),
    ("pre_tokenizer", {**SPLIT, "pattern": {"Regex": "(a+)+"}}),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [LEVEL, LEVEL]}),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": []}]}),
    ("post_processor", {**TEMPLATE, "single": [A, A]}), ("post_processor", {**TEMPLATE, "single": []}),
    ("post_processor", {**TEMPLATE, "single": [{"Sequence": {"id": "B", "type_id": 0}}]}),
    ("post_processor", {**TEMPLATE, "single": [A, {"SpecialToken": {"id": "z", "type_id": 0}}]}),
    ("post_processor", {**TEMPLATE, "single": [A, {}]}),
    ("post_processor", {"type": "Sequence", "processors": [{**TEMPLATE, "single": [A]}, PAIR]}),
    ("post_processor", {"type": "Sequence", "processors": [{"type": "Sequence", "processors": []}]}),
    ("post_processor", {**PAIR, "cls": ["x", -1]}),
    *(("added_tokens", [{"id": 9, "content": "x y", **TOKEN, **harm}]) for harm in (
        {"single_word": True}, {"content": ""}, {"content": "a" * 257}, {"id": 8}, {"x": 1}, {"lstrip": None},
        {"content": "b"}, {"content": "x ", "rstrip": True})),
    ("added_tokens", [{"id": 9, "content": "x", **TOKEN}, {"id": 9, "content": "x", **TOKEN}]),
]  # fmt: skip
"""Members of a small file, with values that devices refuse."""


def small(kind: str) -> dict[str, Any]:
    """A file of nine words."""
    vocab = {word: place for place, word in enumerate("abcdefghi")}
    word_piece = {"unk_token": "a", "continuing_subword_prefix": "", "max_input_chars_per_word": 100}
    pairs = json.loads(as_devices_know(Tokenizer(models.BPE())))["model"]
    model = pairs if kind == "BPE" else {"type": kind, **word_piece}
    file = json.loads(as_devices_know(Tokenizer(models.BPE())))
    return file | {"model": {**model, "vocab": vocab}}


def refused_files() -> list[dict[str, Any]]:
    """Small files, each with something that devices refuse, by where it is."""
    pairs, pieces = small("BPE"), small("WordPiece")
    of_model = [(pairs, *each) for each in (*MODEL_REFUSED, *BPE_REFUSED)] + [
        (pieces, *each) for each in (*MODEL_REFUSED, ("max_input_chars_per_word", 10**9), ("unk_token", "z"))
    ]
    return [
        *({"at": place, "file": pairs | {place: value}} for place, value in REFUSED_AT),
        *(
            {"at": f"model.{place}", "file": one | {"model": one["model"] | {place: value}}}
            for one, place, value in of_model
        ),
        *({"at": f"no {place}", "file": {k: v for k, v in pairs.items() if k != place}} for place in pairs),
    ]


def word_piece() -> Tokenizer:
    """As BERT's, without case and accents."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(TEXTS * 3, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special))
    around = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    return made


def gpt2() -> Tokenizer:
    """As GPT-2's: nothing around a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return _of_bytes(made, ["<|endoftext|>"])


def roberta() -> Tokenizer:
    """As RoBERTa's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made = _of_bytes(made, ["<s>", "<pad>", "</s>"])
    file = json.loads(made.to_str())
    shape = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True}
    file["added_tokens"].append({"id": made.get_vocab_size(), "content": "<mask>", **shape})
    return Tokenizer.from_str(json.dumps(file))


def qwen() -> Tokenizer:
    """As Qwen's and Llama 3's: composed, with an expression of its own, and whole words first."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(QWEN), "isolated", invert=False)
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return _of_bytes(made, ["<|endoftext|>"])


def _of_bytes(made: Tokenizer, special: list[str]) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS * 3, trainer)
    return made


def main() -> None:
    """Write the file."""
    made = {make.__name__: make() for make in (word_piece, gpt2, roberta, qwen)}
    vectors = [
        {"name": name, "file": json.loads(as_devices_know(one)), "ids": [one.encode(text).ids for text in TEXTS]}
        for name, one in made.items()
    ]
    taken = [{"expression": one, "pieces": [_pieces(one, text) for text in TEXTS]} for one in TAKEN]
    refused = [{"expression": one, "what": unknown_in(one)} for one in REFUSED]
    expressions = {"taken": taken, "refused": refused}
    files = {"small": small("BPE"), "refused": refused_files()}
    written = {"texts": TEXTS, "tokenizers": vectors, "expressions": expressions, "files": files}
    PATH.write_text(json.dumps(written, ensure_ascii=True) + "\n")


def _pieces(expression: str, text: str) -> list[str]:
    """What an expression matches and what is between, as the library has it."""
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


if __name__ == "__main__":
    main()
