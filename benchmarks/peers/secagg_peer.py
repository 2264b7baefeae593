"""Secure aggregation against Flower's SecAgg+ functions, on the same work in one run: one JSON line.

    python benchmarks/peers/secagg_peer.py [--n 100] [--dim 1000000] [--dropout 0.1] [--venv FOLDER]

Both have the same n, neighbours k, threshold t, dimension and drop-outs. Flower comes from PyPI into a virtual
environment of its own, which is made on the first run; `secagg_flower.py` runs there. CPU time of the whole
process, the least of `--repeats` runs.

Two things differ. Flower's functions know no signatures, so the like of them is mode honest; mode active is shown too.
And its masks come from NumPy's Mersenne Twister under a 32-bit seed, ours from AES-256.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.options import SecaggOptions
from benchmarks.secagg import SecaggCosts, run
from muster.header import header

FLOWER = "flwr==1.41.0"


def python_with_flower(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", FLOWER], check=True, stdout=sys.stderr)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--dim", type=int, default=1_000_000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=5, help="runs of the device, and of Muster's server")
    parser.add_argument("--server-repeats", type=int, default=1, help="runs of the peer's server, which takes long")
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / f"muster-{FLOWER}")
    options = parser.parse_args()

    def ours(honest: bool) -> SecaggCosts:
        work = {name: getattr(options, name) for name in ("n", "dim", "dropout", "repeats")}
        return run(SecaggOptions(**work, honest=honest), lambda *_: None)

    honest = ours(honest=True)
    work = {name: getattr(options, name) for name in ("n", "dim", "dropout", "repeats", "server_repeats")}
    work |= {"k": honest.k, "t": honest.t}
    command = [python_with_flower(options.venv), Path(__file__).with_name("secagg_flower.py"), json.dumps(work)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment.pop("PYTHONPATH", None)
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    theirs = json.loads(printed.splitlines()[-1])
    active = ours(honest=False)
    print(json.dumps({
        **header("secagg_peer"),
        "commit": commit(), "peer": FLOWER, "n": options.n, "k": honest.k, "t": honest.t, "dim": options.dim,
        "dropout": options.dropout, "peer_client_ms": theirs["client_ms"], "peer_server_s": theirs["server_s"],
        "peer_vector_bytes": theirs["vector_bytes"],
        "honest_client_ms": honest.client_ms, "active_client_ms": active.client_ms,
        "server_s": min(honest.server_s, active.server_s), "bytes_up": active.bytes_up,
        "client_ratio_honest": theirs["client_ms"] / honest.client_ms,
        "client_ratio_active": theirs["client_ms"] / active.client_ms,
        "server_ratio": theirs["server_s"] / min(honest.server_s, active.server_s),
        "upload_to_float32": active.bytes_up / (4 * options.dim) if options.dim else None,
    }))  # fmt: skip


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()


if __name__ == "__main__":
    main()
