"""A round as one reads it: one client after the other, float64 sums. The engine must agree with it."""

import numpy as np
import torch

from export.model import GradientOracle, MeasureOracle
from fedcore.algorithms.algorithm import ServerStep, trips_of, with_carries
from fedcore.batching import StreamKey, batches
from fedcore.plan import in_turn


def reference_round(model, algorithm, state, shards, number, seed, *, kept=None, clients=None):
    """The next server state (float32 NumPy) after clients `shards`, in slot order.

    kept: what each of them kept from before, replaced by what it keeps now. clients: how many there are in all.
    """
    trip = in_turn(trips_of(algorithm), number)
    received = trip.broadcast({name: torch.from_numpy(vector) for name, vector in state.items()})
    total, weights = {}, 0.0
    for slot, shard in enumerate(shards):
        carries, broadcast = {}, received | (kept[slot] if kept else {})
        for index, item in enumerate(trip.passes):
            known = with_carries(broadcast, carries)
            carry = item.begin(known)
            for rows, mask in batches(item.loop, len(shard["y"]), StreamKey(seed, number, slot), index):
                real = rows[mask == 1]  # truly short, where the engine pads and masks
                batch = {name: torch.from_numpy(array[real]) for name, array in shard.items()}
                make, of = (MeasureOracle, model.evaluating()) if item.forward else (GradientOracle, model)
                carry = item.step(carry, known, make(of, batch, torch.ones(len(real))))
            carries[item.name] = carry
        weight = len(shard["y"]) if algorithm.weighting == "examples" else 1.0
        for name, value in trip.report(broadcast, carries).items():
            total[name] = total.get(name, 0) + weight * value.numpy().astype(np.float64)
        weights += weight
        if kept:
            kept[slot] = algorithm.keep(broadcast, carries)
    mean = {name: value / weights for name, value in total.items()}
    step = ServerStep(len(shards), model.schema.layers, participation=len(shards) / (clients or len(shards)))
    wide = {name: vector.astype(np.float64) for name, vector in state.items()}
    return {name: vector.astype(np.float32) for name, vector in trip.update(wide, mean, step).items()}
