"""A fleet whose reports say who was counted: device i adds one to value i, and one to the value of its attempt.

A real store, the real driver, a clock that only the operations move. Whatever happens to the devices, the requests,
the answers, the database and the coordinator, each committed mean must be that of exactly the devices that hold a
receipt of that attempt. A 2 in the sum is a double count, a 0 for the holder of a receipt a loss, a foreign attempt's
mark a report of a round that was given up.

    python -m tests.coordinator.one_hot --seeds 20 --operations 10000
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.postgresql import binaries, cluster
from muster.output import header
from tests.coordinator.one_hot_world import BufferedWorld, Operation, Violation, World
from tests.coordinator.shared_world import SharedBufferedWorld, SharedWorld

FAIR_EVERY = 250
"""Operations between two times of fair weather, in which a round must be won."""
WEIGHTS = {
    "turn": 30,
    "check_in": 18,
    "wait": 20,
    "hang_up": 2,
    "upload": 26,
    "replay": 5,
    "another_body": 3,
    "lose_request": 2,
    "lose_answer": 4,
    "abort": 1,
    "abort_again": 0.7,
    "advance": 3.5,
    "linger": 4,
    "hold": 4,
    "break_off": 2,
    "pause": 1,
    "resume": 3,
    "cancel": 0.2,
    "restart": 0.4,
    "take_over": 0.4,
    "haunt": 2,
    "fail_commit": 0.7,
    "lose_commit": 0.5,
}


KINDS = {
    "cohorts": World,
    "buffered": BufferedWorld,
    "three replicas": SharedWorld,
    "buffered at three replicas": SharedBufferedWorld,
}


def operations(seed: int, count: int, kind: type[World] = World) -> list[Operation]:
    """A list of operations. The number of each picks among the devices that it makes sense for, whoever they are."""
    source = random.Random(seed)
    weights = WEIGHTS | kind.operations
    names = source.choices(list(weights), list(weights.values()), k=count)
    return [(name, source.randrange(1000)) for name in names]


def play(script: list[Operation], folder: Path, database: str = "", kind: type[World] = World) -> Counter:
    """Play the operations; what was done, and how many rounds were committed.

    Raises Violation with the operations that led to it, to be handed to `play` again.
    """
    done = []
    with closing(kind(folder, database)) as world:
        try:
            for index, operation in enumerate(script):
                done.append(operation)
                world.do(operation)
                if index % FAIR_EVERY == FAIR_EVERY - 1:
                    world.fair_weather()
            world.fair_weather()
        except Violation as violation:
            raise Violation(f"{violation}, after {len(done)} operations: {done}") from violation
        return world.seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Play generated operations against a coordinator, seed by seed.")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--kind", choices=KINDS, default="cohorts", help="of rounds, or of the world around them")
    parser.add_argument("--postgresql", action="store_true", help="on a PostgreSQL server of its own")
    options = parser.parse_args()
    total, began = Counter(), time.process_time()
    with cluster(binaries()) if options.postgresql else nullcontext() as server:
        for seed in range(options.first, options.first + options.seeds):
            with TemporaryDirectory(prefix="one-hot-") as folder:
                print(f"seed {seed}", file=sys.stderr)
                database = server.without_tables() if server else ""
                kind = KINDS[options.kind]
                total += play(operations(seed, options.operations, kind), Path(folder), database, kind)
    cpu_s = round(time.process_time() - began, 1)
    figures = {
        "seeds": options.seeds,
        "operations": options.operations,
        "cpu_s": cpu_s,
        "done": dict(total.most_common()),
    }
    print(json.dumps({**header("one_hot"), **figures}))


if __name__ == "__main__":
    main()
