"""Origins: the web pages that may speak to a port from a browser (CORS, https://fetch.spec.whatwg.org)."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_METHODS = ("GET", "HEAD", "PATCH", "POST", "PUT")
_REQUEST_FIELDS = (
    "Content-Digest", "Content-Type", "If-None-Match", "If-Range", "Prefer", "Range", "Repr-Digest", "Signature",
    "Signature-Input", "Upload-Complete", "Upload-Length", "Upload-Offset",
)  # fmt: skip
_ANSWER_FIELDS = (
    "Content-Range", "Date", "ETag", "Muster-Problem", "Preference-Applied", "Retry-After", "Upload-Complete",
    "Upload-Offset",
)  # fmt: skip
_PREFLIGHT_S = 7200
"""The time for which a browser caches a preflight answer: the most that Chromium accepts."""


def origins(text: str) -> tuple[str, ...]:
    """The origins of a text, such as `https://app.example, http://127.0.0.1:8000`.

    Raises ValueError naming the invalid part.
    """
    listed = tuple(filter(None, map(str.strip, text.split(","))))
    for origin in listed:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or origin != f"{parts.scheme}://{parts.netloc}" or not parts.hostname:
            raise ValueError(f"{origin!r} is no origin; an origin is a scheme and a host, such as https://app.example")
    return listed


def open_to(allowed: tuple[str, ...], app: ASGIApp) -> ASGIApp:
    """Wrap an application so that pages of these origins may use it. This must be the outermost layer.

    A page cannot read an answer without the header fields that this adds, so a refusal by an outer layer would look
    like a broken connection.
    """
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=_METHODS,
        allow_headers=_REQUEST_FIELDS,
        expose_headers=_ANSWER_FIELDS,
        max_age=_PREFLIGHT_S,
    )
