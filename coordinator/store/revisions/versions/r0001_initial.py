"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger(), nullable=False, comment="from 1, without gaps"),
        sa.Column("at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.Column(
            "actor",
            sa.Text(),
            nullable=False,
            comment="an operator with the token's id, an operator on the store, or a device",
        ),
        sa.Column("action", sa.String(length=32), nullable=False, comment="what was done, such as task-paused"),
        sa.Column("subject", sa.Text(), nullable=False, comment="id of the task, token or device"),
        sa.Column("detail", sa.Text(), nullable=False, comment="more about it; often empty"),
        sa.Column(
            "sha256", sa.String(length=64), nullable=False, comment="hash over all this and the hash before, hex"
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
        comment="What operators, tokens and devices did; rows are only ever added, each chained to the one before",
    )
    op.create_table(
        "blobs",
        sa.Column("sha256", sa.String(length=64), nullable=False, comment="digest of the bytes, hex; the file's name"),
        sa.Column("size", sa.BigInteger(), nullable=False, comment="bytes"),
        sa.Column(
            "public",
            sa.Boolean(),
            nullable=False,
            comment="whether devices may fetch it: plans, graphs, checkpoints; never server state",
        ),
        sa.Column("created_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.Column(
            "unneeded_at",
            sa.Float(),
            nullable=True,
            comment="since when no row points at it, in seconds since 1970; null before",
        ),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_blobs")),
        comment="Immutable files; a row is written after its file is durable",
    )
    op.create_table(
        "devices",
        sa.Column(
            "id", sa.String(length=32), nullable=False, comment="made from the public key, which therefore has one id"
        ),
        sa.Column(
            "algorithm",
            sa.String(length=32),
            nullable=False,
            comment="signature algorithm: ed25519 or ecdsa-p256-sha256",
        ),
        sa.Column(
            "public_key",
            sa.String(length=200),
            nullable=False,
            comment="in base64url: 32 bytes, or an uncompressed point",
        ),
        sa.Column(
            "attestation",
            sa.String(length=32),
            nullable=False,
            comment="kind of evidence at enrolment (wire §9), such as credential",
        ),
        sa.Column("enrolled_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.Column("revoked_at", sa.Float(), nullable=True, comment="seconds since 1970, while an operator refuses it"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
        comment="Devices that may sign requests",
    )
    op.create_index("devices_enrolled", "devices", ["enrolled_at"], unique=False)
    op.create_index("devices_revoked", "devices", ["revoked_at"], unique=False)
    op.create_table(
        "ended_sessions",
        sa.Column("session", sa.String(length=22), nullable=False, comment="the random part of its cookie"),
        sa.Column(
            "expires_at",
            sa.Float(),
            nullable=False,
            comment="seconds since 1970, from when on the cookie is worthless anyway",
        ),
        sa.PrimaryKeyConstraint("session", name=op.f("pk_ended_sessions")),
        comment="Web sessions that were ended before their time, by a logout",
    )
    op.create_table(
        "identity",
        sa.Column(
            "name",
            sa.String(length=16),
            nullable=False,
            comment="server or lineage: a public key; blobs: the id of the place of blobs",
        ),
        sa.Column("value", sa.String(length=64), nullable=False, comment="the value: hex, or a lineage key as text"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_identity")),
        comment="What must match the files that belong to this database; a coordinator starts with no others",
    )
    op.create_table(
        "populations",
        sa.Column("name", sa.String(length=200), nullable=False, comment="name that devices check in under"),
        sa.Column("created_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.Column(
            "holder",
            sa.String(length=8),
            nullable=True,
            comment="replica that drives the population; null when none does",
        ),
        sa.Column(
            "term",
            sa.BigInteger(),
            nullable=False,
            comment="counts the holders; what an earlier one still writes is refused",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_populations")),
        comment="Groups of devices that check in together, each with the lease of the one process that drives it",
    )
    op.create_index("populations_of", "populations", ["holder"], unique=False)
    op.create_table(
        "releases",
        sa.Column("position", sa.BigInteger(), nullable=False, comment="from 0, without gaps"),
        sa.Column("release", sa.JSON(), nullable=False, comment="the statement, its signer and the signature"),
        sa.Column("logged_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_releases")),
        comment="The log of releases for secure rounds; rows are only ever added, as devices can demand a proof",
    )
    op.create_table(
        "replicas",
        sa.Column(
            "id",
            sa.String(length=8),
            nullable=False,
            comment="id of the process; ids of its sessions and assignments begin with it",
        ),
        sa.Column("url", sa.Text(), nullable=False, comment="where the other replicas reach it"),
        sa.Column(
            "beat",
            sa.BigInteger(),
            nullable=False,
            comment="counts up while it lives; once it stands still, others declare the replica gone",
        ),
        sa.Column(
            "draining", sa.Boolean(), nullable=False, comment="whether it is about to stop, and takes no population"
        ),
        sa.Column(
            "seen_at",
            sa.Float(),
            nullable=False,
            comment="seconds since 1970 at its last beat, by its own clock; for people",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
        sa.UniqueConstraint("url", name=op.f("uq_replicas_url")),
        comment="Coordinator processes that drive populations",
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=8), nullable=False, comment="the part of the token that is no secret"),
        sa.Column("name", sa.String(length=60), nullable=False, comment="whose it is"),
        sa.Column("role", sa.String(length=16), nullable=False, comment="viewer or operator"),
        sa.Column(
            "sha256",
            sa.String(length=64),
            nullable=False,
            comment="hash of its secret part, hex; the token itself is never stored",
        ),
        sa.Column("created_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.Column("expires_at", sa.Float(), nullable=False, comment="seconds since 1970, from when on it is worthless"),
        sa.Column("revoked_at", sa.Float(), nullable=True, comment="seconds since 1970, once it is worthless before"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        comment="Tokens of the admin API",
    )
    op.create_table(
        "transitions",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=False,
            comment="row id, in order of time",
        ),
        sa.Column("entity", sa.String(length=16), nullable=False, comment="task, round or assignment"),
        sa.Column("entity_id", sa.String(length=32), nullable=False, comment="its id"),
        sa.Column("from_state", sa.String(length=16), nullable=False, comment="state before; empty at creation"),
        sa.Column("to_state", sa.String(length=16), nullable=False, comment="state after"),
        sa.Column("cause", sa.Text(), nullable=False, comment="its cause"),
        sa.Column("at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transitions")),
        comment="Every change of state, in order",
    )
    op.create_index("transitions_of", "transitions", ["entity", "entity_id"], unique=False)
    op.create_table(
        "sealed_blobs",
        sa.Column("sha256", sa.String(length=64), nullable=False, comment="the blob"),
        sa.Column("sealed_sha256", sa.String(length=64), nullable=False, comment="the blob with its bytes, sealed"),
        sa.Column(
            "key",
            sa.String(length=64),
            nullable=False,
            comment="key that opens them, hex; nowhere else, and in no earlier transaction",
        ),
        sa.ForeignKeyConstraint(["sealed_sha256"], ["blobs.sha256"], name=op.f("fk_sealed_blobs_sealed_sha256")),
        sa.ForeignKeyConstraint(["sha256"], ["blobs.sha256"], name=op.f("fk_sealed_blobs_sha256")),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_sealed_blobs")),
        comment="Models of private rounds that were stored sealed before their row was committed",
    )
    op.create_table(
        "session_shapes",
        sa.Column("population", sa.String(length=200), nullable=False, comment="whose sessions"),
        sa.Column(
            "task",
            sa.String(length=32),
            nullable=False,
            comment="the task that they were assigned to; empty before there is one",
        ),
        sa.Column("shape", sa.String(length=200), nullable=False, comment="the steps of a session, in order"),
        sa.Column("count", sa.BigInteger(), nullable=False, comment="sessions with these steps"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_session_shapes_population")),
        sa.PrimaryKeyConstraint("population", "task", "shape", name=op.f("pk_session_shapes")),
        comment="Counts of sessions by their steps; nothing of a single device",
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(length=32), nullable=False, comment="opaque id"),
        sa.Column("name", sa.String(length=100), nullable=False, comment="name for people, not unique"),
        sa.Column("bundle", sa.Text(), nullable=False, comment="name of the bundle"),
        sa.Column("population", sa.String(length=200), nullable=False, comment="whose devices take part"),
        sa.Column("state", sa.String(length=16), nullable=False, comment="active, paused, completed or cancelled"),
        sa.Column(
            "reason",
            sa.Text(),
            nullable=False,
            comment="why the task is in this state; empty when nothing is to be said",
        ),
        sa.Column("algorithm", sa.String(length=64), nullable=False, comment="name of the algorithm"),
        sa.Column("algorithm_settings", sa.JSON(), nullable=False, comment="its settings"),
        sa.Column("plan_sha256", sa.String(length=64), nullable=False, comment="what devices execute"),
        sa.Column(
            "plan_signature",
            sa.JSON(none_as_null=True),
            nullable=True,
            comment="who signed the plan, and the signature",
        ),
        sa.Column(
            "release", sa.JSON(none_as_null=True), nullable=True, comment="the signed release, of a task with secagg"
        ),
        sa.Column(
            "certificate_sha256",
            sa.String(length=64),
            nullable=False,
            comment="proof, made at export, that its graphs compute what they should",
        ),
        sa.Column("state_sha256", sa.String(length=64), nullable=False, comment="server state before round 1"),
        sa.Column("checkpoint_sha256", sa.String(length=64), nullable=False, comment="what devices receive in round 1"),
        sa.Column("goal", sa.Integer(), nullable=False, comment="reports that end a round"),
        sa.Column("minimum", sa.Integer(), nullable=False, comment="reports that a round must have to count"),
        sa.Column("rounds", sa.Integer(), nullable=False, comment="committed rounds after which the task is completed"),
        sa.Column("over_selection", sa.Float(), nullable=False, comment="devices selected per report wanted"),
        sa.Column("selection_timeout_s", sa.Float(), nullable=False, comment="seconds that a round waits for devices"),
        sa.Column("reporting_deadline_s", sa.Float(), nullable=False, comment="seconds that a round waits for reports"),
        sa.Column(
            "max_attempts",
            sa.Integer(),
            nullable=False,
            comment="failed attempts at a round in a row after which the task is paused",
        ),
        sa.Column(
            "max_loss_growth",
            sa.Float(),
            nullable=False,
            comment="times its first values that a loss may be; 0 looks at no loss",
        ),
        sa.Column("min_examples", sa.Integer(), nullable=False, comment="examples that a device must hold"),
        sa.Column(
            "min_separation_s",
            sa.Float(),
            nullable=False,
            comment="seconds between two participations of a device, at least",
        ),
        sa.Column(
            "min_separation_rounds",
            sa.Integer(),
            nullable=False,
            comment="from one round of a device to its next, at least; 1 is none",
        ),
        sa.Column("requires", sa.JSON(), nullable=False, comment="conditions that a device must state"),
        sa.Column(
            "on_device", sa.JSON(), nullable=False, comment="conditions that a device checks by itself before it waits"
        ),
        sa.Column("seed", sa.BigInteger(), nullable=False, comment="key of every random number that a device draws"),
        sa.Column("formats", sa.JSON(), nullable=False, comment="formats that the plan must have"),
        sa.Column(
            "budget",
            sa.JSON(),
            nullable=False,
            comment="the largest footprint that a device can bear; null where it is not bounded",
        ),
        sa.Column(
            "secagg",
            sa.JSON(none_as_null=True),
            nullable=True,
            comment="how reports are masked; null when they are not",
        ),
        sa.Column("clear", sa.JSON(), nullable=False, comment="bounds on a report that is not masked"),
        sa.Column(
            "schedule",
            sa.JSON(),
            nullable=False,
            comment="how the server learning rate and the goal change from round to round",
        ),
        sa.Column(
            "same_cohort",
            sa.Boolean(),
            nullable=False,
            comment="whether a second trip draws only devices that the first one counted",
        ),
        sa.Column(
            "buffered", sa.JSON(none_as_null=True), nullable=True, comment="mode buffered; null in mode synchronous"
        ),
        sa.Column(
            "privacy",
            sa.JSON(none_as_null=True),
            nullable=True,
            comment="noise on sums, and the budget; null without them",
        ),
        sa.Column("created_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.ForeignKeyConstraint(["certificate_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_certificate_sha256")),
        sa.ForeignKeyConstraint(["checkpoint_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_checkpoint_sha256")),
        sa.ForeignKeyConstraint(["plan_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_plan_sha256")),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_tasks_population")),
        sa.ForeignKeyConstraint(["state_sha256"], ["blobs.sha256"], name=op.f("fk_tasks_state_sha256")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        comment="Tasks: a plan, a population, and the settings of rounds",
    )
    op.create_table(
        "ledger",
        sa.Column("task", sa.String(length=32), nullable=False, comment="the task"),
        sa.Column("number", sa.Integer(), nullable=False, comment="the round whose noisy sum was released"),
        sa.Column(
            "entry",
            sa.JSON(),
            nullable=False,
            comment="what it spends: mechanism, noise, bound and devices, as accounting needs them",
        ),
        sa.Column("epsilon", sa.Float(), nullable=False, comment="what the task has spent with it, at its delta"),
        sa.Column(
            "nonce",
            sa.String(length=64),
            nullable=True,
            comment="what its noise is made of again, with a key that is not here",
        ),
        sa.Column(
            "signer",
            sa.String(length=60),
            nullable=True,
            comment="the public half of that key; both null for noise of one round",
        ),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_ledger_task")),
        sa.PrimaryKeyConstraint("task", "number", name=op.f("pk_ledger")),
        comment="What rounds spent of their task's privacy budget; rows are only ever added",
    )
    op.create_table(
        "observations",
        sa.Column("task", sa.String(length=32), nullable=False, comment="the task"),
        sa.Column(
            "replica",
            sa.String(length=8),
            nullable=False,
            comment="the driver that says this; worthless once another drives the population",
        ),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="counts the writes"),
        sa.Column(
            "since",
            sa.Float(),
            nullable=False,
            comment="when it took the task up, or found it resumed, in seconds since 1970",
        ),
        sa.Column("begins_at", sa.Float(), nullable=True, comment="the end of the last pause after failed attempts"),
        sa.Column("eligible", sa.Integer(), nullable=False, comment="waiting devices that could be drawn"),
        sa.Column(
            "ineligible",
            sa.JSON(),
            nullable=False,
            comment="waiting devices that could not, by what keeps them from it",
        ),
        sa.Column(
            "rejected",
            sa.JSON(),
            nullable=False,
            comment="check-ins of the last minute or two that were rejected, by what kept them",
        ),
        sa.Column(
            "accepted_at",
            sa.Float(),
            nullable=True,
            comment="the last accepted check-in to the population, in seconds since 1970",
        ),
        sa.Column("silent", sa.Integer(), nullable=False, comment="devices of the round that were not heard of lately"),
        sa.Column(
            "silent_since",
            sa.Float(),
            nullable=True,
            comment="since when the first of them was not, in seconds since 1970",
        ),
        sa.Column("phase", sa.String(length=16), nullable=False, comment="phase of a secure round; empty without one"),
        sa.Column(
            "answered", sa.Integer(), nullable=False, comment="devices that have sent their message of the phase"
        ),
        sa.Column("asked", sa.Integer(), nullable=False, comment="devices whose message the phase needs"),
        sa.Column(
            "members", sa.Integer(), nullable=True, comment="devices that a second trip of the same cohort may draw"
        ),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_observations_task")),
        sa.PrimaryKeyConstraint("task", name=op.f("pk_observations")),
        comment="What drivers know of their tasks only in memory: why a task makes no progress",
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, comment="row id"),
        sa.Column("task", sa.String(length=32), nullable=False, comment="the task"),
        sa.Column("number", sa.Integer(), nullable=False, comment="from 1; a committed number is never run again"),
        sa.Column(
            "attempt",
            sa.Integer(),
            nullable=False,
            comment="from 1; an abandoned number is tried again as the next attempt",
        ),
        sa.Column(
            "state",
            sa.String(length=16),
            nullable=False,
            comment="selecting, configuring, reporting, aggregating, committed or abandoned",
        ),
        sa.Column("reason", sa.Text(), nullable=False, comment="why it was abandoned; else empty"),
        sa.Column("assigned", sa.Integer(), nullable=False, comment="devices given an assignment"),
        sa.Column("reported", sa.Integer(), nullable=False, comment="reports folded into the sum"),
        sa.Column("aborted", sa.Integer(), nullable=False, comment="devices that aborted"),
        sa.Column("lost", sa.Integer(), nullable=False, comment="devices that vanished"),
        sa.Column("expired", sa.Integer(), nullable=False, comment="devices that the deadline cut off"),
        sa.Column(
            "stale",
            sa.Integer(),
            nullable=False,
            comment="assignments that were too stale at its end; this and the next three: buffered",
        ),
        sa.Column(
            "taken_over", sa.Integer(), nullable=False, comment="open assignments of earlier rounds that it began with"
        ),
        sa.Column("handed_on", sa.Integer(), nullable=False, comment="open assignments that went on after its end"),
        sa.Column(
            "staleness",
            sa.JSON(),
            nullable=False,
            comment="counts of its reports by staleness, from 0; empty in mode synchronous",
        ),
        sa.Column(
            "opened_at",
            sa.Float(),
            nullable=False,
            comment="when it could draw devices, in seconds since 1970; not when it began to wait",
        ),
        sa.Column("ended_at", sa.Float(), nullable=True, comment="seconds since 1970"),
        sa.Column(
            "state_sha256", sa.String(length=64), nullable=True, comment="server state after the round, once committed"
        ),
        sa.Column(
            "checkpoint_sha256",
            sa.String(length=64),
            nullable=True,
            comment="what devices receive next, once committed",
        ),
        sa.Column(
            "lineage", sa.JSON(none_as_null=True), nullable=True, comment="signed entry that says where it comes from"
        ),
        sa.Column("metrics", sa.JSON(), nullable=False, comment="mean metrics by name"),
        sa.ForeignKeyConstraint(["checkpoint_sha256"], ["blobs.sha256"], name=op.f("fk_rounds_checkpoint_sha256")),
        sa.ForeignKeyConstraint(["state_sha256"], ["blobs.sha256"], name=op.f("fk_rounds_state_sha256")),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_rounds_task")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
        sa.UniqueConstraint("task", "number", "attempt", name=op.f("uq_rounds_task_number_attempt")),
        comment="Attempts at a round",
    )
    op.create_index("rounds_with", "rounds", ["checkpoint_sha256"], unique=False)
    op.create_table(
        "assignments",
        sa.Column("id", sa.String(length=32), nullable=False, comment="unguessable id"),
        sa.Column(
            "round",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=False,
            comment="the round that drew the device, from whose model it starts",
        ),
        sa.Column(
            "slot",
            sa.Integer(),
            nullable=False,
            comment="place in the cohort, from 0; keys the device's random numbers",
        ),
        sa.Column("device", sa.String(length=200), nullable=False, comment="the device that signed the check-in"),
        sa.Column(
            "state",
            sa.String(length=16),
            nullable=False,
            comment="assigned, reported, aborted, lost, not-needed, expired or too-stale",
        ),
        sa.Column(
            "reason",
            sa.Text(),
            nullable=False,
            comment="why it was aborted, or its device is left out of further attempts; else empty",
        ),
        sa.Column("assigned_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.ForeignKeyConstraint(["round"], ["rounds.id"], name=op.f("fk_assignments_round")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assignments")),
        sa.UniqueConstraint("round", "slot", name=op.f("uq_assignments_round_slot")),
        comment="One device's part in one round",
    )
    op.create_table(
        "reports",
        sa.Column("assignment", sa.String(length=32), nullable=False, comment="the assignment"),
        sa.Column(
            "round",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=False,
            comment="the round whose sum it is in",
        ),
        sa.Column("sha256", sa.String(length=64), nullable=False, comment="digest of the body, hex"),
        sa.Column("received_at", sa.Float(), nullable=False, comment="seconds since 1970"),
        sa.ForeignKeyConstraint(["assignment"], ["assignments.id"], name=op.f("fk_reports_assignment")),
        sa.ForeignKeyConstraint(["round"], ["rounds.id"], name=op.f("fk_reports_round")),
        sa.PrimaryKeyConstraint("assignment", name=op.f("pk_reports")),
        comment="Reports that were counted; their contents are never stored",
    )
    op.create_index("reports_of", "reports", ["round"], unique=False)


def downgrade() -> None:
    """Drop every table."""
    op.drop_index("reports_of", table_name="reports")
    op.drop_table("reports")
    op.drop_table("assignments")
    op.drop_index("rounds_with", table_name="rounds")
    op.drop_table("rounds")
    op.drop_table("observations")
    op.drop_table("ledger")
    op.drop_table("tasks")
    op.drop_table("session_shapes")
    op.drop_table("sealed_blobs")
    op.drop_index("transitions_of", table_name="transitions")
    op.drop_table("transitions")
    op.drop_table("tokens")
    op.drop_table("replicas")
    op.drop_table("releases")
    op.drop_index("populations_of", table_name="populations")
    op.drop_table("populations")
    op.drop_table("identity")
    op.drop_table("ended_sessions")
    op.drop_index("devices_revoked", table_name="devices")
    op.drop_index("devices_enrolled", table_name="devices")
    op.drop_table("devices")
    op.drop_table("blobs")
    op.drop_table("audit")
