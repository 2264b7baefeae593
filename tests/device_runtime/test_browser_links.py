"""Links to the page of devices in a real browser: one changes nothing of a device before the person takes part."""

import functools
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import urlencode

from fedcore.signing import SigningKey
from muster.local.browser_demo import Person
from tests.conformance.browser import Files
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.pages import DIGITS, build, kept_examples
from tests.device_runtime.proxy import road_to
from tests.device_runtime.test_browser import (
    await_commit,
    browser as browser,  # noqa: PLC0414 - fixtures
    bundle as bundle,  # noqa: PLC0414
    is_hidden,
    kept,
    opened as opened,  # noqa: PLC0414
    page as page,  # noqa: PLC0414
    task as task,  # noqa: PLC0414
)

REACHES = """
const [url, done] = arguments;
fetch(url, { mode: "no-cors" }).then(() => done("reached"), () => done("refused"));"""
ADDS = """
const script = document.createElement("script");
script.textContent = "window.added = true";
document.body.append(script);
return window.added === true;"""
FRAMES = """
const [url, done] = arguments;
const frame = document.createElement("iframe");
frame.src = url;
frame.onload = () => setTimeout(() => done(frame.contentDocument.getElementById("state").textContent), 2000);
document.body.append(frame);"""


def follow(browser, url, **link):
    """Open a link, and press nothing."""
    browser.get(f"{url}/page/?{urlencode(link, doseq=True)}" if link else f"{url}/page/")
    return functools.partial(browser.execute_script, "return document.getElementById(arguments[0]).innerText")


def test_a_link_is_followed_later_only_where_the_person_took_part(tmp_path, coordinators, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        person = Person(browser, local.url, "p")
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        person.waits_for("state", "There is nothing to train under the name")
        person.press("pause")
        for link in ({"population": "theirs"}, {"population": "p", "coordinator": "http://127.0.0.1:1/"}):
            follow(browser, local.url, **link, signer="ed25519:theirs")
            text = follow(browser, local.url)
            wait_until(lambda text=text: "Ready" in text("state"))
            assert (text("population"), text("count")) == ("p", "1")
            assert is_hidden(browser, "other-signers")


def test_a_page_goes_to_the_coordinator_that_serves_it_and_to_no_other(tmp_path, coordinators, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        text = follow(browser, local.url, population="p", coordinator="https://theirs.example/")
        wait_until(lambda: "This link leads to theirs.example" in text("state"))
        assert browser.execute_script("return document.getElementById('take-part').disabled")
        text = follow(browser, local.url, population="p", coordinator=local.url)
        wait_until(lambda: "Ready" in text("state"))


def test_a_person_reads_where_reports_go_before_taking_part(tmp_path, coordinators, page, browser):
    key = SigningKey.new(tmp_path / "release.pem").signer
    with coordinators.local(tmp_path / "a", page=str(page)) as local, road_to(local.url) as road:
        text = follow(browser, road.url, population="p\u202eelif\u200b", signer=key)
        wait_until(lambda: "Ready" in text("state"))
        assert text("host") == road.url.removeprefix("http://")
        assert text("signers") == key
        assert text("population") == "p\\u202eelif\\u200b"
        assert set(road.calls) == {"page"}


def test_examples_rules_and_keys_are_for_one_population_alone(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local, road_to(local.url) as road:
        made, person = task(local), Person(browser, road.url, "mine")
        person.draw(DIGITS[7], 7)
        browser.execute_script(
            "const form = document.getElementById('owner'); form.elements.namedItem('days').value = '60';"
            "form.dispatchEvent(new Event('change'));"
        )
        person.waits_for("rules-state", "Kept")
        person.press("take-part")
        person.waits_for("state", "There is nothing to train under the name")
        person.press("pause")
        text = follow(browser, road.url, population="p")
        wait_until(lambda: "Ready" in text("state"))
        assert text("count") == "0"
        assert browser.execute_script("return document.getElementById('owner').elements.days.value") == "30"
        assert not is_hidden(browser, "other-target")
        assert text("before").startswith("“mine” at 127.0.0.1")
        theirs = Person(browser, road.url, "p")
        theirs.draw(DIGITS[1], 1)
        theirs.press("take-part")
        theirs.waits_for("state", "Done: round 1, 1 example, in the clear")
        await_commit(local, made)
        theirs.press("leave")
        theirs.waits_for("state", "You left")
        # Two populations see two devices, and leaving one keeps the other.
        assert (road.calls.count("enrol"), kept(browser, "keys")) == (2, [])
        person.open()
        assert (kept(browser, "keys"), kept_examples(browser)["y"].tolist()) == (["device", "secagg"], [7])


def test_a_page_on_another_server_goes_to_coordinators_that_it_names(tmp_path, coordinators, task, browser):
    with (
        served(tmp_path / "page") as url,
        coordinators.local(tmp_path / "a", allowed_origins=url) as local,
        road_to(local.url) as theirs,
    ):
        build(tmp_path / "page", local.url)
        made, person = task(local), Person(browser, url, "p")
        assert browser.execute_async_script(REACHES, theirs.url) == "refused"
        assert browser.execute_script(ADDS) is False
        assert person.text("host") == local.url.removeprefix("http://")
        text = follow(browser, url, population="p", coordinator=theirs.url)
        wait_until(lambda: "This link leads to" in text("state"))
        person.open()
        person.draw(DIGITS[7], 7)
        person.press("take-part")
        person.waits_for("state", "Done: round 1, 1 example, in the clear")
        await_commit(local, made)
        browser.get(f"{url}/page/icon.svg")
        browser.get(f"{url}/other.html")
        framed = browser.execute_async_script(FRAMES, f"{url}/page/?population=p")
        assert framed == "Another site shows this page inside its own: open it by itself."
        assert theirs.calls == []


@contextmanager
def served(page):
    """Another server's files, those of the page under /page, without a header that says what they may do."""
    page.mkdir()
    (page.parent / "other.html").write_text("<!doctype html><title>another page</title><body>")
    handler = functools.partial(Files, directory=str(page.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
