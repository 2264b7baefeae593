"""A picture of how users mix classes: a row for each user, a column for each class, darker by its share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from muster.pictures.heat_map import picture_of, shade, words_at, words_upwards
from muster.pictures.picture import GREY, Picture

LEFT, TOP, WIDE, HIGH, GAP, BARS, BELOW = 40, 44, 560, 400, 20, 100, 50
ROWS = 200
"""More users than these are too thin to see: so many are drawn, evenly spaced."""


def draw_label_mix(counts: NDArray[np.int64], title: str) -> Picture:
    """Draw how often each user has each class, (users, classes). Users with one largest class stand together."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-shares.max(1), shares.argmax(1)))
    order = order[np.linspace(0, len(order) - 1, min(len(order), ROWS)).astype(int)]
    high, wide = HIGH / len(order), WIDE / counts.shape[1]
    held = counts[order].sum(1)
    parts = [_box(LEFT, TOP, WIDE, HIGH, shade(0.0))]
    for at, user in enumerate(order):
        y = TOP + high * at
        parts += [
            _box(LEFT + wide * of, y, wide, high, shade(float(share))) for of, share in enumerate(shares[user]) if share
        ]
        parts.append(_box(LEFT + WIDE + GAP, y, BARS * int(held[at]) / max(int(held.max()), 1), high, GREY))
    bottom = TOP + HIGH
    parts += [
        words_at(LEFT + wide * (at + 0.5), bottom + 18, str(at))
        for at in range(0, counts.shape[1], 1 + counts.shape[1] // 24)
    ]
    parts += [
        words_at(LEFT + WIDE / 2, 24, f"{title}: share of each user's labels"),
        words_at(LEFT + WIDE / 2, bottom + 40, "class"),
        words_upwards(24, TOP + HIGH / 2, "user, by largest class"),
        words_at(LEFT + WIDE + GAP + BARS / 2, bottom + 18, f"labels, to {held.max():,}"),
    ]
    return picture_of(LEFT + WIDE + GAP + BARS + GAP, bottom + BELOW, parts)


def _box(x: float, y: float, wide: float, high: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}" fill="{fill}"/>'
