"""What leaves a device: a report, to its coordinator alone, and nothing else that its examples decide."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

from device_runtime.session import run_session
from fedcore import checkpoint
from tests.device_runtime import linear
from tests.device_runtime.coordinator import serving, status
from tests.device_runtime.test_secure import (
    RELEASE,
    TRUSTING,
    Aggregator,
    issuing,
    parties,
    secure,  # noqa: F401 - a fixture
    terms,
)

OF_A_SIGNATURE = {"signature", "signature-input", "content-digest"}
VALUES = st.floats(-1, 1, width=32)
ROWS = st.lists(st.tuples(st.lists(VALUES, min_size=linear.D, max_size=linear.D), VALUES), min_size=8, max_size=15)


def examples(rows):
    x, y = zip(*rows, strict=True)
    return {"x": np.array(x, np.float32), "y": np.array(y, np.float32)}


def said(coordinator, config, folder, held):
    """Every request of a new device's first session, with these examples: what names it, and its body."""
    coordinator.enrolments.clear()
    coordinator.calls.clear()
    if coordinator.invite:
        coordinator.aggregate = Aggregator(terms(coordinator.plan, coordinator.checkpoint)).answer
    requests, answer = [], coordinator.answer

    def note(method, path, headers, body, signature):
        requests.append(((method, path, {n: v for n, v in headers.items() if n.lower() not in OF_A_SIGNATURE}), body))
        return answer(method, path, headers, body, signature)

    np.savez(folder / "examples.npz", **held)
    coordinator.answer = note
    device = replace(config, examples=folder / "examples.npz", state=folder / "state", policy=TRUSTING)
    outcome = run_session(device if coordinator.invite else replace(device, policy=None))
    coordinator.answer = answer
    assert outcome.outcome == "reported"
    return requests


def assert_examples_decide_only_reports(coordinator, config, new_folder, is_report):
    """Whatever they are, and however many, from one power of two to the next."""

    def rest(requests):
        return [(about, len(body) if is_report(about[1]) else body) for about, body in requests]

    usual = rest(said(coordinator, config, new_folder(), linear.examples(8)))

    @settings(max_examples=10, deadline=None, phases=[Phase.generate])  # every example is a session
    @given(rows=ROWS)
    def found(rows):
        requests = said(coordinator, config, new_folder(), examples(rows))
        assert rest(requests) == usual
        for about, body in requests:
            if about[1].endswith("/report"):
                (report,) = checkpoint.decode(body, linear.plan().report.wire).values()
                assert report.size == linear.plan().report.size

    found()


@pytest.fixture
def new_folder(tmp_path_factory):
    return lambda: tmp_path_factory.mktemp("device")


@pytest.mark.security("A report holds model-sized vectors, a weight and metric sums")
def test_examples_decide_nothing_that_leaves_but_the_report(coordinator, config, new_folder):
    assert_examples_decide_only_reports(coordinator, config, new_folder, lambda path: path.endswith("/report"))


@pytest.mark.security("A report holds model-sized vectors, a weight and metric sums")
@pytest.mark.security("Nothing else about a vector: weights, metrics and indicators are inside the mask")
def test_in_a_secure_round_examples_decide_masked_words_alone(secure, config, new_folder):  # noqa: F811
    random = ("/v1/credentials", "/secagg/")  # its keys, and what is made with them
    assert_examples_decide_only_reports(secure, config, new_folder, lambda path: any(one in path for one in random))


LISTENING = """
import sys
called = set()

def hook(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        called.add(arguments[1][:2])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        called.add(tuple(arguments[:2]))

sys.addaudithook(hook)
from muster.commands.device import main
try:
    main(sys.argv[1:])
finally:
    print(sorted(called), file=sys.stderr)
"""


def called_by(config, *options):
    """The addresses that the process of a device calls in one session, and its outcome."""
    words = ["run", "--once", "--json", "--coordinator", config.coordinator, "--population", config.population]
    words += ["--examples", config.examples, "--state", config.state, *options]
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-c", LISTENING, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **proxies})
    return set(ast.literal_eval(done.stderr.splitlines()[-1])), json.loads(done.stdout)["outcome"]


def address(coordinator):
    return "127.0.0.1", int(coordinator.url.rpartition(":")[2])


@pytest.mark.security("calls its coordinator alone, and for secure rounds the enrolment authority")
def test_a_device_calls_its_coordinator_alone(coordinator, config):
    assert called_by(config) == ({address(coordinator)}, "reported")


@pytest.mark.security("calls its coordinator alone, and for secure rounds the enrolment authority")
def test_a_device_of_secure_rounds_calls_its_authority_too(secure, config, tmp_path):  # noqa: F811
    secure.aggregate = Aggregator(terms(secure.plan, secure.checkpoint)).answer
    (tmp_path / "policy.toml").write_text(f'signers = ["{RELEASE.signer}"]')
    with serving() as authority:
        authority.issue, secure.parties = issuing(), lambda url: parties()(authority.url)
        found = called_by(config, "--policy", tmp_path / "policy.toml")
        assert found == ({address(secure), address(authority)}, "reported")
        assert len(authority.issued) == 1


@pytest.mark.security("calls its coordinator alone, and for secure rounds the enrolment authority")
@pytest.mark.parametrize("call", ["check-in", "assignment", "blob", "report"])
def test_a_device_is_sent_nowhere_else(coordinator, config, call):
    with serving() as other:
        coordinator.faults[call] = [status(code, Location=other.url) for code in (301, 302, 303, 307, 308)] * 4
        called, outcome = called_by(config)
        assert called == {address(coordinator)}
        assert outcome != "reported"
        assert not other.calls
