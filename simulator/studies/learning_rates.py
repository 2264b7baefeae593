"""Client and server learning rates: accuracies over a grid of both.

Wang et al. 2021, section 3, and Reddi et al., "Adaptive federated optimization", ICLR 2021, figure 2: what is good lies
on a diagonal, as a larger client learning rate needs a smaller one of the server.
"""

from __future__ import annotations

from typing import Any

from simulator.studies.papers import FIELD_GUIDE
from simulator.studies.study import Findings, Grid, Study
from simulator.studies.trainings import finals, settings_in_words, train
from simulator.studies.trials import Trials

CLIENT = (0.01, 0.03, 0.1, 0.3, 1.0)
SERVER = {"fedavg": (0.1, 0.3, 1.0, 3.0, 10.0), "fedadam": (0.003, 0.01, 0.03, 0.1, 0.3)}
LOCAL = {"epochs": 3, "batch_size": 20}
COHORT = 10


def _find(trials: Trials) -> Findings:
    rounds, size = (2, 2) if trials.quick else (20, 5)
    common: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": rounds, "cohort": COHORT}
    grids = []
    for name, server in SERVER.items():
        clients, servers = CLIENT[-size:], server[-size:]
        cases = [
            common
            | {
                "evaluate_every": min(2, rounds),
                "algorithm": name,
                "settings": LOCAL | {"client_lr": client_lr, "server_lr": server_lr},
            }
            for server_lr in servers
            for client_lr in clients
        ]
        trained = iter(trials.run(train, cases))
        grids.append(
            Grid(
                title=f"Accuracy of {name} after {rounds} rounds",
                row_name="server_lr",
                rows=servers,
                column_name="client_lr",
                columns=clients,
                values=[[finals(next(trained)) for _ in clients] for _ in servers],
            )
        )
    setup = (
        f"Data `digits` over 75 users, of whom 60 train; model `mlp`; cohorts of {COHORT}; {settings_in_words(LOCAL)}."
    )
    return Findings(setup=setup, grids=grids)


LEARNING_RATES = Study(
    "learning-rates", "How do the learning rates of clients and server depend on each other?", FIELD_GUIDE, _find
)
