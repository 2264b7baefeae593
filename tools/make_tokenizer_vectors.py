"""Write the vectors of tokenizers: small ones of each kind that devices know, and the tokens of texts in many scripts.

    python -m tools.make_tokenizer_vectors

The vocabularies are trained anew, so a run may change them all. tests/device_runtime/test_texts.py holds the library to
the file, device_runtime/js/tests/texts.test.ts the runtime in TypeScript.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from export.huggingface.tokenizer import unknown_in

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
    "a*|b", r"\p{Lu}\P{Lu}*", "(?:|a)b?",
]  # fmt: skip
"""Expressions of known tokenizers, and one of each kind that devices know."""
REFUSED = [
    "(a+)+b", "(?:a|aa){2,}b", "(?:a|b)*", "(?!a)*b", "a+?b", "a{2}?", "a*+", "^a", "a$", r"a\b", r"\Aa", r"(a)\1",
    r"\p{Han}", r"\p{^L}", "(?<=a)b",
    "(?>a)b", "(?i)a", "(?i:[ab])", r"(?i:a\s)", "(?i:(a))", "(?i:.)", "(?=ab)", "(?!a|b)", "(?!a+)b", "[a[bc]]",
    "[a-z&&[aeiou]]", r"[\S]", r"\w", "a{,3}", "a{300}", "a" * 2001,
]  # fmt: skip


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
        {"name": name, "file": json.loads(one.to_str()), "ids": [one.encode(text).ids for text in TEXTS]}
        for name, one in made.items()
    ]
    taken = [{"expression": one, "pieces": [_pieces(one, text) for text in TEXTS]} for one in TAKEN]
    refused = [{"expression": one, "what": unknown_in(one)} for one in REFUSED]
    written = {"texts": TEXTS, "tokenizers": vectors, "expressions": {"taken": taken, "refused": refused}}
    PATH.write_text(json.dumps(written, ensure_ascii=True) + "\n")


def _pieces(expression: str, text: str) -> list[str]:
    """What an expression matches, as the library has it."""
    split = pre_tokenizers.Split(Regex(expression), "removed", invert=True)
    return [piece for piece, _ in split.pre_tokenize_str(text)]


if __name__ == "__main__":
    main()
