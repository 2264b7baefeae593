"""Generated requests against both APIs: the OpenAPI documents say what may be sent and what may come back.

MUSTER_EXAMPLES=1000 asks for as many requests per route as that; without it there are few, always the same.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import cycle
from urllib.parse import urlsplit

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from requests.auth import AuthBase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coordinator.api.authentication import issue
from coordinator.rules.entities import Role
from coordinator.settings import Settings
from fedcore.wire import messages
from fedcore.wire.messages import CheckIn
from fedcore.wire.signatures import PublicKey, SignableRequest, Signer, content_digest
from tests.coordinator.devices import CAPABILITIES, Devices
from tests.servers import serving_both

EXAMPLES = int(os.environ.get("MUSTER_EXAMPLES", "5"))
schemathesis.serializer.alias("application/partial-upload", "application/octet-stream")
OPEN = ("/healthz", "/readyz")
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
    """Both APIs' URLs, on a store with a task; a device that has an assignment; and names of what there is."""
    task = register(goal=1, rounds=1000)
    given = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0, "admin_port": 0}
    settings = Settings(**given, max_wait_s=2, message_limit_bytes=2048, accept_unattested=True)
    with serving_both(settings) as urls, httpx2.Client(base_url=urls.devices, timeout=10) as client:
        signer = Devices(client)["a"]
        hello = messages.encode(CheckIn(capabilities=CAPABILITIES, examples={"default": 10}))
        session = client.post("/v1/populations/phones/checkins", content=hello, auth=signer).json()["session"]
        path = f"/v1/sessions/{session}/assignments"
        assigned = client.post(path, headers={"Prefer": "wait=2"}, auth=signer).json()
        known = {"population": "phones", "session": session, "task": task, "sha256": assigned["plan"]["sha256"]}
        yield urls, Signs(signer.signer), known | {"assignment": assigned["assignment"]}


class Signs(AuthBase):
    """Signs what schemathesis sends, as a device does."""

    def __init__(self, signer):
        self.signer, self.newcomer = signer, Signer(PublicKey.of(signer.key).text, signer.key)

    def __call__(self, request):
        body = request.body.encode() if isinstance(request.body, str) else request.body
        if body:
            request.headers["Content-Digest"] = content_digest(body)
        about = SignableRequest(request.method, urlsplit(request.url).netloc, request.path_url, request.headers.get)
        signer = self.newcomer if request.path_url == "/v1/devices" else self.signer
        request.headers.update(signer.headers(about, int(time.time())))
        return request


def every_route(url, ask, known):
    """Generated requests to every route of the document at this address; every other one is about what there is."""
    turn = cycle((False, True))

    def about_something(case):
        if next(turn):
            case.path_parameters |= {name: known[name] for name in case.path_parameters if name in known}
        ask(case)

    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        FEW(given(case=found.ok().as_strategy())(about_something))()


@pytest.mark.promise("Bad input gets a problem document, never a 5xx, and changes nothing")
@pytest.mark.security("Bad input is answered with a problem and changes nothing")
def test_whatever_a_device_sends_is_answered_as_the_document_says(served):
    urls, signs, known = served
    statuses = Counter()

    def ask(case):
        answer = case.call(auth=signs)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    every_route(urls.devices, ask, known)
    assert statuses[200] > 0
    assert not statuses[401]


def test_whatever_comes_unsigned_is_refused_as_the_document_says(served):
    urls, _, known = served

    def ask(case):
        answer = case.call()
        assert answer.status_code == (200 if case.path in OPEN else 401)
        case.validate_response(answer, checks=CHECKS)

    every_route(urls.devices, ask, known)


def test_whatever_an_operator_sends_is_answered_as_the_document_says(served, store):
    urls, _, known = served
    token = issue(store.database, "alice", Role.OPERATOR)[1]

    def ask(case):
        case.validate_response(case.call(headers={"Authorization": f"Bearer {token}"}), checks=CHECKS)

    every_route(urls.admin, ask, known)
