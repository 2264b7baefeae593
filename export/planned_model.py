"""The model of a plan bundle, rebuilt from its source."""

from __future__ import annotations

from export.errors import UnknownModel
from export.model import Model, ModelSpec, parameter_count
from export.models import MODELS, load
from export.normalising import as_planned
from fedcore.bundle import Bundle
from fedcore.checkpoint import decode_frozen, frozen_specs_of
from fedcore.errors import PlanError
from fedcore.params import FLOAT_BYTES
from fedcore.plan import ExampleSpec


def source_of(bundle: Bundle, named: str | None = None) -> str:
    """The source of a bundle's model: `named`, else the bundle's own if that is a built-in model.

    A bundle is untrusted, and importing a module that it names would run its author's code. Raises UnknownModel when
    the model has to be named.
    """
    if named is None and bundle.manifest.model not in MODELS:
        raise UnknownModel(
            f"the bundle's model is {bundle.manifest.model!r}; if you trust that code, name it with --model"
        )
    return named or bundle.manifest.model


def planned_model(bundle: Bundle, source: str | ModelSpec, seed: int = 0) -> Model:
    """The model of a bundle, sized for its examples, with its frozen values. seed: of the trained weights.

    Raises UnknownModel, InvalidModel, PlanError for examples without fields or a model larger than the initial state,
    and SchemaError if the plan's frozen values are not the model's.
    """
    plan = bundle.plan
    if not plan.examples.fields:
        raise PlanError(f"the examples of plan {plan.name} have no fields")
    spec = _sized(bundle, plan.examples, source) if isinstance(source, str) else source
    model = Model(as_planned(spec, plan).with_local(",".join(plan.schema.local)), seed)
    if plan.frozen is not None:  # they may have been drawn under another seed
        model.freeze(decode_frozen(bundle.read(plan.frozen.blob), frozen_specs_of(model.frozen_vectors)))
    return model


def _sized(bundle: Bundle, examples: ExampleSpec, source: str) -> ModelSpec:
    """A model for the examples of a bundle, which is untrusted.

    Raises PlanError when a built-in model would be larger than the initial state, before it takes memory.
    """
    spec = load(source, examples.fields[0].shape, examples.fields[-1].high)
    if source not in MODELS:  # its size is its own
        return spec
    wanted, capacity = parameter_count(spec), len(bundle.read(bundle.manifest.state)) // FLOAT_BYTES
    if wanted > capacity:
        raise PlanError(
            f"the model {spec.name} has {wanted:,} parameters with the examples of the plan in {bundle.folder}, whose "
            f"initial state holds {capacity:,} numbers at most; name the model of the plan, or export it again"
        )
    return spec
