"""The problem types of the admin API. One table for both ends: the server answers with them, its client raises them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from coordinator import errors
from coordinator.api.http import answer_problem, answer_refusal
from fedcore.errors import FedcoreError
from fedcore.wire.messages import PROBLEMS, URN, Problem, ProblemKind, RetryWindow

_OWN: dict[str, tuple[type[Exception], int, str]] = {
    "bad-token": (errors.BadToken, 401, "The token is missing, unknown, revoked or expired"),
    "role-lacking": (errors.RoleLacking, 403, "The token's role does not allow this"),
    "unknown-task": (errors.UnknownTask, 404, "No task has this id"),
    "unknown-population": (errors.UnknownPopulation, 404, "No population has this name"),
    "no-such-device": (errors.UnknownDeviceId, 404, "No device has this id"),
    "unknown-round": (errors.UnknownRound, 404, "The task has no such round, or it was not committed"),
    "unknown-model": (errors.UnknownModel, 404, "No model has this name, or no such version was released"),
    "not-private": (errors.NotPrivate, 404, "The task promises no privacy"),
    "wrong-kind": (errors.WrongKind, 404, "A question has no model, and other tasks have no answer"),
    "task-ended": (errors.TaskEnded, 409, "The task is over, or not in a state that this starts from"),
    "keys-differ": (errors.KeysDiffer, 409, "The coordinator has another key than the task's release names"),
    "budget-exceeded": (errors.BudgetExceeded, 409, "The population's privacy budget has no room for this"),
    "invalid-budget": (errors.InvalidBudget, 422, "The population cannot have this privacy budget"),
    "invalid-task": (errors.InvalidTask, 422, "The settings contradict each other, or do not fit the bundle"),
    "invalid-model": (errors.InvalidModel, 422, "The model cannot be released or rolled out like this"),
    "webhook-failed": (errors.WebhookFailed, 409, "The webhook of alerts did not take an event, or none is set"),
    "invalid-bundle": (FedcoreError, 422, "The bundle is damaged, or its algorithm or signature is not good"),
}  # fmt: skip
"""Problem types that only the admin API has, each with the error that it stands for, its status and title."""
_SHARED = (
    "malformed-message", "unknown-resource", "method-not-allowed", "unknown-blob", "too-large", "digest-mismatch",
    "internal", "unavailable",
)  # fmt: skip
ADMIN_ERRORS = {slug: error for slug, (error, _, _) in _OWN.items()}
"""The errors that have a problem type of their own, by the type's name."""
ADMIN_PROBLEMS = {slug: ProblemKind(status, title) for slug, (_, status, title) in _OWN.items()}
ADMIN_PROBLEMS |= {slug: PROBLEMS[slug] for slug in _SHARED}
"""Every problem type of the admin API."""


def slug_of(error: Exception) -> str:
    """The name of the problem type of an error in ADMIN_ERRORS."""
    return next(slug for slug, kind in ADMIN_ERRORS.items() if isinstance(error, kind))


def install_admin_problems(app: FastAPI, retry: RetryWindow) -> None:
    """Make a problem document of the errors that the store and bundles raise."""

    async def refusal(request: Request, error: Exception) -> Response:
        slug = slug_of(error)
        kind = ADMIN_PROBLEMS[slug]
        headers = {"WWW-Authenticate": "Bearer"} if kind.status == 401 else {}
        return answer_problem(request.scope, Problem(URN + slug, kind.title, kind.status, str(error)), headers)

    async def conflict(request: Request, error: Exception) -> Response:
        return answer_refusal(request.scope, errors.Unavailable(str(error)), retry)

    for kind in ADMIN_ERRORS.values():
        app.add_exception_handler(kind, refusal)
    app.add_exception_handler(errors.StoreConflict, conflict)
