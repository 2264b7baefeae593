"""Text of strangers on an operator's screen: nothing in it moves the cursor, hides, or turns what stands around it."""

import ast
import io
import json
import logging
import re
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from coordinator.dashboard.rendering import Renderer, Visitor
from coordinator.monitoring import configure_logs
from fedcore.bundle import AlgorithmRef, Bundle, Certificate
from fedcore.errors import visible
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan
from fedcore.privacy.settings import (
    CertifiedLedger,
    LedgerEntry,
    Privacy,
    PrivacyCertificate,
    certificate_file,
    ledger_digest,
)
from fedcore.release import Release, SumBounds
from fedcore.signing import SigningKey
from muster import output
from tests.coordinator.bundles import EVIDENCE, make_bundle, make_plan
from tests.muster.terminal import on_terminal
from tests.test_layers import ROOT

# A title, a cleared line, C1's CSI, a bell, overrides and isolates, what has no width, lines that look like ours.
HOSTILE = (
    "ok\x1b]0;mine\x07\x1b[2K\r\x9b31m\x85\u202eelif\u2066\u2069\u061c\u200b\u200d\ufeff\u00ad\u3164\ufe0f"
    "\U000e0041\u2028\u2029\x0b\x7f\x00\nsigner  ed25519:trusted"
)
UNSEEN = re.compile(r"(?!\n)[^ -~\w–×·…│─•━╸╺]|[\u115f\u1160\u3164\uffa0]")
SPOOFED = re.compile(r"^signer +ed25519:trusted", re.MULTILINE)
DIGEST = 64 * "0"


def check(shown):
    """What a terminal gets is plain lines, none of them made up, in which the text can still be recognised."""
    assert UNSEEN.findall(shown) == [], shown.encode("unicode_escape").decode()
    assert not SPOOFED.search(shown), shown
    assert re.search(r"u001b[^\n]*\n?[^\n]*u202e", shown), shown


@contextmanager
def lying(answers):
    """The admin API of a coordinator that says what it likes, by path; any other is a problem of its wording."""

    class Liar(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            problem = {"type": f"urn:muster:problem:{HOSTILE}", "title": HOSTILE, "status": 400, "detail": HOSTILE}
            body = json.dumps(answers.get(path, problem)).encode()
            self.send_response(200 if path in answers else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ["--coordinator", f"http://127.0.0.1:{server.server_port}"]
        server.shutdown()


@pytest.fixture
def bundle(tmp_path):
    """A bundle in which a stranger chose every name that a format leaves to him."""
    vector, graphs = VectorSpec("params", 4), ("report", f"{HOSTILE}.begin", f"{HOSTILE}.step")
    plan = msgspec.structs.replace(
        make_plan(formats=("onnx",)),
        name=HOSTILE,
        schema=ParamSchema((TensorSpec(HOSTILE, (4,)),)),
        examples=ExampleSpec((Field(HOSTILE, "float32", (2,)),), collection=HOSTILE),
        passes=(PassPlan(HOSTILE, make_plan().passes[0].loop, (vector,), (HOSTILE,)),),
        graphs={"onnx": {name: BlobRef.of(name.encode()) for name in graphs}},
    )
    made = make_bundle(tmp_path / "plan", plan=make_plan())
    certificate = msgspec.json.encode(Certificate(HOSTILE, {HOSTILE: EVIDENCE}))
    manifest = msgspec.structs.replace(
        made.manifest,
        name=HOSTILE,
        model=HOSTILE,
        algorithm=AlgorithmRef(HOSTILE, {HOSTILE: HOSTILE}),
        plan=BlobRef.of(plan.encode()),
        certificate=BlobRef.of(certificate),
        compress=HOSTILE,
    )
    blobs = [plan.encode(), certificate, made.read(made.manifest.state), *(name.encode() for name in graphs)]
    return Bundle.write(made.folder, manifest, blobs).folder


def test_a_bundle_moves_nothing_on_the_screen_of_who_signs_it(bundle, typed):
    check(on_terminal(80, "plan", "show", bundle)[1])
    check(typed("plan", "show", bundle)[1])


def test_json_of_a_bundle_is_the_same_text_escaped(bundle, typed):
    code, out, _ = typed("plan", "show", bundle, "--json")
    assert (code, UNSEEN.findall(out)) == (0, [])
    facts = json.loads(out)
    assert (facts["plan"], facts["model"], list(facts["examples"])) == (HOSTILE, HOSTILE, [HOSTILE])


def test_a_bundle_that_cannot_be_read_is_refused_in_plain_words(bundle, typed):
    (bundle / "manifest.json").write_text(json.dumps({"version": 1, HOSTILE: HOSTILE}))
    code, out, err = typed("plan", "verify", bundle)
    assert (code, UNSEEN.findall(out + err)) == (1, [])


def test_tasks_and_devices_of_a_lying_coordinator_move_nothing(typed):
    state = {"number": 0, "state_sha256": HOSTILE, "checkpoint_sha256": HOSTILE}
    settings = {"population": "p", "goal": 2, "rounds": 2}
    task = {"id": HOSTILE, "name": HOSTILE, "bundle": HOSTILE, "state": "active", "reason": HOSTILE}
    task |= {"settings": settings, "algorithm": {"name": HOSTILE, "settings": {HOSTILE: HOSTILE}}}
    task |= {"plan_sha256": HOSTILE, "plan_signature": None, "certificate_sha256": HOSTILE, "release": None}
    task |= {"initial": state, "created_at": 0}
    progress = {"task": HOSTILE, "reason": "selecting", "sentence": HOSTILE, "stalled": False}
    device = {"id": HOSTILE, "key": HOSTILE, "attestation": HOSTILE, "enrolled_at": 0.0, "revoked_at": None}
    entry = {"number": 1, "at": 0.0, "sha256": DIGEST}
    entry |= dict.fromkeys(("actor", "action", "subject", "detail"), HOSTILE)
    api = "/admin/v1"
    answers = {f"{api}/tasks": [task], f"{api}/progress": [progress], f"{api}/devices": [device]}
    answers |= {f"{api}/tasks/t": task, f"{api}/tasks/t/progress": progress, f"{api}/tasks/t/spent": []}
    answers |= {f"{api}/tasks/t/rounds": [], f"{api}/tasks/t/evaluations": [], f"{api}/audit": [entry]}
    answers |= {f"{api}/tasks/t/sessions": [{"task": HOSTILE, "shape": HOSTILE, "count": 1}]}
    answers |= {f"{api}/tasks/t/history": [{"at": 0.0, "before": HOSTILE, "after": HOSTILE, "cause": HOSTILE}]}
    with lying(answers) as where:
        for command in ("task list", "task show t", "task metrics t", "task history t", "audit show"):
            check(typed(*command.split(), *where)[1])
        check(typed("coordinator", "devices", "list", *where)[1])


def test_a_problem_of_a_lying_coordinator_is_one_line(typed):
    with lying({}) as where:
        code, out, err = typed("task", "list", *where)
    check(err)
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_a_release_moves_nothing_on_the_screen(typed):
    bounds = SumBounds(clip_norm=1.0, bits=8, max_examples=1, min_sum=9)
    release = Release(
        population=HOSTILE,
        plan=DIGEST,
        checkpoint=DIGEST,
        bounds=bounds,
        lineage=HOSTILE,
        counter=1,
        expires_at=int(time.time()) + 60,
    )
    signed = msgspec.to_builtins(SigningKey(Ed25519PrivateKey.generate()).sign_statement(release))
    with lying({"/admin/v1/releases": [signed]}) as where:
        check(typed("plan", "log", *where)[1])


def test_a_certificate_moves_nothing_on_the_screen(tmp_path, typed):
    model = tmp_path / "m.safetensors"
    model.write_bytes(safetensors.numpy.save({"w": np.zeros(2, np.float32)}))
    privacy = Privacy(epsilon=1.0, delta=1e-5, users=9, noise_multiplier=1.0)
    rows = (LedgerEntry(round=1, noise_multiplier=1.0, clip=1.0, devices=2),)
    certificate = PrivacyCertificate(
        task=HOSTILE,
        round=1,
        model=BlobRef.of(model.read_bytes()).sha256,
        privacy=privacy,
        rounds=1,
        epsilon=9.0,
        ledger=ledger_digest(rows),
    )
    signed = SigningKey(Ed25519PrivateKey.generate()).sign_statement(certificate)
    certificate_file(model).write_bytes(CertifiedLedger(signed, rows).encode())
    check("".join(typed("privacy", "verify", model)[1:]))


def test_progress_on_a_terminal_moves_nothing_but_its_bar(monkeypatch):
    written = io.StringIO()
    screen = Console(file=written, force_terminal=True, color_system=None, width=4000, legacy_windows=False)
    monkeypatch.setattr(output, "stderr", screen)
    with output.doing(f"round of [red]{HOSTILE}") as say:
        say(f"[link=x]{HOSTILE}")
    own = re.compile(r"\r|\x1b\[(2K|1A|\?25[lh])")
    shown = own.sub("", written.getvalue())
    check(shown)
    assert "[red]" in shown
    assert "[link=x]" in shown


@pytest.mark.parametrize("colours", [True, False])
def test_lines_of_a_services_log_are_of_its_making(colours, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: colours)
    monkeypatch.setattr(sys, "stderr", stream)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        assert configure_logs("info", "text")
        for name in ("coordinator.driver", "authority.service"):
            try:
                raise ValueError(HOSTILE)
            except ValueError:
                logging.getLogger(name).exception("task %s is paused: %s", HOSTILE, HOSTILE, extra={"route": HOSTILE})
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    shown = re.sub(r"\x1b\[\d*m", "", stream.getvalue())
    check(shown)
    assert len([line for line in shown.splitlines() if "is paused" in line]) == 2


def test_the_dashboard_shows_the_text_of_strangers_too():
    page = Renderer().part("problem.html", Visitor(None, ""), what=HOSTILE, back="/")
    assert UNSEEN.findall(page) == []
    assert "\\u202e" in page


def test_what_is_hidden_turns_or_is_obeyed_is_seen_and_all_else_stays():
    assert visible("a\x1b[2K\u202e\U000e0041\n") == "a\\u001b[2K\\u202e\\udb40\\udc41\\u000a"
    plain = "naïve Größe Ελληνικά עברית العربية 日本語 🙂 – × … C:\\x1b"
    assert visible(plain) == plain
    assert json.loads(f'"{visible(HOSTILE)}"') == HOSTILE


def test_no_command_writes_past_where_text_is_made_visible():
    """Every other way to print is a way past it."""
    past = []
    for path in sorted((ROOT / "muster").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.search(r"^print$|\becho$|(stdout|stderr|stream)\.(write|print)|writelines$", called):
                past.append(f"{path.relative_to(ROOT)}: {called}")
    assert past == ["muster/plain.py: sys.stderr.write", "muster/plain.py: stream.write"]
