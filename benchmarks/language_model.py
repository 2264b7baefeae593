"""A small language model on one device: its frozen weights in 32, 8 and 4 bits.

The shape is that of SmolLM2-135M (Allal et al., arXiv:2502.02737, 2025): 30 layers of 576, a vocabulary of 49,152 whose
embedding is also the last layer. Its weights are drawn, as nothing is downloaded. Adapters of rank 8 are trained on
batches of two texts of 64 tokens. The figures are those of the certificate: of graphs on ONNX Runtime, in a process
that has nothing else.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.runner import LanguageModelOptions
from benchmarks.usage import least_cpu_s
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.capabilities import random_field
from export.build import export_bundle
from export.huggingface.folder import Pretrained, spec_of
from export.model import Model
from export.weights import BITS, EXACT
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from fedcore.plan import EXAMPLE, FROZEN, PARAMS, PREDICT, prefixed
from muster.output import Say

SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
TOKENS, BATCH, RANK = 64, 2, 8
TARGETS = {"blob_ratio_8": 0.28, "blob_ratio_4": 0.17, "peak_mb_8": 450.0, "peak_mb_4": 380.0, "step_ratio": 1.7}


def run(options: LanguageModelOptions, say: Say) -> dict[str, Any]:
    """The figures of each number of bits.

    blob_mb: of what is frozen, in 10^6 bytes. peak_mb: of the process that trains, in 2^20. step_ms, predict_ms: CPU
    time of a step, and of a prediction for one text. parity_l2: the largest distance from torch. loss: before training,
    and loss_exact with exact weights. step_ratio: to 32 bits. Raises InvalidModel without the extra `huggingface`.
    """
    with tempfile.TemporaryDirectory(prefix="muster-language-model-") as place:
        folder = Path(place)
        say("draw the weights")
        _save(folder / "model", {**SHAPE, **options.shape})
        found: list[dict[str, Any]] = []
        for bits in (EXACT, *BITS):
            say(f"{bits} bits")
            found.append(_measured(folder, bits, found[0] if found else None))
    return {"bits": found, "targets": TARGETS}


def _save(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(folder)


def _measured(folder: Path, bits: int, exact: dict[str, Any] | None) -> dict[str, Any]:
    model = Model(spec_of(Pretrained(str(folder / "model"), "causal-lm", rank=RANK, tokens=TOKENS, bits=bits)))
    bundle = export_bundle(model, create("fedavg", {"batch_size": BATCH}), folder / str(bits))
    evidence, cost = bundle.certificate.formats["onnx"], bundle.certificate.quantisation
    blob_mb = (0 if bundle.plan.frozen is None else bundle.plan.frozen.blob.size) / 1e6
    step_ms = evidence.footprint.step_cpu_ms
    return {
        "bits": bits,
        "blob_mb": blob_mb,
        "peak_mb": evidence.footprint.peak_rss_mb,
        "step_ms": step_ms,
        "parity_l2": evidence.worst,
        "report_kb": 4 * bundle.plan.report.size / 1000,
        "predict_ms": 1e3 * _predict_s(bundle, model),
        "loss": None if cost is msgspec.UNSET else cost.loss,
        "loss_exact": None if cost is msgspec.UNSET else cost.exact_loss,
        "blob_ratio": blob_mb / exact["blob_mb"] if exact else 1.0,
        "step_ratio": step_ms / exact["step_ms"] if exact else 1.0,
    }


def _predict_s(bundle: Bundle, model: Model) -> float:
    """CPU seconds of a prediction for one text, the least of three."""
    predict, random = bundle.plan.predict, np.random.default_rng(0)
    if predict is None:
        return math.nan
    graph = OnnxRuntime().load(bundle.read(predict.graphs["onnx"]), PREDICT)
    texts = {item.name: random_field(item, 1, random) for item in model.spec.inputs}
    inputs = {PARAMS: model.initial} | prefixed(FROZEN, model.frozen_vectors) | prefixed(EXAMPLE, texts)
    outputs = {item.name: np.empty((1, *item.shape), item.dtype) for item in predict.outputs}
    return least_cpu_s(lambda: graph.run(inputs, outputs), 3)
