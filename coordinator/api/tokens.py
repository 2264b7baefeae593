"""Bearer tokens of the admin API, each with a role. The database holds only a hash of a token."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from coordinator.errors import BadToken, InvalidToken, UnknownToken
from coordinator.rules.entities import Role, Token
from coordinator.store.database import Database

_TEXT = re.compile(r"muster_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[\w.@+-]{1,60}")
_NOBODY = hashlib.sha256(b"").hexdigest()


def issue(database: Database, name: str, role: Role) -> tuple[Token, str]:
    """A new token, and its text, which is stored nowhere. Raises InvalidToken for an unusable name."""
    if not _NAME.fullmatch(name):
        raise InvalidToken(f"name must be 1 to 60 letters, digits or any of . @ + - _, not {name!r}")
    token_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    with database.writing() as records:
        token = Token(id=token_id, name=name, role=role, created_at=records.at)
        records.tokens.add(token, _hash(secret))
    return token, f"muster_{token_id}_{secret}"


def tokens(database: Database) -> list[Token]:
    """Every token, oldest first, revoked ones too."""
    with database.reading() as records:
        return [token for token, _ in records.tokens.all()]


def revoke(database: Database, token_id: str) -> Token:
    """Revoke a token; again is the same as once. Raises UnknownToken."""
    with database.writing() as records:
        records.tokens.revoke(token_id)
        found = records.tokens.find(token_id)
    if found is None:
        raise UnknownToken(f"there is no token {token_id!r}; `muster coordinator tokens` lists them")
    return found[0]


def authenticate(database: Database, text: str) -> Token:
    """The token of a text. Raises BadToken, which does not say what is wrong with it."""
    match = _TEXT.fullmatch(text)
    with database.reading() as records:
        found = records.tokens.find(match[1]) if match else None
    # A token of 256 random bits needs no slow hash. The comparison takes as long for one that does not exist.
    same = hmac.compare_digest(found[1] if found else _NOBODY, _hash(match[2] if match else text))
    if found is None or not same or found[0].revoked_at is not None:
        raise BadToken("the token is none of this coordinator, or was revoked")
    return found[0]


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
