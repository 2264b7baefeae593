"""The Ray cluster that a training runs on: how this process connects to it, and how many workers it has room for."""

from __future__ import annotations

import logging
import os
import socket
from importlib.util import find_spec
from typing import Any

from export.errors import reason
from simulator.engines.workers.processes import usable_cores
from simulator.errors import EngineError

# A cluster's head answers within so many seconds, or not at all.
ANSWER_S = 5.0
# It speaks gRPC: the server's first frame is of the type SETTINGS (RFC 9113, section 3.4).
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HTTP2_SETTINGS = b"\x04"


def connect(address: str, workers: int | None, *, on_gpus: bool = False) -> int:
    """Connect this process to a cluster; gives how many workers are to train: `workers`, or one for each of its CPUs.

    on_gpus: or of its GPUs, which each worker gets one of, beside a CPU. address: "auto", the cluster that
    this machine is part of; "local", a new one on this machine, which ends with this process; or HOST:PORT, where the
    head of a cluster listens. A connection that this process has already is used as it is.
    Raises EngineError when Ray is not installed, or there is no such cluster, or it has too few CPUs or GPUs.
    """
    if find_spec("ray") is None:
        raise EngineError("ray is not installed: pip install 'muster-fl[ray]'")
    _check_address(address)
    import ray  # an extra, and it takes a second

    if not ray.is_initialized():
        local = address == "local"
        ours: dict[str, Any] = {"num_cpus": workers or usable_cores(), "include_dashboard": False} if local else {}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is started here tells its makers nothing
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **ours)
        except Exception as error:  # of several kinds, by what is wrong
            what = "start a Ray cluster on this machine" if local else f"join the Ray cluster {address!r}"
            raise EngineError(f"cannot {what}: {reason(error)}") from error
    kind = "GPU" if on_gpus else "CPU"
    there = int(ray.cluster_resources().get(kind, 0))  # type: ignore[no-untyped-call]
    if there < (workers or 1):
        raise EngineError(
            f"the Ray cluster has {there} {kind}s, and {workers or 1} workers need one each; add machines to it, or "
            "take fewer --processes"
        )
    return workers or there


def _check_address(address: str) -> None:
    """Raise EngineError when an address has another form, or nothing answers there: Ray itself waits for minutes."""
    if address in {"auto", "local"}:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise EngineError(f"a Ray cluster is auto, local or HOST:PORT, such as 192.0.2.1:6379, not {address!r}")
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as connection:
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(4)
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"no Ray cluster answers at {address}: {error}; `ray start --head` on a machine begins one, and says its "
            "address"
        ) from error
    if answer[3:] != HTTP2_SETTINGS:
        raise EngineError(
            f"something else than a Ray cluster answers at {address}; its own port is 6379, if not chosen"
        )
