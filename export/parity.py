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
from collections.abc import Callable, Mapping
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
from fedcore.algorithms.algorithm import Algorithm, Carry, Pass
from fedcore.bundle import Certificate, Evidence, Footprint, Parity
from fedcore.params import Float32
from fedcore.plan import PassPlan, Plan

STEPS = 3
TOLERANCE = 1e-5
# A network with kinks may differ by so many times what torch differs from itself in float64, and never by more than
# the second figure.
OWN_FACTOR, KINKED_TOLERANCE = 10, 5e-3
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
class Reference:
    """What torch computes: the last carry and summed metrics of every pass, and the report; float64 for the model's own
    round-off."""

    carries: dict[str, Arrays]
    report: Arrays


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

    def reference(self, dtype: torch.dtype = torch.float32) -> Reference:
        """The work done by torch, without any of the exporter's rewriting but its dropout."""
        model = self.model
        if dtype != torch.float32:
            model = copy.copy(model)
            model.module = copy.deepcopy(model.module).to(dtype)
        received = _tensors(self.broadcast, dtype)
        carries = {item.name: self._torch_pass(model, item, received, dtype) for item in self.algorithm.passes}
        last = {name: {key: value for key, value in carry.items() if key != METRICS} for name, carry in carries.items()}
        report = self.algorithm.report(received, last)
        return Reference({name: _arrays(carry) for name, carry in carries.items()}, _arrays(report))

    def _torch_pass(self, model: Model, item: Pass, received: Carry, dtype: torch.dtype) -> Carry:
        carry: Carry = item.begin(received)
        sums = torch.zeros(len(model.metrics), dtype=dtype)
        for batch in self.batches[item.name]:
            fields, mask = _tensors(batch.fields, dtype), torch.from_numpy(batch.mask).to(dtype)
            oracle = GradientOracle(model, fields, mask, torch.from_numpy(batch.noise))
            carry = item.step(carry, received, oracle)
            sums += oracle.sums
        return carry | {METRICS: sums}

    def exported(self, plan: Plan, graphs: Mapping[str, Executable]) -> Reference:
        """The work done by exported graphs."""
        received = _named("broadcast", self.broadcast)
        carries = {one.name: self._exported_pass(one, graphs, received) for one in plan.passes}
        feed = {f"{name}.carry.{key}": value for name, carry in carries.items() for key, value in carry.items()}
        report = _vectors({s.name: s.size for s in plan.report.segments if s.reduction == "mean"})
        graphs["report"].run(received | feed, report)
        return Reference(carries, report)

    def _exported_pass(self, one: PassPlan, graphs: Mapping[str, Executable], received: Arrays) -> Arrays:
        sizes = {spec.name: spec.size for spec in one.carry}
        carry, sums = _vectors(sizes), np.zeros(len(one.metrics))
        graphs[f"{one.name}.begin"].run(received, _named("next", carry))
        for batch in self.batches[one.name]:
            after, metrics = _vectors(sizes), np.empty(len(one.metrics), np.float32)
            feed = received | _named("carry", carry) | _named("example", batch.fields)
            graphs[f"{one.name}.step"].run(
                feed | {"mask": batch.mask, "noise": batch.noise}, _named("next", after) | {METRICS: metrics}
            )
            carry, sums = after, sums + metrics
        return carry | {METRICS: sums}

    def distances(self, found: Reference, expected: Reference) -> dict[str, float]:
        """By graph, the worst relative l2 of its vectors."""
        scale = float(np.linalg.norm(self.broadcast["params"]))
        received = _tensors(self.broadcast, torch.float32)
        apart = {
            f"{item.name}.step": _distance(
                found.carries[item.name], expected.carries[item.name], _arrays(item.begin(received)), scale
            )
            for item in self.algorithm.passes
        }
        return apart | {"report": _distance(found.report, expected.report, {}, scale)}


def certify(
    model: Model,
    algorithm: Algorithm,
    plan: Plan,
    graphs: Graphs,
    progress: Callable[[str, str], None] = lambda form, doing: None,
) -> Certificate:
    """Run every pass for three steps and the report on every format's runtime and on torch, and measure the cost.

    graphs: serialised, by format and name. Raises ParityFailed, naming format and graph, when a vector is too far off.
    """
    trial = Trial.draw(model, algorithm)
    progress("", "run torch")
    expected = trial.reference()
    own = trial.distances(expected, trial.reference(torch.float64))
    evidence = {}
    for name, written in graphs.items():
        progress(name, "run and compare")
        found = trial.distances(_run(trial, plan, name, written), expected)
        evidence[name] = _judged(model.spec.name, name, found, own, _footprint(plan, name, written))
    return Certificate(f"torch {torch.__version__}", evidence)


def _run(trial: Trial, plan: Plan, name: str, graphs: Mapping[str, bytes]) -> Reference:
    try:
        backend = backends.BACKENDS[backends.FORMATS[name]]()
    except DeviceError as error:
        raise UnknownFormat(f"graphs of format {name!r} cannot be certified here: {error}") from error
    try:
        return trial.exported(plan, {part: backend.load(graph, part) for part, graph in graphs.items()})
    except DeviceError as error:
        raise ParityFailed(f"{backend.runtime} cannot run an exported graph: {error}: {error.detail}") from error


def _judged(
    model: str, name: str, found: Mapping[str, float], own: Mapping[str, float], footprint: Footprint
) -> Evidence:
    rounding = max(own.values())
    tolerance = TOLERANCE if rounding <= TOLERANCE else min(KINKED_TOLERANCE, OWN_FACTOR * rounding)
    for graph, l2 in found.items():
        if not l2 <= tolerance:
            raise ParityFailed(
                f"{model}: {name} graph {graph} is {l2:.1e} (relative l2) from torch after {STEPS} steps, allowed is "
                f"{tolerance:.0e}; if the model is right, export it with another --seed or a smaller learning rate, "
                "and report this"
            )
    form = FORMATS[name]()
    return Evidence(
        runtime=backends.BACKENDS[backends.FORMATS[name]]().runtime,
        version=form.version,
        tolerance=tolerance,
        parity=tuple(Parity(graph, STEPS, l2, own[graph]) for graph, l2 in found.items()),
        footprint=footprint,
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
    return math.nan if any(map(math.isnan, apart)) else max(apart)


def _vectors(sizes: Mapping[str, int]) -> Arrays:
    return {name: np.empty(size, np.float32) for name, size in sizes.items()}


def _named(prefix: str, values: Arrays) -> Arrays:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _tensors(values: Arrays, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors; those of floats in `dtype`."""
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _arrays(values: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: value.detach().numpy() for name, value in values.items()}
