"""Forms by which an operator promotes a released model and rolls it back: each a page that asks, and what it does."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.service import Service
from coordinator.dashboard.actions import Fields
from coordinator.dashboard.forms import SHOWN, status_of
from coordinator.dashboard.models import model_form
from coordinator.dashboard.rendering import Renderer, model_page_of, redirect
from coordinator.dashboard.web_sessions import Visitor, WebSessions
from coordinator.errors import InvalidModel, UnknownModel
from coordinator.rules.entities import Role
from coordinator.rules.model_gate import Gate
from coordinator.rules.roll_outs import check_share, share_of

_VERBS = ("promote", "roll-back")


class ModelForms:
    """The endpoints of the forms."""

    def __init__(self, service: Service, sessions: WebSessions, renderer: Renderer) -> None:
        self._store = service.store
        self._sessions = sessions
        self._renderer = renderer

    def ask(self, request: Request, population: str, name: str, verb: str) -> Response:
        """Ask for the version and the share that devices are to be given."""
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        return self._show(request, visitor, (population, name, verb), {})

    def act(self, request: Request, population: str, name: str, verb: str, fields: Fields) -> Response:
        """Promote a version or roll back, or show the form again with what is wrong beside its field."""
        visitor, asked = self._sessions.visitor(request), (population, name, verb)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        try:
            self._sessions.check_form(visitor, fields)
            visitor.token.demand(Role.OPERATOR)
            if wrong := self._act(asked, fields, visitor.token.signature):
                return self._show(request, visitor, asked, fields, wrong)
        except SHOWN as error:
            return self._renderer.problem(
                request, visitor, status_of(error), str(error), model_page_of(population, name)
            )
        return redirect(model_page_of(population, name))

    def _act(self, asked: tuple[str, str, str], fields: Fields, by: str) -> dict[str, str]:
        """Do what a form asks for. The answer is what was wrong with which field; nothing was done then."""
        population, name, verb = asked
        field, version = "version", _number(fields.get("version", ""))
        try:
            if verb == "roll-back":
                self._store.roll_back_model(population, name, version, by)
                return {}
            field = "share"
            share = share_of(fields.get("share", "").strip())
            check_share(share)
            field = "gate"
            gate = fields.get("gate", "").strip() or None
            if gate:
                Gate.parse(gate)
            field = "version"
            if version is None:
                raise InvalidModel("choose the version that devices are to be given")
            self._store.promote_model(population, name, version, share, gate, by)
        except InvalidModel as error:
            return {field: str(error)}
        return {}

    def _show(
        self,
        request: Request,
        visitor: Visitor,
        asked: tuple[str, str, str],
        fields: Fields,
        wrong: Fields | None = None,
    ) -> Response:
        population, name, verb = asked
        if verb not in _VERBS:
            raise HTTPException(404, "Not Found")
        try:
            with self._store.database.reading() as records:
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
