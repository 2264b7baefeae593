"""Rows of tokens, audit log, alerts, budgets and observations, within one transaction."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, Table, case, delete, exists, func, insert, or_, select, update

from coordinator.rules.alerts import Action, Alert, AlertEvent, AuditEntry, Finding, Watcher, unwatched
from coordinator.rules.budget import Counted, PopulationBudget
from coordinator.rules.entities import LiveRound, Task, Token
from coordinator.rules.progress import LastAttempt, Observation, TaskStatus
from coordinator.rules.states import RoundState
from coordinator.store import tables
from coordinator.store.records.rows import ENDED, Part, reader, task_of
from coordinator.store.starting import start_of

_ALERTS = select(tables.ALERTS, tables.TASKS.c.population, tables.TASKS.c.name.label("task_name")).outerjoin(
    tables.TASKS
)
_alert, _entry, _budget, _token = reader(Alert), reader(AuditEntry), reader(PopulationBudget), reader(Token)
_observation, _attempt = reader(Observation), reader(LastAttempt)


class AlertRecords(Part):
    """The operations on alerts. `due`: whether a webhook is to be told."""

    def watcher(self) -> Watcher | None:
        """The replica that evaluates alerts; None while there is no population. Stays so until a writer ends."""
        columns = (tables.POPULATIONS.c.name, tables.REPLICAS.c.id, tables.REPLICAS.c.seen_at)
        query = select(*columns).outerjoin(tables.REPLICAS, tables.POPULATIONS.c.holder == tables.REPLICAS.c.id)
        query = query.order_by(tables.POPULATIONS.c.created_at, tables.POPULATIONS.c.name).limit(1)
        if self._writing:
            query = query.with_for_update(read=True, of=tables.POPULATIONS)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else Watcher(*row)

    def open(self) -> list[Alert]:
        """Alerts that were not cleared, the newest first."""
        return self._read(_ALERTS.where(tables.ALERTS.c.cleared_at.is_(None)))

    def listed(self, limit: int) -> list[Alert]:
        """What people see: that nobody evaluates alerts, if so, then open ones, then cleared ones, the newest first."""
        unseen = [] if self._only is not None else unwatched(self.watcher(), self.at)
        return [*unseen, *self._read(_ALERTS.limit(limit))]

    def due(self, limit: int) -> list[AlertEvent]:
        """The first events of which the webhook is still to be told, in order of time."""
        timed: list[tuple[float, AlertEvent]] = []
        raised, cleared = (
            (tables.ALERTS.c.raised_due, tables.ALERTS.c.raised_at),
            (tables.ALERTS.c.cleared_due, tables.ALERTS.c.cleared_at),
        )
        for is_cleared, (due, at) in enumerate((raised, cleared)):
            rows = self._connection.execute(_ALERTS.where(due).order_by(at, tables.ALERTS.c.id).limit(limit))
            timed += [(getattr(row, at.name), AlertEvent(_alert(row), cleared=bool(is_cleared))) for row in rows]
        return [event for _, event in sorted(timed, key=lambda pair: pair[0])][:limit]

    def add(self, found: Finding, *, due: bool) -> None:
        """Raise the alert of a finding."""
        kind, task, subject = found.key
        values: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "kind": kind,
            "task": task,
            "subject": subject,
            "text": found.text,
        }
        values |= {"remedy": found.remedy, "raised_at": self.at, "raised_due": due, "cleared_due": False}
        self._connection.execute(insert(tables.ALERTS), values)

    def clear(self, alert: Alert, *, due: bool) -> None:
        """Clear an open alert: not before it was raised, perhaps by a replica whose clock is ahead."""
        this = update(tables.ALERTS).where(tables.ALERTS.c.id == alert.id)
        self._connection.execute(this.values(cleared_at=max(self.at, alert.raised_at), cleared_due=due))

    def has_old(self, kept_s: float) -> bool:
        """Whether an alert was cleared longer ago than that."""
        old = select(tables.ALERTS.c.id).where(tables.ALERTS.c.cleared_at < self.at - kept_s).limit(1)
        return self._connection.scalar(old) is not None

    def delete_old(self, kept_s: float) -> None:
        """Delete alerts that were cleared longer ago than that, whether or not the webhook was told."""
        self._connection.execute(delete(tables.ALERTS).where(tables.ALERTS.c.cleared_at < self.at - kept_s))

    def delivered(self, event: AlertEvent) -> None:
        """Write that the webhook was told."""
        told = {"cleared_due" if event.cleared else "raised_due": False}
        self._connection.execute(update(tables.ALERTS).where(tables.ALERTS.c.id == event.alert.id).values(**told))

    def _read(self, query: Select[Any]) -> list[Alert]:
        query = query if self._only is None else query.where(self._shown(tables.TASKS.c.population))
        order = (tables.ALERTS.c.cleared_at.is_not(None), tables.ALERTS.c.raised_at.desc(), tables.ALERTS.c.id)
        return self._all(_alert, query.order_by(*order))


_LAST = select(func.max(tables.AUDIT.c.number))
_MOST = 1000
"""Entries in one answer."""


class AuditRecords(Part):
    """The operations on the audit log."""

    def append(
        self, actor: str, action: Action, subject: str, detail: str = "", *, population: str | None = None
    ) -> None:
        """Add an entry. The last thing in a transaction: other writers of the log wait for its end."""
        self._lock_writers(tables.AUDIT)
        query = select(tables.AUDIT.c.number, tables.AUDIT.c.sha256).order_by(tables.AUDIT.c.number.desc()).limit(1)
        number, previous = self._connection.execute(query).one_or_none() or (0, "")
        entry = AuditEntry(
            number=number + 1,
            at=self.at,
            actor=actor,
            action=action.value,
            subject=subject,
            detail=detail,
            population=population,
            sha256="",
        )
        entry = replace(entry, sha256=entry.chained(previous))
        self._connection.execute(insert(tables.AUDIT).values(**asdict(entry)))

    def last(self) -> int:
        """The number of the last entry; 0 for none."""
        return self._connection.scalar(_LAST) or 0

    def entries(self, after: int | None, limit: int) -> list[AuditEntry]:
        """The first `limit` entries after that number, or the last ones; in order, at most a thousand."""
        shown = select(tables.AUDIT).where(self._shown(tables.AUDIT.c.population))
        query = shown.order_by(tables.AUDIT.c.number.desc())
        if after is not None:
            query = shown.where(tables.AUDIT.c.number > after).order_by(tables.AUDIT.c.number)
        entries = self._all(_entry, query.limit(min(limit, _MOST)))
        return entries if after is not None else entries[::-1]

    def about_devices(self, after: int) -> list[tuple[str, Action]]:
        """The devices that were revoked or allowed again after that entry, in order."""
        actions = (Action.DEVICE_REVOKED, Action.DEVICE_ALLOWED)
        query = select(tables.AUDIT.c.subject, tables.AUDIT.c.action).where(
            (tables.AUDIT.c.number > after) & tables.AUDIT.c.action.in_(actions)
        )
        return [
            (row.subject, Action(row.action)) for row in self._connection.execute(query.order_by(tables.AUDIT.c.number))
        ]


class BudgetRecords(Part):
    """The operations on budgets, and the query for what they bound."""

    def hold(self) -> None:
        """Let others who add tasks, or change budgets, wait until the transaction ends: no two may see the same room.

        Lock first, then read: what was read before may have changed.
        """
        self._lock_writers(tables.BUDGETS)

    def of(self, population: str) -> PopulationBudget | None:
        """The budget of a population; None without one."""
        this = (tables.BUDGETS.c.population == population) & self._shown(tables.BUDGETS.c.population)
        return self._one(_budget, select(tables.BUDGETS).where(this))

    def set(self, population: str, budget: PopulationBudget | None) -> None:
        """Set the budget of a population, or remove it."""
        if budget is None:
            self._connection.execute(delete(tables.BUDGETS).where(tables.BUDGETS.c.population == population))
            return
        values = asdict(budget)
        add = self._insert_unless(tables.BUDGETS).on_conflict_do_update(
            index_elements=[tables.BUDGETS.c.population], set_=values
        )
        self._connection.execute(add, {"population": population, **values})

    def counted(self, population: str) -> list[Counted]:
        """Every task of a population with what counts of it, oldest first."""
        of_population = tables.TASKS.c.population == population
        # Tasks first: a round that ends meanwhile is then counted twice at worst, as one to come and as one that left.
        tasks = self._all(
            task_of, select(tables.TASKS).where(of_population).order_by(tables.TASKS.c.created_at, tables.TASKS.c.id)
        )
        committed = func.max(case((tables.ROUNDS.c.state == RoundState.COMMITTED, tables.ROUNDS.c.number), else_=0))
        live = func.max(case((tables.ROUNDS.c.state.in_(ENDED), 0), else_=1))
        query = (
            select(tables.ROUNDS.c.task, committed, live)
            .join(tables.TASKS)
            .where(of_population)
            .group_by(tables.ROUNDS.c.task)
        )
        rounds = {task: (number, bool(runs)) for task, number, runs in self._connection.execute(query)}
        query = (
            select(tables.LEDGER.c.task, func.count().label("rows"))
            .join(tables.TASKS)
            .where(of_population)
            .group_by(tables.LEDGER.c.task)
        )
        rows: dict[str, int] = {row.task: row.rows for row in self._connection.execute(query)}
        return [Counted(task, *rounds.get(task.id, (0, False)), rows.get(task.id, 0)) for task in tasks]


class TokenRecords(Part):
    """The operations on tokens."""

    def add(self, token: Token, sha256: str) -> None:
        """Write a token, by the hash of its secret."""
        self._connection.execute(insert(tables.TOKENS).values(**token.kept, sha256=sha256))

    def find(self, token_id: str) -> tuple[Token, str] | None:
        """A token and the hash of its secret."""
        return self._one(_with_hash, select(tables.TOKENS).where(tables.TOKENS.c.id == token_id))

    def all(self) -> list[tuple[Token, str]]:
        """Every token, oldest first."""
        return self._all(_with_hash, select(tables.TOKENS).order_by(tables.TOKENS.c.created_at, tables.TOKENS.c.id))

    def revoke(self, token_id: str) -> bool:
        """Revoke a token, unless it is revoked already; whether that changed anything."""
        still_good = (tables.TOKENS.c.id == token_id) & tables.TOKENS.c.revoked_at.is_(None)
        return (
            self._connection.execute(update(tables.TOKENS).where(still_good).values(revoked_at=self.at)).rowcount == 1
        )

    def end_session(self, session: str, expires_at: float) -> None:
        """Note that a web session is over, and forget those that expired since; again is the same as once."""
        self._connection.execute(delete(tables.ENDED_SESSIONS).where(tables.ENDED_SESSIONS.c.expires_at <= self.at))
        ended = self._insert_unless(tables.ENDED_SESSIONS).values(session=session, expires_at=expires_at)
        self._connection.execute(ended.on_conflict_do_nothing())

    def has_ended(self, session: str) -> bool:
        """Whether a web session was ended before its time."""
        return bool(self._connection.scalar(select(exists().where(tables.ENDED_SESSIONS.c.session == session))))


def _with_hash(row: Row[Any]) -> tuple[Token, str]:
    return _token(row), row.sha256


_UPLOAD_S = 86_400.0
"""How long what was uploaded may be named; as long as bytes without a row are kept."""


def _evaluating(part: str) -> ColumnElement[str]:
    """The digest of a part of the bundle by which a task's models are evaluated."""
    digest: ColumnElement[str] = tables.TASKS.c.evaluation["bundle"][part]["sha256"].as_string()
    return digest


_EVALUATED_BY = [_evaluating(part) for part in ("plan", "certificate", "state")]
_HELD: tuple[tuple[Table, list[ColumnElement[str]]], ...] = (
    (tables.UPLOADS, [tables.UPLOADS.c.sha256]),
    (
        tables.TASKS,
        [
            *(tables.TASKS.c[f"{part}_sha256"] for part in ("plan", "certificate", "state", "checkpoint")),
            *_EVALUATED_BY,
        ],
    ),
    (tables.MODEL_RELEASES, [tables.MODEL_RELEASES.c.plan_sha256, tables.MODEL_RELEASES.c.parameters_sha256]),
)
"""The columns that name blobs of a population, of which an operator there may make use by their digest."""


class UploadRecords(Part):
    """The operations on what operators of some populations uploaded, and the query for blobs that are theirs.

    A digest alone gives nobody bytes of another population: they must have been sent, or be of a task or a model there.
    """

    def add(self, sha256: str) -> None:
        """Note that an operator of the populations that may be seen has sent these bytes; forget old notes."""
        self._connection.execute(delete(tables.UPLOADS).where(tables.UPLOADS.c.at < self.at - _UPLOAD_S))
        new = self._insert_unless(tables.UPLOADS).on_conflict_do_update(
            index_elements=[*tables.UPLOADS.primary_key], set_={"at": self.at}
        )
        for population in sorted(self._only or ()):
            self._connection.execute(new, {"population": population, "sha256": sha256, "at": self.at})

    def foreign(self, digests: Iterable[str]) -> set[str]:
        """Those of these blobs that are not of the populations which may be seen."""
        return {one for one in digests if not any(self._has(place, one) for place in _HELD)}

    def has_plan(self, sha256: str) -> bool:
        """Whether a task that may be seen runs this plan, so that all that it names was looked at then."""
        return self._has((tables.TASKS, [tables.TASKS.c.plan_sha256, _evaluating("plan")]), sha256)

    def _has(self, place: tuple[Table, list[ColumnElement[str]]], sha256: str) -> bool:
        table, columns = place
        of_them = self._shown(table.c.population) & or_(*(column == sha256 for column in columns))
        return bool(self._connection.scalar(select(exists().where(of_them))))


class ObservationRecords(Part):
    """The operations on observations, and the situations of tasks that are made of them."""

    def write(self, task: str, replica: str, seen: Observation) -> None:
        """Write a driver's observation of a task in place of the last one; times are in seconds since 1970."""
        values = {"replica": replica, **asdict(seen)}
        changed = update(tables.OBSERVATIONS).where(tables.OBSERVATIONS.c.task == task)
        more = {"version": tables.OBSERVATIONS.c.version + 1}
        if not self._connection.execute(changed.values(**values, **more)).rowcount:
            self._connection.execute(insert(tables.OBSERVATIONS).values(task=task, version=1, **values))

    def version(self) -> int:
        """A number that changes whenever something is written."""
        return self._connection.scalar(select(func.sum(tables.OBSERVATIONS.c.version))) or 0

    def situations(self, tasks: Sequence[Task], live: Iterable[LiveRound]) -> list[TaskStatus]:
        """The situations of these tasks. live: the rounds that have not ended, of a task in their order."""
        running: dict[str, LiveRound] = {}
        for round_ in live:
            running.setdefault(round_.task, round_)
        these = [task.id for task in tasks]
        committed, ended, observed = self._committed(these), self._ended(these), self._observed(these)
        drivers = self._drivers()
        statuses = []
        for task in tasks:
            driver, seen_at = drivers.get(task.settings.population, (None, None))
            statuses.append(
                TaskStatus(
                    task=task,
                    committed=committed.get(task.id, 0),
                    round=running.get(task.id),
                    last=ended.get(task.id),
                    driver_seen_at=seen_at,
                    observed=observed.get((task.id, driver)),
                    starts_at=start_of(task.settings),
                )
            )
        return statuses

    def _committed(self, tasks: Sequence[str]) -> dict[str, int]:
        done = tables.ROUNDS.c.task.in_(tasks) & (tables.ROUNDS.c.state == RoundState.COMMITTED)
        query = (
            select(tables.ROUNDS.c.task, func.max(tables.ROUNDS.c.number)).where(done).group_by(tables.ROUNDS.c.task)
        )
        return {row[0]: row[1] for row in self._connection.execute(query)}

    def _ended(self, tasks: Sequence[str]) -> dict[str, LastAttempt]:
        """The last ended attempt of each task."""
        ended = tables.ROUNDS.c.task.in_(tasks) & tables.ROUNDS.c.ended_at.is_not(None)
        newest = select(func.max(tables.ROUNDS.c.id)).where(ended).group_by(tables.ROUNDS.c.task)
        query = select(
            tables.ROUNDS.c.task, tables.ROUNDS.c.number, tables.ROUNDS.c.reason, tables.ROUNDS.c.ended_at
        ).where(tables.ROUNDS.c.id.in_(newest))
        return {row.task: _attempt(row) for row in self._connection.execute(query)}

    def _drivers(self) -> dict[str, tuple[str, float]]:
        """The replica that drives each population, and the time of its last beat."""
        query = select(tables.POPULATIONS.c.name, tables.REPLICAS.c.id, tables.REPLICAS.c.seen_at)
        present = query.join(tables.REPLICAS, tables.POPULATIONS.c.holder == tables.REPLICAS.c.id)
        return {name: (replica, seen_at) for name, replica, seen_at in self._connection.execute(present)}

    def _observed(self, tasks: Sequence[str]) -> dict[tuple[str, str | None], Observation]:
        """The observation of each task by each replica."""
        rows = self._connection.execute(select(tables.OBSERVATIONS).where(tables.OBSERVATIONS.c.task.in_(tasks)))
        return {(row.task, row.replica): _observation(row) for row in rows}
