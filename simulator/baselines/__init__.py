"""Baselines of studies, by name: what federated training is compared with, on the same users and examples.

`pooled` and `local` train the model by the algorithm: on the examples of all training users as those of one client, or
on every user's own alone. `dane`, `cocoa` and `sparse_fsvrg` are distributed optimizers of linear models.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

LinearBaseline: TypeAlias = Literal["dane", "cocoa", "sparse_fsvrg"]
Baseline: TypeAlias = Literal["pooled", "local", LinearBaseline]
LOSSES = ("ridge", "logistic")
"""The linear models, by their loss."""
