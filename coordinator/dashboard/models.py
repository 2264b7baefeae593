"""Pages of released models: their values, and the forms that promote one and roll it back."""

from __future__ import annotations

from datetime import date
from typing import Any, NamedTuple

from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.dashboard.curves import Chart, chart, charts
from coordinator.dashboard.rendering import Endpoints, Fields, Visitor, model_page_of
from coordinator.dashboard.views import evaluated
from coordinator.errors import InvalidModel, UnknownModel
from coordinator.rules.entities import Task, Token
from coordinator.rules.kinds import Figures, figures_of
from coordinator.rules.roll_outs import Gate, Model, ModelCount, ModelVersion, RollOut, check_share, earlier, share_of
from coordinator.rules.task_settings import canonical
from coordinator.store.models import COUNTED_DAYS, model_of, versions_of
from coordinator.store.records.records import Records
from fedcore.signing import ModelRelease


class Origin(NamedTuple):
    """Where a version is from: a task and its round. attempt: the one that was committed; None of the start."""

    task: Task
    round: int
    attempt: int | None


class VersionPart(NamedTuple):
    """A version on the page of its model. share: of the devices that are given it now, from 0 to 1."""

    version: ModelVersion
    statement: ModelRelease
    share: float
    origin: Origin | None
    figures: Figures | None


class InUse(NamedTuple):
    """Check-ins of the last day that has any, by version; over time: by day, a line for each version."""

    day: str
    counts: tuple[ModelCount, ...]
    over_time: Chart | None

    @property
    def check_ins(self) -> int:
        """Those that stated a version."""
        return sum(one.check_ins for one in self.counts)


class ModelPage(NamedTuple):
    """All that the page of a model shows; versions and roll-outs, the newest first. unserved: the share without any."""

    model: Model
    versions: tuple[VersionPart, ...]
    unserved: float
    history: tuple[RollOut, ...]
    training: Task | None
    charts: tuple[Chart, ...]
    in_use: InUse | None


def models_page(records: Records) -> dict[str, Any]:
    """Every model that was released."""
    return {"models": [model_of(records, population, name) for population, name in records.models.names()]}


def model_page(records: Records, population: str, name: str) -> dict[str, Any]:
    """The page of a model. Raises UnknownModel."""
    versions = versions_of(records, population, name)
    model, roll_outs = model_of(records, population, name), records.models.roll_outs(population, name)
    parts = tuple(_part(records, model, version) for version in reversed(versions))
    training = parts[0].origin.task if parts[0].origin else None
    curve = evaluated(records.overview.evaluations(training.id)) if training else []
    page = ModelPage(
        model=model,
        versions=parts,
        unserved=1 - sum(part.share for part in parts),
        history=tuple(reversed(roll_outs)),
        training=training,
        charts=charts(curve) if len(curve) > 1 else (),
        in_use=_in_use(records.models.counts(population, name, COUNTED_DAYS)),
    )
    return {"page": page}


def model_form(records: Records, population: str, name: str) -> dict[str, Any]:
    """What the forms of a model choose from. back: what a roll-back returns to; None where it withdraws.

    Raises UnknownModel.
    """
    versions = versions_of(records, population, name)
    roll_outs = records.models.roll_outs(population, name)
    try:
        back, obstacle = earlier(roll_outs, None), ""
    except (InvalidModel, UnknownModel) as error:
        back, obstacle = None, str(error)
    return {
        "model": model_of(records, population, name),
        "numbers": [version.number for version in reversed(versions)],
        "back": back,
        "obstacle": obstacle,
    }


def _in_use(counts: list[ModelCount]) -> InUse | None:
    if not counts:
        return None
    last = date.fromisoformat(counts[-1].day)
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in counts:
        ago = (date.fromisoformat(one.day) - last).days
        lines.setdefault(f"version {one.number}", []).append((ago, one.check_ins))
    over_time = (
        chart("check-ins", lines, "in a day", "days before the last") if len({one.day for one in counts}) > 1 else None
    )
    return InUse(counts[-1].day, tuple(one for one in counts if one.day == counts[-1].day), over_time)


def _part(records: Records, model: Model, version: ModelVersion) -> VersionPart:
    statement, share = version.statement, 0.0
    if model.share is not None:
        share += model.share if version.number == model.current else 0
        share += 1 - model.share if version.number == model.others else 0
    return VersionPart(
        version, statement, share, _origin(records, statement), figures_of("evaluate", statement.evaluation)
    )


def _origin(records: Records, statement: ModelRelease) -> Origin | None:
    """Its task was there when the version was released, and tasks stay."""
    if statement.origin is UNSET:
        return None
    task, number = records.task(statement.origin.task), statement.origin.round
    return Origin(task, number, records.overview.committed_attempt(task.id, number))


_VERBS = ("promote", "roll-back")
WITHDRAW = "withdraw"
"""What the form of a roll-back has in the place of a version, where there is none to return to."""


class ModelForms(Endpoints):
    """The endpoints of the forms."""

    def ask(self, request: Request, population: str, name: str, verb: str) -> Response:
        """Ask for the version and the share that devices are to be given."""
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        return self._show(request, visitor, visitor.token, (population, name, verb), {})

    def act(self, request: Request, population: str, name: str, verb: str, fields: Fields) -> Response:
        """Promote a version or roll back, or show the form again with what is wrong beside its field."""
        asked = population, name, verb

        def act(visitor: Visitor, token: Token) -> Response | None:
            wrong = self._act(asked, fields, token)
            return self._show(request, visitor, token, asked, fields, wrong) if wrong else None

        return self._operate(request, fields, model_page_of(population, name), act)

    def _act(self, asked: tuple[str, str, str], fields: Fields, token: Token) -> dict[str, str]:
        """Do what a form asks for. The answer is what was wrong with which field; nothing was done then."""
        (population, name, verb), store, by = asked, self._store(token), token.signature
        withdraw = fields.get("version") == WITHDRAW
        field, version = "version", None if withdraw else _number(fields.get("version", ""))
        try:
            if verb == "roll-back":
                store.roll_back_model(population, name, version, withdraw, by)
                return {}
            field = "share"
            share = share_of(fields.get("share", "").strip())
            check_share(share)
            field = "gate"
            gate = fields.get("gate", "").strip() or None
            if gate:
                Gate.parse(gate)
            field, where = "where", fields.get("where", "").strip()
            canonical(where, InvalidModel)
            field = "version"
            if version is None:
                raise InvalidModel("choose the version that devices are to be given")
            store.promote_model(population, name, version, share, gate, where=where, by=by)
        except InvalidModel as error:
            return {field: str(error)}
        return {}

    def _show(
        self,
        request: Request,
        visitor: Visitor,
        token: Token,
        asked: tuple[str, str, str],
        fields: Fields,
        wrong: Fields | None = None,
    ) -> Response:
        population, name, verb = asked
        if verb not in _VERBS:
            raise HTTPException(404, "Not Found")
        try:
            with self._store(token).database.reading() as records:
                seen = model_form(records, population, name)
        except UnknownModel as error:
            return self._renderer.problem(request, visitor, 404, str(error), "/models")
        status = 422 if wrong else 200
        return self._renderer.page(request, visitor, f"{verb}.html", status, **seen, given=fields, wrong=wrong or {})


def _number(text: str) -> int | None:
    """The number of a version; None of an empty field. Raises UnknownModel."""
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UnknownModel(f"{text!r} is not a version's number: choose one that was released")
    return int(text)
