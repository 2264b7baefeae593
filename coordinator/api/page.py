"""The web page by which browsers take part, as files of a folder that `make page` built, served at /page."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE = "/page"
_COMPRESSED = ".gz"


class PageFiles(StaticFiles):
    """The files, compressed where the build left them so, under a policy by which nothing of others is loaded.

    connect_to: URLs of other origins that the page must reach, such as an authority's.
    """

    def __init__(self, folder: Path, connect_to: tuple[str, ...] = ()) -> None:
        super().__init__(directory=folder, html=True)
        others = "".join(f" {parts.scheme}://{parts.netloc}" for parts in map(urlsplit, connect_to))
        self._headers = {
            "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
            f"style-src 'self'; img-src 'self'; manifest-src 'self'; connect-src 'self'{others}; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
            "Cache-Control": "no-cache",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept-Encoding",
            "X-Content-Type-Options": "nosniff",
        }

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """The answer with a file, or that the browser has it already."""
        compressed = Path(f"{full_path}{_COMPRESSED}")
        packed = "gzip" in Headers(scope=scope).get("accept-encoding", "") and compressed.is_file()
        if packed:
            full_path, stat_result = compressed, compressed.stat()
        answer = super().file_response(full_path, stat_result, scope, status_code)
        answer.headers.update(self._headers | ({"Content-Encoding": "gzip"} if packed else {}))
        return answer
