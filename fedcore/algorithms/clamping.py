"""Comparing and clamping, with operations that graphs and all tensor libraries have."""

from __future__ import annotations

from fedcore.algorithms.algorithm import Vector


def indicator(comparison: Vector, like: Vector) -> Vector:
    """1 where a comparison is true, else 0, in the type of `like`."""
    return (0.0 * like + 1.0) * comparison


def clamped(values: Vector) -> Vector:
    """Values clamped to 0 … 1."""
    return values * (values > 0) * (values < 1) + indicator(values >= 1, values)
