"""Heads of requests: what HTTP/1.1 asks of one beyond its grammar (RFC 9110, RFC 9112), and how others are refused."""

from __future__ import annotations

import re
from http import HTTPStatus

import httptools

from ingress.errors import RefusedRequest

HEAD_BYTES = 1 << 14
"""The largest head of a request, and the most bytes around a body in chunked coding, including trailers."""
HEAD_FIELDS = 100
"""The most header fields of a request, and the most trailers."""
_HOST = re.compile(rb"(\[[0-9a-f:.]+\]|[\w.~!$&'()*+,;=%-]+)(:\d*)?", re.ASCII | re.IGNORECASE)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)
_OTHER_VERSION = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""The parser's words about a version that it does not know, and about that of HTTP/2's preface."""


def _wrong_version() -> RefusedRequest:
    return RefusedRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "use HTTP/1.1")


def too_large(target: bytes) -> RefusedRequest:
    """The refusal of a head with this target that is larger than HEAD_BYTES or has more fields than HEAD_FIELDS."""
    if len(target) > HEAD_BYTES // 2:
        return RefusedRequest(
            HTTPStatus.REQUEST_URI_TOO_LONG, f"a head, with its target, has less than {HEAD_BYTES} bytes"
        )
    return RefusedRequest(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the head of a request has less than {HEAD_BYTES} bytes and at most {HEAD_FIELDS} header fields",
    )


def refusal_of(error: httptools.HttpParserError) -> RefusedRequest:
    """The refusal of what the parser cannot read, or of what one of its callbacks refused."""
    if isinstance(error.__context__, RefusedRequest):
        return error.__context__
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "unknown method")
    if str(error) in _OTHER_VERSION:
        return _wrong_version()
    return RefusedRequest(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")


def check_fields(version: str, fields: list[tuple[bytes, bytes]]) -> None:
    """Raise RefusedRequest unless there is one host, and every coding and expectation is supported.

    Otherwise a proxy might see another request than the application does.
    """
    if version not in ("1.0", "1.1"):
        raise _wrong_version()
    hosts = 0
    for name, value in fields:
        if name == b"host":
            hosts += 1 if _HOST.fullmatch(value) else 2
        elif name == b"transfer-encoding" and version == "1.0":
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no transfer codings; use HTTP/1.1")
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            raise RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "the only supported transfer coding is chunked")
        elif name == b"expect" and value.lower() != b"100-continue":
            raise RefusedRequest(HTTPStatus.EXPECTATION_FAILED, "the only supported expectation is 100-continue")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "send one Host header field, with a name or an address")


def path_of(method: bytes, target: bytes, fields: list[tuple[bytes, bytes]]) -> bytes:
    """The path and query of a target. The host of an absolute one replaces that of the field Host (RFC 9112 3.2.2).

    Raises RefusedRequest.
    """
    if method == b"CONNECT":
        raise RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "this server is not a proxy")
    if target.startswith(b"/") and b"#" not in target:
        return target
    if target == b"*" and method == b"OPTIONS":
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not _HOST.fullmatch(absolute[1]):
        raise RefusedRequest(
            HTTPStatus.BAD_REQUEST, "a target is a path and query, or an http(s) URL with a host, without a fragment"
        )
    fields[:] = [(name, absolute[1] if name == b"host" else value) for name, value in fields]
    return (absolute[2] or b"/") + (absolute[3] or b"")
