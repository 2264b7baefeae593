"""Bearer tokens of the admin API, each with a role. The database holds only a hash of a token."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import UTC, datetime

from coordinator.errors import BadToken, InvalidToken, UnknownToken
from coordinator.rules.audit import STORE, Action
from coordinator.rules.entities import Role, Token
from coordinator.store.database import Database

_TEXT = re.compile(r"muster_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[\w.@+-]{1,60}")
_DAY_S, _MOST_DAYS = 86_400.0, 3650
DAYS = 90
"""Days for which a token is good, if nothing else is asked for."""
_NOBODY = hashlib.sha256(b"").hexdigest()


def issue(database: Database, name: str, role: Role, days: float = DAYS) -> tuple[Token, str]:
    """A new token, good for `days`, and its text, which is stored nowhere.

    Raises InvalidToken for an unusable name or time.
    """
    if not _NAME.fullmatch(name):
        raise InvalidToken(f"name must be 1 to 60 letters, digits or any of . @ + - _, not {name!r}")
    if not 0 < days <= _MOST_DAYS:
        raise InvalidToken(f"days must be above 0 and at most {_MOST_DAYS}, not {days:g}: every token expires")
    token_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    with database.writing() as records:
        expires_at = records.at + days * _DAY_S
        token = Token(id=token_id, name=name, role=role, created_at=records.at, expires_at=expires_at)
        records.tokens.add(token, _hash(secret))
        records.audit.append(STORE, Action.TOKEN_MADE, token_id, f"{role} {name}, until {_date(expires_at)}")
    return token, f"muster_{token_id}_{secret}"


def tokens(database: Database) -> list[Token]:
    """Every token, oldest first, revoked ones too."""
    with database.reading() as records:
        return [token for token, _ in records.tokens.all()]


def revoke(database: Database, token_id: str) -> Token:
    """Revoke a token; again is the same as once. Raises UnknownToken."""
    with database.writing() as records:
        ended = records.tokens.revoke(token_id)
        row = records.tokens.find(token_id)
        if row is not None and ended:
            records.audit.append(STORE, Action.TOKEN_REVOKED, token_id, row[0].name)
    if row is None:
        raise UnknownToken(f"there is no token {token_id!r}; `muster coordinator tokens` lists them")
    return row[0]


def authenticate(database: Database, text: str) -> Token:
    """The token of a text. Raises BadToken, which does not say what is wrong, unless a token that was good expired."""
    match = _TEXT.fullmatch(text)
    with database.reading() as records:
        row, now = records.tokens.find(match[1]) if match else None, records.at
    # A token of 256 random bits needs no slow hash. The comparison takes as long for one that does not exist.
    same = hmac.compare_digest(row[1] if row else _NOBODY, _hash(match[2] if match else text))
    if row is None or not same or row[0].revoked_at is not None:
        raise BadToken("unknown or revoked token")
    if row[0].state(now) == "expired":
        when = _date(row[0].expires_at)
        raise BadToken(f"the token expired on {when}; `muster coordinator token` makes another")
    return row[0]


def token_of_session(database: Database, token_id: str, session: str) -> Token | None:
    """The token with an id, shown before to `authenticate`, while it is good and its web session was not ended."""
    with database.reading() as records:
        row, now, ended = records.tokens.find(token_id), records.at, records.tokens.has_ended(session)
    return row[0] if row is not None and row[0].state(now) == "good" and not ended else None


def end_session(database: Database, session: str, expires_at: float) -> None:
    """End a web session at every replica, before `expires_at`, when its cookie ends."""
    with database.writing() as records:
        records.tokens.end_session(session, expires_at)


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
