"""Flower's SecAgg+ functions on a given workload: one JSON line. `secagg_peer.py` runs it where Flower is installed.

    python benchmarks/peers/secagg_flower.py '{"n": 100, "k": 32, "t": 22, "dim": 1000000, "dropout": 0.1, …}'

The device runs the stages of Flower's own client mod. The server runs the loop of its workflow's unmask stage, function
for function. Transport, and the training around them, are left out.
"""

import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import flwr
import numpy as np
from flwr.common import ConfigRecord, ndarrays_to_parameters
from flwr.common.secure_aggregation import ndarrays_arithmetic, quantization
from flwr.common.secure_aggregation.crypto import shamir
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

# A function of the package hides the module of the same name.
mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
CLIP, QUANTA, MODULUS, MOST_WEIGHT = 8.0, 1 << 22, 1 << 32, 1000.0  # the defaults of its workflow


def cpu(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def device(work: dict[str, Any]) -> tuple[float, int]:
    """CPU seconds of one of Flower's devices, with as many neighbours as the work says."""
    key, n_near = mod.Key, work["k"]
    setup = ConfigRecord({
        key.SAMPLE_NUMBER: work["n"], key.SHARE_NUMBER: n_near + 1, key.THRESHOLD: work["t"],
        key.CLIPPING_RANGE: CLIP, key.TARGET_RANGE: QUANTA, key.MOD_RANGE: MODULUS, key.MAX_WEIGHT: MOST_WEIGHT,
    })  # fmt: skip
    states = [mod.SecAggPlusState() for _ in range(n_near + 1)]
    for nid, state in enumerate(states):
        state.nid = nid
    update = ndarrays_to_parameters([np.random.default_rng(0).normal(0, 0.01, work["dim"]).astype(np.float32)])

    spent, keys = cpu(lambda: mod._setup(states[0], setup))
    public = [keys, *(mod._setup(state, setup) for state in states[1:])]
    table = {
        str(nid): (public_keys[key.PUBLIC_KEY_1], public_keys[key.PUBLIC_KEY_2])
        for nid, public_keys in enumerate(public)
    }
    seconds, _ = cpu(lambda: mod._share_keys(states[0], table))
    spent += seconds
    boxes = []
    for state in states[1:]:
        sealed = mod._share_keys(state, table)
        boxes.append(sealed[key.CIPHERTEXT_LIST][sealed[key.DESTINATION_LIST].index(0)])
    delivered = {key.CIPHERTEXT_LIST: boxes, key.SOURCE_LIST: list(range(1, n_near + 1))}
    seconds, masked = cpu(lambda: mod._collect_masked_vectors(states[0], delivered, 10, update))
    spent += seconds
    dead = round(n_near * work["dropout"])
    request = {key.ACTIVE_NODE_ID_LIST: list(range(n_near + 1 - dead)),
             key.DEAD_NODE_ID_LIST: list(range(n_near + 1 - dead, n_near + 1))}  # fmt: skip
    seconds, _ = cpu(lambda: mod._unmask(states[0], request))
    return spent + seconds, sum(len(part) for part in masked[key.MASKED_PARAMETERS])


def server(work: dict[str, Any]) -> float:
    """CPU seconds of Flower's unmask stage, from shares to the dequantised sum."""
    source = random.Random(0)
    n, k, t = work["n"], work["k"], work["t"]
    ring = list(range(n))
    source.shuffle(ring)
    near = {nid: {ring[(at + step) % n] for step in range(-(k // 2), k // 2 + 1)} for at, nid in enumerate(ring)}
    alive = set(range(n - round(n * work["dropout"])))
    pairs = [mod.generate_key_pairs() for _ in range(n)]
    collected = {}
    for nid in range(n):
        secret = source.randbytes(32) if nid in alive else mod.private_key_to_bytes(pairs[nid][0])
        shares = shamir.create_shares(secret, t, k + 1)
        collected[nid] = [share for share, peer in zip(shares, sorted(near[nid]), strict=True) if peer in alive]
    public = [mod.public_key_to_bytes(pair[1]) for pair in pairs]
    total = [np.array([len(alive)], np.int64), np.zeros(work["dim"], np.int64)]
    shapes = ndarrays_arithmetic.get_parameters_shape(total)

    def unmask() -> Any:
        masked = total
        for nid, shares in collected.items():
            secret = shamir.combine_shares(shares)
            if nid in alive:
                mask = pseudo_rand_gen(secret, MODULUS, shapes)
                masked = ndarrays_arithmetic.parameters_subtraction(masked, mask)
                continue
            for peer in near[nid] - {nid}:
                shared = mod.generate_shared_key(
                    mod.bytes_to_private_key(secret),
                    mod.bytes_to_public_key(public[peer]),
                )
                mask = pseudo_rand_gen(shared, MODULUS, shapes)
                change = (
                    ndarrays_arithmetic.parameters_addition
                    if nid > peer
                    else ndarrays_arithmetic.parameters_subtraction
                )
                masked = change(masked, mask)
        _, rest = ndarrays_arithmetic.factor_extract(ndarrays_arithmetic.parameters_mod(masked, MODULUS))
        return quantization.dequantize(rest, CLIP, QUANTA)

    return cpu(unmask)[0]


def main() -> None:
    work = json.loads(sys.argv[1])
    runs = [device(work) for _ in range(work["repeats"])]
    seconds = min(server(work) for _ in range(work["server_repeats"]))
    figures = {"client_ms": 1e3 * min(run[0] for run in runs), "server_s": seconds, "vector_bytes": runs[0][1]}
    print(json.dumps({"version": flwr.__version__, **figures}))


if __name__ == "__main__":
    main()
