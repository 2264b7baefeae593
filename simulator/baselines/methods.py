"""The distributed optimizers of linear models, by name."""

from __future__ import annotations

from simulator.baselines.cocoa import CocoaPlus
from simulator.baselines.dane import Dane
from simulator.baselines.method import Method
from simulator.baselines.sparse_fsvrg import SparseFsvrg

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Dane, CocoaPlus, SparseFsvrg)}
