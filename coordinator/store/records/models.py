"""Rows of released models, of blobs that are sealed or go, and of the store's identity, within one transaction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from datetime import date

import msgspec
from sqlalchemy import ColumnElement, Table, bindparam, case, delete, exists, func, insert, or_, select, update

from coordinator.rules.entities import SealedBlob
from coordinator.rules.roll_outs import ModelCount, ModelVersion, RollOut
from coordinator.rules.states import AssignmentState, RoundState
from coordinator.store import tables
from coordinator.store.records.rows import DAY_S, ModelCounts, Part, adding, reader
from fedcore.plan import BlobRef
from fedcore.release import Signed
from fedcore.signing import ModelRelease
from fedcore.validation import converter

_signed = converter(Signed)


_ADD = adding(tables.MODEL_COUNTS)
_version, _roll_out = reader(ModelVersion), reader(RollOut)


class ModelRecords(Part):
    """The operations on these rows."""

    def hold(self) -> None:
        """Let other writers of these rows wait until the transaction ends: what is the next one rests on all before."""
        self._lock_writers(tables.MODEL_RELEASES)
        self._lock_writers(tables.MODEL_ROLL_OUTS)

    def names(self) -> list[tuple[str, str]]:
        """Every model: its population and its name, in order."""
        columns = (tables.MODEL_RELEASES.c.population, tables.MODEL_RELEASES.c.name)
        names = select(*columns).where(self._shown(columns[0])).distinct()
        rows = self._connection.execute(names.order_by(*columns))
        return [(row.population, row.name) for row in rows]

    def versions(self, population: str, name: str) -> list[ModelVersion]:
        """The released versions of a model, in order of their numbers: 1, 2, 3 …"""
        of_model = self._of_model(tables.MODEL_RELEASES, population, name)
        return self._all(
            _version, select(tables.MODEL_RELEASES).where(of_model).order_by(tables.MODEL_RELEASES.c.number)
        )

    def version(self, population: str, name: str, number: int) -> ModelVersion:
        """One released version."""
        this = self._of_model(tables.MODEL_RELEASES, population, name) & (tables.MODEL_RELEASES.c.number == number)
        return _version(self._connection.execute(select(tables.MODEL_RELEASES).where(this)).one())

    def roll_outs(self, population: str, name: str) -> list[RollOut]:
        """The roll-outs of a model, in order of time."""
        of_model = self._of_model(tables.MODEL_ROLL_OUTS, population, name)
        return self._all(
            _roll_out, select(tables.MODEL_ROLL_OUTS).where(of_model).order_by(tables.MODEL_ROLL_OUTS.c.id)
        )

    def add_counts(self, counts: ModelCounts) -> None:
        """Add to the counts of check-ins by version; those of versions that were not released are left out."""
        if not counts:
            return
        newest = select(
            tables.MODEL_RELEASES.c.population, tables.MODEL_RELEASES.c.name, func.max(tables.MODEL_RELEASES.c.number)
        )
        rows = self._connection.execute(
            newest.group_by(tables.MODEL_RELEASES.c.population, tables.MODEL_RELEASES.c.name)
        )
        released = {(population, name): number for population, name, number in rows}
        known = [
            {**stated._asdict(), "day": _date(stated.day), "count": count}
            for stated, count in counts.items()
            if stated.number <= released.get((stated.population, stated.name), 0)
        ]
        if known:
            self._connection.execute(_ADD[self._connection.dialect.name], known)

    def counts(self, population: str, name: str, days: int) -> list[ModelCount]:
        """The check-ins that stated a version of a model, by day and version, in order; of the last days only."""
        of_model = self._of_model(tables.MODEL_COUNTS, population, name)
        first = _date(int(self.at // DAY_S) - days)
        key, count = (tables.MODEL_COUNTS.c.day, tables.MODEL_COUNTS.c.number), tables.MODEL_COUNTS.c["count"]
        sums = [func.sum(case((tables.MODEL_COUNTS.c.refused == refused, count), else_=0)) for refused in (False, True)]
        query = select(*key, *sums).where(of_model & (tables.MODEL_COUNTS.c.day > first)).group_by(*key).order_by(*key)
        return [
            ModelCount(day, number, int(used), int(refused))
            for day, number, used, refused in self._connection.execute(query)
        ]

    def _of_model(self, table: Table, population: str, name: str) -> ColumnElement[bool]:
        return (table.c.population == population) & (table.c.name == name) & self._shown(table.c.population)

    def add_version(self, release: ModelRelease, signed: Signed) -> ModelVersion:
        """Write a released version, whose plan and parameters have rows."""
        same = {"population": release.population, "name": release.name, "number": release.number}
        blobs = {"plan_sha256": release.plan.sha256, "parameters_sha256": release.parameters.sha256}
        values = {**same, **blobs, "release": msgspec.to_builtins(signed), "created_at": self.at}
        self._connection.execute(insert(tables.MODEL_RELEASES), values)
        return self.version(release.population, release.name, release.number)

    def add_roll_out(self, made: RollOut) -> None:
        """Write a roll-out, which is the newest of its model from now on."""
        self._connection.execute(insert(tables.MODEL_ROLL_OUTS), asdict(made))


def _date(day: int) -> str:
    """A day since 1970 as 2026-11-26."""
    return date.fromordinal(date(1970, 1, 1).toordinal() + day).isoformat()


class ReleaseRecords(Part):
    """The operations on the log of releases."""

    def append(self, release: Signed) -> None:
        """Add a release at the end, unless the log has it. Other writers of the log wait for the transaction's end."""
        self._lock_writers(tables.RELEASES)
        if release not in self.log():
            position = self._connection.scalar(select(func.count()).select_from(tables.RELEASES))
            values = {"release": msgspec.to_builtins(release), "logged_at": self.at}
            self._connection.execute(insert(tables.RELEASES).values(position=position, **values))

    def log(self) -> list[Signed]:
        """Every release that devices were ever shown, in the order in which they were added."""
        query = select(tables.RELEASES.c.release).order_by(tables.RELEASES.c.position)
        return [_signed(row) for row in self._connection.scalars(query)]


class SealedRecords(Part):
    """The operations on these rows."""

    def add(self, blob: SealedBlob) -> None:
        """Add the key of a blob; both blobs have their rows. Equal bytes need one only."""
        if self.find(blob.ref.sha256) is None:
            values = {"sha256": blob.ref.sha256, "sealed_sha256": blob.sealed.sha256, "key": blob.key.hex()}
            self._connection.execute(insert(tables.SEALED_BLOBS).values(**values))

    def find(self, sha256: str) -> SealedBlob | None:
        """The sealed form of a blob, if it has one."""
        query = select(tables.SEALED_BLOBS.c.key, tables.BLOBS.c.sha256, tables.BLOBS.c.size)
        query = query.join(tables.BLOBS, tables.SEALED_BLOBS.c.sealed_sha256 == tables.BLOBS.c.sha256)
        row = self._connection.execute(query.where(tables.SEALED_BLOBS.c.sha256 == sha256)).one_or_none()
        if row is None:
            return None
        size = self._connection.scalar(select(tables.BLOBS.c.size).where(tables.BLOBS.c.sha256 == sha256)) or 0
        return SealedBlob(BlobRef(sha256, size), BlobRef(row.sha256, row.size), bytes.fromhex(row.key))

    def names(self) -> list[str]:
        """The digests of all blobs that have a sealed form."""
        return list(self._connection.scalars(select(tables.SEALED_BLOBS.c.sha256)))

    def forget(self, names: Collection[str]) -> None:
        """Remove the keys of blobs that are stored in plain; note the time at the sealed ones."""
        these = tables.SEALED_BLOBS.c.sha256.in_(names)
        sealed = select(tables.SEALED_BLOBS.c.sealed_sha256).where(these)
        self._connection.execute(
            update(tables.BLOBS).where(tables.BLOBS.c.sha256.in_(sealed)).values(unneeded_at=self.at)
        )
        self._connection.execute(delete(tables.SEALED_BLOBS).where(these))


class GarbageRecords(Part):
    """The operations on these rows."""

    def known_blobs(self, names: Collection[str]) -> set[str]:
        """Those of `names` that are blobs with a row; until the transaction ends no other one adds or removes any."""
        self._lock_writers(tables.BLOBS)
        return set(self._connection.scalars(select(tables.BLOBS.c.sha256).where(tables.BLOBS.c.sha256.in_(names))))

    def rounds_with_models(self, task_id: str) -> list[int]:
        """The committed rounds whose models are kept."""
        kept = (tables.ROUNDS.c.task == task_id) & tables.ROUNDS.c.checkpoint_sha256.is_not(None)
        return list(self._connection.scalars(select(tables.ROUNDS.c.number).where(kept)))

    def models_in_use(self, task_id: str) -> set[int]:
        """The rounds from whose models open assignments start; 0 is the start."""
        open_ = (tables.ROUNDS.c.task == task_id) & (tables.ASSIGNMENTS.c.state == AssignmentState.ASSIGNED)
        drawn = select(tables.ROUNDS.c.number).join(tables.ASSIGNMENTS).where(open_).distinct()
        return {number - 1 for number in self._connection.scalars(drawn)}

    def forget_models(self, task_id: str, numbers: Collection[int]) -> None:
        """Remove the models of committed rounds; note the time at blobs that no row points at any more."""
        self._lock_writers(tables.BLOBS)
        of_rounds = (
            (tables.ROUNDS.c.task == task_id)
            & tables.ROUNDS.c.number.in_(numbers)
            & tables.ROUNDS.c.checkpoint_sha256.is_not(None)
        )
        models = self._connection.execute(
            select(tables.ROUNDS.c.state_sha256, tables.ROUNDS.c.checkpoint_sha256).where(of_rounds)
        )
        let_go = {digest for row in models for digest in row}
        self._connection.execute(
            update(tables.ROUNDS).where(of_rounds).values(state_sha256=None, checkpoint_sha256=None)
        )
        pointers = [key.parent for table in tables.METADATA.tables.values() for key in table.foreign_keys]
        pointers = [column for column in pointers if column.references(tables.BLOBS.c.sha256)]
        needed = [tables.BLOBS.c.sha256.in_(select(column).where(column.is_not(None))) for column in pointers]
        gone = tables.BLOBS.c.sha256.in_(let_go) & ~or_(*needed)
        self._connection.execute(update(tables.BLOBS).where(gone).values(unneeded_at=self.at))

    def forget_blobs(self, age_s: float) -> int:
        """Remove the rows of blobs at which nothing has pointed for that long; answers how many."""
        self._lock_writers(tables.BLOBS)
        return self._connection.execute(
            delete(tables.BLOBS).where(tables.BLOBS.c.unneeded_at < self.at - age_s)
        ).rowcount

    def rounds_with_cohorts(self, task_id: str, age_s: float, within: int) -> list[int]:
        """Row ids of rounds that ended over `age_s` ago, whose assignments are still there.

        The last `within` committed rounds of the task, and all later ones, are not among them. Nor are those with an
        assignment that is open.
        """
        of_task = tables.ROUNDS.c.task == task_id
        committed = select(func.max(tables.ROUNDS.c.number)).where(
            of_task & (tables.ROUNDS.c.state == RoundState.COMMITTED)
        )
        last = self._connection.scalar(committed) or 0
        old = of_task & (tables.ROUNDS.c.ended_at < self.at - age_s) & (tables.ROUNDS.c.number <= last - within)
        here = tables.ASSIGNMENTS.c.round == tables.ROUNDS.c.id
        over = exists().where(here) & ~exists().where(here & (tables.ASSIGNMENTS.c.state == AssignmentState.ASSIGNED))
        return list(self._connection.scalars(select(tables.ROUNDS.c.id).where(old & over).order_by(tables.ROUNDS.c.id)))

    def forget_cohort(self, round_id: int) -> int:
        """Remove a round's assignments with their reports and transitions; answers how many assignments."""
        ids = select(tables.ASSIGNMENTS.c.id).where(tables.ASSIGNMENTS.c.round == round_id)
        of_them = (tables.TRANSITIONS.c.entity == "assignment") & tables.TRANSITIONS.c.entity_id.in_(ids)
        self._connection.execute(delete(tables.TRANSITIONS).where(of_them))
        self._connection.execute(delete(tables.REPORTS).where(tables.REPORTS.c.assignment.in_(ids)))
        return self._connection.execute(
            delete(tables.ASSIGNMENTS).where(tables.ASSIGNMENTS.c.round == round_id)
        ).rowcount


_VALUE = select(tables.IDENTITY.c.value).where(tables.IDENTITY.c.name == bindparam("key"))


class IdentityRecords(Part):
    """The values by their names.

    What is read in a `writing` transaction does not change until its end. Processes that start together on a new
    database decide one after the other: the first one writes, and the others find its value.
    """

    def get(self, name: str) -> str | None:
        """A value; None before there is one."""
        if self._writing:
            self._lock_writers(tables.IDENTITY)
        value: str | None = self._connection.scalar(_VALUE, {"key": name})
        return value

    def names_blobs(self) -> bool:
        """Whether the database names any blob."""
        return self._connection.scalar(select(tables.BLOBS.c.sha256).limit(1)) is not None

    def put(self, name: str, value: str) -> None:
        """Write a value in place of the one before."""
        self._lock_writers(tables.IDENTITY)
        there = update(tables.IDENTITY).where(tables.IDENTITY.c.name == name).values(value=value)
        if self._connection.execute(there).rowcount == 0:
            self._connection.execute(insert(tables.IDENTITY).values(name=name, value=value))
