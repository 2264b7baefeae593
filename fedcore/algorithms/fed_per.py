"""FedPer: the layers near the output stay on every client, and the others are averaged.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", arXiv 2019, Algorithms 1 and
2. With w the shared parameters, and v_i those of client i:

    on client i     y starts at w and v_i; for every batch   y −= client_lr · g(y), all of it at once
                    v_i = the trained v
    on the server   w += server_lr · mean(y_w − w)

Traps: w is trained together with a v that does not fit it yet. A client's first v_i is the checkpoint's v, and nothing
improves that one. What the server evaluates with its own v is nobody's model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.local_training import PartlyLocal


@dataclass(frozen=True, slots=True)
class FedPer(PartlyLocal):
    """Down: d. Up: d, of which the local parameters are 0. Server state: the model. Client state: v_i.

    server_lr: step size on the mean delta; 1 is the paper's averaging.
    epochs, batch_size: e and b of the paper.
    weighting: "examples" is the paper's γ = n_j / n.
    """

    name: ClassVar[str] = "fedper"
