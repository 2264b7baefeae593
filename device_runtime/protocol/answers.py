"""Answers of the coordinator, checked and decoded: messages, problems, the received part of an upload."""

from __future__ import annotations

import contextlib
import email.utils
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from device_runtime.errors import BadAnswer, RefusalHints, Refused, plain
from device_runtime.protocol.connection import HttpResponse
from fedcore.errors import WireError
from fedcore.wire.messages import Assignment, Rejected, decode
from fedcore.wire.problems import PROBLEM_FIELD, PROBLEM_TYPE, Problem, decode_problem

MOST_FORMATS = 20
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def decode_answer(asked: str, answer: Answer, kind: Any) -> Any:
    """The message in an answer. asked: the request, for errors. Raises BadAnswer."""
    if not answer.headers.get("content-type", "").startswith("application/json"):
        # Usually a captive portal's or a proxy's page, which is gone in minutes.
        raise BadAnswer(f"{asked} was answered with something other than JSON")
    try:
        return decode(answer.body, kind)
    except WireError as error:
        raise BadAnswer(f"{asked}: {error}", permanent=True) from error


def upload_offset(answer: Answer, length: int) -> int:
    """The number of bytes of an upload that have arrived; `length` when it was counted. Raises BadAnswer."""
    if answer.headers.get("upload-complete") == "?1":
        return length
    offset = answer.headers.get("upload-offset", "")
    if not _NUMBER.fullmatch(offset) or int(offset) > length:
        raise BadAnswer("the coordinator does not say how much of the report has arrived")
    return int(offset)


def printable(answer: Rejected) -> Rejected:
    """A rejection whose format names are safe to print."""
    return msgspec.structs.replace(answer, formats=tuple(map(plain, answer.formats[:MOST_FORMATS])))


def check_names(assignment: Assignment) -> None:
    """Raise BadAnswer unless an assignment's names are printable: they are stored, and shown to the device's owner."""
    for name in (assignment.assignment, assignment.task, assignment.plan.sha256, assignment.checkpoint.sha256):
        if plain(name) != name:
            raise BadAnswer(f"an assignment names something {name[:40]!r}, which is no name", permanent=True)


def is_continuation(response: HttpResponse, start: int) -> bool:
    """Whether an answer is the rest of a blob from byte `start` on; otherwise it is the whole blob."""
    return response.status == 206 and response.headers.get("content-range", "").startswith(f"bytes {start}-")


def refusal(asked: str, answer: Answer) -> Refused:
    """The error for an answer with a problem; without a problem document, one made from the status."""
    after = answer.headers.get("retry-after", "")
    after_s = float(after) if after.isdecimal() else 0.0
    problem = Problem("", "", answer.status, f"{asked} was answered with status {answer.status}")
    if answer.headers.get("content-type", "").startswith(PROBLEM_TYPE):
        with contextlib.suppress(WireError):
            problem = decode_problem(answer.body)
    # An answer to HEAD has no body.
    slug = problem.slug or answer.headers.get(PROBLEM_FIELD.lower()) or f"http-{answer.status}"
    hints = RefusalHints(problem.retry, after_s, _time(answer.headers.get("date", "")))
    return Refused(answer.status, slug, problem.detail, hints)


def _time(date: str) -> float | None:
    """Seconds since 1970 of a Date header; None if it is not a date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
