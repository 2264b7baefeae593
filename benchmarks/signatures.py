"""The cost of a signed request: authentication against the bare verification of its signature, and signing.

A request is a check-in with a body of 300 bytes. Authentication is everything between a parsed request and the
handler: reading both fields, rebuilding what was signed, the key from memory, the signature, the table of replays. All
are timed in turns in one process, in CPU time of one thread, and the least of each counts.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.requests import Request as HttpRequest

from benchmarks.runner import SignaturesOptions
from benchmarks.usage import in_turns, times
from coordinator.api.authentication import Authenticator
from coordinator.monitoring import Metrics
from coordinator.store.tasks import open_coordinator_store
from fedcore.wire.signatures import PrivateKey, PublicKey, SignableRequest, Signer, content_digest, device_id, sign
from ingress.limits import RateLimit
from muster.output import Say

BODY = b"x" * 300
PATH = "/v1/populations/phones/checkins"
BLOCK = 100


def run(options: SignaturesOptions, say: Say) -> dict[str, Any]:
    """CPU microseconds by algorithm: of the authenticator and its peer, of signing a request and its peer."""
    keys: list[PrivateKey] = [Ed25519PrivateKey.generate(), generate_private_key(SECP256R1())]
    costs = []
    for key in keys:
        say(PublicKey.of(key).algorithm)
        with tempfile.TemporaryDirectory(prefix="muster-signatures-") as place:
            costs.append(_measure(key, options.blocks, Path(place)))
    return {"costs": costs}


def _measure(key: PrivateKey, blocks: int, folder: Path) -> dict[str, Any]:
    public = PublicKey.of(key)
    signer = Signer(device_id(public.text), key)
    message, requests = b"y" * len(BODY), list[HttpRequest]()
    signature = sign(key, message)
    with open_coordinator_store(f"sqlite:///{folder / 'm.db'}", folder / "blobs") as store, asyncio.Runner() as runner:
        with store.database.writing() as records:
            records.devices.add(signer.keyid, public.text, "none")
        authenticator = Authenticator(store, RateLimit(1_000_000), Metrics())
        run = runner.get_loop().run_until_complete
        run(authenticator.device(_request(signer)))  # from now on the key is in memory

        async def authenticate() -> None:
            for request in requests[-BLOCK:]:  # all are kept, so that no time goes into freeing them
                await authenticator.device(request)

        works = {
            "sign_request_us": times(BLOCK, lambda: requests.append(_request(signer))),
            "authenticate_us": lambda: run(authenticate()),
            "verify_us": times(BLOCK, lambda: public.check(signature, message)),
            "sign_us": times(BLOCK, lambda: sign(key, message)),
        }
        least = {name: min(spent) / BLOCK * 1e6 for name, spent in in_turns(works, blocks).items()}
    return {
        "algorithm": public.algorithm,
        "authenticate_us": least["authenticate_us"],
        "verify_us": least["verify_us"],
        "authenticate_to_verify": least["authenticate_us"] / least["verify_us"],
        "sign_request_us": least["sign_request_us"],
        "sign_us": least["sign_us"],
    }


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
