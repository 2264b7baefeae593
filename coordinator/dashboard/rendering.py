"""HTML of the dashboard: templates, and the headers that every page has."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import quote

import jinja2
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from coordinator.dashboard.curves import HEIGHT, WIDTH
from coordinator.dashboard.times import age, clock, date
from coordinator.dashboard.web_sessions import CSRF_FIELD, Visitor
from coordinator.rules.budget import in_words
from coordinator.rules.buffers import mean_staleness
from fedcore.figures import PERCENTILES
from fedcore.validation import text_of
from fedcore.visible import visible_lines

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Renderer:
    """Pages and parts of them, from templates in which all that is not marked up is escaped."""

    def part(self, template: str, visitor: Visitor, **seen: Any) -> str:
        """A part of a page, or all of it, for a visitor."""
        return _templates().get_template(template).render(visitor=visitor, **seen)

    def page(self, request: Request, visitor: Visitor, template: str, status: int = 200, **seen: Any) -> Response:
        """A page for a visitor, with the cookie of a session that began with it."""
        html = self.part(template, visitor, **seen)
        response = Response(html, status, HEADERS, media_type="text/html")
        visitor.give(request, response)
        return response

    def login(self, request: Request, visitor: Visitor, status: int = 401, wrong: str = "") -> Response:
        """The form that asks for a token. wrong: what was wrong with the last one."""
        return self.page(request, visitor, "login.html", status, wrong=wrong)

    def problem(self, request: Request, visitor: Visitor, status: int, what: str, back: str = "/") -> Response:
        """A page that says why something was not done."""
        return self.page(request, visitor, "problem.html", status, what=what, back=back)


@functools.cache
def _templates() -> jinja2.Environment:
    """The templates, each read and compiled once in a process."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("coordinator.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finished,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {
        "width": WIDTH,
        "height": HEIGHT,
        "csrf_field": CSRF_FIELD,
        "percentiles": PERCENTILES,
    }
    templates.filters |= {"date": date, "clock": clock, "age": age, "text": text_of, "bytes": _bytes}
    templates.filters |= {"mean_staleness": mean_staleness, "percent": _percent, "epsilon": in_words}
    return templates


def model_page_of(population: str, name: str) -> str:
    """The address of a model's page."""
    return f"/populations/{quote(population, safe='')}/models/{quote(name, safe='')}"


def page_of(task: str) -> str:
    """The address of a task's page."""
    return f"/tasks/{quote(task, safe='')}"


def redirect(to: str) -> Response:
    """The answer to a form that succeeded: the browser loads a page, and loading it again repeats nothing."""
    return RedirectResponse(to, 303, headers=HEADERS)


def _finished(value: object) -> object:
    """What an expression of a template gives, with text of strangers made visible."""
    return visible_lines(value) if type(value) is str else value


def _percent(share: float) -> str:
    """A share from 0 to 1 in percent."""
    return f"{100 * share:.6g} %"


def _bytes(count: int) -> str:
    """A number of bytes in the largest of their units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
