"""An inference model in one of its forms, compared with the model that it is made of before anybody has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from export.errors import UnknownFormat, UnknownModel
from export.inference.trained import SIZES, OutputsByName, Trained, check_alike
from fedcore.plan import Field, PredictPlan
from fedcore.validation import offered

if TYPE_CHECKING:
    from export.inference.int8 import Cost
    from export.model import ModelSpec

SUFFIXES = {"onnx": ".onnx", "executorch": ".pte", "torch": ".pt2"}
"""The forms of an inference model, and the endings of their files."""
FOLDERS = ("peft", "transformers")
"""The forms of a pretrained model, which are folders."""
DRAWN = 256
"""Examples to measure what int8 costs, where none are given."""


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """A file for apps. cost: what int8 costs; None for a model in float."""

    data: bytes
    cost: Cost | None = None


def check_form(to: str, *, int8: bool) -> None:
    """Raise UnknownFormat for a form that there is not, or int8 where it is not offered."""
    forms = (*SUFFIXES, *FOLDERS)
    if to not in forms:
        raise UnknownFormat(f"no inference model is called {to!r}; {offered(to, forms)}")
    if int8 and to != "onnx":
        raise UnknownFormat(f"int8 is made by ONNX Runtime's quantiser, so for onnx and not for {to}")


def inference_model(
    trained: Trained,
    to: str = "onnx",
    *,
    source: str | ModelSpec | None = None,
    int8: bool = False,
    examples: OutputsByName | None = None,
) -> InferenceModel:
    """A trained model with its weights inside: "onnx", "executorch" or "torch".

    source: of the module, which executorch and torch are made of; onnx is made of the predict graph. int8: have ONNX
    Runtime quantise it. examples: on which the cost of int8 is measured, with a label if they have one; else drawn.
    Raises ExportError and PlanError, naming what is missing.
    """
    check_form(to, int8=int8)
    predict = trained.predict
    if to != "onnx":
        return InferenceModel(_of_module(trained, to, source))
    from export.inference.onnx_model import with_weights

    data = with_weights(trained.graph("onnx"), trained.plan.name, trained.plan.schema, trained.params, trained.frozen)
    from export.inference.int8 import cost_of, quantised, run

    for size in SIZES:
        drawn = trained.drawn(size, seed=size)
        check_alike("ONNX", run(data, drawn), trained.outputs(drawn))
    if not int8:
        return InferenceModel(data)
    small = quantised(data)
    given = trained.drawn(DRAWN) if examples is None else examples
    return InferenceModel(small, cost_of(data, small, given, _label(trained, predict)))


def _label(trained: Trained, predict: PredictPlan) -> Field | None:
    """The field of the examples that the model does not take, if there is one."""
    others = [item for item in trained.plan.examples.fields if item.name not in predict.inputs]
    return others[0] if len(others) == 1 else None


def _of_module(trained: Trained, to: str, source: str | ModelSpec | None) -> bytes:
    if source is None:
        raise UnknownModel(f"a model for {to} is made of its module, which a plan does not name; name it with --model")
    from export.inference.torch_model import module_of, to_executorch, to_torch

    model = module_of(trained, source)
    return to_torch(trained, model) if to == "torch" else to_executorch(trained, model)
