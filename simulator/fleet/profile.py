"""Fleet profiles: the kinds of emulated devices, with their shares, speeds, faults and conditions.

A fleet profile is a TOML file of kinds (docs/emulators.md). Everything is drawn by seed: properties once per device,
failures once per session.
"""

from __future__ import annotations

import itertools
import math
import random
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from device_runtime.backends import BACKENDS
from device_runtime.conditions import Requirements
from device_runtime.errors import ConfigError
from fedcore.errors import why
from fedcore.validation import converter, offered
from secagg.encoding import DEVICE_MESSAGES
from simulator.errors import ProfileError
from simulator.fleet.faults import EmulatedConditions, EmulatedDevice, PlannedDeath, PlannedFailure
from simulator.fleet.fork_servers import BROWSER, HERE, JVM, NODE, architectures
from simulator.labels import draw_labels, label_shares

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Range = float | tuple[float, float]
"""A number, or the least and the greatest value to draw for each device."""
# Limits of what a machine can emulate: beyond these, times and sums overflow.
BOUNDS = {
    "weight": (1e-6, 1e6),
    "bandwidth": (1.0, 1e12),
    "slow_down": (1.0, 1e6),
    "clock_skew_s": (-1e9, 1e9),
    "drop_out_step": (1.0, 1e9),
}
# The number of seeds for a device's own draws.
SEEDS = 2**32


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device; `weight` is its share of a fleet. The keys of a profile: docs/emulators.md.

    bandwidth, slow_down: drawn evenly in the logarithm. clock_skew_s, drop_out_step: drawn evenly. labels: with their
    shares, as `region=eu:0.3`. Raises ValueError naming the key and its value.
    """

    name: str
    weight: float = 1.0
    runtime: Literal["python", "node", "browser", "jvm"] = "python"
    arch: str = HERE
    backend: str = "onnxruntime"
    bandwidth: Range | None = None
    slow_down: Range = 1.0
    clock_skew_s: Range = 0.0
    silence: Share = 0.0
    drop_out: Share = 0.0
    drop_out_step: int | tuple[int, int] = (1, 10)
    drop_out_secagg: Share = 0.0
    conditions: EmulatedConditions | None = None
    requirements: Requirements = Requirements()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        label_shares(self.labels)
        for key, (least, most) in BOUNDS.items():
            self._check(key, least, most)
        if self.silence + self.drop_out + self.drop_out_secagg > 1:
            raise ValueError(
                f"silence = {self.silence}, drop_out = {self.drop_out} and drop_out_secagg = {self.drop_out_secagg} "
                "are more than 1 together"
            )
        if self.conditions is None and self.requirements != Requirements():
            raise ValueError("requirements never hold without conditions: give the kind some")
        if self.runtime != "python":
            self._check_plain()

    @property
    def host(self) -> str:
        """The host of its devices: its architecture's fork server, NODE, BROWSER or JVM."""
        return self.arch if self.runtime == "python" else self.runtime

    def _check_plain(self) -> None:
        """Refuse faults for devices that share a process or a browser, so that none can fail alone."""
        fields = zip(self.__struct_fields__[1:], self.__struct_defaults__, strict=True)
        allowed = {"weight", "runtime", "labels"}
        others = [key for key, default in fields if key not in allowed and getattr(self, key) != default]
        if others:
            raise ValueError(f"devices of runtime {self.runtime} are as this machine is: leave out {', '.join(others)}")

    def _check(self, key: str, least: float, most: float) -> None:
        value = getattr(self, key)
        if value is None:
            return
        low, high = _ends(value)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{key} = {_shown(value)}: it must be a finite number, or the least and the most of one")
        if low > high:
            raise ValueError(f"{key} = {_shown(value)}: the least comes first and the most second")
        if low < least or high > most:
            raise ValueError(f"{key} = {_shown(value)}: it must be at least {least:g} and at most {most:g}")

    def draw_device(self, rng: random.Random) -> EmulatedDevice:
        """Draw one device of this kind."""
        return EmulatedDevice(
            bandwidth=None if self.bandwidth is None else _log_uniform(rng, self.bandwidth),
            slow_down=_log_uniform(rng, self.slow_down),
            clock_skew_s=rng.uniform(*_ends(self.clock_skew_s)),
            seed=rng.randrange(SEEDS),
            conditions=self.conditions,
            requirements=self.requirements,
            labels=draw_labels(label_shares(self.labels), rng),
        )

    def draw_failure(self, rng: random.Random) -> PlannedFailure:
        """Draw the failure of a device of this kind in one session; most often it is none."""
        chance, step = rng.random(), rng.randint(*map(int, _ends(self.drop_out_step)))
        death = PlannedDeath(rng.choice(DEVICE_MESSAGES), sent=rng.random() < 0.5)
        if chance < self.silence:
            return PlannedFailure(silent=True)
        if chance < self.silence + self.drop_out:
            return PlannedFailure(dies_after=step)
        if chance < self.silence + self.drop_out + self.drop_out_secagg:
            return PlannedFailure(dies_at=death)
        return PlannedFailure()


RUNTIMES: dict[str, dict[str, Any]] = {
    "python": {},
    "aarch64": {"arch": "aarch64"},
    "node": {"runtime": NODE},
    "browser": {"runtime": BROWSER},
    "jvm": {"runtime": JVM},
}
"""Runtimes of devices by name, as keys of a kind."""


def counted_kinds(text: str) -> tuple[Kind, ...]:
    """The kinds in a text such as `node:8,python:4`, whose weights are these counts. Raises ProfileError."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        if name not in RUNTIMES:
            raise ProfileError(f"no runtime is called {name!r}; {offered(name, tuple(RUNTIMES))}")
        if name in counts or not count.isdecimal() or not 1 <= int(count) <= BOUNDS["weight"][1]:
            raise ProfileError(f"{part.strip()!r}: a runtime comes once, with how many devices it runs, as in {name}:8")
        counts[name] = int(count)
    return tuple(Kind(name=name, weight=float(count), **RUNTIMES[name]) for name, count in counts.items())


def equal_kinds(archs: Sequence[str], backends: Sequence[str]) -> tuple[Kind, ...]:
    """A kind for every architecture with every backend, in equal shares; the backend changes first."""
    return tuple(
        Kind(name=f"{arch} {backend}", arch=arch, backend=backend)
        for arch, backend in itertools.product(archs, backends)
    )


def assign_kinds(kinds: Sequence[Kind], count: int) -> list[Kind]:
    """The kind of each of `count` devices, evenly mixed; kinds of equal weight alternate.

    Smooth weighted round-robin: of the first n devices, each kind has its share of n to within about one.
    """
    whole = sum(kind.weight for kind in kinds)
    credits, assigned = [0.0] * len(kinds), []
    for _ in range(count):
        credits = [credit + kind.weight for credit, kind in zip(credits, kinds, strict=True)]
        chosen = credits.index(max(credits))
        credits[chosen] -= whole
        assigned.append(kinds[chosen])
    return assigned


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


_file = converter(_File)
_to_kind = converter(Kind)


def load_profile(path: Path) -> tuple[Kind, ...]:
    """The kinds in a profile. Raises ProfileError when the file is missing, or naming an unknown key or a bad value."""
    try:
        file = _file(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ProfileError(f"fleet profile {path}: {why(error)}") from error
    kinds = tuple(_kind(path, number, values) for number, values in enumerate(file.kind, start=1))
    twice = [name for name, count in Counter(kind.name for kind in kinds).items() if count > 1]
    if twice:
        raise ProfileError(f"fleet profile {path}: two kinds have the name {twice[0]!r}")
    if all(kind.silence + kind.drop_out >= 1 for kind in kinds):
        raise ProfileError(f"fleet profile {path}: nobody ever reports: silence and drop_out are 1 in every kind")
    return kinds


def _kind(path: Path, number: int, values: dict[str, Any]) -> Kind:
    try:
        kind = _to_kind(_known(values))
        for key, value, choices in (("arch", kind.arch, architectures()), ("backend", kind.backend, tuple(BACKENDS))):
            if value not in choices:
                raise ConfigError(f"{key} = {value!r}: there are {', '.join(choices)}")
        conditions = kind.conditions
        if conditions is None:
            return kind
        if conditions.trace is not None:
            # A trace lies beside the profile, and devices may work in another folder.
            conditions = replace(conditions, trace=str(path.absolute().parent / conditions.trace))
        if conditions.constant is not None and (unmet := kind.requirements.unmet(conditions.constant)):
            raise ConfigError(f"its constant conditions never meet its requirements: {'; '.join(unmet)}")
        conditions.source(0, lambda: 0.0)  # raise an error here instead of in every device
        return replace(kind, conditions=conditions)
    except (msgspec.ValidationError, ConfigError) as error:
        name = values.get("name", number)
        raise ProfileError(f"fleet profile {path}, kind {name!r}: {error}") from error


def _known(values: dict[str, Any]) -> dict[str, Any]:
    unknown = [key for key in values if key not in Kind.__struct_fields__]
    if unknown:
        raise ConfigError(f"there is no key `{unknown[0]}`; {offered(unknown[0], Kind.__struct_fields__)}")
    return values


def _ends(value: Range) -> tuple[float, float]:
    return value if isinstance(value, tuple) else (value, value)


def _log_uniform(rng: random.Random, value: Range) -> float:
    low, high = map(math.log, _ends(value))
    return math.exp(rng.uniform(low, high)) if low < high else _ends(value)[0]


def _shown(value: Range) -> str:
    return f"[{value[0]:g}, {value[1]:g}]" if isinstance(value, tuple) else f"{value:g}"
