"""A bare route for check-ins: it reads the body, verifies the signature, parses the message and rejects it.

    python -m benchmarks.bare_route KEYS READY

KEYS: a file with a JSON object of public keys by device. READY: the file to write the URL to.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from fedcore.wire.messages import CheckIn, Rejected, RetryWindow, decode, encode
from fedcore.wire.signatures import PublicKey, SignableRequest, Signature, sha256_in


def bare_app(keys: dict[str, PublicKey]) -> FastAPI:
    """An application that rejects the signed check-ins of these devices."""
    app = FastAPI(telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False})
    no = encode(Rejected("no-task", RetryWindow(1.0, 2.0)))

    @app.post("/v1/populations/{population}/checkins")
    async def check_in(request: Request) -> Response:
        """Reject a check-in once its signature and its message are checked; 422 for a body of another digest."""
        body, fields = await request.body(), request.headers
        signature = Signature.parse(fields["signature-input"], fields["signature"])
        about = SignableRequest(request.method, fields["host"], request.scope["raw_path"].decode(), fields.get)
        signature.check(about, keys[signature.keyid])
        if sha256_in(fields["content-digest"]) != hashlib.sha256(body).digest():
            return Response(status_code=422)
        decode(body, CheckIn)
        return Response(no, media_type="application/json")

    return app


def main(keys: Path, ready: Path) -> None:
    """Serve on a free loopback port until told to end."""
    app = bare_app({name: PublicKey.parse(text) for name, text in json.loads(keys.read_bytes()).items()})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the coordinator does
        partial = ready.with_suffix(".partial")
        partial.write_text(f"http://127.0.0.1:{listener.getsockname()[1]}")
        partial.replace(ready)
        uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run([listener])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
