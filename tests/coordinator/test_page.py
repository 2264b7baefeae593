"""The files of the web page for browsers: how they are served, and that a folder without them is refused."""

import gzip

import pytest

from coordinator.errors import InvalidSettings
from coordinator.server import serving
from coordinator.settings import Settings, load_settings
from tests.coordinator.devices import speaking_to

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
