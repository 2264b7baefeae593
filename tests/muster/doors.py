"""Doors: every way to create a task on a coordinator, and to ask for a simulation, with the same settings for each."""

import functools
import html
import json
import re
import warnings
from contextlib import ExitStack, contextmanager

import httpx2

import muster
from coordinator.errors import InvalidTask, UnknownTask
from coordinator.rules.task_settings import TaskSettings
from coordinator.settings import Settings
from coordinator.store.tasks import open_coordinator_store
from fedcore.errors import FedcoreError
from fedcore.signing import SigningKey, key_text
from fedcore.validation import settings_of
from muster.options import option_of
from simulator.configuration import SimulationConfig
from simulator.errors import EngineError, RunError
from simulator.runs.sweeping import read_sweep
from simulator.simulation import completed
from tests.coordinator.bundles import make_private_bundle
from tests.coordinator.conftest import AUTHORITY_KEY
from tests.coordinator.pages import csrf, log_in
from tests.muster.test_cli import in_process
from tests.servers import serving_both
from tests.stores import without_rows

PAIRS = ("requires", "on_device", "schedule", "privacy", "settings")
"""The parts that commands take as KEY=VALUE."""


class Doors:
    """A coordinator, and every way to create a task on it; each answers the id of the task, or why there is none."""

    def __init__(self, folder, urls, store, token, closing):
        self.store, self.bundle = store, make_private_bundle(folder / "plan", 8)
        self.urls, self.folder, self._token = urls, folder, token
        self._manifest = (self.bundle.folder / "manifest.json").read_text()
        self._closing, self._key = closing, folder / "release.pem"
        assert in_process("key", "new", "--out", self._key).exit_code == 0

    def command_here(self, settings):
        return self._command(settings, "--db", f"sqlite:///{self.folder / 'm.db'}", "--blobs", self.folder / "blobs")

    def command_elsewhere(self, settings):
        return self._command(settings, "--coordinator", self.urls.admin)

    def form(self, settings):
        flat = {name: value for name, value in settings.items() if not isinstance(value, dict)}
        for part, values in settings.items():
            if isinstance(values, dict):
                flat |= {part: "yes"} | {f"{part}.{name}": value for name, value in values.items()}
        client, token = self._page
        given = {"csrf": token, "manifest": self._manifest, "release": self._release(settings), **flat}
        made = client.post("/new", data={name: written(value) for name, value in given.items()})
        if made.status_code == 303:
            return made.headers["location"].rpartition("/")[2]
        return html.unescape(re.search(r'role="alert">([^<]*)', made.text)[1])

    def admin_api(self, settings):
        new = {"manifest": json.loads(self._manifest), "settings": settings}
        if release := self._release(settings):
            new["release"] = json.loads(release)
        made = httpx2.post(f"{self.urls.admin}/admin/v1/tasks", json=new, headers=self.headers, timeout=60)
        return made.json()["id"] if made.status_code == 201 else made.json()["detail"]

    def python(self, settings):
        key = SigningKey.load(self._key) if "secagg" in settings else None
        quietly = warnings.catch_warnings(action="ignore")  # of a target that no device matches
        with muster.Coordinator(self.urls.admin, self._token) as coordinator, quietly:
            try:
                return coordinator.create(self.bundle, release_key=key, **settings).id
            except (InvalidTask, UnknownTask, FedcoreError) as error:
                return str(error)

    @property
    def headers(self):
        """Those of an operator's request."""
        return {"Authorization": f"Bearer {self._token}"}

    def page(self):
        """The form of a new task, as people read it."""
        return html.unescape(self._page[0].get("/new").text)

    @functools.cached_property
    def _page(self):
        """A client with an operator's session that has uploaded the bundle, and the token of its forms."""
        client = self._closing.enter_context(httpx2.Client(base_url=self.urls.admin, timeout=60))
        log_in(client, self._token)
        token = csrf(client.get("/new"))
        for ref, data in self.bundle.blobs():
            client.put(f"/new/blobs/{ref.sha256}", content=data, headers={"X-CSRF-Token": token})
        return client, token

    def _command(self, settings, *where):
        options = [*options_of(settings), *where, "--json"]
        if "secagg" in settings:
            options += ["--release-key", self._key]
        made = in_process("task", "create", "--plan", self.bundle.folder, *options)
        return json.loads(made.stdout)["task"] if made.exit_code == 0 else f"{made.output}{made.exception}"

    def _release(self, settings):
        """What `muster task release` writes for a task with secure aggregation; nothing for others."""
        if "secagg" not in settings:
            return ""
        out = self.folder / "release.json"
        where = ["--coordinator", self.urls.admin, "--plan", self.bundle.folder, "--release-key", self._key]
        made = in_process("task", "release", *options_of(settings), *where, "--out", out)
        return out.read_text() if made.exit_code == 0 else made.output


DOORS = (Doors.command_here, Doors.command_elsewhere, Doors.form, Doors.admin_api, Doors.python)


def written(value):
    """A value as a person writes it into a form or behind an option."""
    return ",".join(value) if isinstance(value, list) else value if isinstance(value, str) else repr(value)


def options_of(settings, kind=TaskSettings):
    """The words of a command that has these settings of a class."""
    switches = {one.name for one in settings_of(kind) if one.optional}
    words = []
    for name, value in settings.items():
        if name in PAIRS:
            words += [word for key, one in value.items() for word in (option_of(name), f"{key}={written(one)}")]
        elif isinstance(value, dict):
            words += [option_of(name)] * (name in switches)
            words += [word for key, one in value.items() for word in (option_of(key), written(one))]
        else:
            words += [option_of(name), *([] if value is True else [written(value)])]
    return words


class Asked(Exception):
    """A simulation was asked for, which a test of its settings does not run."""


class SimulationDoors:
    """Every way to ask for a simulation; each answers its whole configuration, or why there is none."""

    def __init__(self, folder, monkeypatch):
        self._folder, self._asked = folder, []
        for place in ("muster.commands.simulate._simulated", "muster.python.simulating._in_memory"):
            monkeypatch.setattr(place, self._ask)

    def command(self, settings):
        return self._answer(in_process("simulate", *options_of(settings, SimulationConfig)))

    def file(self, settings):
        path = self._folder / "simulation.toml"
        path.write_text(toml_of(settings))
        return self._answer(in_process("simulate", path))

    def sweep(self, settings):
        path = self._folder / "sweep.toml"
        path.write_text(toml_of({"options": settings, "grid": {"seed": [settings.get("seed", 0)]}}))
        try:
            return read_sweep(path)[0].config
        except RunError as error:
            return str(error)

    def python(self, settings):
        try:
            muster.simulate(**{"users" if name == "dataset" else name: value for name, value in settings.items()})
        except Asked:
            return completed(self._asked.pop())
        except (EngineError, TypeError) as error:
            return str(error)

    def _ask(self, config, *_):
        self._asked.append(config)
        raise Asked

    def _answer(self, done):
        return completed(self._asked.pop()) if self._asked else f"{done.output}{done.exception}"


SIMULATION_DOORS = (
    SimulationDoors.command,
    SimulationDoors.file,
    SimulationDoors.sweep,
    SimulationDoors.python,
)


def toml_of(settings, table=""):
    """Settings as TOML: single values, then a table for each mapping."""
    tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if name not in tables]
    inner = [f"[{table}{name}]\n{toml_of(value, f'{table}{name}.')}" for name, value in tables.items()]
    return "".join(lines + inner)


@contextmanager
def opened(folder, monkeypatch):
    """The doors of a coordinator whose files are in a folder."""
    database, blobs = without_rows(folder / "m.db"), folder / "blobs"
    authority = {"authority": key_text(AUTHORITY_KEY), "authority_url": "https://authority.example.org"}
    with (
        open_coordinator_store(database, blobs) as store,
        serving_both(Settings(database=database, blobs=blobs, port=0, admin_port=0, **authority)) as urls,
    ):
        made = in_process("coordinator", "token", "--name", "alice", "--role", "operator", "--db", database)
        monkeypatch.setenv("MUSTER_TOKEN", made.stdout.strip())
        with ExitStack() as closing:
            doors = Doors(folder, urls, store, made.stdout.strip(), closing)
            assert doors._page  # whose upload of the bundle serves the admin API too
            yield doors
