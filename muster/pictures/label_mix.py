"""A picture of users' labels: a row for each user, a column for each class, darker where its share is larger."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from muster.pictures.heat_map import picture_of, shade, text_at, text_upwards
from muster.pictures.picture import GREY, Picture

LEFT, TOP, WIDTH, HEIGHT, GAP, BARS, BELOW = 40, 44, 560, 400, 20, 100, 50
ROWS = 200
"""The most users drawn, evenly spaced; more rows would be too thin to see."""


def draw_label_mix(counts: NDArray[np.int64], title: str) -> Picture:
    """Draw the shares of labels. counts: of each class at each user (users, classes).

    Users with the same largest class stand together.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-shares.max(1), shares.argmax(1)))
    order = order[np.linspace(0, len(order) - 1, min(len(order), ROWS)).astype(int)]
    height, width = HEIGHT / len(order), WIDTH / counts.shape[1]
    totals = counts[order].sum(1)
    parts = [_box(LEFT, TOP, WIDTH, HEIGHT, shade(0.0))]
    for at, user in enumerate(order):
        y = TOP + height * at
        parts += [
            _box(LEFT + width * label, y, width, height, shade(float(share)))
            for label, share in enumerate(shares[user])
            if share
        ]
        parts.append(_box(LEFT + WIDTH + GAP, y, BARS * int(totals[at]) / max(int(totals.max()), 1), height, GREY))
    bottom = TOP + HEIGHT
    parts += [
        text_at(LEFT + width * (label + 0.5), bottom + 18, str(label))
        for label in range(0, counts.shape[1], 1 + counts.shape[1] // 24)
    ]
    parts += [
        text_at(LEFT + WIDTH / 2, 24, f"{title}: share of each user's labels"),
        text_at(LEFT + WIDTH / 2, bottom + 40, "class"),
        text_upwards(24, TOP + HEIGHT / 2, "user, by largest class"),
        text_at(LEFT + WIDTH + GAP + BARS / 2, bottom + 18, f"labels, to {totals.max():,}"),
    ]
    return picture_of(LEFT + WIDTH + GAP + BARS + GAP, bottom + BELOW, parts)


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'
