"""The files of a folder: the weights that they give a model, and the tokenizer of its texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from device_runtime.errors import PlanRefused
from device_runtime.texts import check, check_added
from export.errors import InvalidModel, reason

POOLER = "pooler"
"""A layer between some models and a classifier's head. It may be drawn, as the head may."""
LEFT_OUT = {POOLER, "decoder"}
"""Parts of a model that it has for some tasks alone, as Funnel has a decoder."""
FOREIGN = {
    "adapter_config.json": "of adapters; merge them into their model, and give the folder of that",
    "shard-*-model-*.safetensors": "of a checkpoint by several processes; write it with save_pretrained in one",
}
"""Files that `transformers` reads beside those of a folder's weights, or in their place."""


def check_folder(folder: str, config: Any) -> None:
    """Raise InvalidModel for a folder with weights that are quantised, or in files of other kinds or names."""
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise InvalidModel(f"{folder} has quantised weights ({method}); give the folder of the exact ones")
    if other := getattr(config, "transformers_weights", None):
        raise InvalidModel(f"{folder}/config.json says that weights are in {other}; write them with save_pretrained")
    for pattern, what in FOREIGN.items():
        if found := next(Path(folder).glob(pattern), None):
            raise InvalidModel(f"{folder} has a file {found.name}, {what}")


def check_given(folder: str, model: Any, report: Mapping[str, Any], has_head: bool) -> frozenset[str]:
    """The names of the tensors that were drawn, because the files lack them or have them in another size.

    report: what `transformers` found. Raises InvalidModel where they are not all of a head, and for tensors of the
    files that the model has no place for, unless they are of another head.
    """
    prefix, kind = f"{model.base_model_prefix}.", type(model).__name__
    _check_files(folder, model)
    sizes = {name: (list(found), list(wanted)) for name, found, wanted in report["mismatched_keys"]}
    drawn, unused = frozenset({*report["missing_keys"], *sizes}), sorted(report["unexpected_keys"])

    def part(name: str) -> str:
        return name.removeprefix(prefix).partition(".")[0]

    needed = [name for name in sorted(drawn) if part(name) != POOLER and not (has_head and not name.startswith(prefix))]
    if absent := [name for name in needed if name not in sizes]:
        raise InvalidModel(f"{folder} lacks {_some(absent)} of {kind}{_hint(absent[0], prefix, unused)}")
    if needed:
        found, wanted = sizes[needed[0]]
        raise InvalidModel(f"{folder} has {_some(needed)} in the size {found}, and its config.json says {wanted}")
    base = model.base_model
    parts = {part(name) for name, _ in (*base.named_parameters(), *base.named_modules())} - {POOLER}
    heads = has_head or base is model
    within = {
        name for name in unused if part(name) in parts or (name.startswith(prefix) and part(name) not in LEFT_OUT)
    }
    if strange := [name for name in unused if not heads or name in within]:
        raise InvalidModel(f"{folder} has {_some(strange)}, for which {kind} of its config.json has no place")
    return drawn


def _check_files(folder: str, model: Any) -> None:
    """Raise InvalidModel for a tensor that is there twice, of which one would be taken, and for weights of integers."""
    from safetensors import safe_open  # comes with transformers, which read the files

    prefix, places = f"{model.base_model_prefix}.", dict[str, str]()
    known = {name.removeprefix(prefix): one for name, one in (*model.named_parameters(), *model.named_buffers())}
    for path in _files(Path(folder)):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                inside, place = name.removeprefix(prefix), f"{name} in {path.name}"
                if other := places.get(inside):
                    raise InvalidModel(f"{folder} has one tensor twice: {other}, and {place}; remove one")
                is_weight = known[inside].is_floating_point() if inside in known else name.endswith(".weight")
                if is_weight and "F" not in (dtype := file.get_slice(name).get_dtype()):
                    raise InvalidModel(f"{folder} has {place} as {dtype}; weights are floating-point numbers")
                places[inside] = place


def _files(folder: Path) -> list[Path]:
    """Those of a folder's weights, which an index may name otherwise."""
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ()
    return sorted({*folder.glob("model*.safetensors"), *(folder / name for name in named)})


def _hint(absent: str, prefix: str, unused: Iterable[str]) -> str:
    """What stands in front of a name that is absent, where the files have it so."""
    inside = absent.removeprefix(prefix)
    for name in (prefix + inside, inside):
        for other in unused:
            if other.endswith(f".{name}"):
                return f": its names begin with {other.removesuffix(name)}; save the model without what wraps it"
    return ""


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other tensors"


FILE = "tokenizer.json"
TRIAL = (
    "The quick brown fox, isn't it? I've 12,345 reasons!",
    "Быстрая лиса, ёлка и Йод; Ώρα ΣΊΣΥΦΟΣ",
    "בְּרֵאשִׁית مُحَمَّد ١٢٣ क्षि สุนัข",
    "快速的棕色狐狸。茶色の狐 カタカナ ﾊﾝｶｸ が 한국어",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 🥹 ❤️ ☃",
    "ﬁ Å e\u0301 ½ ① ℌ İ ı ß ẞ ǅ ſ",
    "tab\tnew\nline\r\n nbsp\u00a0 zwsp\u200b soft\u00ad bell\x07 x\u2028y\u0085z   ",
    "DON'T we'll $5.00 a+b=c `q` <t> 𝔘𝔫𝔦 𠀀 　ＡＢＣ",
    "\u32ff\u1c90\ua7c4\u0897\u08e2\u166d\U00011937\U00010d50\U00011de1\U00016ea0\ua7dc\ua7f2",
)
"""Texts of many scripts; the last has characters that are newer than some tables of Unicode, or change in them."""
AWAY = "move the file away, and the app makes the tokens"
SAMPLES, A_SAMPLE, ADDED = 8, 8, 16
CONFIGS = "special_tokens_map.json", "tokenizer_config.json"
"""Files that say which token stands for what a vocabulary lacks, where there is no vocabulary."""


class Found(NamedTuple):
    """The bytes of a file, and texts with their tokens."""

    data: bytes
    trial: tuple[tuple[str, tuple[int, ...]], ...]


def read(folder: Path, vocabulary: int, tokens: int) -> Found | None:
    """A folder's tokenizer as the library writes it, or None where there is none.

    Raises InvalidModel for one that devices do not know, that gives tokens from `vocabulary` on, that leaves no room
    for a text in `tokens`, or that is not the one which `transformers` makes of the whole folder.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # comes with transformers, which read the folder

    try:
        tokenizer = Tokenizer.from_str(path.read_bytes().decode())
    except Exception as error:  # the library raises Exception itself
        raise InvalidModel(f"{path} is no tokenizer: {reason(error)}") from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest >= vocabulary:
        raise InvalidModel(f"{path} gives token {highest}, and the model knows {vocabulary}; it is another model's")
    added = tokenizer.num_special_tokens_to_add(False)
    if added >= tokens:
        raise InvalidModel(f"{path} adds {added} tokens to every text; {tokens} leave no room, so ask for more tokens")
    own, added_texts = _own_texts(tokenizer), _added_texts(tokenizer)
    texts = (*TRIAL, *own[:: len(own) // SAMPLES + 1], *added_texts[:ADDED])
    data = as_devices_know(tokenizer)
    try:
        check(data)
        check_added(tokenizer)
    except PlanRefused as error:
        raise InvalidModel(f"{path}: {error}; {AWAY}") from error
    _check_whole(folder, tokenizer, (*texts, *own, *added_texts[ADDED:]), vocabulary)
    return Found(data, tuple((text, tuple(tokenizer.encode(text).ids)) for text in texts))


def _check_whole(folder: Path, tokenizer: Any, texts: Iterable[str], vocabulary: int) -> None:
    """Raise InvalidModel where `transformers` gives a folder's model other tokens, by its tokenizer_config.json, say.

    Tokens from `vocabulary` on, which it adds to a file without them, are nothing that a model could read.
    """
    from transformers import AutoTokenizer

    try:
        whole: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        other = whole.backend_tokenizer
        every = dict.fromkeys((*texts, *_own_texts(other), *_added_texts(other)))
        tried = [(text, whole(text)) for text in every]
    except Exception as error:  # whatever the library raises for what it finds
        raise InvalidModel(f"{folder / FILE} is no tokenizer for transformers: {reason(error)}; {AWAY}") from error
    if whole.truncation_side == "left":
        raise InvalidModel(f"{folder}: its truncation_side is left, and devices cut a text at its end; set it to right")
    kind = type(whole).__name__
    for text, found in tried:
        ids = found["input_ids"]
        if ids != tokenizer.encode(text).ids and max(ids, default=0) < vocabulary:
            raise _another(folder, f"gives other tokens for {text!r}", kind)
        if any(found.get("token_type_ids", ())):
            raise InvalidModel(f"{folder / FILE} gives tokens types other than 0, which devices do not; {AWAY}")
    # What shows in no word, such as words that no merges make, is compared as it is written.
    if _model(tokenizer) != _model(other):
        raise _another(folder, "has another model", kind)
    normalized = _normalized(other) if tokenizer.normalizer is not None else {}
    for content, value in _normalized(tokenizer).items():
        if normalized.get(content, value) != value:
            raise _another(folder, f"looks for {content!r} in other forms of a text", kind)


def is_unknown(folder: Path, found: Found | None, token: int | None) -> bool:
    """Whether a token stands for what the vocabulary lacks, by a folder's tokenizer, or by what is noted beside it."""
    if found is not None:
        model = json.loads(found.data)["model"]
        return bool(model["vocab"].get(model["unk_token"]) == token)
    noted: dict[str, Any] = {}
    try:
        for path in (folder / name for name in CONFIGS):
            noted |= json.loads(path.read_bytes()) if path.is_file() else {}
        unknown, padding = (_content(noted.get(f"{name}_token")) for name in ("unk", "pad"))
        own = _content(noted.get("added_tokens_decoder", {}).get(str(token)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{path} is not as transformers writes it: {reason(error)}") from error
    return unknown is not None and unknown in (padding, own)


def _content(token: Any) -> Any:
    """The letters of a special token, which is noted as these or with its members."""
    return token["content"] if isinstance(token, dict) else token


def _another(folder: Path, what: str, kind: str) -> InvalidModel:
    return InvalidModel(
        f"{folder / FILE} {what} than {kind}, by which transformers reads this folder; write the one you mean by its "
        f"save_pretrained, or {AWAY}"
    )


def _model(tokenizer: Any) -> dict[str, Any]:
    """The model of a tokenizer, without members that say nothing."""
    return {name: value for name, value in json.loads(tokenizer.to_str())["model"].items() if value}


def _normalized(tokenizer: Any) -> dict[str, bool]:
    """Whether each added token is looked for in a text's normal form."""
    return {token.content: token.normalized for token in tokenizer.get_added_tokens_decoder().values()}


def is_special(data: bytes, token: int | None) -> bool:
    """Whether a token is one that no text has, such as [PAD], unless it is written out."""
    return any(one["id"] == token and one["special"] for one in json.loads(data)["added_tokens"])


def as_devices_know(tokenizer: Any) -> bytes:
    """The file of a tokenizer of the library, which loses what devices have no use for."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.decoder = None
    return bytes(tokenizer.to_str().encode())


def _own_texts(tokenizer: Any) -> list[str]:
    """Texts with every word of the vocabulary: where two split texts differently, a word lies across a place."""
    ids = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    starts = range(0, len(ids), A_SAMPLE)
    return [tokenizer.decode(ids[start : start + A_SAMPLE], skip_special_tokens=False) for start in starts]


def _added_texts(tokenizer: Any) -> list[str]:
    """A text with each token that was added to the vocabulary."""
    contents = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    return [f"a  {content}  b{content}" for content in contents]
