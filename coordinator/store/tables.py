"""The tables. Portable SQL only: text, integers, floats (seconds since 1970), booleans, JSON."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from coordinator.rules.task_names import LONGEST_NAME

# Names that a later migration can call a constraint by, on every engine.
METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
_SERIAL = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only in a column called INTEGER


def _column(
    name: str,
    kind: Any,
    *constraints: Any,
    comment: str,
    null: bool = False,
    key: bool = False,
    unique: bool = False,
) -> Column[Any]:
    return Column(name, kind, *constraints, comment=comment, nullable=null, primary_key=key, unique=unique)


def _blob(name: str, comment: str, *, null: bool = False) -> Column[Any]:
    return _column(name, String(64), ForeignKey("blobs.sha256"), comment=comment, null=null)


IDENTITY = Table(
    "identity",
    METADATA,
    _column(
        "name", String(16), comment="server or lineage: a public key; blobs: the id of the place of blobs", key=True
    ),
    _column("value", String(64), comment="the value: hex, or a lineage key as text"),
    comment="What must match the files that belong to this database; a coordinator starts with no others",
)

REPLICAS = Table(
    "replicas",
    METADATA,
    _column("id", String(8), comment="id of the process; ids of its sessions and assignments begin with it", key=True),
    _column("url", Text, comment="where the other replicas reach it", unique=True),
    _column(
        "beat", BigInteger, comment="counts up while it lives; once it stands still, others declare the replica gone"
    ),
    _column("draining", Boolean, comment="whether it is about to stop, and takes no population"),
    _column("seen_at", Float, comment="seconds since 1970 at its last beat, by its own clock; for people"),
    comment="Coordinator processes that drive populations",
)

POPULATIONS = Table(
    "populations",
    METADATA,
    _column("name", String(200), comment="name that devices check in under", key=True),
    _column("created_at", Float, comment="seconds since 1970"),
    # Not a foreign key: a replica that is gone has no row, and that is how its populations become free.
    _column("holder", String(8), comment="replica that drives the population; null when none does", null=True),
    _column("term", BigInteger, comment="counts the holders; what an earlier one still writes is refused"),
    Index("populations_of", "holder"),
    comment="Groups of devices that check in together, each with the lease of the one process that drives it",
)

DEVICES = Table(
    "devices",
    METADATA,
    _column("id", String(32), comment="made from the public key, which therefore has one id", key=True),
    _column("algorithm", String(32), comment="signature algorithm: ed25519 or ecdsa-p256-sha256"),
    _column("public_key", String(200), comment="in base64url: 32 bytes, or an uncompressed point"),
    _column("attestation", String(32), comment="kind of evidence at enrolment (wire §9), such as credential"),
    _column("enrolled_at", Float, comment="seconds since 1970"),
    _column("revoked_at", Float, comment="seconds since 1970, while an operator refuses it", null=True),
    Index("devices_revoked", "revoked_at"),
    Index("devices_enrolled", "enrolled_at"),
    comment="Devices that may sign requests",
)

BLOBS = Table(
    "blobs",
    METADATA,
    _column("sha256", String(64), comment="digest of the bytes, hex; the file's name", key=True),
    _column("size", BigInteger, comment="bytes"),
    _column("public", Boolean, comment="whether devices may fetch it: plans, graphs, checkpoints; never server state"),
    _column("created_at", Float, comment="seconds since 1970"),
    _column(
        "unneeded_at", Float, comment="since when no row points at it, in seconds since 1970; null before", null=True
    ),
    comment="Immutable files; a row is written after its file is durable",
)

SEALED_BLOBS = Table(
    "sealed_blobs",
    METADATA,
    _column("sha256", String(64), ForeignKey("blobs.sha256"), comment="the blob", key=True),
    _blob("sealed_sha256", "the blob with its bytes, sealed"),
    _column("key", String(64), comment="key that opens them, hex; nowhere else, and in no earlier transaction"),
    comment="Models of private rounds that were stored sealed before their row was committed",
)

TASKS = Table(
    "tasks",
    METADATA,
    _column("id", String(32), comment="opaque id", key=True),
    _column("name", String(LONGEST_NAME), comment="name for people, not unique"),
    _column("bundle", Text, comment="name of the bundle"),
    _column("population", String(200), ForeignKey("populations.name"), comment="whose devices take part"),
    _column("state", String(16), comment="active, paused, completed or cancelled"),
    _column("reason", Text, comment="why the task is in this state; empty when nothing is to be said"),
    _column("algorithm", String(64), comment="name of the algorithm"),
    _column("algorithm_settings", JSON, comment="its settings"),
    _blob("plan_sha256", "what devices execute"),
    _column("plan_signature", JSON(none_as_null=True), comment="who signed the plan, and the signature", null=True),
    _column("release", JSON(none_as_null=True), comment="the signed release, of a task with secagg", null=True),
    _blob("certificate_sha256", "proof, made at export, that its graphs compute what they should"),
    _blob("state_sha256", "server state before round 1"),
    _blob("checkpoint_sha256", "what devices receive in round 1"),
    _column("settings", JSON, comment="the settings of its rounds, every one; the population has a column of its own"),
    _column("created_at", Float, comment="seconds since 1970"),
    comment="Tasks: a plan, a population, and the settings of rounds",
)

OBSERVATIONS = Table(
    "observations",
    METADATA,
    _column("task", String(32), ForeignKey("tasks.id"), comment="the task", key=True),
    _column("replica", String(8), comment="the driver that says this; worthless once another drives the population"),
    _column("version", BigInteger, comment="counts the writes"),
    _column("since", Float, comment="when it took the task up, or found it resumed, in seconds since 1970"),
    _column("begins_at", Float, comment="the end of the last pause after failed attempts", null=True),
    _column("eligible", Integer, comment="waiting devices that could be drawn"),
    _column("ineligible", JSON, comment="waiting devices that could not, by what keeps them from it"),
    _column("rejected", JSON, comment="check-ins of the last minute or two that were rejected, by what kept them"),
    _column(
        "accepted_at", Float, comment="the last accepted check-in to the population, in seconds since 1970", null=True
    ),
    _column("silent", Integer, comment="devices of the round that were not heard of lately"),
    _column("silent_since", Float, comment="since when the first of them was not, in seconds since 1970", null=True),
    _column("phase", String(16), comment="phase of a secure round; empty without one"),
    _column("answered", Integer, comment="devices that have sent their message of the phase"),
    _column("asked", Integer, comment="devices whose message the phase needs"),
    _column("members", Integer, comment="devices that a second trip of the same cohort may draw", null=True),
    comment="What drivers know of their tasks only in memory: why a task makes no progress",
)

SESSION_SHAPES = Table(
    "session_shapes",
    METADATA,
    _column("population", String(200), ForeignKey("populations.name"), comment="whose sessions", key=True),
    _column("task", String(32), comment="the task that they were assigned to; empty before there is one", key=True),
    _column("shape", String(200), comment="the steps of a session, in order", key=True),
    _column("count", BigInteger, comment="sessions with these steps"),
    comment="Counts of sessions by their steps; nothing of a single device",
)

ROUNDS = Table(
    "rounds",
    METADATA,
    _column("id", _SERIAL, comment="row id", key=True),
    _column("task", String(32), ForeignKey("tasks.id"), comment="the task"),
    _column("number", Integer, comment="from 1; a committed number is never run again"),
    _column("attempt", Integer, comment="from 1; an abandoned number is tried again as the next attempt"),
    _column("state", String(16), comment="selecting, configuring, reporting, aggregating, committed or abandoned"),
    _column("reason", Text, comment="why it was abandoned; else empty"),
    _column("assigned", Integer, comment="devices given an assignment"),
    _column("reported", Integer, comment="reports folded into the sum"),
    _column("aborted", Integer, comment="devices that aborted"),
    _column("lost", Integer, comment="devices that vanished"),
    _column("expired", Integer, comment="devices that the deadline cut off"),
    _column("stale", Integer, comment="assignments that were too stale at its end; this and the next three: buffered"),
    _column("taken_over", Integer, comment="open assignments of earlier rounds that it began with"),
    _column("handed_on", Integer, comment="open assignments that went on after its end"),
    _column("staleness", JSON, comment="counts of its reports by staleness, from 0; empty in mode synchronous"),
    _column("opened_at", Float, comment="when it could draw devices, in seconds since 1970; not when it began to wait"),
    _column("ended_at", Float, comment="seconds since 1970", null=True),
    _blob("state_sha256", "server state after the round, once committed", null=True),
    _blob("checkpoint_sha256", "what devices receive next, once committed", null=True),
    _column("lineage", JSON(none_as_null=True), comment="signed entry that says where it comes from", null=True),
    _column("metrics", JSON, comment="mean metrics by name"),
    UniqueConstraint("task", "number", "attempt"),
    Index("rounds_with", "checkpoint_sha256"),
    comment="Attempts at a round",
)

LEDGER = Table(
    "ledger",
    METADATA,
    # This primary key is what makes a round count once.
    _column("task", String(32), ForeignKey("tasks.id"), comment="the task", key=True),
    _column("number", Integer, comment="the round whose noisy sum was released", key=True),
    _column("entry", JSON, comment="what it spends: mechanism, noise, bound and devices, as accounting needs them"),
    _column("epsilon", Float, comment="what the task has spent with it, at its delta"),
    _column("nonce", String(64), comment="what its noise is made of again, with a key that is not here", null=True),
    _column("signer", String(60), comment="the public half of that key; both null for noise of one round", null=True),
    comment="What rounds spent of their task's privacy budget; rows are only ever added",
)

ASSIGNMENTS = Table(
    "assignments",
    METADATA,
    _column("id", String(32), comment="unguessable id", key=True),
    _column(
        "round", _SERIAL, ForeignKey("rounds.id"), comment="the round that drew the device, from whose model it starts"
    ),
    _column("slot", Integer, comment="place in the cohort, from 0; keys the device's random numbers"),
    _column("device", String(200), comment="the device that signed the check-in"),
    _column("state", String(16), comment="assigned, reported, aborted, lost, not-needed, expired or too-stale"),
    _column("reason", Text, comment="why it was aborted, or its device is left out of further attempts; else empty"),
    _column("assigned_at", Float, comment="seconds since 1970"),
    UniqueConstraint("round", "slot"),
    comment="One device's part in one round",
)

REPORTS = Table(
    "reports",
    METADATA,
    # This primary key is what makes a report count once.
    _column("assignment", String(32), ForeignKey("assignments.id"), comment="the assignment", key=True),
    _column("round", _SERIAL, ForeignKey("rounds.id"), comment="the round whose sum it is in"),
    _column("sha256", String(64), comment="digest of the body, hex"),
    _column("received_at", Float, comment="seconds since 1970"),
    Index("reports_of", "round"),
    comment="Reports that were counted; their contents are never stored",
)

TOKENS = Table(
    "tokens",
    METADATA,
    _column("id", String(8), comment="the part of the token that is no secret", key=True),
    _column("name", String(60), comment="whose it is"),
    _column("role", String(16), comment="viewer or operator"),
    _column("sha256", String(64), comment="hash of its secret part, hex; the token itself is never stored"),
    _column("created_at", Float, comment="seconds since 1970"),
    _column("expires_at", Float, comment="seconds since 1970, from when on it is worthless"),
    _column("revoked_at", Float, comment="seconds since 1970, once it is worthless before", null=True),
    comment="Tokens of the admin API",
)

ENDED_SESSIONS = Table(
    "ended_sessions",
    METADATA,
    _column("session", String(22), comment="the random part of its cookie", key=True),
    _column("expires_at", Float, comment="seconds since 1970, from when on the cookie is worthless anyway"),
    comment="Web sessions that were ended before their time, by a logout",
)

AUDIT = Table(
    "audit",
    METADATA,
    # No serial: the number is part of what is hashed, and a gap is a row that was removed.
    _column("number", BigInteger, comment="from 1, without gaps", key=True),
    _column("at", Float, comment="seconds since 1970"),
    _column("actor", Text, comment="an operator with the token's id, an operator on the store, or a device"),
    _column("action", String(32), comment="what was done, such as task-paused"),
    _column("subject", Text, comment="id of the task, token or device"),
    _column("detail", Text, comment="more about it; often empty"),
    _column("sha256", String(64), comment="hash over all this and the hash before, hex"),
    comment="What operators, tokens and devices did; rows are only ever added, each chained to the one before",
)

RELEASES = Table(
    "releases",
    METADATA,
    # No serial: the position is part of what is proven, and a gap is a row that was removed.
    _column("position", BigInteger, comment="from 0, without gaps", key=True),
    _column("release", JSON, comment="the statement, its signer and the signature"),
    _column("logged_at", Float, comment="seconds since 1970"),
    comment="The log of releases for secure rounds; rows are only ever added, as devices can demand a proof",
)

TRANSITIONS = Table(
    "transitions",
    METADATA,
    _column("id", _SERIAL, comment="row id, in order of time", key=True),
    _column("entity", String(16), comment="task, round or assignment"),
    _column("entity_id", String(32), comment="its id"),
    _column("from_state", String(16), comment="state before; empty at creation"),
    _column("to_state", String(16), comment="state after"),
    _column("cause", Text, comment="its cause"),
    _column("at", Float, comment="seconds since 1970"),
    Index("transitions_of", "entity", "entity_id"),
    comment="Every change of state, in order",
)
