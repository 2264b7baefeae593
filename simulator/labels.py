"""Labels that emulated and modelled devices draw: for each name, the shares of its values."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from fedcore.labels import check_labels

Shares = Mapping[str, Mapping[str, float]]
"""The shares of devices with each value, by the label's name."""
_ROUNDING = 1e-9


def label_shares(texts: Iterable[str]) -> Shares:
    """The shares in texts such as `region=eu:0.3`. Raises ValueError, which names the label and what is wrong."""
    shares: dict[str, dict[str, float]] = {}
    for text in texts:
        label, colon, share = text.rpartition(":")
        name, equals, value = label.partition("=")
        if not (colon and equals):
            raise ValueError(f"label {text!r} is not like region=eu:0.3")
        check_labels({name: value})
        if value in shares.setdefault(name, {}):
            raise ValueError(f"label {label} is given twice")
        shares[name][value] = _share(label, share)
        if (whole := sum(shares[name].values())) > 1 + _ROUNDING:
            raise ValueError(f"label {name}: its shares are {whole:g} together, more than 1")
    check_labels({name: next(iter(values)) for name, values in shares.items()})
    return shares


def draw_labels(shares: Shares, rng: random.Random) -> dict[str, str]:
    """The labels of one device, which may have no value of a name."""
    labels = {}
    for name, values in shares.items():
        chance = rng.random()
        for value, share in values.items():
            chance -= share
            if chance < 0:
                labels[name] = value
                break
    return labels


def _share(label: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"label {label}: its share must be a number from 0 to 1, not {text}")
    return share
