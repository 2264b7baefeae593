"""Authentication of devices, by signed requests that are fresh and accepted once, and of operators, by tokens.

Spec: docs/spec/wire.md §10.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from coordinator import errors
from coordinator.api.limits import admit
from coordinator.monitoring import Metrics
from coordinator.rules.alerts import STORE, Action
from coordinator.rules.entities import Device, Role, Token
from coordinator.store.database import Database
from coordinator.store.tasks import CoordinatorStore
from fedcore.errors import StaleSignature
from fedcore.wire.signatures import AHEAD_S, WINDOW_S, PublicKey, SignableRequest, Signature
from ingress.limits import RateLimit
from ingress.server import Signed, named_key, read, signer_of

# Bearer tokens of the admin API, each with a role. The database holds only a hash of a token.


_TEXT = re.compile(r"muster_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[\w.@+-]{1,60}")
_DAY_S = 86_400
_MOST_DAYS = 3650
_LONGEST_POPULATION = 200
DAYS = 90
"""Days for which a token is good, if nothing else is asked for."""
_NOBODY = hashlib.sha256(b"").hexdigest()
PERSON = "Muster-Person"
"""The header in which a proxy, known by its token, names the person for whom it asks."""
_PERSON = re.compile(r"[A-Za-z0-9_.@+-]{1,254}")


def issue(
    database: Database,
    name: str,
    role: Role,
    days: float = DAYS,
    *,
    populations: Sequence[str] = (),
    proxy: bool = False,
) -> tuple[Token, str]:
    """A new token, good for `days`, and its text, which is stored nowhere.

    populations: those that it is limited to; without any it is good for all. proxy: as `Token` says. Raises
    InvalidToken for an unusable name or time, for a population that can have no such name, and for a token of
    Prometheus that is limited, or a proxy's.
    """
    _check(name, role, days, populations, proxy=proxy)
    token_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    limits = tuple(sorted(set(populations))) or None
    with database.writing() as records:
        now, expires_at = records.at, records.at + days * _DAY_S
        whose = partial(Token, id=token_id, name=name, role=role, populations=limits, proxy=proxy)
        token = whose(created_at=now, expires_at=expires_at)
        records.tokens.add(token, _hash(secret))
        records.audit.append(STORE, Action.TOKEN_MADE, token_id, f"{token.rights}, until {_date(expires_at)}")
    return token, f"muster_{token_id}_{secret}"


def _check(name: str, role: Role, days: float, populations: Sequence[str], *, proxy: bool) -> None:
    if not _NAME.fullmatch(name):
        raise errors.InvalidToken(f"name must be 1 to 60 letters, digits or any of . @ + - _, not {name!r}")
    if not 0 < days <= _MOST_DAYS:
        raise errors.InvalidToken(f"days must be above 0 and at most {_MOST_DAYS}, not {days:g}: every token expires")
    if role is Role.METRICS and (populations or proxy):
        raise errors.InvalidToken("metrics are of the whole coordinator: leave out --population and --proxy")
    for population in populations:
        if not 0 < len(population) <= _LONGEST_POPULATION or not population.isprintable():
            raise errors.InvalidToken(
                f"{population[:60]!r} can be no population: its name is 1 to 200 printable characters"
            )


def for_person(token: Token, named: Sequence[str]) -> Token:
    """The token of a proxy with the person whom a request names, in so many fields.

    Raises RoleLacking for a token that is no proxy's, and BadToken unless there is one name.
    """
    if not token.proxy:
        raise errors.RoleLacking(f"{PERSON} is believed from a proxy; the token {token.id} was not made with --proxy")
    if len(named) != 1 or not _PERSON.fullmatch(named[0]):
        found, wanted = ", ".join(named)[:60], "one person in 1 to 254 letters, digits or any of . @ + - _"
        raise errors.BadToken(f"{PERSON} must name {wanted}, not {found!r}: look at the proxy's configuration")
    return replace(token, person=named[0])


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
        raise errors.UnknownToken(f"there is no token {token_id!r}; `muster coordinator tokens` lists them")
    return row[0]


def authenticate(database: Database, text: str) -> Token:
    """The token of a text. Raises BadToken, which does not say what is wrong, unless a token that was good expired."""
    match = _TEXT.fullmatch(text)
    with database.reading() as records:
        row, now = records.tokens.find(match[1]) if match else None, records.at
    # A token of 256 random bits needs no slow hash. The comparison takes as long for one that does not exist.
    same = hmac.compare_digest(row[1] if row else _NOBODY, _hash(match[2] if match else text))
    if row is None or not same or row[0].revoked_at is not None:
        raise errors.BadToken("unknown or revoked token")
    if row[0].state(now) == "expired":
        when = _date(row[0].expires_at)
        raise errors.BadToken(f"the token expired on {when}; `muster coordinator token` makes another")
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


# Authentication of devices: every request is signed, fresh, accepted once, and checked before its body is read.


K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `limit` pairs, those used last. For one thread, and for values that never change."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pairs: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of a key; None when it is not cached."""
        value = self._pairs.get(key)
        if value is not None:
            self._pairs.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> V:
        """Cache a value and answer it; the pair that was used longest ago may go."""
        self._pairs[key] = value
        self._pairs.move_to_end(key)
        if len(self._pairs) > self._limit:
            self._pairs.popitem(last=False)
        return value


# Replay protection: fresh signatures, each accepted once. Pure: time is an argument. Spec: docs/spec/wire.md §10.
#
# No replay of a request that this process took is ever accepted. A signature that was made before this process began to
# answer is refused too, unless no earlier process can have accepted it. When that was is told by the clock as it is
# now, less the time that has passed on a steady clock, so that a clock which is set right later refuses nobody; and in
# the first ten minutes also by the clock of then. A clock that is set back by more than `WINDOW_S` repeats time: then
# replays of what an earlier process took can be accepted, once.

_KEY_BYTES = 16

_SWEEP_S = 1.0


class Replays:
    """The signatures accepted within the window, at most `limit`.

    Times are in seconds since 1970; `steady` ones are of a clock that nobody sets. Memory: about 100 bytes a signature,
    for five minutes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._began = self._began_steady = -math.inf
        self._count = 0
        self._seen: dict[int, set[bytes]] = {}
        self._forgotten: dict[int, int] = {}
        """Of every five minutes of the last day, the latest time of which a signature was forgotten."""
        self._swept = -math.inf

    def begin(self, now: float, steady: float) -> None:
        """Begin to answer."""
        self._began, self._began_steady = now, steady

    def demand_new(self, signature: Signature, known_since: float, now: float, steady: float) -> bytes:
        """What to `remember` of a new signature, whose key was enrolled at `known_since`.

        Raises ReplayedSignature, StaleSignature when an earlier process may have accepted it, or as `check_time`.
        """
        signature.check_time(now)  # again: time may have passed since, and then it may be forgotten now
        self._sweep(now)
        first = max(self._first(signature, known_since, now, steady), self._forgotten.get(_span(signature), -1) + 1)
        if signature.created < first:
            wait_s = max(0.0, math.ceil(first) - now)
            raise StaleSignature("the coordinator has restarted since this was signed; sign it again", wait_s)
        kept = hashlib.sha256(f"{signature.keyid} {signature.nonce}".encode()).digest()[:_KEY_BYTES]
        if kept in self._seen.get(signature.created, ()):
            raise errors.ReplayedSignature("a request with this nonce came before; sign every request anew")
        return kept

    def remember(self, created: int, kept: bytes) -> None:
        """Accept what `demand_new` gave for a signature made at `created`. Raises Unavailable when no more fit."""
        if self._count >= self._limit:
            raise errors.Unavailable("too many requests came within five minutes; come back later")
        self._seen.setdefault(created, set()).add(kept)
        self._count += 1

    def _first(self, signature: Signature, known_since: float, now: float, steady: float) -> float:
        """The earliest time at which a signature of a device, enrolled at `known_since`, was not made for another."""
        age_s = steady - self._began_steady
        began = now - age_s
        if known_since >= max(began, self._began):
            return -math.inf
        fresh_then = self._began - WINDOW_S <= signature.created < self._began + AHEAD_S
        return (self._began if fresh_then and age_s < 2 * WINDOW_S else began) + AHEAD_S

    def _sweep(self, now: float) -> None:
        """Forget signatures that are too old to be accepted; once a second is often enough."""
        if 0 <= now - self._swept < _SWEEP_S:
            return
        for created in [created for created in self._seen if created < now - WINDOW_S]:
            self._count -= len(self._seen.pop(created))
            span = created // WINDOW_S
            self._forgotten[span] = max(self._forgotten.get(span, created), created)
        for span in [span for span in self._forgotten if span < (now - _DAY_S) // WINDOW_S]:
            del self._forgotten[span]
        self._swept = now


def _span(signature: Signature) -> int:
    return signature.created // WINDOW_S


KEYS = 1 << 16
"""Public keys kept in memory, at about 600 bytes each."""
REQUESTS = 1 << 20
"""The most signatures that are remembered, for five minutes each."""
_SIGNED = "muster.signed"


class Authenticator:
    """Checks signatures. Its methods run before a route's endpoint, and keep the signer in the request's scope.

    limit: how often a device may ask, which also bounds its share of what is remembered.
    """

    def __init__(self, store: CoordinatorStore, limit: RateLimit, metrics: Metrics) -> None:
        self._store = store
        self._limit = limit
        self._metrics = metrics
        self._keys: LruCache[str, tuple[PublicKey, float]] = LruCache(KEYS)
        self._replays = Replays(REQUESTS)
        self._revoked: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Begin to answer, or to answer for more: signatures that another process may have accepted are refused."""
        self._replays.begin(time.time(), time.monotonic())

    def refuse(self, devices: frozenset[str]) -> None:
        """Refuse exactly these devices from now on, whose keys may be in memory. From any thread."""
        self._revoked = devices

    async def device(self, request: Request) -> None:
        """Demand an enrolled device's signature.

        Raises RequestError, UnknownDevice, ReplayedSignature, DeviceRevoked, TooManyRequests or Unavailable.
        """
        signature, about = self._read(request)
        key, since = self._keys.get(signature.keyid) or await self._find(signature.keyid)
        signer = signer_of(signature, about, key)
        if signature.keyid in self._revoked:
            raise errors.DeviceRevoked
        kept = self._replays.demand_new(signature, since, time.time(), time.monotonic())
        self._admit(signature, kept)
        request.scope[_SIGNED] = signer

    async def new_device(self, request: Request) -> None:
        """Demand the signature of a key that names itself. Raises RequestError.

        These are not remembered: enrolling twice changes nothing, and anybody can make keys and fill the memory.
        """
        signature, about = self._read(request)
        request.scope[_SIGNED] = signer_of(signature, about, named_key(signature))

    def _admit(self, signature: Signature, kept: bytes) -> None:
        """Count a device's own request; replays by others do not count against it."""
        try:
            admit(self._limit, signature.keyid)
            self._replays.remember(signature.created, kept)
        except (errors.TooManyRequests, errors.Unavailable) as refusal:
            self._metrics.shed.labels("device" if isinstance(refusal, errors.TooManyRequests) else "signatures").inc()
            raise

    def _read(self, request: Request) -> tuple[Signature, SignableRequest]:
        """The signature of a request, which is fresh and covers all that it must."""
        signature, about = read(request)
        signature.check_time(time.time())
        return signature, about

    async def _find(self, device: str) -> tuple[PublicKey, float]:
        enrolled = await run_in_threadpool(self._look_up, device)
        return self._keys.put(device, (PublicKey.parse(enrolled.key), enrolled.enrolled_at))

    def _look_up(self, device: str) -> Device:
        with self._store.database.reading() as records:
            enrolled = records.devices.find(device)
        if enrolled is None:
            raise errors.UnknownDevice("no device has this id here; enrol")
        demand_allowed(enrolled)
        return enrolled


def demand_allowed(device: Device) -> None:
    """Raise DeviceRevoked for a device that an operator has revoked."""
    if device.revoked_at is not None:
        raise errors.DeviceRevoked


def signed(request: Request) -> Signed:
    """The signer of a request that an Authenticator has checked."""
    signer: Signed = request.scope[_SIGNED]
    return signer


def demand_body(request: Request, sha256: bytes) -> None:
    """Raise WrongBody unless a body with this SHA-256 is the one that was signed."""
    signed(request).check(sha256)
