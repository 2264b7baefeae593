"""Proof that exported graphs compute what torch computes: the same steps on both, on the real runtime, compared.

Parameters after several steps are compared, not one loss: a wrong gradient can hide behind one loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
Arrays = dict[str, np.ndarray]


def certify(model: Model, algorithm: Algorithm, graphs: Mapping[str, bytes], seed: int = 0) -> Certificate:
    """Run every pass for three steps and the report on ONNX Runtime and on torch.

    graphs: ONNX bytes by graph name. Raises ParityFailed, naming the graph, above 1e-5 relative l2.
    """
    random = np.random.default_rng(seed)
    state = algorithm.init(torch.from_numpy(model.initial))
    broadcast = {name: vector.numpy().copy() for name, vector in algorithm.broadcast(state).items()}
    for name, vector in broadcast.items():
        if name != "params":  # an optimizer state of zeros would hide a wrong term
            np.add(vector, np.abs(random.normal(0, 0.01, vector.shape)), out=vector, casting="same_kind")
    sessions = {name: _session(graph) for name, graph in graphs.items()}
    found, carries, references = [], {}, {}
    for item in algorithm.passes:
        batches = list(_batches(model, item.loop.batch_size, random))
        carries[item.name] = _run_exported(sessions, item, broadcast, batches)
        references[item.name] = _run_torch(model, item, broadcast, batches)
        found.append(Parity(f"{item.name}.step", STEPS, _distance(carries[item.name], references[item.name])))
    feed = {f"{name}.carry.{key}": value for name, carry in carries.items() for key, value in carry.items()}
    reported = _run(sessions["report"], _named("broadcast", broadcast) | feed)
    expected = algorithm.report(_tensors(broadcast), {name: _tensors(carry) for name, carry in references.items()})
    found.append(Parity("report", STEPS, _distance(reported, _arrays(expected))))
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
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _run(session: onnxruntime.InferenceSession, feed: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    used = {item.name for item in session.get_inputs()}
    values = session.run(names, {name: value for name, value in feed.items() if name in used})
    return dict(zip(names, values, strict=True))


def _run_exported(
    sessions: Mapping[str, onnxruntime.InferenceSession],
    item: Pass,
    broadcast: Arrays,
    batches: list[tuple[Arrays, Float32]],
) -> Arrays:
    received = _named("broadcast", broadcast)
    carry = _run(sessions[f"{item.name}.begin"], received)
    for batch, mask in batches:
        state = {name.replace("next.", "carry.", 1): value for name, value in carry.items()}
        carry = _run(sessions[f"{item.name}.step"], state | received | _named("example", batch) | {"mask": mask})
        del carry["metrics"]
    return {name.removeprefix("next."): value for name, value in carry.items()}


def _run_torch(model: Model, item: Pass, broadcast: Arrays, batches: list[tuple[Arrays, Float32]]) -> Arrays:
    received = _tensors(broadcast)
    carry: Carry = item.begin(received)
    for batch, mask in batches:
        carry = item.step(carry, received, GradientOracle(model, _tensors(batch), torch.from_numpy(mask)))
    return _arrays(carry)


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


def _distance(found: Arrays, expected: Arrays) -> float:
    a = np.concatenate([found[name].astype(np.float64) for name in sorted(expected)])
    b = np.concatenate([expected[name].astype(np.float64) for name in sorted(expected)])
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _named(prefix: str, values: Arrays) -> Arrays:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _tensors(values: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def _arrays(values: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: value.detach().numpy() for name, value in values.items()}
