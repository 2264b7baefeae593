"""Released models on the store itself: what is released, and which devices are given which version."""

from __future__ import annotations

from msgspec import UNSET

from coordinator.errors import InvalidModel, UnknownBlob, UnknownModel
from coordinator.rules import roll_outs as roll_out_rules
from coordinator.rules.audit import STORE, Action
from coordinator.store.blobs import OpenedStore
from coordinator.store.records.records import Records
from fedcore.plan import BlobRef, Plan
from fedcore.release import Signed
from fedcore.signing import ModelRelease, verified

COUNTED_DAYS = 30
"""Days of counts that are shown, this one and those before."""


class ModelStore(OpenedStore):
    """The operations of `TaskStore` on models. Those that change something also take `by`, the actor."""

    def models(self) -> list[roll_out_rules.Model]:
        with self.database.reading() as records:
            return [model_of(records, population, name) for population, name in records.models.names()]

    def model_versions(self, population: str, name: str) -> list[roll_out_rules.ModelVersion]:
        with self.database.reading() as records:
            return versions_of(records, population, name)

    def model_history(self, population: str, name: str) -> list[roll_out_rules.RollOut]:
        with self.database.reading() as records:
            versions_of(records, population, name)
            return records.models.roll_outs(population, name)

    def model_counts(self, population: str, name: str) -> list[roll_out_rules.ModelCount]:
        with self.database.reading() as records:
            versions_of(records, population, name)
            return records.models.counts(population, name, COUNTED_DAYS)

    def release_model(self, signed: Signed, by: str = STORE) -> roll_out_rules.ModelVersion:
        release = verified(signed, ModelRelease)
        plan = Plan.decode(self._read(release.plan))
        roll_out_rules.check_model(plan, self._read(release.parameters))
        served = {release.plan, release.parameters, *roll_out_rules.predicting(plan)}
        for ref in served:
            self._read(ref)
        with self.database.writing() as records:
            records.models.hold()
            if release.population not in records.populations():
                raise InvalidModel(f"there is no population {release.population!r}: a task's is the first of its name")
            earlier_ones = records.models.versions(release.population, release.name)
            roll_out_rules.check_next(release, signed.signer, earlier_ones, records.at)
            if release.origin is not UNSET:
                task = records.task(release.origin.task)
                roll_out_rules.check_origin(release, task.settings.population, task.plan_sha256)
            self.add_blobs(records, dict.fromkeys(served, True))
            made = records.models.add_version(release, signed)
            what = f"version {release.number} for {release.population}, signed by {signed.signer}"
            records.audit.append(by, Action.MODEL_RELEASED, release.name, what)
        return made

    def promote_model(
        self, population: str, name: str, version: int, share: float, gate: str | None = None, by: str = STORE
    ) -> roll_out_rules.RollOut:
        rule = None if gate is None else roll_out_rules.Gate.parse(gate)
        with self.database.writing() as records:
            records.models.hold()
            promoted, before = _version(records, population, name, version), records.models.roll_outs(population, name)
            roll_out_rules.check_promotion(before, version, share)
            compared = (
                ""
                if rule is None
                else rule.compare(promoted.statement.evaluation, records.models.versions(population, name), before)
            )
            return _roll_out(records, promoted, share, roll_out_rules.RollOutKind.PROMOTE, by, compared)

    def roll_back_model(
        self, population: str, name: str, version: int | None = None, by: str = STORE
    ) -> roll_out_rules.RollOut:
        with self.database.writing() as records:
            records.models.hold()
            versions, before = versions_of(records, population, name), records.models.roll_outs(population, name)
            to = roll_out_rules.earlier(before, version)
            if to is None:
                return _roll_out(
                    records, versions[before[-1].number - 1], 0.0, roll_out_rules.RollOutKind.ROLL_BACK, by
                )
            return _roll_out(
                records, _version(records, population, name, to), 1.0, roll_out_rules.RollOutKind.ROLL_BACK, by
            )

    def plan_part(self, task_id: str, part: str | None = None) -> bytes:
        with self.database.reading() as records:
            data = self.blobs.get(records.task(task_id).plan_sha256)
        if part is None:
            return data
        named = next((ref for ref in roll_out_rules.predicting(Plan.decode(data)) if ref.sha256 == part), None)
        if named is None:
            raise UnknownBlob(f"the plan of task {task_id} names no predict graph or frozen vectors {part[:12]}…")
        return self._read(named)

    def model_for(self, device: str, population: str, name: str) -> Signed | None:
        """The release of a model for a device; None when it has none."""
        with self.database.reading() as records:
            number = roll_out_rules.version_for(device, records.models.roll_outs(population, name))
            return None if number is None else records.models.version(population, name, number).release

    def _read(self, ref: BlobRef) -> bytes:
        """A blob that a release names. Raises UnknownBlob, or DigestMismatch when it has another size."""
        return ref.check(self.blobs.get(ref.sha256))


def model_of(records: Records, population: str, name: str) -> roll_out_rules.Model:
    """A model that was released, and what devices have of it."""
    roll_outs = records.models.roll_outs(population, name)
    newest = roll_outs[-1] if roll_outs else None
    return roll_out_rules.Model(
        population=population,
        name=name,
        versions=len(records.models.versions(population, name)),
        current=newest.number if newest else None,
        share=newest.share if newest else None,
        others=roll_out_rules.for_all(roll_outs) if newest and newest.share < 1 else None,
    )


def versions_of(records: Records, population: str, name: str) -> list[roll_out_rules.ModelVersion]:
    """The versions of a model, one at least. Raises UnknownModel."""
    versions = records.models.versions(population, name)
    if not versions:
        raise UnknownModel(f"population {population!r} has no model {name!r}; `muster model list` has them")
    return versions


def _version(records: Records, population: str, name: str, number: int) -> roll_out_rules.ModelVersion:
    """A version that may be rolled out. Raises UnknownModel, and InvalidModel when devices would refuse it."""
    versions = {version.number: version for version in versions_of(records, population, name)}
    if number not in versions:
        raise UnknownModel(f"version {number} of model {name!r} was not released; the last one is {max(versions)}")
    version = versions[number]
    shown = {one.number for one in records.models.roll_outs(population, name)}
    roll_out_rules.check_counter(version.statement, version.release.signer, [versions[one] for one in sorted(shown)])
    roll_out_rules.check_unexpired(version.statement, records.at)
    return version


def _roll_out(
    records: Records,
    version: roll_out_rules.ModelVersion,
    share: float,
    kind: roll_out_rules.RollOutKind,
    by: str,
    gate: str = "",
) -> roll_out_rules.RollOut:
    done = Action.MODEL_PROMOTED if kind is roll_out_rules.RollOutKind.PROMOTE else Action.MODEL_ROLLED_BACK
    what = f"version {version.number} for {share:.6g} of the devices of {version.population}"
    records.audit.append(by, done, version.name, f"{what}; {gate}" if gate else what)
    made = roll_out_rules.RollOut(
        population=version.population,
        name=version.name,
        number=version.number,
        share=share,
        kind=kind,
        at=records.at,
        actor=by,
        gate=gate,
    )
    records.models.add_roll_out(made)
    return made
