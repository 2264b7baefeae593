"""The purity of a model: its loss of an example hangs on parameters, that example and its noise, and on nothing else.

Graphs and recorded steps hold a model's operators and run none of its Python, and batches are padded. So both are tried
on a few examples against plain torch: the module as it is, called with weights in its own parameters. Shapes: B batch,
D parameters, M metric sums.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from export.errors import ImpureModel
from export.model import GradientOracle, Model
from export.python_state import NUMPY, kept, watched

REAL, EXAMPLES = 3, 5
"""The examples of a trial that the mask keeps, and all of them."""
# A gradient may be so far from plain torch's, or as many times as far as round-off of the parameters moves that.
TOLERANCE, OWN_TIMES = 1e-4, 20
STEP, TINY, ROUND_OFF = 0.01, 1e-30, float(np.finfo(np.float32).eps)
ONCE = "graphs and recorded steps run none of a model's Python, so that would happen once and never again"
LEAVE = "Leave it out of forward, loss and metrics: only parameters are kept from one step to the next"
DRAW = "Draw by nn.Dropout, randn_like or rand_like, which draw anew in every step"


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch: fields (B, …), mask float32 (B,), noise int32 (B,)."""

    fields: Mapping[str, Tensor]
    mask: Tensor
    noise: Tensor

    @classmethod
    def of(cls, examples: Mapping[str, np.ndarray], count: int) -> Sample:
        """The first `count` of EXAMPLES examples, of which the last are padding."""
        numbers = torch.arange(count, dtype=torch.int32)
        fields = {name: torch.tensor(values[:count]) for name, values in examples.items()}
        return cls(fields, (numbers < REAL).float(), numbers * 0x2545F491)


@dataclass(frozen=True, slots=True)
class Found:
    """What a batch gives: metric sums (M,), and the gradient (D,) of its loss."""

    sums_M: Tensor
    gradient_D: Tensor


Gradient = Callable[[Model, Tensor, Sample], Found]
"""What is held against plain torch, at parameters (D,)."""


def of_oracle(model: Model, params_D: Tensor, sample: Sample) -> Found:
    """What the gradient oracle gives, which the exporter traces."""
    oracle = GradientOracle(model, sample.fields, sample.mask, sample.noise)
    gradient_D = oracle(params_D)[1]
    return Found(oracle.sums, gradient_D)


def check_pure(model: Model, examples: Mapping[str, np.ndarray], gradient: Gradient = of_oracle) -> None:
    """Hold a padded batch against its real examples in plain torch, and again at parameters a step further.

    examples: EXAMPLES of them, every field. What is not finite on them is left to others to notice.
    Raises ImpureModel, naming the cause, and whatever the user's own code raises.
    """
    name, params_D = model.spec.name, torch.from_numpy(model.initial)
    # Made anew for every call, as a model may change its input in place.
    padded, real = (functools.partial(Sample.of, examples, count) for count in (EXAMPLES, REAL))
    first = _called_twice(model, params_D, real)
    nudged_D = params_D * (1 + ROUND_OFF * (torch.arange(len(params_D)) % 3 - 1))
    allowed = max(TOLERANCE, OWN_TIMES * _worst(model, _plain(model, nudged_D, real()), first))
    further_D = params_D - STEP * params_D.norm().clamp(min=1) * nn.functional.normalize(first.gradient_D, dim=0)
    for point_D, expected in ((params_D, first), (further_D, _plain(model, further_D, real()))):
        if _worst(model, gradient(model, point_D, padded()), expected) > allowed:
            alone = _differences(model, gradient(model, point_D, real()), expected)
            wrong = [part for part, difference in alone.items() if difference > allowed]
            raise ImpureModel(f"{name}: {_held(wrong) if wrong else _mixed(model, padded(), real())}")


def _called_twice(model: Model, params_D: Tensor, sample: Callable[[], Sample]) -> Found:
    """What plain torch gives. Raises ImpureModel where Python draws, keeps something, or gives something else again."""
    name = model.spec.name
    with watched(model.module) as called:
        first, before = _plain(model, params_D, sample()), kept(model)
        again, after = _plain(model, params_D, sample()), kept(model)
    called += [NUMPY] if before[NUMPY] != after[NUMPY] else []
    if called:
        timed = called[0].startswith(("time", "datetime"))
        raise ImpureModel(f"{name} calls {called[0]}; {ONCE}. {LEAVE if timed else DRAW}")
    moved = [what for what, values in before.items() if after.get(what) != values]
    if moved:
        raise ImpureModel(f"{name} changes {moved[0]} in every call; {ONCE}. {LEAVE}")
    if _worst(model, again, first) > TOLERANCE:
        raise ImpureModel(
            f"{name} gives another loss or gradient when it is called again with the same examples and parameters, so "
            f"it counts, keeps or draws something; {ONCE}. {LEAVE}"
        )
    return first


def _plain(model: Model, params_D: Tensor, sample: Sample) -> Found:
    """What the module gives by itself, where every example counts. Raises ImpureModel if it changes its parameters."""
    own = {name: value for name, value in model.module.named_parameters() if value.requires_grad}
    with _set(own, model.tensors(params_D)):
        loss, sums_M = model.loss({}, sample.fields, torch.ones_like(sample.mask), sample.noise)
        gradients = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
        for name, value in model.tensors(params_D).items():
            if not torch.equal(own[name], value):
                raise ImpureModel(f"{model.spec.name} changes the parameter {name!r} by itself; leave that to training")
    return Found(sums_M, torch.cat([gradient.reshape(-1) for gradient in gradients]))


@contextlib.contextmanager
def _set(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters that hold other values meanwhile, which whoever holds on to one sees."""
    before = {name: value.detach().clone() for name, value in own.items()}
    try:
        _copy(own, values)
        yield
    finally:
        _copy(own, before)


def _copy(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _differences(model: Model, found: Found, expected: Found) -> dict[str, float]:
    """How far off the gradient of each tensor is, and under "" the worst metric sum: in parts of what is expected.

    The gradient of a tensor may be zero but for round-off, so a hundredth of the whole gradient counts as well.
    """
    apart = {"": max(map(_off, found.sums_M.double(), expected.sums_M.double(), expected.sums_M.abs() + 0.01 * REAL))}
    whole, gradients = expected.gradient_D.norm(), model.tensors(found.gradient_D)
    for name, gradient in model.tensors(expected.gradient_D).items():
        apart[name] = _off(gradients[name], gradient, gradient.norm() + 0.01 * whole)
    return apart


def _worst(model: Model, found: Found, expected: Found) -> float:
    return max(_differences(model, found, expected).values())


def _off(found: Tensor, expected: Tensor, size: Tensor) -> float:
    """Nothing, where no number is expected."""
    if not expected.isfinite().all():
        return 0.0
    difference = (found - expected).norm().item()
    return difference / max(size.item(), TINY) if np.isfinite(difference) else np.inf


def _held(wrong: Sequence[str]) -> str:
    """The message about parameters that are read behind the module's back; wrong: those whose gradients are."""
    which = ", ".join(f"parameter {name!r}" for name in wrong if name) or "a parameter"
    return (
        f"the loss or forward holds on to {which} outside of its layer, as in a variable or a list, and so does not see "
        "it change in training; read parameters in forward, as attributes of their layers. If it does not, please "
        "report it"
    )


def _mixed(model: Model, padded: Sample, real: Sample) -> str:
    """The message about examples that influence each other: where, and what to do."""
    return (
        f"{_mixer(model, padded, real)} lets the examples of a batch influence each other, as by a mean over the batch, "
        "negatives from it, or a branch on its values; padding would count. Make the loss of an example from that "
        "example alone, take group normalisation in the place of statistics of the batch, and torch.where of a branch"
    )


def _mixer(model: Model, padded: Sample, real: Sample) -> str:
    """The layer, loss or metric which gives other values for the same examples when others are beside them."""
    with torch.no_grad():
        (among, found), (alone, expected) = (_calls(model, one) for one in (padded, real))
    for (path, *ours), (_, *theirs) in zip(among, alone, strict=False):
        given, made = (_same_rows(*pair) for pair in zip(ours, theirs, strict=True))
        if not made:
            # What comes in is mixed where the layer around it has mixed it.
            path = path if given else path.rpartition(".")[0]
            return f"layer {path!r}" if path else "the model's own forward"
    metric = next((name for name, values in found.items() if not _same_rows(values, expected[name])), "loss")
    return "the loss" if metric == "loss" else f"the metric {metric!r}"


def _calls(model: Model, sample: Sample) -> tuple[list[tuple[str, Any, Any]], dict[str, Tensor]]:
    """The calls of layers, in the order in which they end: path, inputs, outputs; and loss and metrics by example."""
    calls: list[tuple[str, Any, Any]] = []
    with contextlib.ExitStack() as hooks:
        for path, layer in model.module.named_modules():
            hook = layer.register_forward_hook(lambda layer, given, made, path=path: calls.append((path, given, made)))
            hooks.callback(hook.remove)
        return calls, model.measure({}, sample.fields, sample.noise)


def _same_rows(among: Any, alone: Any) -> bool:
    """Whether values have the same rows of the real examples; where they have no such rows, nothing is said."""
    pairs = zip(tree_leaves(among), tree_leaves(alone), strict=False)
    rows = [(ours[:REAL], theirs) for ours, theirs in pairs if _by_example(ours, EXAMPLES) and _by_example(theirs, REAL)]
    return all(torch.allclose(ours, theirs, 1e-4, 1e-5, equal_nan=True) for ours, theirs in rows)


def _by_example(value: Any, examples: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:1] == (examples,)
