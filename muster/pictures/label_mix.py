"""A picture of how users mix classes: a row for each user, a column for each class, darker by its share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from muster.pictures.run_curves import write_figure

FORMATS = (".png", ".svg")


def draw_label_mix(counts: NDArray[np.int64], title: str, path: Path) -> None:
    """Write the picture in the format that the path ends with, one of FORMATS.

    counts: how often each user has each class, (users, classes). Users with one largest class stand together. Raises
    NotWritten.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-shares.max(1), shares.argmax(1)))
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    image = axes.imshow(shares[order], aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    axes.set(title=title, xlabel="class", ylabel="user, by largest class")
    figure.colorbar(image, ax=axes, label="share of the user's labels", location="left")
    sizes.barh(np.arange(len(order)), counts[order].sum(1), height=1.0)
    sizes.set(xlabel="labels")
    write_figure(figure, path)
