"""The address and the secret of the webhook of alerts: what they may be, and how they are shown."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LEAST_SECRET_BYTES = 16


def place_of(url: str) -> str:
    """An address without its user, path and query, any of which may hold a secret."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def check_webhook(url: str) -> None:
    """Raises ValueError for an address that alerts are not sent to, without the parts of it that may be secret."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        shown = f"{url.partition('://')[0]}://…" if "://" in url else "it"
        raise ValueError(f"{shown} is no address for alerts; give one such as https://alerts.example/muster")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ValueError(f"{place_of(url)} is not this machine, and http protects nothing on the way; give https")


def read_secret(path: Path) -> bytes:
    """The secret of a file, without white space around it. Raises ValueError for one that is no secret."""
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"the webhook's secret {path} cannot be read: {error.strerror}") from error
    if mode & 0o007:
        raise ValueError(f"everybody on this machine may read or change the webhook's secret: chmod 600 {path}")
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ValueError(f"{path} holds {len(secret)} bytes; a webhook's secret has at least {_LEAST_SECRET_BYTES}")
    return secret
