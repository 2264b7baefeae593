"""The web page for browsers: how its files are served, the link to it, and what is refused as a page."""

import gzip
import html
import re

import httpx2
import pytest

from coordinator.dashboard.pages import join_link
from coordinator.errors import InvalidSettings
from coordinator.rules.task_settings import Secagg
from coordinator.settings import Settings, load_settings
from tests.coordinator.conftest import RELEASE
from tests.coordinator.devices import speaking_to
from tests.servers import serving, serving_both

SCRIPT = b"console.log('a page');" * 50
AUTHORITY = {"authority": "ed25519:" + "A" * 43, "authority_url": "https://authority.example:8082/below"}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "built").mkdir()
    (folder / "built" / "index.html").write_text("<!doctype html>")
    (folder / "built" / "page.js").write_bytes(SCRIPT)
    (folder / "built" / "page.js.gz").write_bytes(gzip.compress(SCRIPT))
    settings = {"database": f"sqlite:///{folder}/state.db", "blobs": folder / "blobs", "port": 0, "admin_port": 0}
    with serving(Settings(**settings, **AUTHORITY, page=folder / "built")) as url, speaking_to(url) as client:
        yield client


def test_a_file_comes_compressed_to_who_takes_that(client):
    packed = client.get("/page/page.js", headers={"Accept-Encoding": "gzip, br"})
    plain = client.get("/page/page.js", headers={"Accept-Encoding": "identity"})
    assert packed.content == plain.content == SCRIPT
    assert (packed.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert {answer.headers["content-type"].split(";")[0] for answer in (packed, plain)} == {"text/javascript"}


def test_a_file_that_a_browser_has_is_not_sent_again(client):
    first = client.get("/page/page.js")
    assert client.get("/page/page.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 304


def test_the_page_may_load_and_reach_nothing_of_others_but_the_authority(client):
    policy = client.get("/page/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'wasm-unsafe-eval';")
    assert "connect-src 'self' https://authority.example:8082;" in policy


def test_a_path_leads_out_of_the_folder_of_the_page_nowhere(client):
    assert client.get("/page/..%2Fstate.db").status_code == 404


def test_a_folder_without_a_page_is_refused_by_its_name(tmp_path):
    with pytest.raises(InvalidSettings, match="where no page is built; `make page` builds one"):
        load_settings({"page": tmp_path})


@pytest.mark.parametrize(
    "url", ["fl.example/page/", "https://fl.example/page", "https://fl.example/page/?a=b", "https:///"]
)
def test_an_address_that_is_none_of_a_page_is_refused(url):
    with pytest.raises(InvalidSettings, match="is not the address of a page, which ends in /"):
        load_settings({"page_url": url})


def test_the_page_of_a_population_has_the_link_to_the_page(register, served):
    register(population="phones & more")
    link, shown = link_on(f"{served.admin}/populations/phones%20%26%20more")
    assert link == f"{served.devices}/page/?population=phones+%26+more"
    assert httpx2.get(link).status_code == 200
    assert shown.count('role="img" aria-label="QR code') == 1
    assert "names no signer" in shown
    assert "Phones need an HTTPS link" in shown


def test_the_link_to_the_page_names_its_address_and_who_releases_plans(store, register, database, tmp_path):
    task = register(goal=8, minimum=8, secagg=Secagg())
    (tmp_path / "index.html").touch()
    where = {"database": database, "blobs": tmp_path / "blobs", "port": 0, "admin_port": 0}
    settings = Settings(**where, page=tmp_path, page_url="https://fl.example/page/", loopback_viewer=True)
    with serving_both(settings) as urls:
        link, shown = link_on(f"{urls.admin}/populations/phones")
        assert link == f"https://fl.example/page/?population=phones&signer={RELEASE.signer}"
        assert shown.count(f"<code>{RELEASE.signer}</code>") == 1
        assert "HTTPS" not in shown
    store.cancel(task)
    assert join_link("https://fl.example/page/", "phones", store.tasks()).signers == ()


def test_a_link_that_is_too_long_for_a_qr_code_has_none():
    link = join_link(f"https://fl.example/{3000 * 'a'}/", "phones", ())
    assert (link.secure, link.qr) == (True, "")


def link_on(url):
    """The link to the page on a page of the dashboard, and all of what that shows."""
    shown = httpx2.get(url).text
    return html.unescape(re.search(r'href="(http[^"]+)"', shown)[1]), shown
