"""The algorithms, by name. Each is one file."""

from __future__ import annotations

from collections.abc import Mapping

from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_dyn import FedDyn
from fedcore.algorithms.fed_pd import FedPD
from fedcore.algorithms.local_ada_alter import LocalAdaAlter
from fedcore.algorithms.mime_lite import MimeLite
from fedcore.algorithms.scaffold import Scaffold
from fedcore.algorithms.settings import parse
from fedcore.errors import UnknownAlgorithm
from fedcore.names import offered

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.name: cls for cls in (FedAvg, FedAdam, MimeLite, LocalAdaAlter, Scaffold, FedDyn, FedPD)
}


def create(name: str, settings: Mapping[str, object] | None = None) -> Algorithm:
    """The algorithm called `name` with `settings` over its defaults; values may be text.

    Raises UnknownAlgorithm, or InvalidSetting naming the setting and what it may be.
    """
    if name not in ALGORITHMS:
        raise UnknownAlgorithm(f"no algorithm is called {name!r}; {offered(name, ALGORITHMS)}")
    algorithm: Algorithm = parse(ALGORITHMS[name], settings or {})
    return algorithm
