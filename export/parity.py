"""Proof that exported graphs compute what torch computes: the same steps on both, on the real runtime, compared.

Parameters after several steps are compared, not one loss: a wrong gradient can hide behind one loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

# Set before the import, which would otherwise open a telemetry store, give this machine an id and start a thread.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime
import torch

from export.errors import ParityFailed
from export.model import GradientOracle, Model
from export.onnx import OPSET
from fedcore.algorithms.algorithm import Algorithm, Carry, Pass
from fedcore.bundle import Certificate, Parity
from fedcore.params import Float32
from fedcore.plan import Field

STEPS = 3
TOLERANCE = 1e-5
METRICS = "metrics"
Arrays = dict[str, np.ndarray]


def certify(model: Model, algorithm: Algorithm, graphs: Mapping[str, bytes], seed: int = 0) -> Certificate:
    """Run every pass for three steps and the report on ONNX Runtime and on torch.

    graphs: ONNX bytes by graph name. Raises ParityFailed, naming the graph, above 1e-5.

    What is compared, and relative to what: docs/models.md.
    """
    random = np.random.default_rng(seed)
    state = algorithm.init(torch.from_numpy(model.initial))
    broadcast = {name: vector.numpy().copy() for name, vector in algorithm.broadcast(state).items()}
    for name, vector in broadcast.items():
        if name != "params":  # an optimizer state of zeros would hide a wrong term
            np.add(vector, np.abs(random.normal(0, 0.01, vector.shape)), out=vector, casting="same_kind")
    sessions = {name: _session(graph) for name, graph in graphs.items()}
    found, carries, references = [], {}, {}
    scale = float(np.linalg.norm(broadcast["params"]))
    for item in algorithm.passes:
        batches = list(_batches(model, item.loop.batch_size, random))
        exported = _run_exported(sessions, item, broadcast, batches)
        torchs = _run_torch(model, item, broadcast, batches)
        start = _arrays(item.begin(_tensors(broadcast)))
        found.append(Parity(f"{item.name}.step", STEPS, _distance(exported, torchs, start, scale)))
        carries[item.name], references[item.name] = exported, torchs
    feed = {f"{name}.carry.{key}": value for name, carry in carries.items() for key, value in carry.items()}
    reported = _run(sessions["report"], _named("broadcast", broadcast) | feed)
    expected = algorithm.report(_tensors(broadcast), {name: _tensors(carry) for name, carry in references.items()})
    found.append(Parity("report", STEPS, _distance(reported, _arrays(expected), {}, scale)))
    certificate = Certificate(
        f"onnxruntime {onnxruntime.__version__}", f"torch {torch.__version__}", OPSET, TOLERANCE, tuple(found)
    )
    for parity in found:
        if not parity.l2 <= TOLERANCE:
            raise ParityFailed(
                f"{model.spec.name}: graph {parity.graph} is {parity.l2:.1e} (relative l2) from torch "
                f"after {STEPS} steps, allowed is {TOLERANCE:.0e}"
            )
    return certificate


def _session(graph: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _run(session: onnxruntime.InferenceSession, feed: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    used = {item.name for item in session.get_inputs()}
    try:
        values = session.run(names, {name: value for name, value in feed.items() if name in used})
    except Exception as error:  # the runtime's exceptions have no common base
        raise ParityFailed(f"ONNX Runtime cannot run an exported graph: {error}") from error
    return dict(zip(names, values, strict=True))


def _run_exported(
    sessions: Mapping[str, onnxruntime.InferenceSession],
    item: Pass,
    broadcast: Arrays,
    batches: list[tuple[Arrays, Float32]],
) -> Arrays:
    received = _named("broadcast", broadcast)
    carry = _run(sessions[f"{item.name}.begin"], received)
    metrics: list[Float32] = []
    for batch, mask in batches:
        state = {name.replace("next.", "carry.", 1): value for name, value in carry.items()}
        carry = _run(sessions[f"{item.name}.step"], state | received | _named("example", batch) | {"mask": mask})
        metrics.append(carry.pop(METRICS))
    sums: Float32 = np.asarray(np.sum(metrics, axis=0), np.float32)
    return {name.removeprefix("next."): value for name, value in carry.items()} | {METRICS: sums}


def _run_torch(model: Model, item: Pass, broadcast: Arrays, batches: list[tuple[Arrays, Float32]]) -> Arrays:
    received = _tensors(broadcast)
    carry: Carry = item.begin(received)
    sums = torch.zeros(len(model.metrics))
    for batch, mask in batches:
        oracle = GradientOracle(model, _tensors(batch), torch.from_numpy(mask))
        carry = item.step(carry, received, oracle)
        sums += oracle.sums
    return _arrays(carry | {METRICS: sums})


def _batches(model: Model, size: int, random: np.random.Generator) -> Iterator[tuple[Arrays, Float32]]:
    """Three random batches; the last is short, so the mask is exercised."""
    for step in range(STEPS):
        mask = np.ones(size, np.float32)
        if step == STEPS - 1:
            mask[(size + 1) // 2 :] = 0
        yield {item.name: _random_field(item, size, random) for item in model.spec.fields}, mask


def _random_field(item: Field, size: int, random: np.random.Generator) -> np.ndarray:
    shape = (size, *item.shape)
    if item.high is None:
        return random.normal(size=shape).astype(item.dtype)
    return random.integers(0, item.high, shape).astype(item.dtype)


def _distance(found: Arrays, expected: Arrays, start: Arrays, scale: float) -> float:
    """The worst vector's l2 difference over how far that vector moved from `start` (from zero when absent there).

    A difference of two models of norm `scale` loses digits to cancellation however right the graph is. The denominator
    grows by what makes one unit of float32 round-off of such a model count as the tolerance.
    """
    floor = float(np.finfo(np.float32).eps) / TOLERANCE * scale
    worst = 0.0
    for name, vector in expected.items():
        moved = np.linalg.norm(vector.astype(np.float64) - start.get(name, 0.0))
        worst = max(worst, float(np.linalg.norm(found[name].astype(np.float64) - vector) / (moved + floor)))
    return worst


def _named(prefix: str, values: Arrays) -> Arrays:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _tensors(values: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def _arrays(values: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: value.detach().numpy() for name, value in values.items()}
