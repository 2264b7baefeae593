"""Pages of the dashboard, live where they follow what happens, and the table of its addresses."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlencode, urlsplit

import segno
from fastapi import APIRouter, Depends, FastAPI
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.admin import Access
from coordinator.api.limits import DRAWN_AT_ONCE, ConnectionLimit
from coordinator.api.openapi import BYTES
from coordinator.api.page import PAGE
from coordinator.api.service import Service
from coordinator.dashboard import rendering, views
from coordinator.dashboard.curves import asked_part, comparison
from coordinator.dashboard.models import ModelForms, model_page, models_page
from coordinator.dashboard.new_task import NewTaskForm, told_apart, values
from coordinator.errors import Unavailable, UnknownBlob, UnknownModel, UnknownPopulation, UnknownRound, UnknownTask
from coordinator.operations import PREFIX
from coordinator.rules.alerts import Action
from coordinator.rules.budget import CLAIM
from coordinator.rules.entities import Task
from coordinator.rules.kinds import kind_of
from coordinator.rules.private_sums import report_bytes
from coordinator.rules.states import TaskState
from coordinator.store.database import Database
from coordinator.store.models import budget_report
from coordinator.store.records.overview import TaskQuery
from coordinator.store.records.records import Records
from fedcore.algorithms.facts import facts_of
from fedcore.bundle import decode_certificate

Look: TypeAlias = Callable[[Records], dict[str, Any]]
"""What a page shows, from rows."""
_TICK_S = 1.0
_REDRAW_S = 5.0
"""The interval after which a page is drawn anew: it shows ages in seconds. And a row may become visible after another
one of a greater id, which was taken for the last."""
_MOST_STREAMS = 100


class Streams(rendering.Endpoints):
    """The streams of open pages."""

    def __init__(self, service: Service, sessions: rendering.WebSessions, renderer: rendering.Renderer) -> None:
        super().__init__(service, sessions, renderer)
        self._open = ConnectionLimit(_MOST_STREAMS)
        self._turns = asyncio.Semaphore(DRAWN_AT_ONCE)

    async def watching(self) -> AsyncIterator[None]:
        """Count an open page as long as it is. Raises Unavailable when as many are open as may be."""
        with self._open.hold():
            yield

    async def follow(self, request: Request, template: str, look: Look) -> AsyncIterator[ServerSentEvent]:
        """The part of a page, again whenever something changed, until the session ends or the coordinator stops."""
        last: object = None
        drawn_at, ending = -_REDRAW_S, False
        with suppress(UnknownTask):
            while not ending:
                ending = self._service.driver.draining  # the last drawing says so
                if ending or time.monotonic() - drawn_at >= _REDRAW_S:
                    last = None
                with suppress(Unavailable):  # the page stays as it is until the database is back
                    async with self._turns:
                        # Asked again every time: a session whose token was revoked sees nothing more.
                        visitor = await run_in_threadpool(self._sessions.visitor, request)
                        if (token := visitor.token) is None:
                            return
                        draw = partial(self._fragment, template, look, visitor, self._store(token).database)
                        version, html = await run_in_threadpool(draw, last)
                    if version != last:
                        yield ServerSentEvent(raw_data=html)
                        drawn_at = time.monotonic()
                    last = version
                await asyncio.sleep(0 if ending else _TICK_S)

    def _fragment(
        self, template: str, look: Look, visitor: rendering.Visitor, database: Database, last: object
    ) -> tuple[object, str]:
        waiting = self._service.metrics.registry.get_sample_value("muster_sessions_waiting")
        with database.reading() as records:
            version = (records.overview.version(), records.observations.version(), waiting)
            if version == last:
                return version, ""
            return version, self._renderer.part(template, visitor, **look(records))


class JoinLink(NamedTuple):
    """A link to the page for browsers. signers: the public keys that release plans, which the link names.

    qr: the link as a QR code, an SVG picture; empty where it is too long for one.
    """

    url: str
    signers: tuple[str, ...]
    qr: str

    @property
    def secure(self) -> bool:
        """Whether it is one by HTTPS: other pages hold keys only on the coordinator's own machine."""
        return urlsplit(self.url).scheme == "https"


def join_link(page_url: str, population: str, tasks: Iterable[Task]) -> JoinLink:
    """The link for a population whose page is at page_url; it names the signers of the tasks that may go on."""
    releases = [task.release for task in tasks if not task.state.ended]
    signers = tuple(sorted({release.signer for release in releases if release is not None}))
    url = f"{page_url}?{urlencode({'population': population, 'signer': signers}, doseq=True, safe=':')}"
    return JoinLink(url, signers, _qr(url))


def _qr(text: str) -> str:
    try:
        code = segno.make_qr(text, error="l")  # the least; more where the size has room
    except segno.DataOverflowError:
        return ""
    # Dark on light in dark mode too, with the four-module border of ISO/IEC 18004: scanners need both.
    return code.svg_inline(border=4, dark="#000", light="#fff", omitsize=True, svgclass=None, lineclass=None)


_ADMIN = "admin"
_CURL = 'curl -H "Authorization: Bearer $TOKEN"'


class Operation(NamedTuple):
    """An operation as the page shows it. refusals: its own errors, without those that most operations have."""

    title: str
    about: str
    curl: str
    parameters: list[dict[str, Any]]
    bodies: dict[str, Any]
    answers: dict[str, Any]
    refusals: dict[str, str]


def api_page(document: Mapping[str, Any]) -> dict[str, Any]:
    """Operations by noun, the errors that at least half of all have, and messages by name."""
    every = [(path, method, one) for path, methods in document["paths"].items() for method, one in methods.items()]
    counted = Counter(refusal for _, _, one in every for refusal in _refusals(one).items())
    common = {refusal for refusal, count in counted.items() if 2 * count >= len(every)}
    nouns: dict[str, list[Operation]] = {}
    for path, method, one in every:
        operation = Operation(
            title=f"{method.upper()} {path}",
            about=one.get("description") or one.get("summary", ""),
            curl=_curl(path, method, one),
            parameters=one.get("parameters", []),
            bodies=one.get("requestBody", {}).get("content", {}),
            answers={status: answer for status, answer in one["responses"].items() if status < "400"},
            refusals=dict(_refusals(one).items() - common),
        )
        nouns.setdefault(_noun(path, one), []).append(operation)
    messages = document["components"]["schemas"]
    return {"title": document["info"]["title"], "nouns": nouns, "common": sorted(common), "messages": messages}


def names_of(schema: Any) -> list[str]:
    """The names of the messages that a part of the document refers to, in order."""
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for inner in schema.values() for name in names_of(inner)]
    return [name for inner in schema for name in names_of(inner)] if isinstance(schema, list) else []


def _refusals(one: Mapping[str, Any]) -> dict[str, str]:
    return {status: answer["description"] for status, answer in one["responses"].items() if status >= "400"}


def _noun(path: str, one: Mapping[str, Any]) -> str:
    """The kind of thing that an operation is about: the last that its path names one of, or else the first word."""
    if one["tags"] != [_ADMIN]:
        return str(one["tags"][0])
    named = re.findall(r"(\w+)/{", path)
    return str(named[-1]) if named else path.removeprefix(f"{PREFIX}/")


def _curl(path: str, method: str, one: Mapping[str, Any]) -> str:
    """What asks for it in a shell, where TOKEN, MUSTER and what the path names are variables."""
    parts = [_CURL if "401" in one["responses"] else "curl"]
    bodies = list(one.get("requestBody", {}).get("content", {}))
    if method != "get":
        parts.append({"head": "--head"}.get(method, f"-X {method.upper()}"))
    if bodies:
        parts.append(f"-H 'Content-Type: {bodies[0]}' --data-binary @FILE")
    if any(BYTES in answer.get("content", {}) for answer in one["responses"].values()):
        parts.append("--output FILE")
    asked = [each["name"] for each in one.get("parameters", []) if each["in"] == "query" and each.get("required")]
    query = "&".join(f"{name}=${name.upper()}" for name in asked)
    filled = re.sub(r"{(\w+)}", lambda found: f"${{{found[1].upper()}}}", path)
    return " ".join([*parts, f'"$MUSTER{filled}{"?" if query else ""}{query}"'])


_LOOK_S = 3600.0
"""The page of an answer that is opened again and again leaves one entry of the audit log in so long."""
_ALERTS = 100
"""Alerts on the overview."""
_STATIC = {
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "chart.js": "text/javascript",
    "upload.js": "text/javascript",
    "htmx-4.0.1.min.js": "text/javascript",
    "hx-sse-4.0.1.min.js": "text/javascript",
}


class Pages(rendering.Endpoints):
    """The endpoints of the pages. Without a good token only the login is shown."""

    def __init__(
        self, service: Service, sessions: rendering.WebSessions, renderer: rendering.Renderer, streams: Streams
    ) -> None:
        super().__init__(service, sessions, renderer)
        self._streams = streams
        self._looked: dict[tuple[str, str], float] = {}

    def overview(self, request: Request, which: views.Asked) -> Response:
        """Alerts, and a page of tasks."""
        return self._page(request, "overview.html", partial(self._overview, which))

    async def overview_events(self, request: Request, which: views.Asked) -> AsyncIterator[ServerSentEvent]:
        """The overview, again whenever something changed."""
        async for event in self._streams.follow(request, "overview_live.html", partial(self._overview, which)):
            yield event

    def task(self, request: Request, task: str, scale: str = "") -> Response:
        """One task: its round, its funnel, its learning curves, its history."""
        page = self._page(request, "task.html", partial(self._task, task, scale))
        token = self._sessions.visitor(request).token
        if token is not None and page.status_code == 200:
            store = self._store(token)
            shown = store.task(task)
            if kind_of(shown.algorithm.name) == "question" and self._is_news(token.signature, task):
                store.note_read(token.signature, Action.ANSWER_READ, shown)
        return page

    def _is_news(self, who: str, task: str) -> bool:
        """Whether the log does not say yet, of the last hour, that somebody looked at the answer of a task."""
        now = time.monotonic()
        self._looked = {look: at for look, at in self._looked.items() if now < at + _LOOK_S}
        return self._looked.setdefault((who, task), now) == now

    async def task_events(self, request: Request, task: str, scale: str = "") -> AsyncIterator[ServerSentEvent]:
        """A task's page, again whenever something changed."""
        async for event in self._streams.follow(request, "task_live.html", partial(self._task, task, scale)):
            yield event

    def population(self, request: Request, population: str) -> Response:
        """One population: its devices, what they run, when they came, how far, and its tasks."""
        return self._page(request, "population.html", partial(self._population, population))

    def models(self, request: Request) -> Response:
        """Every model that was released, and what devices have of it."""
        return self._page(request, "models.html", models_page)

    def model(self, request: Request, population: str, name: str) -> Response:
        """One released model: its versions, who has which, and its roll-outs."""
        return self._page(request, "model.html", lambda records: model_page(records, population, name))

    def rounds(self, request: Request, task: str, before: rendering.RowId | None = None) -> Response:
        """All attempts at rounds of a task, the newest first, on several pages."""
        return self._page(request, "rounds.html", lambda records: views.rounds_page(records, task, before))

    def round(self, request: Request, task: str, number: rendering.Number, attempt: rendering.Number) -> Response:
        """One attempt at a round: its phases, what became of its devices, times and bytes."""

        def look(records: Records) -> dict[str, Any]:
            plan = self._service.store.plan(records.task(task).plan_sha256)
            return {"page": views.round_page(records, plan, task, number, attempt)}

        return self._page(request, "round.html", look)

    def settings(self, request: Request, task: str) -> Response:
        """The settings of a task, with their meanings, its algorithm, its plan and its certificate."""

        def look(records: Records) -> dict[str, Any]:
            record, store = records.task(task), self._service.store
            return {
                "task": record,
                "told_apart": told_apart(record.settings),
                "values": values(record.settings),
                "plan": store.plan(record.plan_sha256),
                "algorithm": facts_of(store.algorithm(record.algorithm)),
                "certificate": decode_certificate(store.blobs.get(record.certificate_sha256)),
            }

        return self._page(request, "settings.html", look)

    def log(self, request: Request, task: str) -> Response:
        """Recent lines of this process's log that name a task."""
        lines, here = self._service.lines, self._service.membership.url

        def look(records: Records) -> dict[str, Any]:
            record = records.task(task)
            of_task, itself = (f" of task {record.named}", ""), (f"task {record.named}", "the task")
            shown = [line._replace(words=line.words.replace(*of_task).replace(*itself)) for line in lines.about(task)]
            return {"task": record, "lines": shown, "here": here}

        return self._page(request, "log.html", look)

    def documentation(self, request: Request) -> Response:
        """The admin API, from its OpenAPI document."""
        app: FastAPI = request.app
        here = {"origin": str(request.base_url).rstrip("/"), "names_of": names_of}
        return self._page(request, "docs.html", lambda _: api_page(app.openapi()) | here)

    def compare(self, request: Request) -> Response:
        """The curves of several tasks in one picture."""
        query = request.query_params
        look = partial(comparison, query.getlist("task"), query.get("metric", ""), query.get("scale", ""))
        return self._page(request, "compare.html", look)

    def confirm(self, request: Request, task: str, verb: str) -> Response:
        """Ask whether a task is to be cancelled, or to which model it is to go back."""
        if verb not in ("cancel", "rollback"):
            raise HTTPException(404, "Not Found")
        return self._page(request, f"{verb}.html", lambda records: views.kept_models(records, task))

    def login(self, request: Request) -> Response:
        """The form that asks for a token."""
        return self._renderer.login(request, self._sessions.visitor(request), 200)

    def static(self, name: str) -> Response:
        """A file that pages need."""
        if name not in _STATIC:
            raise HTTPException(404, "Not Found")
        data = files("coordinator.dashboard").joinpath("static", name).read_bytes()
        return Response(data, media_type=_STATIC[name], headers=rendering.HEADERS | {"Cache-Control": "max-age=3600"})

    def _page(self, request: Request, template: str, look: Look) -> Response:
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        try:
            with self._store(visitor.token).database.reading() as records:
                seen = look(records)
        except (UnknownTask, UnknownRound, UnknownPopulation, UnknownModel) as error:
            return self._renderer.problem(request, visitor, 404, str(error))
        return self._renderer.page(request, visitor, template, **seen)

    def _overview(self, which: TaskQuery, records: Records) -> dict[str, Any]:
        waiting = self._service.metrics.registry.get_sample_value("muster_sessions_waiting")
        return views.overview_page(records, which) | {
            "waiting": int(waiting or 0),
            "devices": None if records.limited else records.devices.counts(),
            "alerts": views.folded(alert for alert in records.alerts.listed(_ALERTS) if alert.cleared_at is None),
            "most_alike": views.MOST_ALIKE,
            "draining": self._service.driver.draining,
        }

    def _population(self, name: str, records: Records) -> dict[str, Any]:
        settings = self._service.settings
        page = views.population_page(records, name, self._service.check_ins.of(name, records.at))
        url = settings.page_url or f"{self._service.membership.url}{PAGE}/"
        tasks = [one for one in records.tasks(TaskState.ACTIVE, TaskState.PAUSED) if one.settings.population == name]
        join = None if settings.page is None else join_link(url, name, tasks)
        return page | {"join": join, "budget": budget_report(self._service.store, records, name), "claim": CLAIM}

    def _task(self, task: str, scale: str, records: Records) -> dict[str, Any]:
        page, store = views.task_page(records, task, log=scale == "log"), self._service.store
        shown = page.line.task
        asked = asked_part(store, records, shown) if page.line.kind == "question" else None
        try:
            report = report_bytes(store.plan(shown.plan_sha256).report, shown.settings)
        except UnknownBlob:
            report = None
        return {"page": page, "report": report, "asked": asked}


# The dashboard's routes: which address is which page, form, stream or download.


def dashboard_router(service: Service, access: Access) -> APIRouter:
    """The routes of the pages, which `/openapi.json` does not describe."""
    sessions, renderer = rendering.WebSessions(service, access), rendering.Renderer()
    streams = Streams(service, sessions, renderer)
    pages, actions = Pages(service, sessions, renderer, streams), rendering.Actions(service, sessions, renderer)
    models = ModelForms(service, sessions, renderer)
    downloads, new = rendering.Downloads(service, sessions, renderer), NewTaskForm(service, sessions, renderer)
    router = APIRouter(include_in_schema=False)
    stream: dict[str, Any] = {
        "response_class": EventSourceResponse,
        "dependencies": [Depends(sessions.require_viewer), Depends(streams.watching)],
    }
    for path, page in (
        ("/", pages.overview),
        ("/compare", pages.compare),
        ("/docs", pages.documentation),
        ("/new", new.form),
        ("/new/matching", new.matching),
        ("/models", pages.models),
        ("/populations/{population}", pages.population),
        ("/populations/{population}/models/{name}", pages.model),
        ("/populations/{population}/models/{name}/{verb}", models.ask),
        ("/login", pages.login),
        ("/static/{name}", pages.static),
        ("/tasks/{task}", pages.task),
        ("/tasks/{task}/rounds", pages.rounds),
        ("/tasks/{task}/rounds/{number}/{attempt}", pages.round),
        ("/tasks/{task}/settings", pages.settings),
        ("/tasks/{task}/log", pages.log),
        ("/tasks/{task}/model", downloads.model),
        ("/tasks/{task}/answer", downloads.answer),
        ("/tasks/{task}/plan", downloads.plan),
        ("/tasks/{task}/certificate", downloads.certificate),
        ("/tasks/{task}/privacy-certificate", downloads.privacy_certificate),
    ):
        router.add_api_route(path, page)
    router.add_api_route("/events", pages.overview_events, **stream)
    router.add_api_route("/tasks/{task}/events", pages.task_events, **stream)
    router.add_api_route("/tasks/{task}/{verb}", pages.confirm)
    for path, act in (
        ("/login", actions.login),
        ("/logout", actions.logout),
        ("/new", new.create),
        ("/populations/{population}/models/{name}/{verb}", models.act),
        ("/tasks/{task}/{verb}", actions.change),
    ):
        router.add_api_route(path, act, methods=["POST"])
    router.add_api_route("/new/blobs/{sha256}", new.upload, methods=["PUT"])
    return router
