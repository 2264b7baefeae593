"""A modelled population as arrays: a row of each for every device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.selection import Capabilities, Needs
from fedcore.conditions import StatedConditions, rounded_down
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.stretches import DAY_S, Nightly, Stretches
from simulator.forecast.traces import read_trace

WAIT_S = 30.0
"""How long a device waits for a round."""
_FORMAT, _COLLECTION = "onnx", "examples"
_EVENING_S, _EVENING_SPREAD_S = 22.5 * 3600.0, 2 * 3600.0
_STRETCH_SPREAD, _BANDWIDTH_SPREAD, _EXAMPLES_SPREAD = 0.4, 0.8, 1.0


@dataclass(frozen=True, slots=True)
class Devices:
    """The properties of N devices, each an array (N,).

    stretches: when they can come. zone: hours ahead of UTC. slow: CPU time over that of the median device. work_s:
    seconds from an assignment to the report, of which cpu_s compute and up_s send it. obstacle: index into `obstacles`,
    0 for none.
    """

    stretches: Stretches
    zone: NDArray[np.int8]
    slow: NDArray[np.float32]
    cpu_s: NDArray[np.float32]
    work_s: NDArray[np.float32]
    up_s: NDArray[np.float32]
    obstacle: NDArray[np.int8]
    obstacles: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.zone)

    @classmethod
    def drawn(cls, config: ForecastConfig) -> Devices:
        """The population of a configuration."""
        chance, count = np.random.default_rng(config.seed), config.devices
        zone = chance.integers(0, config.time_zones, count).astype(np.int8)
        begins = (chance.normal(_EVENING_S, _EVENING_SPREAD_S, count) - 3600.0 * zone) % DAY_S
        lasts = np.minimum(config.charging_s * np.exp(chance.normal(0, _STRETCH_SPREAD, count)), DAY_S)
        slow = np.exp(chance.normal(0, config.speed_spread, count))
        bandwidth = config.bandwidth * np.exp(chance.normal(0, _BANDWIDTH_SPREAD, count))
        examples = np.clip(config.median_examples * np.exp(chance.normal(0, _EXAMPLES_SPREAD, count)), 1, 2**31 - 1)
        held = examples.astype(np.int32)
        obstacle, obstacles = _judged(config, held, chance.random(count) < config.unmetered)
        cpu_s = config.example_s * held * slow
        work_s = cpu_s + (config.bytes_down + config.bytes_up) / bandwidth
        nights = Nightly(begins.astype(np.float32), lasts.astype(np.float32), config.charges, config.seed)
        return cls(
            nights if config.trace is None else read_trace(config.trace, count, config.seed),
            zone,
            slow.astype(np.float32),
            cpu_s.astype(np.float32),
            work_s.astype(np.float32),
            (config.bytes_up / bandwidth).astype(np.float32),
            obstacle,
            obstacles,
        )


def _judged(
    config: ForecastConfig, examples: NDArray[np.int32], unmetered: NDArray[np.bool_]
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """What keeps each device out. The rule judges each kind once: devices that state the same are judged alike."""
    powers = np.floor(np.log2(examples)).astype(np.int64)
    kinds, kind = np.unique(powers * 2 + unmetered, return_inverse=True)
    needs = Needs(frozenset({_FORMAT}), _COLLECTION, config.min_examples, config.task.requires)
    names, judged = [""], []
    for one in kinds:
        conditions = StatedConditions(charging=True, idle=True, unmetered=bool(one % 2))
        held = rounded_down(2 ** int(one // 2))
        able = Capabilities(frozenset({_FORMAT}), {_COLLECTION: held}, conditions=conditions)
        obstacle = needs.unmet_by("", able)
        names += [] if obstacle in names else [obstacle]
        judged.append(names.index(obstacle))
    return np.array(judged, np.int8)[kind], tuple(names)
