"""The algorithms, by name. Each is one file; those of a user's own are named as `package.module:Class`."""

from __future__ import annotations

import dataclasses
import inspect
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
from fedcore.algorithms.personalisation import Personalisation
from fedcore.algorithms.question import Ask
from fedcore.algorithms.scaffold import Scaffold
from fedcore.algorithms.settings import parse
from fedcore.errors import AlgorithmError, InvalidAlgorithm, InvalidSetting, UnknownAlgorithm, UntrustedAlgorithm
from fedcore.validation import import_own, offered, own_name

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


# Algorithms of a user's own: frozen dataclasses, named as `package.module:Class`.
#
# To import a module runs its author's code. So a module is imported only where somebody who may decide that has named
# it: on a command line, or in the settings of a coordinator. What a plan, a bundle or a request says is not enough.


_ALWAYS = ("name", "family", "weighting", "init")
_OF_A_TRIP = ("passes", "broadcast", "report", "update")
_OF_CLIENT_STATE = ("init_client", "keep")


def module_of(name: str) -> str:
    """The module that `package.module:Class` or `file.py:Class` names; empty for a built-in algorithm."""
    module, separator, _ = own_name(name).partition(":")
    return module if separator else ""


def own_algorithm(name: str, modules: Container[str]) -> type[Any]:
    """The class that `package.module:Class` names; its module is looked up in the working folder too.

    modules: those that may be imported.
    Raises UntrustedAlgorithm, UnknownAlgorithm, or InvalidAlgorithm for a class that is none of an algorithm.
    """
    module, _, cls = own_name(name).partition(":")
    if module not in modules:
        raise UntrustedAlgorithm(
            f"algorithm {name!r} is not built in, and a coordinator imports only modules that its settings name; if "
            f"you trust that code, put {module} into its setting `algorithms` (MUSTER_ALGORITHMS={module})"
        )
    try:
        imported = import_own(module)
    except Exception as error:  # whatever the user's own code raises
        words = str(error).strip().partition("\n")[0]
        raise UnknownAlgorithm(f"cannot import {name!r}: {type(error).__name__}: {words}") from error
    found = getattr(imported, cls, None)
    here = [one.__name__ for one in vars(imported).values() if isinstance(one, type) and one.__module__ == module]
    # Without this a name could reach every class that the module itself imports, such as one that starts processes.
    if not isinstance(found, type) or found.__module__ != module:
        raise UnknownAlgorithm(f"module {module} defines no algorithm {cls!r}; {offered(cls, here)}")
    _check_class(found)
    return found


def _check_class(cls: type[Any]) -> None:
    """Refuse what cannot be an algorithm, before it is made."""
    where = f"{cls.__name__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InvalidAlgorithm(f"{where} is no frozen dataclass; put @dataclass(frozen=True) above it")
    required = (*_ALWAYS, "trips") if hasattr(cls, "trips") else (*_ALWAYS, *_OF_A_TRIP)
    if any(hasattr(cls, name) for name in _OF_CLIENT_STATE):
        required = (*required, *_OF_CLIENT_STATE)
    fields = {field.name for field in dataclasses.fields(cls)}
    lacking = [name for name in required if not hasattr(cls, name) and name not in fields]
    if lacking:
        raise InvalidAlgorithm(
            f"{where} lacks {', '.join(lacking)}; fedcore/algorithms/algorithm.py says what an algorithm has"
        )
    bare = [field.name for field in dataclasses.fields(cls) if "setting" not in field.metadata]
    if bare:
        raise InvalidAlgorithm(
            f"{where}: the fields {', '.join(bare)} are no settings; give each a default and a range by a function of "
            "fedcore.algorithms.algorithm, such as positive(0.1)"
        )
