"""A trained model as Hugging Face's libraries read it: adapters for `peft`, or merged weights for `transformers`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from export.errors import InvalidModel
from export.huggingface.folder import Pretrained, config_of, spec_of
from export.huggingface.modules import alike
from export.model import Model
from export.weights import DOWN, EXACT, UP, scale_of
from fedcore.params import Float32, Frozen, ParamSchema
from fedcore.plan import Field

PREFIX = "base_model.model."
"""Of every name in a file of adapters, as peft writes them."""
BESIDE = "*.json", "*.txt", "*.model", "*.jinja", "*_*/config.json"
"""A folder's tokenizer and modules of sentence-transformers, without which its weights would be read otherwise."""


class Values(NamedTuple):
    """What was trained, (D,) of a schema, and what was not: all frozen tensors, flat; with freeze_a they hold A.

    label: what it was trained with, if that is known; tasks may have the same tensors.
    """

    schema: ParamSchema
    params: Float32
    frozen: Mapping[str, Frozen]
    label: Field | None = None


def write_adapters(pretrained: Pretrained, values: Values, folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`, which `PeftModel.from_pretrained` reads.

    Raises InvalidModel for values of another model or of one without adapters, and for a folder that is there already.
    """
    model = _trained(pretrained, values)
    if not (layers := _adapted(model)):
        raise InvalidModel(f"{pretrained.folder} has no adapters; write the whole model: --to transformers")
    _make(folder)
    tensors: dict[str, Tensor] = {}
    for path, layer in layers.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = layer.get_submodule(DOWN).get_parameter("weight")
        tensors[f"{PREFIX}{path}.lora_B.weight"] = layer.get_submodule(UP).get_parameter("weight")
    names = [one.name.removeprefix("model.") for one in values.schema.tensors]
    trained = [name for name in names if "lora_" not in name]
    tensors |= {PREFIX + name: model.get_parameter(name) for name in trained}
    config = {
        "peft_type": "LORA",
        "task_type": pretrained.kind.peft,
        "base_model_name_or_path": pretrained.folder,
        "r": pretrained.rank,
        "lora_alpha": pretrained.rank * scale_of(next(iter(layers.values()))),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(type(layer).__name__ == "Conv1D" for layer in layers.values()),
        "target_modules": list(layers),
        "modules_to_save": sorted({_part(model, name) for name in trained}) or None,
        "inference_mode": True,
    }
    save_file({name: one.detach().contiguous() for name, one in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_merged(pretrained: Pretrained, values: Values, folder: Path) -> None:
    """Write the whole model with its adapters added to its weights, which `from_pretrained` of transformers reads.

    Arguments and errors: as `write_adapters`; and for layers with one weight, to which each would add its own adapters.
    """
    model = _trained(pretrained, values)
    ids = torch.arange(pretrained.tokens)[None] % model.config.vocab_size
    with torch.no_grad():
        adapted: Tensor = model(ids)[0]
        for layer in _adapted(model).values():
            down, up = (layer.get_submodule(name).get_parameter("weight") for name in (DOWN, UP))
            product = scale_of(layer) * (up @ down)
            layer.get_parameter("weight").add_(product.T if type(layer).__name__ == "Conv1D" else product)
            delattr(layer, DOWN)
            delattr(layer, UP)
            layer._forward_hooks.clear()
        if not alike(model(ids)[0], adapted):
            raise InvalidModel(
                f"{pretrained.folder}: weights cannot hold what its adapters do, as when layers share one; write the "
                "adapters: --to peft"
            )
    model.config.use_cache = getattr(config_of(pretrained), "use_cache", False)  # which training does without
    _make(folder)
    model.save_pretrained(folder, safe_serialization=True)
    _copy_beside(Path(pretrained.folder), folder)


def _copy_beside(source: Path, folder: Path) -> None:
    for path in (path for pattern in BESIDE for path in source.glob(pattern)):
        target = folder / path.relative_to(source)
        if not target.exists() and not path.name.endswith(".index.json"):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def _trained(pretrained: Pretrained, values: Values) -> Any:
    """The model of `transformers`, with adapters."""
    model, label = Model(spec_of(pretrained)), values.label
    is_other = label is not None and _kind(label) != _kind(model.spec.label)
    if is_other or model.schema != values.schema or set(model.frozen) != set(values.frozen):
        raise InvalidModel(
            f"{pretrained.folder} with rank {pretrained.rank} and these settings is another model than the plan's: "
            "name it as it was exported"
        )
    for name, vector in model.frozen_vectors.items():
        if DOWN not in name and not np.allclose(vector, values.frozen[name], 1e-5):
            raise InvalidModel(
                f"{pretrained.folder} has other weights than the plan's, in {name}: name the folder that was exported"
            )
    if pretrained.bits == EXACT:
        model.freeze(values.frozen)
    else:  # the folder has exact weights, and nothing else is frozen differently but a random A
        model, few = Model(spec_of(replace(pretrained, bits=EXACT))), values.frozen
        model.freeze({**model.frozen_vectors, **{name: few[name] for name in model.frozen if name in few}})
    return model.trained(values.params).module.model


def _kind(label: Field) -> tuple[Any, ...]:
    return label.dtype, label.shape, label.high, label.ignored


def _part(model: Any, name: str) -> str:
    """The layer of a head that a tensor is of; it may lie within the model, as BERT's pooler does."""
    return name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    return {path: layer for path, layer in model.named_modules() if hasattr(layer, DOWN)}


def _make(folder: Path) -> None:
    if folder.exists():
        raise InvalidModel(f"{folder} is there already; name a new folder")
    folder.mkdir(parents=True)
