"""The page of devices reads what a person draws, with the released model, in a real browser."""

from urllib.parse import urlencode

import numpy as np

from export.model import Model
from export.models import load
from fedcore import checkpoint
from fedcore.plan import BlobRef
from fedcore.signing import ModelRelease, SigningKey
from muster.local.browser_demo import Person
from simulator import datasets
from tests.conformance.browser import served
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.pages import DIGITS, kept_examples
from tests.device_runtime.test_browser import await_commit, browser, bundle, kept, opened, page, task
from tests.tree import ROOT

__all__ = ["browser", "bundle", "opened", "page", "task"]


def scanned():
    """Scanned digits: levels of ink (n, 8, 8), and what they are (n,)."""
    users = datasets.load("digits")
    shards = [users.shard(place) for place in range(len(users))]
    return np.concatenate([one["x"][:, 0] for one in shards]), np.concatenate([one["y"] for one in shards])


def fitted(x, y):
    """The parameters of a logistic regression that reads these digits, by least squares, (D,)."""
    model = Model(load("logreg", (1, 8, 8), 10), 3)
    inputs = np.hstack([x.reshape(-1, 64), np.ones((len(x), 1))])
    solved = np.linalg.lstsq(inputs, 10 * np.eye(10)[y], rcond=None)[0].astype(np.float32)
    weight, bias = (tensor.name for tensor in model.schema.tensors)
    return model.schema.flatten({weight: np.ascontiguousarray(solved[:-1].T), bias: solved[-1]})


def release(local, bundle, key, number, params):
    """Release a version of the page's model, to all devices of population `p`."""
    data = checkpoint.encode({"params": params})
    plan, parameters = bundle.manifest.plan, BlobRef.of(data)
    release = ModelRelease(population="p", name="digits", number=number, plan=plan, parameters=parameters, counter=1)
    local.store.blobs.put(data)
    local.store.release_model(key.sign_statement(release))
    local.store.promote_model("p", "digits", number, 1.0)


def reading(params, inked):
    """What the page says of these cells, (8, 8), with the ink beside them."""
    padded = np.pad(inked, 1)
    beside = padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]
    levels = np.where(inked, 1.0, np.where(beside, 0.3, 0.0)).ravel()
    logits = params[:640].reshape(10, 64) @ levels + params[640:]
    shares = np.exp(logits - logits.max())
    return f"I read: {logits.argmax()}, {100 / shares.sum():.0f} %"


def example_site(folder, page):
    """The files of examples/web, with the built page where its README puts it."""
    folder.mkdir()
    (folder / "index.html").symlink_to(ROOT / "examples" / "web" / "index.html")
    (folder / "muster").symlink_to(page)
    return folder


def follow_the_example(browser, url):
    """Press the buttons of examples/web, at the page that reads everything as a 3."""
    browser.get(url)
    said = "return document.getElementById('said').textContent"
    for name, text in (("read", "It reads 3."), ("part", "reported")):
        wait_until(
            lambda name=name: browser.execute_script(f"return document.getElementById('{name}').onclick != null")
        )
        browser.execute_script(f"document.getElementById('{name}').click()")
        wait_until(lambda text=text: browser.execute_script(said).startswith(text))


def test_the_page_reads_a_drawn_digit_with_each_released_model(tmp_path, coordinators, task, bundle, page, browser):
    (x, y), key = scanned(), SigningKey.new(tmp_path / "models.pem")
    params = fitted(x, y)
    threes = np.zeros_like(params)
    threes[640 + 3] = 50
    with (
        served(example_site(tmp_path / "web", page), tmp_path) as site,
        coordinators.local(tmp_path, page=str(page), allowed_origins=site) as local,
    ):
        made = task(local)
        person = Person(browser, local.url, "p")
        person.sketch(DIGITS[7])
        person.waits_for("reading", "There is no model on this device yet. Once one is released, it says here")
        release(local, bundle, key, 1, params)
        for digit in (0, 6):
            said = f"I read: {digit}, "
            inked = next(one for one in x[y == digit] > 0.5 if reading(params, one).startswith(said))
            person.press("wipe")
            person.sketch(inked)
            person.waits_for("reading", reading(params, inked))
        release(local, bundle, key, 2, threes)
        person.press("keep-7")
        person.sketch(DIGITS[7])
        person.press("take-part")
        person.waits_for("state", "Done: round 1, 1 example, in the clear")
        person.waits_for("reading", "I read: 3, 100 %")
        await_commit(local, made)
        task(local, where="app = example")
        follow_the_example(browser, f"{site}/?{urlencode({'coordinator': local.url, 'population': 'p'})}")
    person.open()
    person.sketch(DIGITS[1])
    person.waits_for("reading", "I read: 3, 100 %")


def test_drawing_makes_nobody_known_again_who_left(tmp_path, coordinators, task, bundle, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        task(local)
        release(local, bundle, SigningKey.new(tmp_path / "models.pem"), 1, np.zeros(650, np.float32))
        person = Person(browser, local.url, "p")
        person.sketch(DIGITS[7])
        person.waits_for("reading", "I read: 0, 10 %")
        assert kept(browser, "keys") != []
        person.press("leave")
        person.waits_for("state", "You left")
        person.press("wipe")
        person.sketch(DIGITS[7])
        person.waits_for("reading", "There is no model on this device yet")
        assert kept(browser, "keys") == []


def test_a_stroke_has_no_gaps_and_a_button_keeps_it(tmp_path, coordinators, task, page, browser):
    with coordinators.local(tmp_path, page=str(page)) as local:
        task(local)
        person = Person(browser, local.url, "p")
        person.press("take-part")
        person.waits_for("state", "draw and keep one digit at least, better ten")
        person.press("pause")
        person.stroke((1.5, 1.5), (6.5, 6.5))
        person.press("keep-4")
        person.waits_for("count", "1")
        examples = kept_examples(browser)
        assert (np.diag(examples["x"][0, 0]) == [0.0, 1, 1, 1, 1, 1, 1, 0]).all()
        assert examples["y"].tolist() == [4]
