"""Proof that exported graphs compute what torch computes, apart from ties, and their footprint.

It compares parameters after several steps, not one loss: a wrong gradient can hide behind one loss. The denominators of
the numbers, and their limits: docs/models.md.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.overrides import TorchFunctionMode

from device_runtime import backends
from device_runtime.backends.backend import Executable
from device_runtime.errors import DeviceError
from export.errors import ParityFailed, UnknownFormat
from export.model import Model
from export.predict import FORMATS, predict_parity
from export.trial import ROUND_OFF, TOLERANCE, Shake, Trial, TrialOutcome, worst
from fedcore.algorithms.algorithm import Algorithm
from fedcore.bundle import Certificate, Evidence, Footprint, Parity
from fedcore.plan import PREDICT, BlobRef, Plan
from fedcore.validation import decoder

_FOOTPRINT = decoder(Footprint)


def footprint(plan: Plan, form: str, graphs: Mapping[BlobRef, bytes]) -> Footprint:
    """The footprint of a plan's graphs of the format `form` on this machine.

    graphs: serialised, also those of other formats. Raises ParityFailed when the graphs do not run.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "plan.json").write_bytes(plan.encode())
        for ref in plan.graphs[form].values():
            (folder / ref.sha256).write_bytes(graphs[ref])
        done = measured_alone(folder, form)
    if done.returncode:
        raise ParityFailed(f"the {form} graphs do not run by themselves: {done.stderr.decode().strip()[-500:]}")
    return _FOOTPRINT.decode(done.stdout)


def measured_alone(folder: Path, form: str) -> subprocess.CompletedProcess[bytes]:
    """A run of `device_runtime.capabilities` for the plan in a folder, and its graphs of the format `form`."""
    command = [sys.executable, "-m", "device_runtime.capabilities", str(folder), form]
    return subprocess.run(command, capture_output=True, check=False)


WORDS = (
    "{} met equal values, of which torch takes any and devices take the first, so that places and gradients differ; "
    "sort(..., stable=True) takes the first everywhere. "
)


class Ties(TorchFunctionMode):
    """Watches a running model. words: a message if it met ties; else empty."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CHOOSING and CHOOSING[func](*args, **kwargs):
            self.words = WORDS.format(func.__name__)
        return func(*args, **kwargs)


def _among_largest(inputs: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> bool:
    """Whether any of the k largest equals another value."""
    ordered = inputs.detach().sort(dim=dim, descending=largest).values
    return _neighbours(ordered.narrow(dim, 0, min(k + 1, ordered.shape[dim])), dim)


def _anywhere(inputs: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> bool:
    """Whether any two values are equal, unless the sort is stable."""
    return not stable and _neighbours(inputs.detach().sort(dim=dim).values, dim)


def _neighbours(ordered: Tensor, dim: int) -> bool:
    return bool((ordered.diff(dim=dim) == 0).any())


CHOOSING: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys([torch.topk, Tensor.topk], _among_largest),
    **dict.fromkeys([torch.sort, Tensor.sort, torch.argsort, Tensor.argsort], _anywhere),
}


# For networks with kinks, where rounding decides much: the tolerance as a multiple of torch's distance from itself, its
# maximum; the number of torch's runs with other rounding errors, and their size in those of one number, as sums have
# several. See `certify`.
OWN_TIMES, KINKED_TOLERANCE = 20, 5e-3
SHAKEN, ROUND_OFFS = 4, 4 * ROUND_OFF
SINGLES = 5
NOT_FINITE = (
    "The loss or its gradient is not finite. Trials draw examples at random: where inputs have a domain (a logarithm, "
    "lengths above 0, probabilities), give the ModelSpec `examples`, which makes them; else take a smaller step size"
)
OTHERWISE = (
    "Examples that influence each other within a batch (a mean over its axis), so that padding counts, do that; a "
    "forward that changes from call to call; and a kink that other examples meet too, which another --seed may avoid. "
    "If it is none of these, please report it"
)


class _FarApart(ParityFailed):
    """A distance that a kink may cause; other examples hardly meet it."""


def certify(
    model: Model,
    algorithm: Algorithm,
    plan: Plan,
    graphs: Mapping[BlobRef, bytes],
    progress: Callable[[str, str], None] = lambda form, doing: None,
) -> Certificate:
    """Run every pass for a few steps and the report on every format's runtime and on torch, and measure the cost.

    Networks of ReLU and group normalisation are chaotic: torch's own float32 and float64 end too far apart for a
    comparison after several steps. For these, every step starts where torch's step did, and the tolerance grows with
    torch's distance from itself: from its float64, and from its float32 where every number has other rounding errors.
    A value so near a kink that rounding decides about its side is on the other side in some of these runs, and so no
    processor's rounding decides about the certificate. Five more steps see one example each, to notice errors that
    this hides; they also start at torch's, since a step size that suits batches can make a model diverge on single
    examples. A single example seldom meets a kink, so the median of these steps must meet the tolerance of every other
    model. If one draw of examples fails, another is tried: a wrong graph fails there, too.

    The predict graph is compared with torch in eval mode (export/predict.py).

    graphs: serialised. Raises ParityFailed, naming format and graph, when a vector is too far off both times.
    """
    of_trips = [_certify_trip(model, algorithm, index, trip, graphs, progress) for index, trip in enumerate(plan.trips)]
    shared = plan.frozen.blob.size if plan.frozen else 0
    evidence = {name: _together([formats[name] for formats in of_trips], shared) for name in plan.graphs}
    for name, parity in _of_predict(model, plan, graphs, progress).items():
        evidence[name] = replace(evidence[name], parity=(*evidence[name].parity, parity))
    return Certificate(f"torch {torch.__version__}", evidence)


def _of_predict(
    model: Model, plan: Plan, graphs: Mapping[BlobRef, bytes], progress: Callable[[str, str], None]
) -> dict[str, Parity]:
    """The distance of the predict graph from torch in eval mode, by format; none where the plan has none."""
    if plan.predict is None:
        return {}
    progress("", f"run and compare {PREDICT}")
    loaded = {name: _load(name, {PREDICT: graphs[ref]})[PREDICT] for name, ref in plan.predict.graphs.items()}
    return predict_parity(model, plan.predict, loaded, fixed={name: FORMATS[name]().fixed_batch for name in loaded})


def _certify_trip(
    model: Model,
    algorithm: Algorithm,
    index: int,
    plan: Plan,
    graphs: Mapping[BlobRef, bytes],
    progress: Callable[[str, str], None],
) -> dict[str, Evidence]:
    """The evidence about trip `index`, with the trip's plan, by format."""
    progress("", "run torch")

    @functools.cache
    def drawn(seed: int) -> _References:
        draw = functools.partial(Trial.draw, model, algorithm, trip_index=index, seed=seed)
        return _References(draw(), draw(SINGLES, real=1))

    evidence = {}
    for name, refs in plan.graphs.items():
        progress(name, "run and compare")
        written = {part: graphs[ref] for part, ref in refs.items()}
        loaded = _load(name, written)
        try:
            tolerance, parity = drawn(0).compare(plan, name, loaded)
        except _FarApart:
            tolerance, parity = drawn(1).compare(plan, name, loaded)
        evidence[name] = Evidence(
            runtime=backends.BACKENDS[backends.FORMATS[name]]().runtime,
            version=FORMATS[name]().version,
            tolerance=tolerance,
            parity=parity,
            footprint=footprint(plan, name, graphs),
        )
    return evidence


def _together(trips: Sequence[Evidence], shared: int) -> Evidence:
    """The evidence about all trips of a format: the cost of the worst trip, and every graph.

    shared: the bytes that the trips have in common.
    """
    first, *others = trips
    parity = [
        *first.parity,
        *(replace(entry, graph=f"second.{entry.graph}") for trip in others for entry in trip.parity),
    ]
    footprints = [trip.footprint for trip in trips]
    together = Footprint(
        step_cpu_ms=max(cost.step_cpu_ms for cost in footprints),
        peak_rss_mb=max(cost.peak_rss_mb for cost in footprints),
        graph_bytes=sum(cost.graph_bytes - shared for cost in footprints) + shared,
    )
    return replace(first, tolerance=max(trip.tolerance for trip in trips), parity=tuple(parity), footprint=together)


class _References:
    """Torch's outcomes of two trials: with whole batches, and with one example per step."""

    def __init__(self, whole: Trial, single: Trial) -> None:
        self._whole, self._single = whole, single
        self._outcome = whole.reference()
        self._own = whole.distances(self._outcome, whole.reference(torch.float64))

    @functools.cached_property
    def _own_guided(self) -> dict[str, float]:
        return self._guided(self._whole.reference(torch.float64, self._outcome))

    @functools.cached_property
    def _rounded_guided(self) -> float:
        """The largest distance of torch from its runs with other rounding errors."""
        shakes = map(_rounded_otherwise, range(SHAKEN))
        runs = (self._whole.reference(guide=self._outcome, shake=shake) for shake in shakes)
        return worst(l2 for run in runs for l2 in self._guided(run).values())

    def _guided(self, outcome: TrialOutcome) -> dict[str, float]:
        return self._whole.distances(outcome, self._outcome, self._outcome, by_tensor=False)

    @functools.cached_property
    def _single_outcome(self) -> TrialOutcome:
        return self._single.reference(guide=self._outcome)

    def compare(self, plan: Plan, name: str, graphs: Mapping[str, Executable]) -> tuple[float, tuple[Parity, ...]]:
        """The tolerance, and the distance of each of a format's graphs from torch. Raises ParityFailed."""
        distances, steps = (
            self._whole.distances(_exported(self._whole, plan, name, graphs), self._outcome),
            self._whole.steps,
        )
        if worst(distances.values()) <= TOLERANCE:
            return TOLERANCE, tuple(
                Parity(graph, steps(graph), l2, self._own[graph]) for graph, l2 in distances.items()
            )
        distances = self._guided(_exported(self._whole, plan, name, graphs, self._outcome))
        subject, own = f"{self._whole.model.spec.name}: {name}", self._own_guided
        apart = worst((*own.values(), self._rounded_guided))
        tolerance = min(KINKED_TOLERANCE, max(TOLERANCE, OWN_TIMES * apart))
        self._check(subject, distances, tolerance, "at one of its steps")
        outcome = _exported(self._single, plan, name, graphs, self._outcome)
        single = self._single.distances(outcome, self._single_outcome, self._outcome, _median)
        self._check(subject, single, TOLERANCE, "after a step of one example")
        parity = (Parity(graph, steps(graph), l2, own[graph], single[graph]) for graph, l2 in distances.items())
        return tolerance, tuple(parity)

    def _check(self, subject: str, distances: Mapping[str, float], tolerance: float, when: str) -> None:
        for graph, l2 in distances.items():
            if not l2 <= tolerance:
                kind, why = (ParityFailed, NOT_FINITE) if math.isnan(l2) else (_FarApart, self._reason())
                raise kind(
                    f"{subject} graph {graph} is {l2:.1e} (relative l2) from torch {when}, allowed is {tolerance:.0e}. "
                    f"{why}"
                )

    def _reason(self) -> str:
        with Ties() as ties:
            self._whole.reference()
        return f"{ties.words}{OTHERWISE}"


def _rounded_otherwise(seed: int) -> Shake:
    """Every number times 1 ± a few rounding errors of float32, at random."""
    generator = torch.Generator().manual_seed(seed)
    return lambda values: values * (1 + ROUND_OFFS * (2 * torch.rand(values.shape, generator=generator) - 1))


def _exported(
    trial: Trial, plan: Plan, name: str, graphs: Mapping[str, Executable], guide: TrialOutcome | None = None
) -> TrialOutcome:
    try:
        return trial.exported(plan, graphs, guide)
    except DeviceError as error:
        raise _cannot_run(name, error) from error


def _median(distances: Iterable[float]) -> float:
    return float(np.median(list(distances)))


def _load(name: str, graphs: Mapping[str, bytes]) -> dict[str, Executable]:
    try:
        backend = backends.BACKENDS[backends.FORMATS[name]]()
    except DeviceError as error:
        raise UnknownFormat(f"graphs of format {name!r} cannot be certified here: {error}") from error
    try:
        return {part: backend.load(graph, part) for part, graph in graphs.items()}
    except DeviceError as error:
        raise _cannot_run(name, error) from error


def _cannot_run(name: str, error: DeviceError) -> ParityFailed:
    return ParityFailed(f"the runtime of {name} cannot run an exported graph: {error}: {error.detail}")
