"""Engines: several implementations of training the clients of a cohort, which agree up to rounding."""

from typing import Literal, TypeAlias

Wanted: TypeAlias = Literal["auto", "graphs", "torch"]
"""The engine that is asked for (simulator/engines/choice.py)."""
