"""Settings of local SGD that suit a built-in model better than the defaults of the algorithms.

A simulation uses them unless its configuration sets others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.local_training import LocalTraining

SUITED: Mapping[str, Mapping[str, Any]] = {
    # With batches of 20 and steps of 0.1, the defaults, it predicts only spaces for dozens of rounds. The batch size is
    # from Reddi et al. 2021, Table 5.
    "char_lstm": {"batch_size": 4, "client_lr": 1.0},
}


def with_default_settings(algorithm: Algorithm, model: str, chosen: Mapping[str, Any]) -> Algorithm:
    """An algorithm with the settings that suit a model, except where the user chose others."""
    if not isinstance(algorithm, LocalTraining) or algorithm.client_optimizer != "sgd":
        return algorithm
    return replace(algorithm, **{name: value for name, value in SUITED.get(model, {}).items() if name not in chosen})
