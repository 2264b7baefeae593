"""The workload of a comparison of engines, and a runner's turns at it. This needs only NumPy.

A runner is a program of this folder that trains with another project's code. `muster bench engine --peers` starts it
with a folder: `workload.json`, the examples of all clients, and the initial weights. It writes one JSON line when it
is ready, and one for each line that it reads: `round` trains the next cohort, `loss` evaluates the global model. It
ends when its input does.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PR_SET_CHILD_SUBREAPER = 36
PROBE = 1000
"""The number of examples, the first of the population, whose loss is compared."""


@dataclass(frozen=True)
class Workload:
    """A model by name, the settings of FedAvg, and the cohort of every round as indices of clients.

    clients: images, float32 (n, 1, 28, 28), and labels, int64 (n,), of each client in a cohort. probe: the same of the
    examples whose loss is compared. weights: initial parameters by their names in torch.
    """

    model: str
    classes: int
    batch_size: int
    client_lr: float
    cohorts: list[list[int]]
    clients: dict[int, tuple[np.ndarray, np.ndarray]]
    probe: tuple[np.ndarray, np.ndarray]
    weights: dict[str, np.ndarray]

    @classmethod
    def read(cls, folder: str) -> "Workload":
        """Read the files of a folder, but only the examples that are used."""
        place = Path(folder)
        settings = json.loads((place / "workload.json").read_text())
        images, labels, starts = (
            np.load(place / f"{name}.npy", mmap_mode="r") for name in ("images", "labels", "starts")
        )

        def copied(start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
            return np.array(images[start:end]), np.array(labels[start:end])

        chosen = {index for cohort in settings["cohorts"] for index in cohort}
        with np.load(place / "weights.npz") as file:
            return cls(
                **settings,
                clients={index: copied(starts[index], starts[index + 1]) for index in chosen},
                probe=copied(0, PROBE),
                weights=dict(file),
            )


class Turns:
    """The rounds that the benchmark asks for. steps: counts the local steps of a round.

    loss: evaluates the global model. Iterating yields a round's index when its turn comes, and answers when the next is
    asked for. From here on, prints go to standard error.
    """

    def __init__(self, version: str, loss: Callable[[], float]) -> None:
        # Descendants whose parent ends become children of this process, so that their CPU time is found.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._version, self._loss, self.steps = version, loss, 0

    def __iter__(self) -> Iterator[int]:
        self._answer(version=self._version)
        rounds = 0
        for line in sys.stdin:
            if line.strip() == "loss":
                self._answer(loss=self._loss())
                continue
            self.steps = 0
            yield rounds
            rounds += 1
            self._answer(steps=self.steps)

    def _answer(self, **values: Any) -> None:
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()
