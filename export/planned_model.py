"""The model of a plan bundle, made again from its source."""

from __future__ import annotations

from export.errors import UnknownModel
from export.model import Model, ModelSpec
from export.models import MODELS, load
from fedcore.bundle import Bundle
from fedcore.checkpoint import decode, specs_of
from fedcore.errors import PlanError


def source_of(bundle: Bundle, named: str | None = None) -> str:
    """Where the model of a bundle is found: as `named`, else as the bundle says if that is a built-in model.

    A bundle may come from anywhere, and importing what it names would run its author's code. Raises UnknownModel when
    the model has to be named.
    """
    if named is None and bundle.manifest.model not in MODELS:
        raise UnknownModel(
            f"the bundle's model is {bundle.manifest.model!r}; if you trust that code, name it with --model"
        )
    return named or bundle.manifest.model


def planned_model(bundle: Bundle, source: str | ModelSpec, seed: int = 0) -> Model:
    """The model of a bundle, sized for its examples, with its frozen values. seed: of the weights that are trained.

    Raises UnknownModel, InvalidModel, PlanError for examples without fields, and SchemaError where the plan
    has other frozen values than the model.
    """
    plan = bundle.plan
    if not plan.examples.fields:
        raise PlanError(f"the examples of plan {plan.name} have no fields")
    first, label = plan.examples.fields[0], plan.examples.fields[-1]
    model = Model(load(source, first.shape, label.high) if isinstance(source, str) else source, seed)
    if plan.frozen is not None:  # they may have been drawn under another seed
        model.freeze(decode(bundle.read(plan.frozen.blob), specs_of(model.frozen_vectors)))
    return model
