"""Proof that exported graphs compute what torch computes: the same steps on both, on a device's own runtime, compared.

Parameters after several steps are compared, not one loss: a wrong gradient can hide behind one loss. What the numbers
are relative to, and how large they may be: docs/models.md.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from device_runtime import backends
from device_runtime.backends.backend import Executable
from device_runtime.errors import DeviceError
from device_runtime.footprint import random_field
from export.errors import ParityFailed, UnknownFormat
from export.formats import FORMATS
from export.model import GradientOracle, Model
from fedcore.algorithms.algorithm import Algorithm
from fedcore.bundle import Certificate, Evidence, Footprint, Parity
from fedcore.params import Float32
from fedcore.plan import PassPlan, Plan

STEPS = 3
TOLERANCE = 1e-5
# For networks with kinks, on which torch's own float32 and float64 part ways: see `certify`.
KINKED_TOLERANCE = 5e-3
METRICS = "metrics"
Arrays = dict[str, np.ndarray]
Graphs = Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input: fields (B, …), mask float32 (B,), noise int32 (B,)."""

    fields: Arrays
    mask: Float32
    noise: np.ndarray


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial: by pass, the carry after every step with that step's metric sums; and the report."""

    trails: dict[str, list[Arrays]]
    report: Arrays

    def last(self, name: str) -> Arrays:
        """The last carry of a pass, with the metrics of all its steps."""
        sums = np.sum([carry[METRICS] for carry in self.trails[name]], axis=0)
        return self.trails[name][-1] | {METRICS: sums}


@dataclass(frozen=True, slots=True)
class Trial:
    """The same work for every runtime: broadcast vectors, and the batches of every pass; the last one is short."""

    model: Model
    algorithm: Algorithm
    broadcast: Arrays
    batches: dict[str, list[Batch]]

    @classmethod
    def draw(cls, model: Model, algorithm: Algorithm, steps: int = STEPS, seed: int = 0) -> Trial:
        """Random batches, and the initial model with every other vector moved off zero, which could hide a term."""
        random = np.random.default_rng(seed)
        state = algorithm.init(torch.from_numpy(model.initial))
        broadcast = {name: vector.numpy().copy() for name, vector in algorithm.broadcast(state).items()}
        for name, vector in broadcast.items():
            if name != "params":
                np.add(vector, np.abs(random.normal(0, 0.01, vector.shape)), out=vector, casting="same_kind")
        batches = {
            item.name: [_batch(model, item.loop.batch_size, step == steps - 1, random) for step in range(steps)]
            for item in algorithm.passes
        }
        return cls(model, algorithm, broadcast, batches)

    def reference(self, dtype: torch.dtype = torch.float32, guide: Outcome | None = None) -> Outcome:
        """The work done by torch, with none of the exporter's rewriting but dropout.

        guide: an outcome from whose carries every step but the first starts, in the place of its own.
        """
        model = self.model
        if dtype != torch.float32:
            model = copy.copy(model)
            model.module = copy.deepcopy(model.module).to(dtype)
        received = _tensors(self.broadcast, dtype)
        trails: dict[str, list[Arrays]] = {}
        for item in self.algorithm.passes:
            carry, trails[item.name] = item.begin(received), []
            for number, batch in enumerate(self.batches[item.name]):
                if guide and number:
                    carry = _tensors(_vectors_of(guide.trails[item.name][number - 1]), dtype)
                fields, mask = _tensors(batch.fields, dtype), torch.from_numpy(batch.mask).to(dtype)
                oracle = GradientOracle(model, fields, mask, torch.from_numpy(batch.noise))
                carry = item.step(carry, received, oracle)
                trails[item.name].append(_arrays(carry | {METRICS: oracle.sums}))
        last = {name: _vectors_of((guide.trails if guide else trails)[name][-1]) for name in trails}
        report = self.algorithm.report(received, {name: _tensors(carry, dtype) for name, carry in last.items()})
        return Outcome(trails, _arrays(report))

    def exported(self, plan: Plan, graphs: Mapping[str, Executable], guide: Outcome | None = None) -> Outcome:
        """The work done by exported graphs; guide: as in `reference`."""
        received = _named("broadcast", self.broadcast)
        trails = {one.name: self._exported_pass(one, graphs, received, guide) for one in plan.passes}
        feed = dict(received)
        for name in trails:
            feed |= _named(f"{name}.carry", _vectors_of((guide.trails if guide else trails)[name][-1]))
        report = _empty({s.name: s.size for s in plan.report.segments if s.reduction == "mean"})
        graphs["report"].run(feed, report)
        return Outcome(trails, report)

    def _exported_pass(
        self, one: PassPlan, graphs: Mapping[str, Executable], received: Arrays, guide: Outcome | None
    ) -> list[Arrays]:
        sizes = {spec.name: spec.size for spec in one.carry}
        carry, trail = _empty(sizes), []
        graphs[f"{one.name}.begin"].run(received, _named("next", carry))
        for number, batch in enumerate(self.batches[one.name]):
            if guide and number:
                carry = _vectors_of(guide.trails[one.name][number - 1])
            after, metrics = _empty(sizes), np.empty(len(one.metrics), np.float32)
            feed = received | _named("carry", carry) | _named("example", batch.fields)
            feed |= {"mask": batch.mask, "noise": batch.noise}
            graphs[f"{one.name}.step"].run(feed, _named("next", after) | {METRICS: metrics})
            carry = after
            trail.append(after | {METRICS: metrics})
        return trail

    def distances(self, found: Outcome, expected: Outcome, *, lockstep: bool = False) -> dict[str, float]:
        """By graph, the worst relative l2 of its vectors: after all steps, or in lockstep after each."""
        scale = float(np.linalg.norm(self.broadcast["params"]))
        received = _tensors(self.broadcast, torch.float32)
        apart = {}
        for item in self.algorithm.passes:
            start = _arrays(item.begin(received))
            if lockstep:
                ours, theirs = found.trails[item.name], expected.trails[item.name]
                starts = [start, *map(_vectors_of, theirs)]
                each = [_distance(*parts, scale) for parts in zip(ours, theirs, starts, strict=False)]
                apart[f"{item.name}.step"] = _worst(each)
            else:
                ends = found.last(item.name), expected.last(item.name)
                apart[f"{item.name}.step"] = _distance(*ends, start, scale)
        return apart | {"report": _distance(found.report, expected.report, {}, scale)}


def certify(
    model: Model,
    algorithm: Algorithm,
    plan: Plan,
    graphs: Graphs,
    progress: Callable[[str, str], None] = lambda form, doing: None,
) -> Certificate:
    """Run every pass for three steps and the report on every format's runtime and on torch, and measure the cost.

    Where torch's own float32 ends further than the tolerance from its float64, as networks of ReLU and group
    normalisation do, nothing can be said about where three steps end. There every step starts where torch's did, and
    the tolerance is wider.

    graphs: serialised, by format and name. Raises ParityFailed, naming format and graph, when a vector is too far off.
    """
    trial = Trial.draw(model, algorithm)
    progress("", "run torch")
    expected = trial.reference()
    own = trial.distances(expected, trial.reference(torch.float64))
    lockstep = max(own.values()) > TOLERANCE
    if lockstep:
        own = trial.distances(trial.reference(torch.float64, expected), expected, lockstep=True)
    evidence = {}
    for name, written in graphs.items():
        progress(name, "run and compare")
        found = _run(trial, plan, name, written, expected if lockstep else None)
        apart = trial.distances(found, expected, lockstep=lockstep)
        tolerance = KINKED_TOLERANCE if lockstep else TOLERANCE
        _check(model.spec.name, name, apart, tolerance)
        evidence[name] = Evidence(
            runtime=backends.BACKENDS[backends.FORMATS[name]]().runtime,
            version=FORMATS[name]().version,
            tolerance=tolerance,
            parity=tuple(Parity(graph, STEPS, l2, own[graph], lockstep) for graph, l2 in apart.items()),
            footprint=_footprint(plan, name, written),
        )
    return Certificate(f"torch {torch.__version__}", evidence)


def _run(trial: Trial, plan: Plan, name: str, graphs: Mapping[str, bytes], guide: Outcome | None) -> Outcome:
    try:
        backend = backends.BACKENDS[backends.FORMATS[name]]()
    except DeviceError as error:
        raise UnknownFormat(f"graphs of format {name!r} cannot be certified here: {error}") from error
    try:
        return trial.exported(plan, {part: backend.load(graph, part) for part, graph in graphs.items()}, guide)
    except DeviceError as error:
        raise ParityFailed(f"{backend.runtime} cannot run an exported graph: {error}: {error.detail}") from error


def _check(model: str, name: str, found: Mapping[str, float], tolerance: float) -> None:
    for graph, l2 in found.items():
        if not l2 <= tolerance:
            raise ParityFailed(
                f"{model}: {name} graph {graph} is {l2:.1e} (relative l2) from torch after {STEPS} steps, allowed is "
                f"{tolerance:.0e}; a loss that is not finite or a kink on the way can do that: try another --seed or a "
                "smaller learning rate, and report it if the model is right"
            )


def _footprint(plan: Plan, name: str, graphs: Mapping[str, bytes]) -> Footprint:
    """Measured in a process without torch."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_bytes(plan.encode())
        for part, ref in plan.graphs[name].items():
            (Path(folder) / ref.sha256).write_bytes(graphs[part])
        command = [sys.executable, "-m", "device_runtime.footprint", folder, name]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise ParityFailed(f"the {name} graphs do not run by themselves: {done.stderr.decode().strip()[-500:]}")
    return msgspec.json.decode(done.stdout, type=Footprint)


def _batch(model: Model, size: int, short: bool, random: np.random.Generator) -> Batch:
    mask = np.ones(size, np.float32)
    if short:
        mask[(size + 1) // 2 :] = 0
    fields = {item.name: random_field(item, size, random) for item in model.spec.fields}
    return Batch(fields, mask, random.integers(-(2**31), 2**31, size).astype(np.int32))


def _distance(found: Arrays, expected: Arrays, start: Arrays, scale: float) -> float:
    """The worst vector's l2 difference over how far that vector moved from `start` (from zero when absent there).

    A difference of two models of norm `scale` loses digits to cancellation however right the graph is. The denominator
    grows by what makes one unit of float32 round-off of such a model count as the tolerance. Not a number if any is.
    """
    floor = float(np.finfo(np.float32).eps) / TOLERANCE * scale
    apart = []
    for name, vector in expected.items():
        moved = np.linalg.norm(vector.astype(np.float64) - start.get(name, 0.0))
        apart.append(float(np.linalg.norm(found[name].astype(np.float64) - vector) / (moved + floor)))
    return _worst(apart)


def _worst(distances: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def _empty(sizes: Mapping[str, int]) -> Arrays:
    return {name: np.empty(size, np.float32) for name, size in sizes.items()}


def _vectors_of(carry: Arrays) -> Arrays:
    return {name: value for name, value in carry.items() if name != METRICS}


def _named(prefix: str, values: Arrays) -> Arrays:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _tensors(values: Arrays, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors; those of floats in `dtype`."""
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _arrays(values: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: value.detach().numpy() for name, value in values.items()}
