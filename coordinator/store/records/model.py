"""Rows of released models and of their roll-outs, within one transaction. They are only ever added."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from typing import Any

import msgspec
from sqlalchemy import Insert, Row, case, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.model_counts import DAY_S, ModelCounts
from coordinator.rules.roll_outs import ModelCount, ModelVersion, RollOut, RollOutKind
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import MODEL_COUNTS, MODEL_RELEASES, MODEL_ROLL_OUTS
from fedcore.decoding import converter
from fedcore.model_release import ModelRelease
from fedcore.release import Signed

_signed = converter(Signed)


def _adding(new: postgresql.Insert | sqlite.Insert) -> Insert:
    more = {"count": MODEL_COUNTS.c["count"] + new.excluded["count"]}
    return new.on_conflict_do_update(index_elements=list(MODEL_COUNTS.primary_key), set_=more)


_ADD = {"postgresql": _adding(postgresql.insert(MODEL_COUNTS)), "sqlite": _adding(sqlite.insert(MODEL_COUNTS))}
_ROLL_OUT = ("population", "name", "number", "share", "at", "actor", "gate")


class ModelRecords(WithinTransaction):
    """The operations on these rows."""

    def hold(self) -> None:
        """Let other writers of these rows wait until the transaction ends: what is the next one rests on all before."""
        self._lock_writers(MODEL_RELEASES)
        self._lock_writers(MODEL_ROLL_OUTS)

    def names(self) -> list[tuple[str, str]]:
        """Every model: its population and its name, in order."""
        columns = (MODEL_RELEASES.c.population, MODEL_RELEASES.c.name)
        rows = self._connection.execute(select(*columns).distinct().order_by(*columns))
        return [(row.population, row.name) for row in rows]

    def versions(self, population: str, name: str) -> list[ModelVersion]:
        """The released versions of a model, in order of their numbers: 1, 2, 3 …"""
        of_model = (MODEL_RELEASES.c.population == population) & (MODEL_RELEASES.c.name == name)
        rows = self._connection.execute(select(MODEL_RELEASES).where(of_model).order_by(MODEL_RELEASES.c.number))
        return [_version_of(row) for row in rows]

    def version(self, population: str, name: str, number: int) -> ModelVersion:
        """One released version."""
        of_model = (MODEL_RELEASES.c.population == population) & (MODEL_RELEASES.c.name == name)
        this = of_model & (MODEL_RELEASES.c.number == number)
        return _version_of(self._connection.execute(select(MODEL_RELEASES).where(this)).one())

    def roll_outs(self, population: str, name: str) -> list[RollOut]:
        """The roll-outs of a model, in order of time."""
        of_model = (MODEL_ROLL_OUTS.c.population == population) & (MODEL_ROLL_OUTS.c.name == name)
        rows = self._connection.execute(select(MODEL_ROLL_OUTS).where(of_model).order_by(MODEL_ROLL_OUTS.c.id))
        return [RollOut(**{name: getattr(row, name) for name in _ROLL_OUT}, kind=RollOutKind(row.kind)) for row in rows]

    def add_counts(self, counts: ModelCounts) -> None:
        """Add to the counts of check-ins by version; those of versions that were not released are left out."""
        if not counts:
            return
        newest = select(MODEL_RELEASES.c.population, MODEL_RELEASES.c.name, func.max(MODEL_RELEASES.c.number))
        rows = self._connection.execute(newest.group_by(MODEL_RELEASES.c.population, MODEL_RELEASES.c.name))
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
        of_model = (MODEL_COUNTS.c.population == population) & (MODEL_COUNTS.c.name == name)
        first = _date(int(self.at // DAY_S) - days)
        key, count = (MODEL_COUNTS.c.day, MODEL_COUNTS.c.number), MODEL_COUNTS.c["count"]
        sums = [func.sum(case((MODEL_COUNTS.c.refused == refused, count), else_=0)) for refused in (False, True)]
        query = select(*key, *sums).where(of_model & (MODEL_COUNTS.c.day > first)).group_by(*key).order_by(*key)
        return [
            ModelCount(day, number, int(used), int(refused))
            for day, number, used, refused in self._connection.execute(query)
        ]

    def add_version(self, release: ModelRelease, signed: Signed) -> ModelVersion:
        """Write a released version, whose plan and parameters have rows."""
        same = {"population": release.population, "name": release.name, "number": release.number}
        blobs = {"plan_sha256": release.plan.sha256, "parameters_sha256": release.parameters.sha256}
        values = {**same, **blobs, "release": msgspec.to_builtins(signed), "created_at": self.at}
        self._connection.execute(insert(MODEL_RELEASES), values)
        return self.version(release.population, release.name, release.number)

    def add_roll_out(self, made: RollOut) -> None:
        """Write a roll-out, which is the newest of its model from now on."""
        self._connection.execute(insert(MODEL_ROLL_OUTS), asdict(made))


def _date(day: int) -> str:
    """A day since 1970 as 2026-11-26."""
    return date.fromordinal(date(1970, 1, 1).toordinal() + day).isoformat()


def _version_of(row: Row[Any]) -> ModelVersion:
    same = {name: getattr(row, name) for name in ("population", "name", "number", "created_at")}
    return ModelVersion(**same, release=_signed(row.release))
