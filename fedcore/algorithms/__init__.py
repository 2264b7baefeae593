"""The algorithms, by name. Each is one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, cast

from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.clipped import Clipped, Clipping
from fedcore.algorithms.compare import Compare
from fedcore.algorithms.dsvrg import Dsvrg
from fedcore.algorithms.evaluate import Evaluate
from fedcore.algorithms.fed_adagrad import FedAdagrad
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.fed_avg_m import FedAvgM
from fedcore.algorithms.fed_buff import FedBuff
from fedcore.algorithms.fed_dane import FedDane
from fedcore.algorithms.fed_dual_avg import FedDualAvg
from fedcore.algorithms.fed_dyn import FedDyn
from fedcore.algorithms.fed_lamb import FedLamb
from fedcore.algorithms.fed_lars import FedLARS
from fedcore.algorithms.fed_nova import FedNova
from fedcore.algorithms.fed_pa import FedPA
from fedcore.algorithms.fed_pd import FedPD
from fedcore.algorithms.fed_per import FedPer
from fedcore.algorithms.fed_prox import FedProx
from fedcore.algorithms.fed_rep import FedRep
from fedcore.algorithms.fed_sgd import FedSGD
from fedcore.algorithms.fed_yogi import FedYogi
from fedcore.algorithms.fsvrg import Fsvrg
from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.algorithms.local_ada_alter import LocalAdaAlter
from fedcore.algorithms.mime import Mime
from fedcore.algorithms.mime_lite import MimeLite
from fedcore.algorithms.norm_fed_avg import NormFedAvg
from fedcore.algorithms.own import module_of, own_algorithm
from fedcore.algorithms.personalisation import Personalisation
from fedcore.algorithms.question import Ask
from fedcore.algorithms.scaffold import Scaffold
from fedcore.algorithms.settings import parse
from fedcore.errors import AlgorithmError, InvalidAlgorithm, InvalidSetting, UnknownAlgorithm
from fedcore.validation import offered

__all__ = ["ALGORITHMS", "create", "module_of", "name_of", "setting_meant", "settings_of"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.name: cls
    for cls in (
        FedAvg,
        FedAdam,
        MimeLite,
        FedSGD,
        FedProx,
        FedNova,
        NormFedAvg,
        FedBuff,
        FedAvgM,
        FedAdagrad,
        FedYogi,
        FedLARS,
        FedLamb,
        FedPA,
        FedDualAvg,
        Mime,
        FedDane,
        Fsvrg,
        Dsvrg,
        LocalAdaAlter,
        Scaffold,
        FedDyn,
        FedPD,
        FedPer,
        FedRep,
        Evaluate,
        Compare,
        Personalisation,
        Ask,
        HeavyHitters,
    )
}

_CLIPPING = {field.name for field in dataclasses.fields(Clipping)}


def create(name: str, settings: Mapping[str, object] | None = None, modules: Container[str] = ()) -> Algorithm:
    """The algorithm called `name` with `settings` over its defaults; values may be text.

    name: a built-in one, or a user's own as `package.module:Class`. settings: with `clip_norm` it is clipped
    (`fedcore.algorithms.clipped`). modules: those from which own ones may be imported.
    Raises UnknownAlgorithm; UntrustedAlgorithm for a module that is none of `modules`; InvalidAlgorithm; or
    InvalidSetting naming the setting and what it may be.
    """
    cls: Any = _class(name, modules)
    given, own = settings or {}, {field.name for field in dataclasses.fields(cls)}
    clipping = {key: value for key, value in given.items() if key in _CLIPPING - own}
    inner = parse(cls, {key: value for key, value in given.items() if key not in clipping})
    if clipping and "clip_norm" not in clipping:
        raise InvalidSetting(f"{name}: {next(iter(clipping))} needs clip_norm, the bound of the first round")
    return cast("Algorithm", Clipped(inner, parse(Clipping, clipping)) if clipping else inner)


def setting_meant(word: str, algorithm: str) -> tuple[str, str] | None:
    """The setting that a word is, and an algorithm that has it: the one of that name, or else the first.

    Or the setting of that algorithm that contains the word, as client_lr contains lr. None where there is neither.
    """
    try:
        named = _class(algorithm, [module_of(algorithm)])
    except AlgorithmError:
        return None
    for cls in (named, *ALGORITHMS.values()):
        if word in _settings_names(cls):
            return word, algorithm if cls is named else cls.name
    holding = [name for name in _settings_names(named) if len(word) > 1 and word in name]
    return (holding[0], algorithm) if holding else None


def _settings_names(cls: Any) -> list[str]:
    return [field.name for field in (*dataclasses.fields(cls), *dataclasses.fields(Clipping))]


def name_of(algorithm: Algorithm) -> str:
    """The name with which `create` finds the algorithm again: its own, or `package.module:Class`."""
    if isinstance(algorithm, Clipped):
        return name_of(algorithm.inner)
    cls = type(algorithm)
    return algorithm.name if ALGORITHMS.get(algorithm.name) is cls else f"{cls.__module__}:{cls.__qualname__}"


def settings_of(algorithm: Algorithm) -> dict[str, Any]:
    """The settings with which `create` makes the algorithm again, every one spelled out."""
    if isinstance(algorithm, Clipped):
        return settings_of(algorithm.inner) | dataclasses.asdict(algorithm.clipping)
    return dataclasses.asdict(algorithm)  # type: ignore[call-overload,no-any-return]


def _class(name: str, modules: Container[str]) -> type[Algorithm]:
    if not module_of(name):
        if name not in ALGORITHMS:
            hint = "or give your own as package.module:Class or file.py:Class"
            raise UnknownAlgorithm(f"no algorithm is called {name!r}; {offered(name, ALGORITHMS)}, {hint}")
        return ALGORITHMS[name]
    own = own_algorithm(name, modules)
    if own.name in ALGORITHMS:
        raise InvalidAlgorithm(f"{name} is called {own.name!r}, as a built-in algorithm is; give it another `name`")
    return own
