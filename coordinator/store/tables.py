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
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from coordinator.rules.entities import LONGEST_NAME

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
    name: str, kind: Any, comment: str, *constraints: Any, null: bool = False, key: bool = False, unique: bool = False
) -> Column[Any]:
    return Column(name, kind, *constraints, comment=comment, nullable=null, primary_key=key, unique=unique)


def _blob(name: str, comment: str, *, null: bool = False) -> Column[Any]:
    return _column(name, String(64), comment, ForeignKey("blobs.sha256"), null=null)


def _version() -> ForeignKeyConstraint:
    """Of a row about a version of a model."""
    columns = ("population", "name", "number")
    return ForeignKeyConstraint(columns, [f"model_releases.{column}" for column in columns])


IDENTITY = Table(
    "identity",
    METADATA,
    _column("name", String(16), "server or lineage: a public key; blobs: the id of the place of blobs", key=True),
    _column("value", String(64), "the value: hex, or a lineage key as text"),
    comment="What must match the files that belong to this database; a coordinator starts with no others",
)

REPLICAS = Table(
    "replicas",
    METADATA,
    _column("id", String(8), "id of the process; ids of its sessions and assignments begin with it", key=True),
    _column("url", Text, "where the other replicas reach it", unique=True),
    _column("beat", BigInteger, "counts up while it lives; once it stands still, others declare the replica gone"),
    _column("draining", Boolean, "whether it is about to stop, and takes no population"),
    _column("seen_at", Float, "seconds since 1970 at its last beat, by its own clock; for people"),
    _column("steady", Float, "a clock of its own that nobody sets, in seconds, at its last beat"),
    comment="Coordinator processes that drive populations",
)

POPULATIONS = Table(
    "populations",
    METADATA,
    _column("name", String(200), "name that devices check in under", key=True),
    _column("created_at", Float, "seconds since 1970"),
    # Not a foreign key: a replica that is gone has no row, and that is how its populations become free.
    _column("holder", String(8), "replica that drives the population; null when none does", null=True),
    _column("term", BigInteger, "counts the holders; what an earlier one still writes is refused"),
    Index("populations_of", "holder"),
    comment="Groups of devices that check in together, each with the lease of the one process that drives it",
)

NOTICES = Table(
    "notices",
    METADATA,
    _column("population", String(200), "whose devices they send away", ForeignKey("populations.name"), key=True),
    _column("replica", String(8), "replica that drove the population and wrote this"),
    _column("version", BigInteger, "counts up with every change"),
    _column("said", Text, "JSON: needs of active tasks, generation of return tokens, end of the idle queue"),
    comment="What decides which devices are sent away, for replicas that do not drive the population",
)

TALLIES = Table(
    "tallies",
    METADATA,
    _column("id", _SERIAL, "number of the row", key=True),
    _column("population", String(200), "whose devices they were", ForeignKey("populations.name")),
    _column("said", Text, "JSON: keyed digests of devices with their windows, and counts of obstacles"),
    Index("tallies_of", "population"),
    comment="Devices that replicas sent away of populations which others drive; the driver counts and deletes them",
)

BUDGETS = Table(
    "budgets",
    METADATA,
    # Not a foreign key: a budget may be set before the first task, and devices check in to a population that has one.
    _column("population", String(200), "whose tasks share it", key=True),
    _column("epsilon", Float, "most that all tasks together may reveal of a device"),
    _column("delta", Float, "the chance that this leaves open"),
    _column("minimum_devices", Integer, "least devices of a group that a question may show"),
    comment="Privacy budgets of populations; whoever adds a task or changes a budget holds the table meanwhile",
)

DEVICES = Table(
    "devices",
    METADATA,
    _column("id", String(32), "made from the public key, which therefore has one id", key=True),
    _column("algorithm", String(32), "signature algorithm: ed25519 or ecdsa-p256-sha256"),
    _column("public_key", String(200), "in base64url: 32 bytes, or an uncompressed point"),
    _column("attestation", String(32), "kind of evidence at enrolment (wire §9), such as credential"),
    _column("enrolled_at", Float, "seconds since 1970"),
    _column("revoked_at", Float, "seconds since 1970, while an operator refuses it", null=True),
    Index("devices_revoked", "revoked_at"),
    Index("devices_enrolled", "enrolled_at"),
    comment="Devices that may sign requests",
)

BLOBS = Table(
    "blobs",
    METADATA,
    _column("sha256", String(64), "digest of the bytes, hex; the file's name", key=True),
    _column("size", BigInteger, "bytes"),
    _column("public", Boolean, "whether devices may fetch it: plans, graphs, checkpoints; never server state"),
    _column("created_at", Float, "seconds since 1970"),
    _column("unneeded_at", Float, "since when no row points at it, in seconds since 1970; null before", null=True),
    comment="Immutable files; a row is written after its file is durable",
)

SEALED_BLOBS = Table(
    "sealed_blobs",
    METADATA,
    _column("sha256", String(64), "the blob", ForeignKey("blobs.sha256"), key=True),
    _blob("sealed_sha256", "the blob with its bytes, sealed"),
    _column("key", String(64), "key that opens them, hex; nowhere else, and in no earlier transaction"),
    comment="Models of private rounds that were stored sealed before their row was committed",
)

TASKS = Table(
    "tasks",
    METADATA,
    _column("id", String(32), "opaque id", key=True),
    _column("name", String(LONGEST_NAME), "name for people, not unique"),
    _column("bundle", Text, "name of the bundle"),
    _column("population", String(200), "whose devices take part", ForeignKey("populations.name")),
    _column("state", String(16), "active, paused, completed or cancelled"),
    _column("reason", Text, "why the task is in this state; empty when nothing is to be said"),
    _column("algorithm", String(64), "name of the algorithm"),
    _column("algorithm_settings", JSON, "its settings"),
    _blob("plan_sha256", "what devices execute"),
    _column("plan_signature", JSON(none_as_null=True), "who signed the plan, and the signature", null=True),
    _column("release", JSON(none_as_null=True), "the signed release, of a task with secagg", null=True),
    _blob("certificate_sha256", "proof, made at export, that its graphs compute what they should"),
    _blob("state_sha256", "server state before round 1"),
    _blob("checkpoint_sha256", "what devices receive in round 1"),
    _column("settings", JSON, "the settings of its rounds, every one; the population has a column of its own"),
    _column("created_at", Float, "seconds since 1970"),
    _column("evaluates", JSON(none_as_null=True), "where the models came from that it evaluates", null=True),
    _column("evaluation", JSON(none_as_null=True), "how often its models are evaluated, by which bundle", null=True),
    comment="Tasks: a plan, a population, and the settings of rounds",
)

OBSERVATIONS = Table(
    "observations",
    METADATA,
    _column("task", String(32), "the task", ForeignKey("tasks.id"), key=True),
    _column("replica", String(8), "the driver that says this; worthless once another drives the population"),
    _column("version", BigInteger, "counts the writes"),
    _column("since", Float, "when it took the task up, or found it resumed, in seconds since 1970"),
    _column("begins_at", Float, "the end of the last pause after failed attempts", null=True),
    _column("eligible", Integer, "waiting devices that could be drawn"),
    _column("ineligible", JSON, "waiting devices that could not, by what keeps them from it"),
    _column("rejected", JSON, "check-ins of the last minute or two that were rejected, by what kept them"),
    _column("accepted_at", Float, "the last accepted check-in to the population, in seconds since 1970", null=True),
    _column("silent", Integer, "devices of the round that were not heard of lately"),
    _column("silent_since", Float, "since when the first of them was not, in seconds since 1970", null=True),
    _column("phase", String(16), "phase of a secure round; empty without one"),
    _column("answered", Integer, "devices that have sent their message of the phase"),
    _column("asked", Integer, "devices whose message the phase needs"),
    _column("members", Integer, "devices that a second trip of the same cohort may draw", null=True),
    _column("quiet_s", Float, "seconds without an accepted check-in after which the task is stalled"),
    comment="What drivers know of their tasks only in memory: why a task makes no progress",
)

SESSION_SHAPES = Table(
    "session_shapes",
    METADATA,
    _column("population", String(200), "whose sessions", ForeignKey("populations.name"), key=True),
    _column("task", String(32), "the task that they were assigned to; empty before there is one", key=True),
    _column("shape", String(200), "the steps of a session, in order", key=True),
    _column("count", BigInteger, "sessions with these steps"),
    comment="Counts of sessions by their steps; nothing of a single device",
)

ROUNDS = Table(
    "rounds",
    METADATA,
    _column("id", _SERIAL, "row id", key=True),
    _column("task", String(32), "the task", ForeignKey("tasks.id")),
    _column("number", Integer, "from 1; a committed number is never run again"),
    _column("attempt", Integer, "from 1; an abandoned number is tried again as the next attempt"),
    _column("state", String(16), "selecting, configuring, reporting, aggregating, committed or abandoned"),
    _column("reason", Text, "why it was abandoned; else empty"),
    _column("assigned", Integer, "devices given an assignment"),
    _column("reported", Integer, "reports folded into the sum"),
    _column("aborted", Integer, "devices that aborted"),
    _column("lost", Integer, "devices that vanished"),
    _column("expired", Integer, "devices that the deadline cut off"),
    _column("stale", Integer, "assignments that were too stale at its end; this and the next three: buffered"),
    _column("taken_over", Integer, "open assignments of earlier rounds that it began with"),
    _column("handed_on", Integer, "open assignments that went on after its end"),
    _column("staleness", JSON, "counts of its reports by staleness, from 0; empty in mode synchronous"),
    _column("opened_at", Float, "when it could draw devices, in seconds since 1970; not when it began to wait"),
    _column("ended_at", Float, "seconds since 1970", null=True),
    _blob("state_sha256", "server state after the round, once committed", null=True),
    _blob("checkpoint_sha256", "what devices receive next, once committed", null=True),
    _column("lineage", JSON(none_as_null=True), "signed entry that says where it comes from", null=True),
    _column("metrics", JSON, "mean metrics by name"),
    UniqueConstraint("task", "number", "attempt"),
    Index("rounds_with", "checkpoint_sha256"),
    comment="Attempts at a round",
)

LEDGER = Table(
    "ledger",
    METADATA,
    # This primary key is what makes a round count once.
    _column("task", String(32), "the task", ForeignKey("tasks.id"), key=True),
    _column("number", Integer, "the round whose noisy sum was released", key=True),
    _column("entry", JSON, "what it spends: mechanism, noise, bound and devices, as accounting needs them"),
    _column("epsilon", Float, "what the task has spent with it, at its delta"),
    _column("nonce", String(64), "what its noise is made of again, with a key that is not here", null=True),
    _column("signer", String(60), "the public half of that key; both null for noise of one round", null=True),
    comment="What rounds spent of their task's privacy budget; rows are only ever added",
)

ASSIGNMENTS = Table(
    "assignments",
    METADATA,
    _column("id", String(32), "unguessable id", key=True),
    _column("round", _SERIAL, "the round that drew the device, from whose model it starts", ForeignKey("rounds.id")),
    _column("slot", Integer, "place in the cohort, from 0; keys the device's random numbers"),
    _column("device", String(200), "the device that signed the check-in"),
    _column("state", String(16), "assigned, reported, aborted, lost, not-needed, expired or too-stale"),
    _column("reason", Text, "why it was aborted, or its device is left out of further attempts; else empty"),
    _column("assigned_at", Float, "seconds since 1970"),
    UniqueConstraint("round", "slot"),
    comment="One device's part in one round",
)

REPORTS = Table(
    "reports",
    METADATA,
    # This primary key is what makes a report count once.
    _column("assignment", String(32), "the assignment", ForeignKey("assignments.id"), key=True),
    _column("round", _SERIAL, "the round whose sum it is in", ForeignKey("rounds.id")),
    _column("sha256", String(64), "digest of the body, hex"),
    _column("received_at", Float, "seconds since 1970"),
    Index("reports_of", "round"),
    comment="Reports that were counted; their contents are never stored",
)

TOKENS = Table(
    "tokens",
    METADATA,
    _column("id", String(8), "the part of the token that is no secret", key=True),
    _column("name", String(60), "whose it is"),
    _column("role", String(16), "viewer, operator or metrics"),
    _column("populations", JSON(none_as_null=True), "those that it is limited to; null for every one", null=True),
    _column("proxy", Boolean, "whether a proxy sends it, with the name of a person"),
    _column("sha256", String(64), "hash of its secret part, hex; the token itself is never stored"),
    _column("created_at", Float, "seconds since 1970"),
    _column("expires_at", Float, "seconds since 1970, from when on it is worthless"),
    _column("revoked_at", Float, "seconds since 1970, once it is worthless before", null=True),
    comment="Tokens of the admin API",
)

ENDED_SESSIONS = Table(
    "ended_sessions",
    METADATA,
    _column("session", String(22), "the random part of its cookie", key=True),
    _column("expires_at", Float, "seconds since 1970, from when on the cookie is worthless anyway"),
    comment="Web sessions that were ended before their time, by a logout",
)

UPLOADS = Table(
    "uploads",
    METADATA,
    _column("population", String(200), "whose operator sent the bytes", key=True),
    _column("sha256", String(64), "their digest", key=True),
    _column("at", Float, "seconds since 1970; forgotten after a day"),
    comment="What operators that are limited to populations uploaded, and may name in tasks and models",
)

AUDIT = Table(
    "audit",
    METADATA,
    # No serial: the number is part of what is hashed, and a gap is a row that was removed.
    _column("number", BigInteger, "from 1, without gaps", key=True),
    _column("at", Float, "seconds since 1970"),
    _column("actor", Text, "an operator with the token's id, an operator on the store, or a device"),
    _column("action", String(32), "what was done, such as task-paused"),
    _column("subject", Text, "id of the task, token or device"),
    _column("detail", Text, "more about it; often empty"),
    _column("population", String(200), "which the subject belongs to; null where it belongs to none", null=True),
    _column("sha256", String(64), "hash over all this and the hash before, hex"),
    comment="What operators, tokens and devices did; rows are only ever added, each chained to the one before",
)

RELEASES = Table(
    "releases",
    METADATA,
    # No serial: the position is part of what is proven, and a gap is a row that was removed.
    _column("position", BigInteger, "from 0, without gaps", key=True),
    _column("release", JSON, "the statement, its signer and the signature"),
    _column("logged_at", Float, "seconds since 1970"),
    comment="The log of releases for secure rounds; rows are only ever added, as devices can demand a proof",
)

MODEL_RELEASES = Table(
    "model_releases",
    METADATA,
    # This primary key is what makes a number name one version for ever.
    _column("population", String(200), "whose devices may use the model", ForeignKey("populations.name"), key=True),
    _column("name", String(64), "name of the model", key=True),
    _column("number", Integer, "of the version: 1, 2, 3 … of the name", key=True),
    _blob("plan_sha256", "has the predict graphs, the schema and the frozen vectors"),
    _blob("parameters_sha256", "the model: a checkpoint with its parameters alone"),
    _column("release", JSON, "the statement, its signer and the signature"),
    _column("created_at", Float, "seconds since 1970"),
    comment="Versions of models that apps may use; rows are only ever added",
)

MODEL_ROLL_OUTS = Table(
    "model_roll_outs",
    METADATA,
    _column("id", _SERIAL, "row id, in order of time", key=True),
    _column("population", String(200), "whose devices"),
    _column("name", String(64), "name of the model"),
    _column("number", Integer, "of the version"),
    _column("share", Float, "of the devices that are given it, up to 1; 0 withdraws it, and no device is given any"),
    _column("kind", String(16), "promote or roll-back"),
    _column("at", Float, "seconds since 1970"),
    _column("actor", Text, "who did it, as in the audit log"),
    _column("gate", Text, "what a gate compared, in words; empty without one"),
    _column("target", Text, "expression on labels that devices of the share match; empty for all"),
    _version(),
    Index("model_roll_outs_of", "population", "name"),
    comment="Which versions devices were given; rows are only ever added, and the newest of a model decides",
)

MODEL_COUNTS = Table(
    "model_counts",
    METADATA,
    _column("population", String(200), "whose check-ins", key=True),
    _column("name", String(64), "name of the model", key=True),
    _column("number", Integer, "of the version", key=True),
    _column("day", String(10), "of the check-ins, UTC, as 2026-11-26", key=True),
    _column("refused", Boolean, "whether devices stated that they refused it, or else that they have it", key=True),
    _column("count", BigInteger, "check-ins that stated so"),
    _version(),
    comment="Counts of check-ins by the version of a model that devices stated; nothing of a single device",
)

ALERTS = Table(
    "alerts",
    METADATA,
    _column("id", String(16), "opaque id", key=True),
    _column("kind", String(32), "what is wrong: the reason of a stalled task, expires, unreadable or disk-full"),
    _column("task", String(32), "the task; null where it is about none", ForeignKey("tasks.id"), null=True),
    _column("subject", Text, "what it is about beside the task, such as the TLS certificate; often empty"),
    _column("text", Text, "a sentence for people, of when it was raised"),
    _column("remedy", Text, "what to do, where the sentence does not say it"),
    _column("raised_at", Float, "seconds since 1970"),
    _column("cleared_at", Float, "seconds since 1970; null while it is open", null=True),
    _column("raised_due", Boolean, "whether the webhook is still to be told that it was raised"),
    _column("cleared_due", Boolean, "whether the webhook is still to be told that it was cleared"),
    Index("alerts_cleared", "cleared_at"),
    comment="What needed an operator: raised once and cleared once; one alert of a kind, task and subject is open",
)

TRANSITIONS = Table(
    "transitions",
    METADATA,
    _column("id", _SERIAL, "row id, in order of time", key=True),
    _column("entity", String(16), "task, round or assignment"),
    _column("entity_id", String(32), "its id"),
    _column("from_state", String(16), "state before; empty at creation"),
    _column("to_state", String(16), "state after"),
    _column("cause", Text, "its cause"),
    _column("at", Float, "seconds since 1970"),
    Index("transitions_of", "entity", "entity_id"),
    comment="Every change of state, in order",
)
