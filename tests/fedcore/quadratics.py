"""Problems whose gradients are known, and devices that train them by the contract, in float64.

Quadratics: F(x) is the mean over examples a of ½‖x − a‖². Regression: the mean over examples (a, t) of ½(a·x − t)²,
where the last column of the examples is t.

Shapes: K clients, D parameters, B examples of a batch. Every function takes `(D,)` or, batched over clients, `(K, D)`.
"""

import numpy as np

from fedcore.algorithms.algorithm import ServerStep, trips_of, with_carries
from fedcore.batching import StreamKey, batches


def gradient_oracle(examples_BD, mask_B):
    """The contract's `grad` on one masked batch of a quadratic, `(B, D)` or `(K, B, D)`."""

    def grad(x_D):
        n = mask_B.sum(-1, keepdims=True)
        difference_BD = (x_D[..., None, :] - examples_BD) * mask_B[..., None]
        loss = 0.5 * (difference_BD**2).sum((-2, -1))[..., None] / n
        return loss, difference_BD.sum(-2) / n, n

    return grad


def regression_oracle(examples_BE, mask_B):
    """The contract's `grad` on one masked batch of a linear regression, `(B, D + 1)` or `(K, B, D + 1)`."""

    def grad(x_D):
        n = mask_B.sum(-1, keepdims=True)
        a_BD, t_B = examples_BE[..., :-1], examples_BE[..., -1]
        residual_B = ((a_BD * x_D[..., None, :]).sum(-1) - t_B) * mask_B
        loss = 0.5 * (residual_B**2).sum(-1)[..., None] / n
        return loss, (residual_B[..., None] * a_BD).sum(-2) / n, n

    return grad


def measure_oracle(examples_BD, mask_B):
    """The contract's `measure` on one masked batch of a quadratic: examples, loss, and how many are within 2 of x."""

    def measure(x_D):
        square_B = ((x_D[..., None, :] - examples_BD) ** 2).sum(-1)
        values = (np.ones_like(square_B), 0.5 * square_B, square_B < 4)
        return np.stack([(value * mask_B).sum(-1) for value in values], -1)

    return measure


def run_device(trip, broadcast, examples_ND, key, oracle=gradient_oracle):
    """What a device reports in a trip."""
    return trip.report(broadcast, run_passes(trip, broadcast, examples_ND, key, oracle))


def run_passes(trip, broadcast, examples_ND, key, oracle=gradient_oracle):
    """The last carry of every pass of a trip, by the loop of the plan's specification."""
    carries = {}
    for index, stage in enumerate(trip.passes):
        received = with_carries(broadcast, carries)
        carry = stage.begin(received)
        for indices, mask in batches(stage.loop, len(examples_ND), key, index):
            batch = examples_ND[indices], mask.astype(np.float64)
            carry = stage.step(carry, received, measure_oracle(*batch) if stage.forward else oracle(*batch))
        carries[stage.name] = carry
    return carries


def run_cohort(trip, broadcast, examples_KND, place_of):
    """The reports `(K, D)` of clients with equally many examples, all at once."""
    clients, count = len(examples_KND), examples_KND.shape[1]
    broadcast_KD = {name: np.repeat(value[None], clients, 0) for name, value in broadcast.items()}
    rows = np.arange(clients)[:, None]
    carries = {}
    for index, stage in enumerate(trip.passes):
        received = with_carries(broadcast_KD, carries)
        carry = stage.begin(received)
        for steps in zip(*(batches(stage.loop, count, place_of(k), index) for k in range(clients)), strict=True):
            indices_KB, mask_KB = (np.stack(column) for column in zip(*steps, strict=True))
            oracle = measure_oracle if stage.forward else gradient_oracle
            carry = stage.step(carry, received, oracle(examples_KND[rows, indices_KB], mask_KB.astype(np.float64)))
        carries[stage.name] = carry
    return trip.report(broadcast_KD, carries)


def mean_report(algorithm, reports, counts):
    """Σ w v / Σ w over the cohort."""
    weights = np.array([n if algorithm.weighting == "examples" else 1 for n in counts], np.float64)
    return {
        name: sum(w * r[name] for w, r in zip(weights, reports, strict=True)) / weights.sum() for name in reports[0]
    }


def run_round(algorithm, state, clients, seed=0, round=0, *, oracle=gradient_oracle, layers=(slice(None),)):
    """The next state, after round `round`, from 0, over `clients`, a list of `(n_i, D)` arrays: one trip."""
    trips = trips_of(algorithm)
    trip = trips[round % len(trips)]
    broadcast = trip.broadcast(state)
    reports = [run_device(trip, broadcast, a, StreamKey(seed, round, slot), oracle) for slot, a in enumerate(clients)]
    mean = mean_report(algorithm, reports, [len(a) for a in clients])
    return trip.update(state, mean, ServerStep(devices=len(clients), layers=layers))
