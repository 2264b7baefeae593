"""A picture as SVG, which notebooks show, and as a file, SVG or PNG."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedcore.errors import NotWritten
from fedcore.private_files import write_whole
from muster.output import remark

FORMATS = (".svg", ".png")
FONTS = "system-ui, Arial, DejaVu Sans, Noto Sans, sans-serif"
"""Browsers take the first; a PNG file is drawn with the first that is installed."""
GREY = "#888"
"""The colour of text: legible on white and on black."""
_ZOOM = 1.5
"""Pixels of a PNG file for each unit of the SVG."""
_WORD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20"><text y="15" font-family="{FONTS}">%s</text></svg>'
)


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A picture. svg: its text; equal figures give equal text."""

    svg: str

    def __repr__(self) -> str:
        return f"Picture({len(self.svg):,} characters of SVG)"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        """Write it in the format of the path's ending, one of FORMATS.

        Raises NotWritten, also for another ending, and for a PNG file without an installed font; for one without resvg
        ModuleNotFoundError.
        """
        path = Path(path)
        if path.suffix not in FORMATS:
            raise NotWritten(errno.EINVAL, f"a picture ends in {' or '.join(FORMATS)}", str(path))
        write_whole(path, self.svg.encode() if path.suffix == ".svg" else self._png(path))

    def _png(self, path: Path) -> bytes:
        from resvg_py import svg_to_bytes

        if not draws_words():
            raise NotWritten(errno.ENOENT, "no font is installed; install DejaVu Sans, or write an SVG", str(path))
        return bytes(svg_to_bytes(svg_string=self.svg, zoom=_ZOOM, background="white"))


def draws_words() -> bool:
    """Whether a font is installed that a PNG file can be drawn with. Raises ModuleNotFoundError without resvg."""
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg_string=_WORD % "word")) != bytes(svg_to_bytes(svg_string=_WORD % ""))


def write_svg_and_png(pictures: Mapping[Path, Picture]) -> None:
    """Write each picture to its path, an SVG file; with resvg and a font, as a PNG file beside it too."""
    for path, picture in pictures.items():
        picture.save(path)
    if find_spec("resvg_py") is None:
        return remark("PNG files need resvg-py: pip install 'muster-fl[plot]'")
    if not draws_words():
        return remark("PNG files need a font: install DejaVu Sans")
    for path, picture in pictures.items():
        picture.save(path.with_suffix(".png"))
    return None
