"""Skellam noise of devices: what a sum of whole numbers reveals about one device, as a Rényi divergence.

Agarwal, Kairouz, Liu, "The Skellam mechanism for differentially private federated learning", NeurIPS 2021, Theorem 3.5:
with noise of variance μ on every whole number, reports whose l1 and l2 norms are at most Δ₁ and Δ₂, and every whole
order α ≥ 2

    D_α ≤ α Δ₂² / 2μ + min(((2α − 1) Δ₂² + 6 Δ₁) / 4μ², 3 Δ₁ / 2μ)

Here μ = z² Δ₂², as devices draw their shares (`secagg.masking`), and Δ₁ ≤ Δ₂², because a whole number is not above its
square.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedcore.privacy.settings import LedgerEntry, Noise


def divergence(rows: Sequence[Noise], order: int) -> float:
    """The greatest Rényi divergence of a whole order between one of these sums with a report and with zeros instead.

    rows: all of one noise multiplier. A plan does not know how reports are rounded, so its rows have infinitely fine
    steps; those of a ledger have their size.
    """
    inverse = rows[0].noise_multiplier ** -2
    squares = [row.square for row in rows if isinstance(row, LedgerEntry)]
    coarse = min((2 * order + 5) * inverse**2 / (4 * min(squares)), 1.5 * inverse) if squares else 0.0
    return order * inverse / 2 + coarse
