"""Tables of Unicode for devices in TypeScript and in Kotlin: those of the installed library of tokenizers.

    python -m tools.make_unicode_tables

Needs Node with Unicode 17 or newer. Run it when the library changes; tests/device_runtime/test_texts.py compares the
tokens of every character.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

RUNTIMES = Path(__file__).parents[1] / "device_runtime"
CATEGORIES = (
    *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm"),
    *("Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co"),
)
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#%&()*+,-./:;<=>?@^_~"
CODES = [code for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
SOME = 5000
SURROGATES = range(0xD800, 0xE000)
CAPITAL_I = 0x130
"""The one letter that becomes two in lower case."""
TYPESCRIPT = """/** Unicode's tables as `tokenizers` {version} has them, written by tools/make_unicode_tables.py.
 *
 * Classes of expressions are those of Unicode 16.0, lower case and numbers of 17.0, normal forms of 9.0, BERT's of 8.0.
 */

/** Runs of characters from 0 on: a sign, whose place in SIGNS is that of its kind in KINDS, and how many if not one. */
export const RUNS = `
{runs}
`;
export const SIGNS = "{signs}";
/** A general category, and what else holds: p punctuation, h hidden, a accent (BERT's), n number, x no normal form. */
export const KINDS =
  "{kinds}";
/** Runs of letters with a lower case, in base 36: how far from the run before, how many, how far apart, and to it. */
export const LOWER = `
{lower}
`;
"""
KOTLIN = '''/**
 * Unicode's tables as `tokenizers` {version} has them, written by tools/make_unicode_tables.py.
 *
 * Classes of expressions are those of Unicode 16.0, lower case and numbers of 17.0, normal forms of 9.0, BERT's of 8.0.
 */
package dev.muster.device.texts

/** Runs of characters from 0 on: a sign, at the place in [SIGNS] of its kind in [KINDS], and how many if not one. */
internal const val RUNS = """
{runs}
"""
internal const val SIGNS = "{signs}"

/** A general category, and what else holds: p punctuation, h hidden, a accent (BERT's), n number, x no normal form. */
internal const val KINDS =
    "{kotlin_kinds}"

/** Runs of letters with a lower case, in base 36: how far from the run before, how many, how far apart, and to it. */
internal const val LOWER = """
{lower}
"""
'''
FILES = {"js/src/core/texts/unicode.ts": TYPESCRIPT, "android/core/src/main/kotlin/texts/Unicode.kt": KOTLIN}
NODE = """
const found = {};
for (const code of JSON.parse(require("fs").readFileSync(0, "utf8"))) {
  const one = String.fromCodePoint(code);
  const texts = [one, `a\\u0345${one}`, `a${one}\\u0334`];
  const forms = texts.flatMap((text) => ["NFC", "NFD", "NFKC", "NFKD"].map((form) => text.normalize(form)));
  if (forms.some((form, k) => form !== texts[k >> 2])) found[code] = forms;
}
console.log(JSON.stringify(found));
"""


def main() -> None:
    """Write the files."""
    kinds = _kinds()
    names = sorted(set(kinds))
    signs = dict(zip(names, SIGNS, strict=False))
    runs = ((signs[kind], len(list(run))) for kind, run in itertools.groupby(kinds))
    spelled = "".join(sign + (str(count) if count > 1 else "") for sign, count in runs)
    lower = " ".join(".".join(_base36(number) for number in run) for run in _lower())
    for path, template in FILES.items():
        text = template.format(
            version=tokenizers.__version__,
            runs="\n".join(textwrap.wrap(spelled, 118, break_on_hyphens=False)),
            signs="".join(signs.values()),
            kinds=" ".join(names),
            kotlin_kinds=' " +\n        "'.join(textwrap.wrap(" ".join(names), 118)),
            lower=textwrap.fill(lower, 118, break_on_hyphens=False),
        )
        (RUNTIMES / path).write_text(text)


def _kinds() -> list[str]:
    """A category and marks for every code, from 0 on."""
    kinds = ["Cs" if code in SURROGATES else "Cn" for code in range(0x110000)]
    for category in CATEGORIES:
        split = pre_tokenizers.Split(Regex(rf"\p{{{category}}}"), "removed", invert=True)
        for start in range(0, len(CODES), SOME):
            for piece, _ in split.pre_tokenize_str("".join(map(chr, CODES[start : start + SOME]))):
                for letter in piece:
                    kinds[ord(letter)] = category
    kinds[0] = "Cch"
    alone = _alone() | {code for code in CODES if kinds[code] == "Cn"}
    for mark, marked in (*_marks().items(), ("x", alone)):
        for code in marked:
            kinds[code] += mark
    return kinds


def _marks() -> dict[str, list[int]]:
    off = dict.fromkeys(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), False)
    clean, strip = (normalizers.BertNormalizer(**{**off, name: True}) for name in ("clean_text", "strip_accents"))
    words, digits = pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits()

    def where(is_one: Callable[[str], bool]) -> list[int]:
        return [code for code in CODES if is_one(chr(code))]

    return {
        "p": where(lambda one: len(words.pre_tokenize_str(f"a{one}b")) == 3),
        "h": where(lambda one: clean.normalize_str(one) == ""),
        "a": where(lambda one: strip.normalize_str(one) == ""),
        "n": where(lambda one: len(digits.pre_tokenize_str(f"a{one}b")) == 3),
    }


def _alone() -> set[int]:
    """Characters with a normal form or an order in newer tables than the library's, and the first parts of those."""
    ran = subprocess.run(["node", "-e", NODE], input=json.dumps(CODES), capture_output=True, text=True, check=True)
    made = [getattr(normalizers, form)() for form in FORMS]
    found = set()
    for code, forms in json.loads(ran.stdout).items():
        one = chr(int(code))
        texts = (one, f"a\u0345{one}", f"a{one}\u0334")
        if forms != [form.normalize_str(text) for text in texts for form in made]:
            found |= {ord(one), ord(forms[1][0]) if forms[1] != one else ord(one)}
    return found


def _lower() -> Iterable[tuple[int, int, int, int]]:
    """Runs: how far from the last one's first letter, how many letters, how far apart, and how far their lower case."""
    lower = normalizers.Lowercase()
    pairs = [(code, lower.normalize_str(chr(code))) for code in CODES if code != CAPITAL_I]
    steps = [(code, ord(small) - code) for code, small in pairs if small != chr(code)]
    before = at = 0
    while at < len(steps):
        start, step = steps[at]
        apart = steps[at + 1][0] - start if at + 1 < len(steps) else 1
        apart = apart if apart in (1, 2) else 1
        count = 1
        while at + count < len(steps) and steps[at + count] == (start + count * apart, step):
            count += 1
        yield start - before, count, apart, step
        before, at = start, at + count


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    if number < 0:
        return f"-{_base36(-number)}"
    return (_base36(number // 36) if number >= 36 else "") + digits[number % 36]


if __name__ == "__main__":
    main()
