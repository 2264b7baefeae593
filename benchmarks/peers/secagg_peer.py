"""Secure aggregation against Flower's SecAgg+ functions, on the same work in one run: one JSON line.

    python -m benchmarks.peers.secagg_peer [--n 100] [--dim 1000000] [--dropout 0.1]

Both have the same n, neighbours k, threshold t, dimension and dropout. `secagg_flower.py` runs Flower's. CPU time of
the whole process, the least of `--repeats` runs.

Two things differ. Flower's functions have no signatures, so mode honest is comparable; mode active is shown too. And
its masks come from NumPy's Mersenne Twister with a 32-bit seed, ours from AES-256.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.runner import SecaggOptions
from benchmarks.secagg import run
from benchmarks.usage import python_with
from muster.output import header

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--dim", type=int, default=1_000_000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=5, help="runs of the device, and of Muster's server")
    parser.add_argument("--server-repeats", type=int, default=1, help="runs of the peer's server, which are slow")
    work = vars(parser.parse_args())
    flower = python_with(HERE / "secagg_flower.txt", lambda doing: print(doing, file=sys.stderr))

    def ours(honest: bool) -> dict[str, Any]:
        shared = {name: work[name] for name in ("n", "dim", "dropout", "repeats")}
        return run(SecaggOptions(**shared, honest=honest), lambda *_: None)

    honest = ours(honest=True)
    asked = json.dumps(work | {"k": honest["k"], "t": honest["t"]})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment.pop("PYTHONPATH", None)
    command = [flower, HERE / "secagg_flower.py", asked]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    theirs = json.loads(printed.splitlines()[-1])
    active = ours(honest=False)
    server_s = min(honest["server_s"], active["server_s"])
    print(json.dumps({
        **header("secagg_peer"),
        "peer": f"flwr=={theirs['version']}", "n": work["n"], "k": honest["k"], "t": honest["t"], "dim": work["dim"],
        "dropout": work["dropout"], "peer_client_ms": theirs["client_ms"], "peer_server_s": theirs["server_s"],
        "peer_vector_bytes": theirs["vector_bytes"],
        "honest_client_ms": honest["client_ms"], "active_client_ms": active["client_ms"],
        "server_s": server_s, "bytes_up": active["bytes_up"],
        "client_ratio_honest": theirs["client_ms"] / honest["client_ms"],
        "client_ratio_active": theirs["client_ms"] / active["client_ms"],
        "server_ratio": theirs["server_s"] / server_s,
        "upload_to_float32": active["bytes_up"] / (4 * work["dim"]) if work["dim"] else None,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
