"""Baselines of studies, by name: what federated training is compared with, on the same users and examples.

`pooled` and `local` train the model by the algorithm: on the examples of all training users as those of one client, or
on every user's own alone. `dane`, `cocoa` and `sparse_fsvrg` are distributed optimizers of linear models.
"""

from __future__ import annotations

from simulator.baselines.cocoa import CocoaPlus
from simulator.baselines.dane import Dane
from simulator.baselines.method import Method
from simulator.baselines.sparse_fsvrg import SparseFsvrg

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Dane, CocoaPlus, SparseFsvrg)}
BASELINES = ("pooled", "local", *METHODS)
