"""Rows of tokens, within one transaction. Their use: coordinator.api.tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.engine import Connection

from coordinator.rules.entities import Role, Token
from coordinator.store.tables import TOKENS


class TokenRecords:
    """The operations on tokens. `at` is the time of the transaction, in seconds since 1970."""

    def __init__(self, connection: Connection, at: float) -> None:
        self._connection = connection
        self._at = at

    def add(self, token: Token, sha256: str) -> None:
        """Write a token, by the hash of its secret."""
        self._connection.execute(insert(TOKENS).values(**asdict(token), sha256=sha256))

    def find(self, token_id: str) -> tuple[Token, str] | None:
        """A token and the hash of its secret."""
        row = self._connection.execute(select(TOKENS).where(TOKENS.c.id == token_id)).one_or_none()
        return None if row is None else _token(row)

    def all(self) -> list[tuple[Token, str]]:
        """Every token, oldest first."""
        rows = self._connection.execute(select(TOKENS).order_by(TOKENS.c.created_at, TOKENS.c.id))
        return [_token(row) for row in rows]

    def revoke(self, token_id: str) -> bool:
        """Revoke a token, unless it is revoked already; whether that changed anything."""
        still_good = (TOKENS.c.id == token_id) & TOKENS.c.revoked_at.is_(None)
        return self._connection.execute(update(TOKENS).where(still_good).values(revoked_at=self._at)).rowcount == 1


def _token(row: Row[Any]) -> tuple[Token, str]:
    same = ("id", "name", "created_at", "expires_at", "revoked_at")
    return Token(**{name: getattr(row, name) for name in same}, role=Role(row.role)), row.sha256
