"""Local-only training: every user trains a model of their own on their own examples, and nothing is ever shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm
from fedcore.plan import prefixed, unprefixed
from simulator.engine import Engine, evaluate_own
from simulator.engines.computing import Computing
from simulator.errors import Diverged
from simulator.population import Population
from simulator.training import CLIENTS, SERVER, PerUser, Tensors, Vectors, check_shapes, digest_of, engine_facts


class LocalOnly:
    """One model for each user, trained by an algorithm whose whole population is that user.

    Every user holds some of their own examples out, and measures their own model on them.
    """

    def __init__(
        self, model: Model, algorithm: Algorithm, users: Population, *, held_out: float, seed: int, device: str
    ) -> None:
        train, self.test = users.split_examples(held_out, seed)
        self._model, self._device = model, device
        self._engines = [
            Engine(model, algorithm, train.subset([user]), seed=seed, computing=Computing(device))
            for user in range(len(train))
        ]
        self._examples = int(train.starts[-1])
        self.facts = engine_facts(self._engines[0], len(train), len(train), "every user has an engine of their own")

    def run_round(self, number: int) -> dict[str, float]:
        """A round of every user; the metrics are means over users."""
        results = [engine.run_round(number, [0], [user]).metrics for user, engine in enumerate(self._engines)]
        means = {name: float(np.mean([metrics[name] for metrics in results])) for name in results[0]}
        return means | {"examples": self._examples}

    def measure(self, number: int) -> PerUser:
        models = (engine.state["params"] for engine in self._engines)
        per_user = evaluate_own(self._model, models, self.test, device=self._device)
        bad = np.flatnonzero(~np.isfinite(per_user["loss"])).tolist()
        if bad:
            raise Diverged(f"round {number}: the models of users {bad} have no finite loss; a lower client_lr may help")
        return per_user

    def vectors(self) -> Vectors:
        """A copy of every user's server state, (users, …), and of what they keep as a client."""
        return {
            **_stacked(SERVER, [engine.state for engine in self._engines]),
            **_stacked(CLIENTS, [engine.client_states for engine in self._engines]),
        }

    def restore(self, vectors: Mapping[str, NDArray[np.floating]]) -> None:
        check_shapes(vectors, self.vectors())
        for user, engine in enumerate(self._engines):
            own = {name: array[user] for name, array in vectors.items()}
            engine.restore(unprefixed(SERVER, own), unprefixed(CLIENTS, own))

    def tensors(self) -> Tensors:
        """None: every user has a model."""
        return {}

    def digest(self) -> str:
        return digest_of([engine.state["params"] for engine in self._engines])


def _stacked(prefix: str, states: Sequence[Mapping[str, NDArray[np.float32]]]) -> Vectors:
    return {**prefixed(prefix, {name: np.stack([state[name] for state in states]) for name in states[0]})}
