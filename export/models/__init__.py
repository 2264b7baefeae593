"""Built-in models by name, and models of the user's own as `package.module:function`, or as `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable

from export.errors import ExportError, InvalidModel, UnknownModel, reason
from export.huggingface.folder import FOLDER, Pretrained, spec_of
from export.model import ModelSpec
from export.models import images, sequences
from fedcore.validation import import_own, offered

MODELS: dict[str, Callable[..., ModelSpec]] = {
    make.__name__: make
    for make in (
        *(images.least_squares, images.logreg, images.mlp, images.digits_cnn, images.emnist_cnn, images.omniglot_cnn),
        *(images.resnet18_gn, images.mobilenetv2_gn, sequences.char_lstm, sequences.word_lstm, sequences.transformer),
    )
}


def check_name(name: str) -> None:
    """Raise UnknownModel unless a name is that of a built-in model, or has the form `package.module:function`."""
    if name not in MODELS and ":" not in name:
        raise UnknownModel(
            f"no model is called {name!r}; {offered(name, MODELS)}, or give your own as package.module:function or "
            "file.py:function, or a pretrained one as hf:FOLDER"
        )


def load(name: str, shape: tuple[int, ...] | None = None, classes: int | None = None) -> ModelSpec:
    """A built-in model, sized for `shape` and `classes` when given, a pretrained one as `hf:FOLDER`, or what one's own
    function returns.

    Modules are looked up in the working folder too. Raises UnknownModel or InvalidModel.
    """
    check_name(name)
    if name in MODELS:
        sizes = {key: value for key, value in (("shape", shape), ("classes", classes)) if value is not None}
        return MODELS[name](**sizes)
    if name.startswith(FOLDER):
        return spec_of(Pretrained.parse(name))
    module, _, function = name.partition(":")
    try:
        make = getattr(import_own(module), function)
    except Exception as error:  # whatever the user's own code raises
        raise UnknownModel(f"cannot import {name!r}: {reason(error)}") from error
    try:
        spec = make()
    except ExportError:
        raise
    except Exception as error:
        raise InvalidModel(f"{name} fails with {reason(error)}") from error
    if not isinstance(spec, ModelSpec):
        raise InvalidModel(f"{name} returned {type(spec).__name__}, expected export.model.ModelSpec")
    return spec
