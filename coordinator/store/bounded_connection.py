"""A connection to PostgreSQL that gives up on a server which does not answer. Loaded only where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus

RV = TypeVar("RV")
_LOOK_S = 0.1
"""How often a wait looks whether the connection was closed."""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed when no whole answer has come after `reply_s`; None waits for ever.

    TCP finds out that packets do not arrive. It cannot where a proxy acknowledges what it does not pass on.
    """

    reply_s: float | None = None
    first_in_transactions: Sequence[str] = ()
    """Expressions that the server evaluates at the begin of every transaction, where no session keeps their effect."""

    def has_session(self) -> bool:
        """Whether a session of the server is this connection's own. A pooler lends one, for a transaction perhaps."""
        return self.execute("SELECT pg_backend_pid()").fetchone() == (self.info.backend_pid,)

    def wait(self, gen: PQGen[RV], interval: float = _LOOK_S, timeout: float | None = None) -> RV:
        """Do what all of the library's operations do. Raises psycopg.OperationalError when it takes too long."""
        try:
            return super().wait(gen, interval, self.reply_s if timeout is None else timeout)
        except psycopg.OperationalError:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                # An answer to what was given up must not be taken for that to the next statement.
                self.pgconn.finish()
            raise
