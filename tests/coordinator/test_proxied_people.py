"""People whom a proxy logs in: named in the audit log, and by nobody else."""

import re
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx2
import pytest

from coordinator.api.authentication import issue
from coordinator.errors import InvalidToken
from coordinator.rules.entities import Role
from fedcore.wire.messages import PROBLEM_FIELD
from tests.coordinator.pages import csrf, log_in
from tests.coordinator.test_admin_operations import bearer
from tests.device_runtime.nginx import DASHBOARD, nginx_before
from tests.tree import ROOT

HOW_TO = ROOT / "docs/how-to/behind-a-proxy.md"

pytestmark = pytest.mark.security("A person's name is believed from a proxy alone, which shows a token of its own")


def named(token, *people):
    """The headers of a proxy that names people."""
    return [("Authorization", f"Bearer {token}"), *(("Muster-Person", one) for one in people)]


@pytest.fixture
def proxy(store):
    """A proxy's token, as it is kept, and its text."""
    return issue(store.database, "sso", Role.OPERATOR, populations=["phones"], proxy=True)


def test_the_audit_log_names_the_person_behind_the_proxy(store, register, locked, proxy):
    task, (token, text) = register(), proxy
    for number, person in enumerate(("ada@example.org", "grace.hopper+x@example.org")):
        with httpx2.Client(base_url=locked.base_url, headers=named(text, person)) as browser:
            assert person in browser.get("/").text
            form = {"csrf": csrf(browser.get(f"/tasks/{task}"))}
            assert browser.post(f"/tasks/{task}/{('pause', 'resume')[number]}", data=form).status_code == 303
        entry = store.audit()[-1]
        assert (entry.subject, entry.actor) == (task, f"operator sso, token {token.id}, for {person}")
        assert store.history(task)[-1].cause == entry.actor


def test_a_form_from_another_site_is_refused_behind_the_proxy_too(store, register, locked, proxy):
    task = register()
    with httpx2.Client(base_url=locked.base_url, headers=named(proxy[1], "ada@example.org")) as browser:
        browser.get("/")
        for field in ({}, {"csrf": "0" * 64}):
            assert browser.post(f"/tasks/{task}/cancel", data=field).status_code == 403
        answer = browser.post(f"/admin/v1/tasks/{task}:cancel")
        assert (answer.status_code, answer.headers[PROBLEM_FIELD]) == (403, "role-lacking")
        assert browser.get("/metrics").status_code == 403
    assert not store.task(task).state.ended


@pytest.mark.parametrize(
    "people",
    [("",), ("a b",), ("ada, operator root",), ("x\ty",), ("a" * 255,), ("ada", "eve"), ("é@x",), ("<b>",), ("a;b",)],
)
def test_a_name_that_is_none_or_too_long_is_refused_in_one_line(locked, proxy, people):
    people = [one.encode() for one in people]
    answer = locked.get(
        "/",
        headers=[
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in named(proxy[1], *people)
        ],
    )
    assert (answer.status_code, answer.headers[PROBLEM_FIELD]) == (401, "bad-token")
    detail = answer.json()["detail"]
    assert detail.startswith("Muster-Person must name one person in 1 to 254 letters")
    assert len(detail) < 250
    assert "\n" not in detail


def test_a_name_from_anybody_else_is_not_believed(store, register, locked, proxy):
    task, (token, text) = register(), issue(store.database, "mallory", Role.OPERATOR)
    answer = locked.get("/", headers=named(text, "ada@example.org"))
    assert (answer.status_code, answer.headers[PROBLEM_FIELD]) == (403, "role-lacking")
    assert locked.get("/", headers=named("muster_0", "ada@example.org")).status_code == 401
    assert locked.get("/", headers=named(proxy[1])).status_code == 401
    assert locked.get("/", headers={"Muster-Person": "ada@example.org"}).status_code == 401
    log_in(locked, text)
    page = csrf(locked.get("/"))
    forged = {"Muster-Person": "ada@example.org"}
    assert locked.post(f"/tasks/{task}/pause", data={"csrf": page}, headers=forged).status_code == 303
    locked.post(f"/admin/v1/tasks/{task}:resume", headers=forged | bearer(text))
    assert {one.actor for one in store.audit() if one.subject == task} == {
        "an operator on the store",
        f"operator mallory, token {token.id}",
    }


def test_a_proxys_token_opens_no_session_and_is_for_viewers_and_operators(store, locked, proxy):
    answer = log_in(locked, proxy[1])
    assert (answer.status_code, "opens no session" in answer.text) == (401, True)
    with pytest.raises(InvalidToken, match="leave out --population and --proxy"):
        issue(store.database, "sso", Role.METRICS, proxy=True)


class _Login(BaseHTTPRequestHandler):
    """Two addresses of oauth2-proxy: whether a cookie is somebody's, and the page that logs people in."""

    def do_GET(self):
        person = re.fullmatch(r"session=(\w*)", self.headers.get("Cookie", "").split("; ")[0])
        if self.path == "/oauth2/auth":
            self.send_response(202 if person else 401)
            if person and person[1]:
                self.send_header("X-Auth-Request-Email", f"{person[1]}@example.org")
        else:
            self.send_response(200)
        text = b"" if self.path == "/oauth2/auth" else b"people log in here"
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Nothing."""


@contextmanager
def logging_in():
    """What logs people in, as long as the block runs; gives its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Login) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def behind_nginx(locked, folder, text, changes):
    """A client of the dashboard behind nginx, with a proxy's token."""
    port = urlsplit(str(locked.base_url)).port
    include = f'proxy_set_header Authorization "Bearer {text}";\n'
    changes = [*changes, ("127.0.0.1:8081", f"127.0.0.1:{port}")]
    with nginx_before(port, folder, DASHBOARD, changes, muster_dashboard=include) as (own, certificate):
        trust = ssl.create_default_context(cafile=certificate)
        with httpx2.Client(base_url=f"https://127.0.0.1:{own}", verify=trust) as client:
            client.certificate = certificate
            yield client


def test_nginx_names_who_is_logged_in_and_no_one_else(store, register, locked, proxy, tmp_path):
    task, (token, text) = register(), proxy
    forged = {"Muster-Person": "root@example.org", "Authorization": "Bearer muster_0"}
    with (
        logging_in() as port,
        behind_nginx(locked, tmp_path, text, [(r"(?s)4180;(.*)4180;", rf"{port};\g<1>{port};")]) as client,
    ):
        stranger = client.get("/", headers=forged)
        assert (stranger.status_code, stranger.text) == (200, "people log in here")
        client.cookies.set("session", "")
        assert 'name="token"' in client.get("/", headers=forged).text
        client.cookies.set("session", "ada")
        page = client.get(f"/tasks/{task}", headers=forged)
        assert "ada@example.org" in page.text
        pause = {"data": {"csrf": csrf(page)}, "headers": forged}
        assert client.post(f"/tasks/{task}/pause", **pause).status_code == 303
        assert client.get("/admin/v1/tasks", headers=forged).status_code == 403
    assert store.audit()[-1].actor == f"operator sso, token {token.id}, for ada@example.org"


def test_nginx_names_whose_client_certificate_it_is(register, locked, proxy, tmp_path):
    described = HOW_TO.read_text().partition("With client certificates instead")[2]
    outside, *inside = (line.partition("#")[0].strip() for line in described.splitlines() if line.startswith("    "))
    inside = " ".join(inside).replace("/etc/ssl/certs/people.pem", f"{tmp_path}/cert.pem")
    changes = [
        ("(?m)^server {", f"{outside}\nserver {{ {inside}"),
        (r"(?s)auth_request /oauth2/auth;.*?x_auth_request_email;", ""),
    ]
    with behind_nginx(locked, tmp_path, proxy[1], changes) as client:
        assert client.get("/").status_code == 400  # nginx asks for a certificate
        trust = ssl.create_default_context(cafile=client.certificate)
        trust.load_cert_chain(client.certificate, tmp_path / "key.pem")
        page = httpx2.get(str(client.base_url), headers={"Muster-Person": "root"}, verify=trust)
    assert 'class="quiet">127.0.0.1<' in page.text
