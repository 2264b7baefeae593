"""Assumptions of the threat model, as `muster doctor --security` judges them."""

from __future__ import annotations

import msgspec


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """An assumption, whether it holds (None: not seen from here), what was found, and how to make it hold."""

    name: str
    holds: bool | None
    found: str
    remedy: str = ""
