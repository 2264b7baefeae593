"""A host application in small: it keeps what its user writes in an example store, and lets Muster train on it.

    python examples/host_app.py --coordinator http://127.0.0.1:8080 --population digits --folder my-app

It holds what a plan for 8×8 digits asks for (`muster export digits_cnn`): `x` float32 (1, 8, 8) and `y` int64. The
folder keeps the examples and the device's state. A `policy.toml` in its `state` says what the device may do.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import numpy as np

from device_runtime import Collection, Device, ExampleStore, Retention
from fedcore.plan import Field

FIELDS = (Field("x", "float32", (1, 8, 8)), Field("y", "int64", high=10))


def record(store: ExampleStore, strokes: int) -> None:
    """What an app does as its user writes: append examples, never more than it will need."""
    random = np.random.default_rng()
    store.append_all(
        "default",
        (
            {
                "x": random.uniform(0, 1, (1, 8, 8)).astype(np.float32),
                "y": np.array(random.integers(0, 10), np.int64),
            }
            for _ in range(strokes)
        ),
    )


def main() -> int:
    """Append examples, run one session, say how it ended."""
    parser = argparse.ArgumentParser(description="Append examples and run one session.")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--population", required=True)
    parser.add_argument("--folder", type=Path, default=Path("host-app"))
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    given.folder.mkdir(parents=True, exist_ok=True)
    store = ExampleStore.open(given.folder / "examples")
    store.declare(Collection("default", FIELDS, Retention(max_count=1000)))
    record(store, strokes=20)
    device = Device(given.coordinator, given.population, given.folder / "examples", given.folder / "state")
    outcome = device.run_once()
    print(outcome.outcome, outcome.reason, outcome.detail)
    return 0 if outcome.outcome in {"reported", "rejected", "not-needed"} else 1


if __name__ == "__main__":
    sys.exit(main())
