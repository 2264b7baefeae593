"""A batch size that a model fixes, found by running it on others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from export.model import Model
from export.trial_examples import draw_examples

SIZES = (2, 3, 4, 5, 7, 8, 10, 16, 20, 32, 50, 64, 100, 128)


def fixed_batch(model: Model) -> str:
    """A message about a model that runs for some batch sizes and not for others; else an empty text."""
    # The same example repeated, so that only the batch size can make the model fail.
    examples = draw_examples(model.spec, 1, np.random.default_rng(0))
    first_size: dict[bool, int] = {}
    for size in SIZES:
        first_size.setdefault(
            _runs(model, {name: np.repeat(values, size, 0) for name, values in examples.items()}, size), size
        )
        if len(first_size) == 2:
            return (
                f"the model fixes its batch size: it runs for {first_size[True]} examples and not for "
                f"{first_size[False]}; write x.shape[0], or -1 in reshape, instead of the number"
            )
    return ""


def _runs(model: Model, examples: Mapping[str, np.ndarray], size: int) -> bool:
    batch = {name: torch.from_numpy(values) for name, values in examples.items()}
    try:
        with torch.no_grad():
            model.loss(model.tensors(torch.from_numpy(model.initial)), batch, torch.ones(size))
    except Exception:  # whatever the user's own code raises
        return False
    return True
