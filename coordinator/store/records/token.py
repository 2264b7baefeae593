"""Rows of tokens and of ended web sessions, within one transaction. Their use: coordinator.api.tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, delete, exists, insert, select, update

from coordinator.rules.entities import Role, Token
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import ENDED_SESSIONS, TOKENS


class TokenRecords(WithinTransaction):
    """The operations on tokens."""

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
        return self._connection.execute(update(TOKENS).where(still_good).values(revoked_at=self.at)).rowcount == 1

    def end_session(self, session: str, expires_at: float) -> None:
        """Note that a web session is over, and forget those that expired since; again is the same as once."""
        self._connection.execute(delete(ENDED_SESSIONS).where(ENDED_SESSIONS.c.expires_at <= self.at))
        ended = self._insert_unless(ENDED_SESSIONS).values(session=session, expires_at=expires_at)
        self._connection.execute(ended.on_conflict_do_nothing())

    def has_ended(self, session: str) -> bool:
        """Whether a web session was ended before its time."""
        return bool(self._connection.scalar(select(exists().where(ENDED_SESSIONS.c.session == session))))


def _token(row: Row[Any]) -> tuple[Token, str]:
    same = ("id", "name", "created_at", "expires_at", "revoked_at")
    return Token(**{name: getattr(row, name) for name in same}, role=Role(row.role)), row.sha256
