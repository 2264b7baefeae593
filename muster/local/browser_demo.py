"""The demo in a browser: a coordinator's page in Chromium and devices on Node train in secure rounds."""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from export.build import export_bundle
from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import keeps_client_state
from fedcore.errors import InvalidSetting
from fedcore.signing import SigningKey
from muster.local.browser import Person, phone
from muster.local.demo_tasks import DATASET, MODEL, SETTINGS, demo_settings, for_algorithm
from muster.local.fleet import local_fleet
from muster.local.memory_folder import memory_folder
from muster.local.server import local_coordinator
from simulator import datasets
from simulator.course import overall
from simulator.engine import evaluate
from simulator.fleet import node
from simulator.fleet.fleet import Fleet
from simulator.fleet.profile import counted_kinds

POPULATION = "digits"
DRAWN = 6
"""The number of examples drawn on the page."""
_INK = 0.5
"""The level above which a cell is inked."""


@dataclass(frozen=True, slots=True)
class BrowserDemo:
    """The outcome. rounds: committed ones. counted: the rounds with a report from the page.

    devices: on Node. test_accuracy: on held-out users. page: its final state. picture: the path of its screenshot.
    """

    rounds: int
    devices: int
    counted: int
    test_accuracy: float
    page: str
    picture: str


def run_browser_demo(name: str, rounds: int, devices: int, seed: int, picture: Path) -> BrowserDemo:
    """Train with `devices` on Node and a page with hand-drawn digits, and save a screenshot of the page, a PNG.

    name: of the algorithm. Raises FleetError where Chromium or Node is missing, PageFailed, InvalidSetting for an
    algorithm that devices in TypeScript do not run.
    """
    program = node.program()
    algorithm = create(name, SETTINGS.get(name))
    if keeps_client_state(algorithm):
        raise InvalidSetting(f"{name} keeps vectors on devices, and those in TypeScript keep none: leave --browser out")
    with tempfile.TemporaryDirectory(prefix="muster-demo-", dir=memory_folder()) as place, phone() as browser:
        folder = Path(place)
        build = [program, "--no-warnings", str(node.FOLDER / "page" / "build.ts"), str(folder / "page")]
        subprocess.run(build, check=True)
        model = Model(load_model(MODEL), seed)
        bundle = export_bundle(model, algorithm, folder / "plan", MODEL)
        train, test = datasets.users(DATASET, None, devices + 1)
        key = SigningKey.new(folder / "release.pem")
        with local_coordinator(folder / "coordinator", secure=True, page=folder / "page") as local:
            settings = demo_settings(POPULATION, len(train), rounds, seed, train, secure=True)
            settings = for_algorithm(settings, algorithm, train)
            task = local.create_task(bundle, settings, key).id
            person = Person(browser, local.url, POPULATION, key.signer)
            drawn = train.shard(devices)
            for levels, digit in zip(drawn["x"][:DRAWN, 0], drawn["y"], strict=False):
                person.draw(levels > _INK, int(digit))
            users, kinds = train.subset(range(devices)), counted_kinds(f"node:{devices}")
            fleet = local_fleet(local, settings, users, key, folder / "devices", kinds=kinds)
            state = _train(fleet, person, rounds)
            person.save_screenshot(picture)
            committed = len(local.committed(task))
            params = local.store.checkpoint(task, committed)["params"]
        accuracy = overall(evaluate(model, params, test)["accuracy"], test)
        return BrowserDemo(committed, devices, person.counted(), accuracy, state, str(picture))


def _train(fleet: Fleet, person: Person, rounds: int) -> str:
    """Let page and fleet train until the task ends; returns the page's state after its last report."""
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(fleet.run)
        person.press("take-part")
        try:
            return person.waits_for("state", f"Done: round {rounds},")
        finally:
            running.result()
