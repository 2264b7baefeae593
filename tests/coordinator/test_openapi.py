"""Generated requests against both APIs: the OpenAPI documents say what may be sent and what may come back.

MUSTER_EXAMPLES=1000 asks for as many requests per route as that; without it there are few, always the same.
"""

from __future__ import annotations

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coordinator.server import serving_both
from coordinator.settings import Settings
from coordinator.store.rows import Role
from coordinator.tokens import issue

EXAMPLES = int(os.environ.get("MUSTER_EXAMPLES", "5"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FEW = settings(
    max_examples=EXAMPLES,
    derandomize="MUSTER_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def served(store, register, tmp_path):
    """Both APIs' URLs, on a store with a task."""
    register(goal=1)
    given = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0, "admin_port": 0}
    with serving_both(Settings(**given, max_wait_s=0.05, message_limit_bytes=2048)) as urls:
        yield urls


def every_route(url, ask):
    """Generated requests to every route of the document at this address."""
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        FEW(given(case=found.ok().as_strategy())(ask))()


def test_whatever_a_device_sends_is_answered_as_the_document_says(served):
    def ask(case):
        case.validate_response(case.call(), checks=CHECKS)

    every_route(served.devices, ask)


def test_whatever_an_operator_sends_is_answered_as_the_document_says(served, store):
    token = issue(store.database, "alice", Role.OPERATOR)[1]

    def ask(case):
        case.validate_response(case.call(headers={"Authorization": f"Bearer {token}"}), checks=CHECKS)

    every_route(served.admin, ask)
