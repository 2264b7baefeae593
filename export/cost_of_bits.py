"""The cost of weights in few bits: the loss with them and with exact ones, before any training."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from msgspec import UNSET, UnsetType

from export.few_bits import Codes
from export.model import Model
from export.trial_examples import draw_examples
from fedcore.bundle import Quantisation

EXAMPLES = 32


def cost_of_bits(model: Model) -> Quantisation | UnsetType:
    """The cost on the model's own examples, else on drawn ones; UNSET where all weights are exact.

    Raises InvalidModel.
    """
    spec, bits = model.spec, [layer.bits for layer in model.module.modules() if isinstance(layer, Codes)]
    if spec.exact is None or not bits:
        return UNSET
    drawn = draw_examples(spec, EXAMPLES, np.random.default_rng(0))
    examples = {name: torch.from_numpy(values) for name, values in drawn.items()}
    mask, params_D = torch.ones(EXAMPLES), torch.from_numpy(model.initial)
    losses = []
    for one in (model, Model(dataclasses.replace(spec, make=spec.exact))):
        same = one.evaluating()
        with torch.no_grad():
            losses.append(float(same.loss(same.tensors(params_D), examples, mask)[0]))
    return Quantisation(bits=min(bits), loss=losses[0], exact_loss=losses[1])
