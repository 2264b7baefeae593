"""The cost of a signed request: authentication against the bare verification of its signature, and signing.

A request is a check-in with a body of 300 bytes. Authentication is everything between a parsed request and the
handler: reading both fields, rebuilding what was signed, the key from memory, the signature, the table of replays. All
are timed in turns in one process, in CPU time of one thread, and the least of each counts.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.requests import Request as HttpRequest

from benchmarks.options import SignaturesOptions
from benchmarks.usage import cpu_s_of
from coordinator.api.authentication import Authenticator
from coordinator.metrics import Metrics
from coordinator.store.tasks import open_coordinator_store
from fedcore.wire.signatures import PrivateKey, PublicKey, SignableRequest, Signer, content_digest, device_id, sign
from ingress.limits import RateLimit
from muster.output import Say

BODY = b"x" * 300
PATH = "/v1/populations/phones/checkins"
BLOCK = 100


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU microseconds of one algorithm: the authenticator and its peer, signing a request and its peer."""

    algorithm: str
    authenticate_us: float
    verify_us: float
    authenticate_to_verify: float
    sign_request_us: float
    sign_us: float


class SignatureCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Both algorithms."""

    costs: list[Cost]


def run(options: SignaturesOptions, say: Say) -> SignatureCosts:
    """Measure both algorithms in turns of BLOCK requests."""
    keys: list[PrivateKey] = [Ed25519PrivateKey.generate(), generate_private_key(SECP256R1())]
    costs = []
    for key in keys:
        say(PublicKey.of(key).algorithm)
        with tempfile.TemporaryDirectory(prefix="muster-signatures-") as place:
            costs.append(asyncio.run(_measure(key, options.blocks, Path(place))))
    return SignatureCosts(costs=costs)


async def _measure(key: PrivateKey, blocks: int, folder: Path) -> Cost:
    public = PublicKey.of(key)
    signer = Signer(device_id(public.text), key)
    message, requests = b"y" * len(BODY), list[HttpRequest]()
    signature = sign(key, message)
    authenticate_s, verify_s, request_s, sign_s = ([] for _ in range(4))
    with open_coordinator_store(f"sqlite:///{folder / 'm.db'}", folder / "blobs") as store:
        with store.database.writing() as records:
            records.devices.add(signer.keyid, public.text, "none")
        authenticator = Authenticator(store, RateLimit(1_000_000), Metrics())
        await authenticator.device(_request(signer))  # from now on the key is in memory
        for _ in range(blocks):
            requests.clear()
            request_s.append(_block_s(lambda: requests.append(_request(signer))))
            began = time.process_time()
            for request in requests:
                await authenticator.device(request)
            authenticate_s.append(time.process_time() - began)
            verify_s.append(_block_s(lambda: public.check(signature, message)))
            sign_s.append(_block_s(lambda: sign(key, message)))
    authenticate_us, verify_us, request_us, sign_us = (
        min(blocks_s) / BLOCK * 1e6 for blocks_s in (authenticate_s, verify_s, request_s, sign_s)
    )
    return Cost(
        algorithm=public.algorithm,
        authenticate_us=authenticate_us,
        verify_us=verify_us,
        authenticate_to_verify=authenticate_us / verify_us,
        sign_request_us=request_us,
        sign_us=sign_us,
    )


def _request(signer: Signer) -> HttpRequest:
    """A fresh request of a device, as the coordinator has it before its body came."""
    fields = {"host": "fl.example.org", "content-length": str(len(BODY)), "content-digest": content_digest(BODY)}
    about = SignableRequest("POST", fields["host"], PATH, fields.get)
    fields |= {name.lower(): value for name, value in signer.headers(about, int(time.time())).items()}
    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
    }
    return HttpRequest(scope)


def _block_s(work: Callable[[], object]) -> float:
    """CPU seconds of a block of BLOCK times some work."""
    return cpu_s_of(lambda: [work() for _ in range(BLOCK)])
