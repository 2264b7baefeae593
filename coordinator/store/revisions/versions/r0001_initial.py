"""The first tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _column(name: str, kind: sa.types.TypeEngine[Any], comment: str, *, null: bool = False) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=null, comment=comment)


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "audit",
        _column("number", sa.BigInteger(), "from 1, without gaps"),
        _column("at", sa.Float(), "seconds since 1970"),
        _column("actor", sa.Text(), "an operator with the token's id, an operator on the store, or a device"),
        _column("action", sa.String(32), "what was done, such as task-paused"),
        _column("subject", sa.Text(), "id of the task, token or device"),
        _column("detail", sa.Text(), "more about it; often empty"),
        _column("sha256", sa.String(64), "hash over all this and the hash before, hex"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
        comment="What operators, tokens and devices did; rows are only ever added, each chained to the one before",
    )
    op.create_table(
        "blobs",
        _column("sha256", sa.String(64), "digest of the bytes, hex; the file's name"),
        _column("size", sa.BigInteger(), "bytes"),
        _column("public", sa.Boolean(), "whether devices may fetch it: plans, graphs, checkpoints; never server state"),
        _column("created_at", sa.Float(), "seconds since 1970"),
        _column(
            "unneeded_at", sa.Float(), "since when no row points at it, in seconds since 1970; null before", null=True
        ),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_blobs")),
        comment="Immutable files; a row is written after its file is durable",
    )
    op.create_table(
        "budgets",
        _column("population", sa.String(200), "whose tasks share it"),
        _column("epsilon", sa.Float(), "most that all tasks together may reveal of a device"),
        _column("delta", sa.Float(), "the chance that this leaves open"),
        _column("minimum_devices", sa.Integer(), "least devices of a group that a question may show"),
        sa.PrimaryKeyConstraint("population", name=op.f("pk_budgets")),
        comment="Privacy budgets of populations; whoever adds a task or changes a budget holds the table meanwhile",
    )
    op.create_table(
        "devices",
        _column("id", sa.String(32), "made from the public key, which therefore has one id"),
        _column("algorithm", sa.String(32), "signature algorithm: ed25519 or ecdsa-p256-sha256"),
        _column("public_key", sa.String(200), "in base64url: 32 bytes, or an uncompressed point"),
        _column("attestation", sa.String(32), "kind of evidence at enrolment (wire §9), such as credential"),
        _column("enrolled_at", sa.Float(), "seconds since 1970"),
        _column("revoked_at", sa.Float(), "seconds since 1970, while an operator refuses it", null=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        comment="Devices that may sign requests",
    )
    op.create_index("devices_enrolled", "devices", ["enrolled_at"])
    op.create_index("devices_revoked", "devices", ["revoked_at"])
    op.create_table(
        "ended_sessions",
        _column("session", sa.String(22), "the random part of its cookie"),
        _column("expires_at", sa.Float(), "seconds since 1970, from when on the cookie is worthless anyway"),
        sa.PrimaryKeyConstraint("session", name=op.f("pk_ended_sessions")),
        comment="Web sessions that were ended before their time, by a logout",
    )
    op.create_table(
        "identity",
        _column("name", sa.String(16), "server or lineage: a public key; blobs: the id of the place of blobs"),
        _column("value", sa.String(64), "the value: hex, or a lineage key as text"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_identity")),
        comment="What must match the files that belong to this database; a coordinator starts with no others",
    )
    op.create_table(
        "populations",
        _column("name", sa.String(200), "name that devices check in under"),
        _column("created_at", sa.Float(), "seconds since 1970"),
        _column("holder", sa.String(8), "replica that drives the population; null when none does", null=True),
        _column("term", sa.BigInteger(), "counts the holders; what an earlier one still writes is refused"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_populations")),
        comment="Groups of devices that check in together, each with the lease of the one process that drives it",
    )
    op.create_index("populations_of", "populations", ["holder"])
    op.create_table(
        "releases",
        _column("position", sa.BigInteger(), "from 0, without gaps"),
        _column("release", sa.JSON(), "the statement, its signer and the signature"),
        _column("logged_at", sa.Float(), "seconds since 1970"),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_releases")),
        comment="The log of releases for secure rounds; rows are only ever added, as devices can demand a proof",
    )
    op.create_table(
        "replicas",
        _column("id", sa.String(8), "id of the process; ids of its sessions and assignments begin with it"),
        _column("url", sa.Text(), "where the other replicas reach it"),
        _column(
            "beat", sa.BigInteger(), "counts up while it lives; once it stands still, others declare the replica gone"
        ),
        _column("draining", sa.Boolean(), "whether it is about to stop, and takes no population"),
        _column("seen_at", sa.Float(), "seconds since 1970 at its last beat, by its own clock; for people"),
        _column("steady", sa.Float(), "a clock of its own that nobody sets, in seconds, at its last beat"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
        sa.UniqueConstraint("url", name=op.f("uq_replicas_url")),
        comment="Coordinator processes that drive populations",
    )
    op.create_table(
        "tokens",
        _column("id", sa.String(8), "the part of the token that is no secret"),
        _column("name", sa.String(60), "whose it is"),
        _column("role", sa.String(16), "viewer, operator or metrics"),
        _column("sha256", sa.String(64), "hash of its secret part, hex; the token itself is never stored"),
        _column("created_at", sa.Float(), "seconds since 1970"),
        _column("expires_at", sa.Float(), "seconds since 1970, from when on it is worthless"),
        _column("revoked_at", sa.Float(), "seconds since 1970, once it is worthless before", null=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        comment="Tokens of the admin API",
    )
    op.create_table(
        "transitions",
        _column("id", _ROW_ID, "row id, in order of time"),
        _column("entity", sa.String(16), "task, round or assignment"),
        _column("entity_id", sa.String(32), "its id"),
        _column("from_state", sa.String(16), "state before; empty at creation"),
        _column("to_state", sa.String(16), "state after"),
        _column("cause", sa.Text(), "its cause"),
        _column("at", sa.Float(), "seconds since 1970"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transitions")),
        comment="Every change of state, in order",
    )
    op.create_index("transitions_of", "transitions", ["entity", "entity_id"])
    op.create_table(
        "model_releases",
        _column("population", sa.String(200), "whose devices may use the model"),
        _column("name", sa.String(64), "name of the model"),
        _column("number", sa.Integer(), "of the version: 1, 2, 3 … of the name"),
        _column("plan_sha256", sa.String(64), "has the predict graphs, the schema and the frozen vectors"),
        _column("parameters_sha256", sa.String(64), "the model: a checkpoint with its parameters alone"),
        _column("release", sa.JSON(), "the statement, its signer and the signature"),
        _column("created_at", sa.Float(), "seconds since 1970"),
        sa.ForeignKeyConstraint(
            ["parameters_sha256"], ["blobs.sha256"], name=op.f("fk_model_releases_parameters_sha256")
        ),
        sa.ForeignKeyConstraint(["plan_sha256"], ["blobs.sha256"], name=op.f("fk_model_releases_plan_sha256")),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_model_releases_population")),
        sa.PrimaryKeyConstraint("population", "name", "number", name=op.f("pk_model_releases")),
        comment="Versions of models that apps may use; rows are only ever added",
    )
    op.create_table(
        "notices",
        _column("population", sa.String(200), "whose devices they send away"),
        _column("replica", sa.String(8), "replica that drove the population and wrote this"),
        _column("version", sa.BigInteger(), "counts up with every change"),
        _column("said", sa.Text(), "JSON: needs of active tasks, generation of return tokens, end of the idle queue"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_notices_population")),
        sa.PrimaryKeyConstraint("population", name=op.f("pk_notices")),
        comment="What decides which devices are sent away, for replicas that do not drive the population",
    )
    op.create_table(
        "sealed_blobs",
        _column("sha256", sa.String(64), "the blob"),
        _column("sealed_sha256", sa.String(64), "the blob with its bytes, sealed"),
        _column("key", sa.String(64), "key that opens them, hex; nowhere else, and in no earlier transaction"),
        sa.ForeignKeyConstraint(["sealed_sha256"], ["blobs.sha256"], name=op.f("fk_sealed_blobs_sealed_sha256")),
        sa.ForeignKeyConstraint(["sha256"], ["blobs.sha256"], name=op.f("fk_sealed_blobs_sha256")),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_sealed_blobs")),
        comment="Models of private rounds that were stored sealed before their row was committed",
    )
    op.create_table(
        "session_shapes",
        _column("population", sa.String(200), "whose sessions"),
        _column("task", sa.String(32), "the task that they were assigned to; empty before there is one"),
        _column("shape", sa.String(200), "the steps of a session, in order"),
        _column("count", sa.BigInteger(), "sessions with these steps"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_session_shapes_population")),
        sa.PrimaryKeyConstraint("population", "task", "shape", name=op.f("pk_session_shapes")),
        comment="Counts of sessions by their steps; nothing of a single device",
    )
    op.create_table(
        "tallies",
        _column("id", _ROW_ID, "number of the row"),
        _column("population", sa.String(200), "whose devices they were"),
        _column("said", sa.Text(), "JSON: keyed digests of devices with their windows, and counts of obstacles"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_tallies_population")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tallies")),
        comment="Devices that replicas sent away of populations which others drive; the driver counts and deletes them",
    )
    op.create_index("tallies_of", "tallies", ["population"])
    op.create_table(
        "tasks",
        _column("id", sa.String(32), "opaque id"),
        _column("name", sa.String(100), "name for people, not unique"),
        _column("bundle", sa.Text(), "name of the bundle"),
        _column("population", sa.String(200), "whose devices take part"),
        _column("state", sa.String(16), "active, paused, completed or cancelled"),
        _column("reason", sa.Text(), "why the task is in this state; empty when nothing is to be said"),
        _column("algorithm", sa.String(64), "name of the algorithm"),
        _column("algorithm_settings", sa.JSON(), "its settings"),
        _column("plan_sha256", sa.String(64), "what devices execute"),
        _column("plan_signature", sa.JSON(none_as_null=True), "who signed the plan, and the signature", null=True),
        _column("release", sa.JSON(none_as_null=True), "the signed release, of a task with secagg", null=True),
        _column("certificate_sha256", sa.String(64), "proof, made at export, that its graphs compute what they should"),
        _column("state_sha256", sa.String(64), "server state before round 1"),
        _column("checkpoint_sha256", sa.String(64), "what devices receive in round 1"),
        _column("settings", sa.JSON(), "the settings of its rounds, every one; the population has a column of its own"),
        _column("created_at", sa.Float(), "seconds since 1970"),
        _column("evaluates", sa.JSON(none_as_null=True), "where the models came from that it evaluates", null=True),
        _column(
            "evaluation", sa.JSON(none_as_null=True), "how often its models are evaluated, by which bundle", null=True
        ),
        sa.ForeignKeyConstraint(["certificate_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_certificate_sha256")),
        sa.ForeignKeyConstraint(["checkpoint_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_checkpoint_sha256")),
        sa.ForeignKeyConstraint(["plan_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_plan_sha256")),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_tasks_population")),
        sa.ForeignKeyConstraint(["state_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_state_sha256")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        comment="Tasks: a plan, a population, and the settings of rounds",
    )
    op.create_table(
        "alerts",
        _column("id", sa.String(16), "opaque id"),
        _column("kind", sa.String(32), "what is wrong: the reason of a stalled task, expires, unreadable or disk-full"),
        _column("task", sa.String(32), "the task; null where it is about none", null=True),
        _column("subject", sa.Text(), "what it is about beside the task, such as the TLS certificate; often empty"),
        _column("text", sa.Text(), "a sentence for people, of when it was raised"),
        _column("remedy", sa.Text(), "what to do, where the sentence does not say it"),
        _column("raised_at", sa.Float(), "seconds since 1970"),
        _column("cleared_at", sa.Float(), "seconds since 1970; null while it is open", null=True),
        _column("raised_due", sa.Boolean(), "whether the webhook is still to be told that it was raised"),
        _column("cleared_due", sa.Boolean(), "whether the webhook is still to be told that it was cleared"),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_alerts_task")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
        comment="What needed an operator: raised once and cleared once; one alert of a kind, task and subject is open",
    )
    op.create_index("alerts_cleared", "alerts", ["cleared_at"])
    op.create_table(
        "ledger",
        _column("task", sa.String(32), "the task"),
        _column("number", sa.Integer(), "the round whose noisy sum was released"),
        _column("entry", sa.JSON(), "what it spends: mechanism, noise, bound and devices, as accounting needs them"),
        _column("epsilon", sa.Float(), "what the task has spent with it, at its delta"),
        _column("nonce", sa.String(64), "what its noise is made of again, with a key that is not here", null=True),
        _column("signer", sa.String(60), "the public half of that key; both null for noise of one round", null=True),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_ledger_task")),
        sa.PrimaryKeyConstraint("task", "number", name=op.f("pk_ledger")),
        comment="What rounds spent of their task's privacy budget; rows are only ever added",
    )
    op.create_table(
        "model_counts",
        _column("population", sa.String(200), "whose check-ins"),
        _column("name", sa.String(64), "name of the model"),
        _column("number", sa.Integer(), "of the version"),
        _column("day", sa.String(10), "of the check-ins, UTC, as 2026-11-26"),
        _column("refused", sa.Boolean(), "whether devices stated that they refused it, or else that they have it"),
        _column("count", sa.BigInteger(), "check-ins that stated so"),
        sa.ForeignKeyConstraint(
            ["population", "name", "number"],
            ["model_releases.population", "model_releases.name", "model_releases.number"],
            name=op.f("fk_model_counts_population"),
        ),
        sa.PrimaryKeyConstraint("population", "name", "number", "day", "refused", name=op.f("pk_model_counts")),
        comment="Counts of check-ins by the version of a model that devices stated; nothing of a single device",
    )
    op.create_table(
        "model_roll_outs",
        _column("id", _ROW_ID, "row id, in order of time"),
        _column("population", sa.String(200), "whose devices"),
        _column("name", sa.String(64), "name of the model"),
        _column("number", sa.Integer(), "of the version"),
        _column(
            "share", sa.Float(), "of the devices that are given it, up to 1; 0 withdraws it, and no device is given any"
        ),
        _column("kind", sa.String(16), "promote or roll-back"),
        _column("at", sa.Float(), "seconds since 1970"),
        _column("actor", sa.Text(), "who did it, as in the audit log"),
        _column("gate", sa.Text(), "what a gate compared, in words; empty without one"),
        sa.ForeignKeyConstraint(
            ["population", "name", "number"],
            ["model_releases.population", "model_releases.name", "model_releases.number"],
            name=op.f("fk_model_roll_outs_population"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_roll_outs")),
        comment="Which versions devices were given; rows are only ever added, and the newest of a model decides",
    )
    op.create_index("model_roll_outs_of", "model_roll_outs", ["population", "name"])
    op.create_table(
        "observations",
        _column("task", sa.String(32), "the task"),
        _column("replica", sa.String(8), "the driver that says this; worthless once another drives the population"),
        _column("version", sa.BigInteger(), "counts the writes"),
        _column("since", sa.Float(), "when it took the task up, or found it resumed, in seconds since 1970"),
        _column("begins_at", sa.Float(), "the end of the last pause after failed attempts", null=True),
        _column("eligible", sa.Integer(), "waiting devices that could be drawn"),
        _column("ineligible", sa.JSON(), "waiting devices that could not, by what keeps them from it"),
        _column("rejected", sa.JSON(), "check-ins of the last minute or two that were rejected, by what kept them"),
        _column(
            "accepted_at", sa.Float(), "the last accepted check-in to the population, in seconds since 1970", null=True
        ),
        _column("silent", sa.Integer(), "devices of the round that were not heard of lately"),
        _column("silent_since", sa.Float(), "since when the first of them was not, in seconds since 1970", null=True),
        _column("phase", sa.String(16), "phase of a secure round; empty without one"),
        _column("answered", sa.Integer(), "devices that have sent their message of the phase"),
        _column("asked", sa.Integer(), "devices whose message the phase needs"),
        _column("members", sa.Integer(), "devices that a second trip of the same cohort may draw", null=True),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_observations_task")),
        sa.PrimaryKeyConstraint("task", name=op.f("pk_observations")),
        comment="What drivers know of their tasks only in memory: why a task makes no progress",
    )
    op.create_table(
        "rounds",
        _column("id", _ROW_ID, "row id"),
        _column("task", sa.String(32), "the task"),
        _column("number", sa.Integer(), "from 1; a committed number is never run again"),
        _column("attempt", sa.Integer(), "from 1; an abandoned number is tried again as the next attempt"),
        _column("state", sa.String(16), "selecting, configuring, reporting, aggregating, committed or abandoned"),
        _column("reason", sa.Text(), "why it was abandoned; else empty"),
        _column("assigned", sa.Integer(), "devices given an assignment"),
        _column("reported", sa.Integer(), "reports folded into the sum"),
        _column("aborted", sa.Integer(), "devices that aborted"),
        _column("lost", sa.Integer(), "devices that vanished"),
        _column("expired", sa.Integer(), "devices that the deadline cut off"),
        _column("stale", sa.Integer(), "assignments that were too stale at its end; this and the next three: buffered"),
        _column("taken_over", sa.Integer(), "open assignments of earlier rounds that it began with"),
        _column("handed_on", sa.Integer(), "open assignments that went on after its end"),
        _column("staleness", sa.JSON(), "counts of its reports by staleness, from 0; empty in mode synchronous"),
        _column(
            "opened_at", sa.Float(), "when it could draw devices, in seconds since 1970; not when it began to wait"
        ),
        _column("ended_at", sa.Float(), "seconds since 1970", null=True),
        _column("state_sha256", sa.String(64), "server state after the round, once committed", null=True),
        _column("checkpoint_sha256", sa.String(64), "what devices receive next, once committed", null=True),
        _column("lineage", sa.JSON(none_as_null=True), "signed entry that says where it comes from", null=True),
        _column("metrics", sa.JSON(), "mean metrics by name"),
        sa.ForeignKeyConstraint(["checkpoint_sha256"], ["blobs.sha256"], name=op.f("fk_rounds_checkpoint_sha256")),
        sa.ForeignKeyConstraint(["state_sha256"], ["blobs.sha256"], name=op.f("fk_rounds_state_sha256")),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_rounds_task")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
        sa.UniqueConstraint("task", "number", "attempt", name=op.f("uq_rounds_task_number_attempt")),
        comment="Attempts at a round",
    )
    op.create_index("rounds_with", "rounds", ["checkpoint_sha256"])
    op.create_table(
        "assignments",
        _column("id", sa.String(32), "unguessable id"),
        _column("round", _ROW_ID, "the round that drew the device, from whose model it starts"),
        _column("slot", sa.Integer(), "place in the cohort, from 0; keys the device's random numbers"),
        _column("device", sa.String(200), "the device that signed the check-in"),
        _column("state", sa.String(16), "assigned, reported, aborted, lost, not-needed, expired or too-stale"),
        _column("reason", sa.Text(), "why it was aborted, or its device is left out of further attempts; else empty"),
        _column("assigned_at", sa.Float(), "seconds since 1970"),
        sa.ForeignKeyConstraint(["round"], ["rounds.id"], name=op.f("fk_assignments_round")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assignments")),
        sa.UniqueConstraint("round", "slot", name=op.f("uq_assignments_round_slot")),
        comment="One device's part in one round",
    )
    op.create_table(
        "reports",
        _column("assignment", sa.String(32), "the assignment"),
        _column("round", _ROW_ID, "the round whose sum it is in"),
        _column("sha256", sa.String(64), "digest of the body, hex"),
        _column("received_at", sa.Float(), "seconds since 1970"),
        sa.ForeignKeyConstraint(["assignment"], ["assignments.id"], name=op.f("fk_reports_assignment")),
        sa.ForeignKeyConstraint(["round"], ["rounds.id"], name=op.f("fk_reports_round")),
        sa.PrimaryKeyConstraint("assignment", name=op.f("pk_reports")),
        comment="Reports that were counted; their contents are never stored",
    )
    op.create_index("reports_of", "reports", ["round"])


def downgrade() -> None:
    """Drop every table, with its indexes."""
    tables = (
        "reports", "assignments", "rounds", "observations", "model_roll_outs", "model_counts", "ledger", "alerts",
        "tasks", "tallies", "session_shapes", "sealed_blobs", "notices", "model_releases", "transitions", "tokens",
        "replicas", "releases", "populations", "identity", "ended_sessions", "devices", "budgets", "blobs", "audit",
    )  # fmt: skip
    for name in tables:
        op.drop_table(name)
