"""The weights that a folder's files give a model: all but those of a head, or the folder is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from export.errors import InvalidModel

POOLER = "pooler"
"""A layer between some models and a classifier's head. It may be drawn, as the head may."""
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
    if strange := [name for name in unused if not heads or part(name) in parts]:
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
