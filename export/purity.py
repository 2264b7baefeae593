"""The purity of a model: its loss of an example depends only on parameters, that example and its noise.

Graphs and recorded steps contain a model's operators and run none of its Python, and batches are padded. So both are
compared on a few examples with plain torch: the unmodified module, with weights in its own parameters. Shapes: B batch,
D parameters, M metric sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from export.errors import ImpureModel
from export.model import GradientOracle, Model
from export.python_state import NUMPY, kept, watched

REAL, EXAMPLES = 3, 5
"""The examples of a trial that the mask keeps, and all of them."""
# The allowed distance of a gradient from plain torch's, or as a multiple of the effect of rounding the parameters.
TOLERANCE, OWN_TIMES = 1e-4, 5
ROUND_OFF, TINY = float(np.finfo(np.float32).eps), 1e-30
# The number of points tried before a model is refused, their distance, and the length of a step, relative to the model.
POINTS, NEAR, STEP = 4, 1e-3, 1e-2
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
        """A copy of the first `count` of EXAMPLES examples, of which the last are padding."""
        numbers = torch.arange(count, dtype=torch.int32)
        fields = {name: torch.tensor(values[:count]) for name, values in examples.items()}
        return cls(fields, (numbers < REAL).float(), numbers * 0x2545F491)


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a batch. sums: (M,), of the metrics. gradient: (D,), of the loss."""

    sums: Tensor
    gradient: Tensor


Gradient = Callable[[Model, Tensor, Sample], Found]
"""The function to compare with plain torch, at parameters (D,)."""


def of_oracle(model: Model, params_D: Tensor, sample: Sample) -> Found:
    """The result of the gradient oracle, which the exporter traces."""
    oracle = GradientOracle(model, sample.fields, sample.mask, sample.noise)
    gradient_D = oracle(params_D)[1]
    return Found(oracle.sums, gradient_D)


def check_pure(model: Model, examples: Mapping[str, np.ndarray], gradient: Gradient = of_oracle) -> None:
    """Compare a padded batch with its real examples in plain torch, and again at parameters one step further.

    examples: EXAMPLES of them, every field. A gradient that is not finite on them passes; other checks notice it.
    Raises ImpureModel, naming the cause, and whatever the user's own code raises.
    """
    trial = _Trial(model, examples, gradient)
    params_D = torch.from_numpy(model.initial)
    first = trial.called_twice(params_D)
    if not first.gradient.isfinite().all():
        return
    trial.hold(params_D, first)
    further_D = params_D - STEP * _as_long(first.gradient, params_D)
    trial.hold(further_D, trial.plain(further_D))


@dataclass(frozen=True, slots=True)
class _Trial:
    """Examples for a model, and the function to compare with plain torch on them."""

    model: Model
    examples: Mapping[str, np.ndarray]
    gradient: Gradient

    @property
    def name(self) -> str:
        return self.model.spec.name

    def plain(self, params_D: Tensor) -> Found:
        """The results of the plain module on the real examples. Raises ImpureModel if it changes its parameters."""
        own = {name: value for name, value in self.model.module.named_parameters() if value.requires_grad}
        sample, values = Sample.of(self.examples, REAL), self.model.tensors(params_D)
        with _set(own, values):
            loss, sums_M = self.model.loss({}, sample.fields, sample.mask, sample.noise)
            gradients = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
            changed = [name for name, value in values.items() if not torch.equal(own[name], value)]
        if changed:
            raise ImpureModel(f"{self.name} changes the parameter {changed[0]!r} by itself; leave that to training")
        return Found(sums_M, torch.cat([gradient.reshape(-1) for gradient in gradients]))

    def called_twice(self, params_D: Tensor) -> Found:
        """Results of plain torch. Raises ImpureModel if Python draws or keeps anything, or a second call differs."""
        with watched(self.model.module) as called:
            first, before = self.plain(params_D), kept(self.model)
            again, after = self.plain(params_D), kept(self.model)
        called += [NUMPY] if before[NUMPY] != after[NUMPY] else []
        if called:
            timed = called[0].startswith(("time", "datetime"))
            raise ImpureModel(f"{self.name} calls {called[0]}; {ONCE}. {LEAVE if timed else DRAW}")
        moved = [what for what, values in before.items() if after.get(what) != values]
        if moved:
            raise ImpureModel(f"{self.name} changes {moved[0]} in every call; {ONCE}. {LEAVE}")
        if max(self._apart(again, first).values()) > TOLERANCE:
            raise ImpureModel(
                f"{self.name} gives another loss or gradient when it is called again with the same examples and "
                f"parameters, so it counts, keeps or draws something; {ONCE}. {LEAVE}"
            )
        return first

    def hold(self, params_D: Tensor, expected: Found) -> None:
        """Raise ImpureModel unless a padded batch gives the expected results, there or at nearby points.

        The gradient jumps where rounding flips a ReLU, but seldom at several points in a row.
        """
        random, point_D = torch.Generator().manual_seed(0), params_D
        for _ in range(POINTS):
            apart = max(self._padded_apart(point_D, expected, EXAMPLES).values())
            if apart <= TOLERANCE or apart <= OWN_TIMES * self._own_apart(point_D, expected, random):
                return
            point_D = params_D + NEAR * _as_long(torch.randn(params_D.shape, generator=random), params_D)
            expected = self.plain(point_D)
        alone = self._padded_apart(point_D, expected, REAL)
        wrong = [part for part, difference in alone.items() if difference > TOLERANCE]
        raise ImpureModel(f"{self.name}: {_held(wrong) if wrong else _mixed(self.model, self.examples)}")

    def _padded_apart(self, params_D: Tensor, expected: Found, examples: int) -> dict[str, float]:
        actual = self.gradient(self.model, params_D, Sample.of(self.examples, examples))
        return self._apart(actual, expected)

    def _own_apart(self, params_D: Tensor, expected: Found, random: torch.Generator) -> float:
        """The effect on plain torch of rounding the parameters."""
        rounded_D = params_D * (1 + ROUND_OFF * torch.randint(-1, 2, params_D.shape, generator=random))
        return max(self._apart(self.plain(rounded_D), expected).values())

    def _apart(self, actual: Found, expected: Found) -> dict[str, float]:
        """The relative error of each tensor's gradient, and as "" that of the worst metric sum.

        The gradient of a tensor may be zero up to rounding, so the denominator adds a hundredth of the whole gradient.
        """
        sizes_M = expected.sums.abs() + 0.01 * REAL
        apart = {"": max(map(_off, actual.sums, expected.sums, sizes_M))}
        whole, of_found = expected.gradient.norm(), self.model.tensors(actual.gradient)
        for name, gradient in self.model.tensors(expected.gradient).items():
            apart[name] = _off(of_found[name], gradient, gradient.norm() + 0.01 * whole)
        return apart


def _off(actual: Tensor, expected: Tensor, size: Tensor) -> float:
    """The difference over a size; 0 if the expected value is not a number."""
    if not expected.isfinite().all():
        return 0.0
    difference = (actual - expected).norm().item()
    return difference / max(size.item(), TINY) if np.isfinite(difference) else np.inf


def _as_long(direction_D: Tensor, params_D: Tensor) -> Tensor:
    """A direction, as long as the parameters, or of length 1 where they are shorter."""
    length: Tensor = params_D.norm().clamp(min=1) / direction_D.norm().clamp(min=TINY)
    return direction_D * length


@contextlib.contextmanager
def _set(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Change the values of parameters in place during the block, so that every reference to one sees them."""
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


def _held(wrong: list[str]) -> str:
    """The message about parameters that are read outside the module. wrong: parameters with wrong gradients."""
    which = next((f"the parameter {name!r}" for name in wrong if name), "a parameter")
    return (
        f"the loss or forward holds on to {which} outside of its layer, as in a variable or a list, and does not see "
        "it change in training. Read parameters in forward, as attributes of layers; if that is so, please report it"
    )


def _mixed(model: Model, examples: Mapping[str, np.ndarray]) -> str:
    """The message about examples that influence each other: where, and what to do."""
    return (
        f"{_mixer(model, examples)} lets the examples of a batch influence each other, as by a mean over the batch, "
        "negatives from it, or a branch on its values; padding would count. Make the loss of an example from that "
        "example alone: group normalisation instead of statistics of the batch, torch.where instead of a branch. A "
        "loss that compares examples takes the mask: ModelSpec(compares=True)"
    )


def _mixer(model: Model, examples: Mapping[str, np.ndarray]) -> str:
    """The layer, loss or metric whose values for the same examples change when other examples join the batch."""
    with torch.no_grad():
        (among, metrics), (alone, expected) = (_calls(model, Sample.of(examples, count)) for count in (EXAMPLES, REAL))
    for (path, *ours), (_, *theirs) in zip(among, alone, strict=False):
        same_input, same_output = (_same_rows(*pair) for pair in zip(ours, theirs, strict=True))
        if not same_output:
            # If the inputs differ already, the surrounding layer has mixed them.
            where = path if same_input else path.rpartition(".")[0]
            return f"layer {where!r}" if where else "the model's own forward"
    metric = next((name for name, values in metrics.items() if not _same_rows(values, expected[name])), "loss")
    return "the loss" if metric == "loss" else f"the metric {metric!r}"


def _calls(model: Model, sample: Sample) -> tuple[list[tuple[str, Any, Any]], dict[Any, Tensor]]:
    """The calls of layers in the order of their ends (path, inputs, outputs), and loss and metrics by example."""
    calls: list[tuple[str, Any, Any]] = []
    with contextlib.ExitStack() as hooks:
        for path, layer in model.module.named_modules():
            hook = layer.register_forward_hook(
                lambda layer, inputs, outputs, path=path: calls.append((path, inputs, outputs))
            )
            hooks.callback(hook.remove)
        return calls, model.measure({}, sample.fields, sample.mask, sample.noise)


def _same_rows(among: Any, alone: Any) -> bool:
    """Whether values have equal rows for the real examples; true if they have no such rows."""
    for ours, theirs in zip(tree_leaves(among), tree_leaves(alone), strict=False):
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == (EXAMPLES, *theirs.shape[1:]):
            rows = ours[: len(theirs)]
            if not torch.allclose(rows, theirs, 1e-4, 1e-5, equal_nan=True):
                return False
    return True
