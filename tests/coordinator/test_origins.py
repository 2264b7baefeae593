"""Web pages of other origins: what a browser lets them send, and which answers it lets them read."""

import httpx2
import pytest

from authority.configuration import AuthorityConfig
from coordinator.errors import InvalidSettings
from coordinator.settings import Settings, load_settings
from fedcore.signing import SucceedingKey
from tests.coordinator.devices import speaking_to
from tests.servers import authority_serving, serving

PAGE = "https://app.example"
CHECK_IN = "/v1/populations/p/checkins"
PREFLIGHT = {
    "Origin": PAGE, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-digest,content-type,prefer,signature,signature-input",
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origins")
    settings = {"database": f"sqlite:///{folder}/state.db", "blobs": folder / "blobs", "port": 0, "admin_port": 0}
    opened = Settings(**settings, accept_unattested=True, device_limit_per_minute=1, allowed_origins=PAGE)
    with serving(opened) as url, speaking_to(url) as client:
        yield client


def test_a_page_of_a_named_origin_may_send_signed_requests(client):
    answer = client.options(CHECK_IN, headers=PREFLIGHT)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "PATCH" in answer.headers["access-control-allow-methods"]


def test_a_page_of_another_origin_may_not(client):
    assert client.options(CHECK_IN, headers=PREFLIGHT | {"Origin": "https://else.example"}).status_code == 400
    answer = client.get("/healthz", headers={"Origin": "https://else.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_can_read_refusals_of_routes_and_of_limits_alike(client):
    device = client.devices["a"]
    answers = [client.post(CHECK_IN, headers={"Origin": PAGE}, auth=device) for _ in range(3)]
    answers.append(client.get("/%00", headers={"Origin": PAGE}))
    assert [answer.status_code for answer in answers][-2:] == [429, 400]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = set(answer.headers["access-control-expose-headers"].split(", "))
        assert {"Date", "Muster-Problem", "Retry-After", "Upload-Offset"} <= exposed


def test_an_authority_answers_the_same_pages(tmp_path):
    SucceedingKey.new("authority").save(tmp_path / "key")
    config = AuthorityConfig(key=tmp_path / "key", port=0, accept_unattested=True, allowed_origins=(PAGE,))
    with authority_serving(config) as url:
        answer = httpx2.options(f"{url}/v1/credentials", headers=PREFLIGHT)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)


@pytest.mark.parametrize("wrong", ["app.example", "https://app.example/", "*", "https://"])
def test_what_is_no_origin_is_refused_by_its_name(wrong):
    with pytest.raises(InvalidSettings, match="is no origin"):
        load_settings({"allowed_origins": wrong})
