"""A privacy budget means the same at each door: the same numbers make the same task, whoever creates it, and how."""

import html
import json
import math
import re
from dataclasses import replace

import httpx2
import pytest

import muster
from coordinator.errors import InvalidTask
from coordinator.rules.private_sums import entry_of, entry_of_devices
from coordinator.settings import Settings
from coordinator.store.tasks import open_coordinator_store
from fedcore.privacy.accounting import spent
from fedcore.signing import SigningKey, key_text
from tests.coordinator.bundles import make_private_bundle
from tests.coordinator.conftest import AUTHORITY_KEY
from tests.coordinator.pages import csrf, log_in
from tests.muster.test_cli import in_process
from tests.servers import serving_both

ROUNDS = 60
BUDGET = {"epsilon": 8.0, "delta": 1e-6, "users": 1000}
SETTINGS = {"population": "phones", "goal": 10, "rounds": ROUNDS, "min_separation_rounds": 20}
SECAGG = {"clip_norm": 2.0, "bits": 6}
PROMISES = {
    "gaussian": {},
    "tree": {"mechanism": "tree"},
    "banded": {"mechanism": "banded", "bands": 4},
    "distributed": {"mechanism": "distributed"},
    "less noise than lasts": {"noise_multiplier": 1.0},
}


class Doors:
    """A coordinator, and every way to create a task on it; each answers the id of the task, or why there is none."""

    def __init__(self, folder, urls, store, token):
        self.store, self.bundle = store, make_private_bundle(folder / "plan", 8)
        self.urls, self._folder, self._token = urls, folder, token
        self._key = folder / "release.pem"
        assert in_process("key", "new", "--out", self._key).exit_code == 0

    def command_here(self, settings):
        return self._command(settings, "--db", f"sqlite:///{self._folder / 'm.db'}", "--blobs", self._folder / "blobs")

    def command_elsewhere(self, settings):
        return self._command(settings, "--coordinator", self.urls.admin)

    def form(self, settings):
        flat = {name: value for name, value in settings.items() if not isinstance(value, dict)}
        for part in ("privacy", "secagg"):
            if part in settings:
                flat |= {part: "yes"} | {f"{part}.{name}": value for name, value in settings[part].items()}
        with httpx2.Client(base_url=self.urls.admin, timeout=60) as client:
            log_in(client, self._token)
            token = csrf(client.get("/new"))
            for ref, data in self.bundle.blobs():
                client.put(f"/new/blobs/{ref.sha256}", content=data, headers={"X-CSRF-Token": token})
            manifest = (self.bundle.folder / "manifest.json").read_text()
            given = {"csrf": token, "manifest": manifest, "release": self._release(settings), **flat}
            made = client.post("/new", data={name: str(value) for name, value in given.items()})
        if made.status_code == 303:
            return made.headers["location"].rpartition("/")[2]
        return html.unescape(re.search(r'role="alert">([^<]*)', made.text)[1])

    def admin_api(self, settings):
        address = f"{self.urls.admin}/admin/v1"
        with httpx2.Client(headers={"Authorization": f"Bearer {self._token}"}, timeout=60) as client:
            for ref, data in self.bundle.blobs():
                client.put(f"{address}/blobs/{ref.sha256}", content=data)
            new = {"manifest": json.loads((self.bundle.folder / "manifest.json").read_text()), "settings": settings}
            release = self._release(settings)
            if release:
                new["release"] = json.loads(release)
            made = client.post(f"{address}/tasks", json=new)
        return made.json()["id"] if made.status_code == 201 else made.json()["detail"]

    def python(self, settings):
        key = SigningKey.load(self._key) if "secagg" in settings else None
        with muster.Coordinator(self.urls.admin, self._token) as coordinator:
            try:
                return coordinator.create(self.bundle, release_key=key, **settings).id
            except (TypeError, InvalidTask) as error:
                return str(error)

    def _command(self, settings, *where):
        options = [*_options(settings), *where, "--json"]
        if "secagg" in settings:
            options += ["--release-key", self._key]
        made = in_process("task", "create", "--plan", self.bundle.folder, *options)
        return json.loads(made.stdout)["task"] if made.exit_code == 0 else f"{made.output}{made.exception}"

    def _release(self, settings):
        """What `muster task release` writes for a task with secure aggregation; nothing for others."""
        if "secagg" not in settings:
            return ""
        out = self._folder / "release.json"
        where = ["--coordinator", self.urls.admin, "--plan", self.bundle.folder, "--release-key", self._key]
        made = in_process("task", "release", *_options(settings), *where, "--out", out)
        return out.read_text() if made.exit_code == 0 else made.output


DOORS = (Doors.command_here, Doors.command_elsewhere, Doors.form, Doors.admin_api, Doors.python)


def _options(settings):
    options = []
    for name, value in settings.items():
        if name == "privacy":
            options += [word for part, one in value.items() for word in ("--privacy", f"{part}={one}")]
        elif name == "secagg":
            options += ["--secagg", *(w for part, one in value.items() for w in (f"--{part.replace('_', '-')}", one))]
        else:
            options += [f"--{name.replace('_', '-')}", value]
    return options


@pytest.fixture
def doors(tmp_path, monkeypatch):
    database, blobs = f"sqlite:///{tmp_path / 'm.db'}", tmp_path / "blobs"
    authority = {"authority": key_text(AUTHORITY_KEY), "authority_url": "https://authority.example.org"}
    with (
        open_coordinator_store(database, blobs) as store,
        serving_both(Settings(database=database, blobs=blobs, port=0, admin_port=0, **authority)) as urls,
    ):
        made = in_process("coordinator", "token", "--name", "alice", "--role", "operator", "--db", database)
        monkeypatch.setenv("MUSTER_TOKEN", made.stdout.strip())
        yield Doors(tmp_path, urls, store, made.stdout.strip())


def lasting(task, plan):
    """For how many rounds the budget of a task lasts, and the ε that its ledger has then, or after all rounds."""
    privacy, rows, epsilon = task.settings.promise, [], 0.0
    for number in range(1, task.settings.rounds + 1):
        if privacy.noise_of_devices:
            row = entry_of_devices(task.settings, plan.report, number, task.settings.goal)
        else:
            row = entry_of(privacy, number, 2.0, task.settings.goal)
        after = spent([*rows, row], privacy.delta)
        if after > privacy.epsilon:
            break
        rows, epsilon = [*rows, row], after
    return len(rows), epsilon


@pytest.mark.parametrize("named", PROMISES)
def test_the_same_numbers_make_the_same_task_at_each_door(doors, named):
    settings = SETTINGS | {"privacy": BUDGET | PROMISES[named]}
    if named == "distributed":
        settings |= {"secagg": SECAGG}
    made = {door.__name__: door(doors, settings) for door in DOORS}
    known = {task.id: task for task in doors.store.tasks()}
    assert set(made.values()) == set(known), made
    tasks = [known[one] for one in made.values()]
    assert {repr(task.settings) for task in tasks} == {repr(tasks[0].settings)}
    lasts = {door: lasting(known[task], doors.bundle.plan) for door, task in made.items()}
    assert len(set(lasts.values())) == 1, lasts
    (rounds, epsilon) = lasts["form"]
    promise = tasks[0].settings.promise
    assert (promise.min_separation_rounds, promise.users, math.isfinite(promise.noise_multiplier)) == (20, 1000, True)
    if "noise_multiplier" not in PROMISES[named]:
        assert rounds == ROUNDS
        assert 0.9 * promise.epsilon < epsilon <= promise.epsilon
        more = replace(tasks[0], settings=replace(tasks[0].settings, rounds=2 * ROUNDS))
        assert lasting(more, doors.bundle.plan)[0] < 2 * ROUNDS  # the noise is the least, and no more than that
    else:
        assert rounds == 40
        assert promise.noise_multiplier == PROMISES[named]["noise_multiplier"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"delta": 0.5}, "delta must be below 1 / users, which is 0.001, not 0.5"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": None}, "privacy: epsilon is missing: it must be a number above 0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"mechanism": "banded", "bands": 30}, "bands must be from 2 to min_separation_rounds (20), not 30"),
        ({"mechanism": "gauss"}, "mechanism"),
        ({"noise_multiplier": 0.01}, "noise_multiplier 0.01 the first round alone spends"),
    ],
)
def test_a_promise_that_cannot_be_is_refused_alike_at_each_door(doors, wrong, words):
    given = {name: value for name, value in (BUDGET | wrong).items() if value is not None}
    for door in DOORS:
        said = " ".join(door(doors, SETTINGS | {"privacy": given}).split())
        assert words in said, door.__name__
    assert doors.store.tasks() == []


def test_a_separation_of_rounds_is_said_once_in_the_settings_of_the_task(doors):
    for door in set(DOORS) - {Doors.form}:  # whose fields are those of the settings
        said = door(doors, SETTINGS | {"privacy": BUDGET | {"min_separation_rounds": 20}})
        assert "there is no 'min_separation_rounds'" in said, door.__name__
