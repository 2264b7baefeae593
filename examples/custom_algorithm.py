"""An algorithm of one's own, from a NumPy gradient to a fleet: FedAgree, by one command.

    python examples/custom_algorithm.py

The class is the whole algorithm. What follows drives it: with a gradient that is one line of NumPy, then simulated, and
at last exported and run by eight device processes that speak HTTP to a coordinator. The engine replays the fleet's
rounds and must reach the same model. The coordinator imports this module, so nothing heavy is imported at its top.

Trap: this algorithm is for rounds in the clear. A secure round rounds every value of a sum to one step, which is far
larger than the squares of most deltas, and the server divides by their mean.

Shapes: D parameters of the model.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedcore.algorithms import create
from fedcore.algorithms.algorithm import Algorithm, Broadcast, Carry, Gradient, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.check import check
from fedcore.algorithms.settings import count, positive
from fedcore.schedule import Loop, Weighting

NAME = "custom_algorithm:FedAgree"  # module and class, as a command line would name them
DEVICES, ROUNDS = 8, 3


@dataclass(frozen=True, slots=True)
class FedAgree:
    """FedAvg that moves each parameter as far as devices agree: Δ̄ · Δ̄² / mean(Δ²), which is Δ̄ where all are alike.

    client_lr, server_lr: step sizes on the device and on the server.
    epochs, batch_size: local sweeps and batch size.
    """

    name: ClassVar[str] = "fedagree"
    family: ClassVar[str] = "averaging"
    weighting: ClassVar[Weighting] = "examples"

    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    epochs: int = count(1)
    batch_size: int = count(20)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass("train", Loop(batch_size=self.batch_size, epochs=self.epochs), dict, self._train),)

    def _train(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        return {"params": carry["params"] - self.client_lr * gradient_D}

    def init(self, params_D: Vector) -> State:
        return {"params": params_D}

    def broadcast(self, state: State) -> Broadcast:
        return {"params": state["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        delta_D = carries["train"]["params"] - broadcast["params"]
        return {"delta": delta_D, "square": delta_D**2}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        agreed_D = mean["delta"] ** 2 / (mean["square"] + 1e-12)
        return {"params": state["params"] + self.server_lr * step.lr_scale * agreed_D * mean["delta"]}


def gradient(centre_D: Vector) -> Gradient:
    """The gradient oracle of a device whose loss is ½‖x − centre‖²: loss, gradient, number of examples."""
    return lambda x_D: (((x_D - centre_D) ** 2).sum(-1)[..., None] / 2, x_D - centre_D, np.ones(1))


def by_hand(algorithm: Algorithm, rounds: int = 60) -> State:
    """The server state after some rounds of three devices, which agree on all but the last of three parameters."""
    centres = np.array([[1.0, -2.0, 3.0], [1.0, -2.0, -1.0], [1.0, -2.0, 1.0]])
    state = algorithm.init(np.zeros(3))
    for _ in range(rounds):
        broadcast, reports = algorithm.broadcast(state), []
        for centre in centres:
            carries = {}
            for stage in algorithm.passes:
                carries[stage.name] = stage.step(stage.begin(broadcast), broadcast, gradient(centre))
            reports.append(algorithm.report(broadcast, carries))
        mean = {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}
        state = algorithm.update(state, mean, ServerStep(devices=len(reports)))
    return state


def simulated() -> float:
    """Accuracy on users who never trained, after fifty rounds of the engine on handwritten digits."""
    from simulator import SimulationConfig, simulate

    settings = {"client_lr": 0.3, "epochs": 2, "batch_size": 4}
    result = simulate(SimulationConfig(model="logreg", algorithm=NAME, settings=settings, rounds=50, cohort=20))
    return float(result.test_accuracy or 0)


def on_a_fleet(algorithm: Algorithm, folder: Path) -> float:
    """How far the model of eight devices over HTTP is from the engine's, relative to the way that training went."""
    from coordinator.store.tasks import TaskSettings
    from export.build import export_bundle
    from export.model import Model
    from export.models import load
    from muster.local.server import local_coordinator
    from simulator import datasets
    from simulator.engine import Engine
    from simulator.fleet.fleet import Fleet, FleetConfig
    from simulator.proofs import counted_cohort, worst_difference

    users, _ = datasets.users("digits", None, DEVICES)
    model = Model(load("logreg"))
    bundle = export_bundle(model, algorithm, folder / "plan")
    with local_coordinator(folder, algorithms="custom_algorithm") as local:
        settings = TaskSettings(population="p", goal=DEVICES, rounds=ROUNDS, over_selection=1.0)
        task = local.store.register_task(bundle, settings).id
        fleet = FleetConfig(coordinator=local.url, population="p", folder=folder / "devices", concurrency=DEVICES)
        clients = Fleet(fleet, users).run().clients
        numbers = range(1, ROUNDS + 1)
        cohorts = [counted_cohort(local.store, task, number, clients) for number in numbers]
        models = [local.store.checkpoint(task, number)["params"] for number in numbers]
    return worst_difference(Engine(model, algorithm, users), users, cohorts, models)


def main() -> None:
    """Drive FedAgree by hand, in the engine and on a fleet."""
    algorithm = create(NAME, {"batch_size": 5}, ["custom_algorithm"])
    check(algorithm)
    print(f"by hand: {by_hand(algorithm)['params'].round(3)}", flush=True)
    print(f"simulated: accuracy {simulated():.3f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(f"on {DEVICES} devices: {on_a_fleet(algorithm, Path(folder)):.1e} from the engine's model", flush=True)


if __name__ == "__main__":
    with contextlib.chdir(Path(__file__).parent):  # where the coordinator finds this module
        main()
