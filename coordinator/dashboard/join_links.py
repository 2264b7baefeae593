"""Links by which browsers join a population, each with its QR code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import segno

from coordinator.rules.entities import Task


class JoinLink(NamedTuple):
    """A link to the page for browsers. signers: the public keys that release plans, which the link names.

    qr: the link as a QR code, an SVG picture; empty where it is too long for one.
    """

    url: str
    signers: tuple[str, ...]
    qr: str

    @property
    def secure(self) -> bool:
        """Whether it is one by HTTPS: other pages hold keys only on the coordinator's own machine."""
        return urlsplit(self.url).scheme == "https"


def join_link(page_url: str, population: str, tasks: Iterable[Task]) -> JoinLink:
    """The link for a population whose page is at page_url; it names the signers of the tasks that may go on."""
    releases = [task.release for task in tasks if not task.state.ended]
    signers = tuple(sorted({release.signer for release in releases if release is not None}))
    url = f"{page_url}?{urlencode({'population': population, 'signer': signers}, doseq=True, safe=':')}"
    return JoinLink(url, signers, _qr(url))


def _qr(text: str) -> str:
    try:
        code = segno.make_qr(text, error="l")  # the least; more where the size has room
    except segno.DataOverflowError:
        return ""
    # Dark on light in dark mode too, with the four-module border of ISO/IEC 18004: scanners need both.
    return code.svg_inline(border=4, dark="#000", light="#fff", omitsize=True, svgclass=None, lineclass=None)
