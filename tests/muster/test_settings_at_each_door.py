"""Every setting of a task or a simulation means the same at each door: one value is stored alike, a bad one is refused
alike, and what people read of it is what its field says."""

import inspect
import json
import re

import httpx2
import pytest

import muster
from coordinator.dashboard.new_task import groups
from coordinator.rules.task_settings import TaskSettings
from fedcore.validation import settings_of
from muster.options import option_of
from simulator.configuration import SimulationConfig
from tests.coordinator.bundles import make_bundle
from tests.muster.doors import DOORS, PAIRS, SIMULATION_DOORS, Doors, SimulationDoors, opened, options_of
from tests.muster.test_cli import in_process
from tools.pages import made

NEEDED = {"population": "phones", "goal": 10, "rounds": 4}
PRIVACY = {"epsilon": 8.0, "delta": 1e-6, "users": 1000}
CLEAR = {
    "population": "tablets",
    "goal": 12,
    "rounds": 5,
    "starts_at": "2026-11-27T06:00:00Z",
    "minimum": 9,
    "over_selection": 1.5,
    "selection_timeout_s": 30.0,
    "reporting_deadline_s": 900.0,
    "max_attempts": 3,
    "max_loss_growth": 4.5,
    "min_examples": 2,
    "purpose": "This task teaches a model to read.",
    "where": "app_version >= 3.2 and region in (eu, uk)",
    "min_separation_s": 60.0,
    "min_separation_rounds": 2,
    "requires": {
        "charging": True,
        "idle": True,
        "unmetered": True,
        "min_battery": 0.4,
        "min_free_storage_bytes": 5000,
        "min_version": "0.2",
        "min_memory_bytes": 2000,
    },
    "on_device": {
        "charging": True,
        "idle": True,
        "unmetered": True,
        "min_battery": 0.25,
        "min_free_storage_bytes": 7000,
        "min_examples": 20,
        "max_example_age_s": 604800.0,
    },
    "hold_out_devices": 0.1,
    "on_held_out": True,
    "seed": 7,
    "formats": ["onnx"],
    "budget": {"peak_rss_mb": 640.0, "step_cpu_ms": 250.0, "graph_bytes": 150000.0, "report_bytes": 90000.0},
    "clear": {"max_norm": 5.5, "max_weight": 50.0, "estimator": "krum", "tolerate": 1},
    "schedule": {
        "warmup_rounds": 2,
        "scaling": "sqrt",
        "reference_cohort": 10,
        "double_every": 2,
        "largest_cohort": 24,
    },
}
MASKED = NEEDED | {
    "secagg": {"clip_norm": 2.5, "bits": 8, "max_examples": 40, "phase_s": 12.5, "group_size": 32},
    "privacy": PRIVACY | {"mechanism": "distributed"},
}
BUFFERED = NEEDED | {"buffered": {"concurrency": 50, "max_staleness": 5}}
NOISED = NEEDED | {
    "min_separation_rounds": 3,
    "privacy": PRIVACY | {"mechanism": "banded", "bands": 2, "noise_multiplier": 3.5},
}
SIMULATED = {"model": "logreg", "processes": 1}
FEDERATED = SIMULATED | {
    "dataset": "mnist_10k",
    "data": "data",
    "start": "start.safetensors",
    "against": "other.safetensors",
    "partition": "shuffled",
    "clients": 90,
    "algorithm": "fedadam",
    "settings": {"client_lr": 0.25},
    "rounds": 7,
    "cohort": 20,
    "held_out": 0.3,
    "hold_out_examples": 0.15,
    "on_held_out_examples": True,
    "evaluate_every": 3,
    "target_accuracy": 0.75,
    "patience": 4,
    "engine": "torch",
    "device": "cuda",
    "at_once": 8,
    "ray": "auto",
    "compress": "rotation",
    "seed": 5,
    "schedule": CLEAR["schedule"],
    "privacy": {"epsilon": 8.0, "delta": 1e-6, "mechanism": "banded", "min_separation_rounds": 3, "bands": 2},
}
SAMPLED = SIMULATED | {"cohort": 20, "privacy": {"noise_multiplier": 3.5, "delta": 1e-6, "poisson": True}}
SUMMED = SIMULATED | {"secagg": MASKED["secagg"], "compress": "rotation,subsample=0.5"}
POOLED = SIMULATED | {"baseline": "pooled"}
COLUMNS = {"user": "who", "inputs": ["a", "b"], "target": "c", "drop_missing": True}
TABLE = SIMULATED | {"dataset": "t.csv", "standardise": True, **COLUMNS}
PERSONAL = SIMULATED | {"algorithm": "fedper", "local": "*.bias", "own_examples": True}
TUNED = SIMULATED | {"own_examples": True, "fine_tune": 3, "same_cohort": True}
REFUSED_BY_THE_ALGORITHM = {"same_cohort": True, "clients": 12}
OF_ANOTHER_TASK = {"starts_from": "nope@3"}
NO_TEXT = {"text": 3, "path": 3, "mapping": 3, "part": 3}
"""What is bad where values have a type; a command has texts alone."""
BAD = {
    "flag": "often",
    "whole number": -1,
    "number": -1.0,
    "choice": "none such",
    "list": ["", ""],
    "text": "a/ü\u200b",
}


def named(settings):
    """All names in some settings, such as `secagg.bits`."""
    for name, value in settings.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, dict) else [name]


def squeezed(text):
    """Text without spaces and ends of lines, at which help is broken anywhere."""
    return "".join(text.split())


def every_setting(kind=TaskSettings):
    """The part, "" for the whole itself, and each setting of it."""
    for one in settings_of(kind):
        yield from (("", one),) if one.part is None else ((one.name, inner) for inner in settings_of(one.part))


@pytest.fixture
def doors(tmp_path, monkeypatch):
    with opened(tmp_path, monkeypatch) as doors:
        yield doors


@pytest.mark.parametrize("settings", [CLEAR, MASKED, BUFFERED, NOISED], ids=["clear", "masked", "buffered", "noised"])
def test_every_setting_is_stored_alike_at_each_door(doors, settings):
    made = {door.__name__: door(doors, settings) for door in DOORS}
    known = {task.id: task.settings for task in doors.store.tasks()}
    assert set(made.values()) == set(known), made
    assert len({repr(one) for one in known.values()}) == 1
    stored = json.loads(json.dumps(httpx2.get(f"{doors.urls.admin}/admin/v1/tasks", headers=doors.headers).json()))
    for name, value in settings.items():
        found = stored[0]["settings"][name]
        wanted = {key: found[key] for key in value} if isinstance(value, dict) else found
        assert wanted == value, name


def test_no_setting_is_left_out_of_these_tests():
    tried = {name for settings in (CLEAR, MASKED, BUFFERED, NOISED) for name in named(settings)} | {
        *REFUSED_BY_THE_ALGORITHM,
        *OF_ANOTHER_TASK,
    }
    assert tried == {f"{part}.{one.name}".lstrip(".") for part, one in every_setting()}


def test_a_command_tells_a_target_in_words_and_how_many_match(doors):
    words = ["task", "create", "--plan", doors.bundle.folder, *options_of(NEEDED), "--where", "region=eu and ring<2"]
    made = in_process(*words, "--coordinator", doors.urls.admin)
    for said in (
        "devices whose region is eu and ring is below 2",
        "0 of 0 devices that came within a day match; 0 tell no labels",
        "no device told a label ring within a day; they tell none",
        "0 devices match, and the goal is 10",
    ):
        assert said in " ".join(made.output.split()), made.output
    near = in_process(*words, "--db", f"sqlite:///{doors.folder / 'm.db'}", "--blobs", doors.folder / "blobs")
    assert "how many devices match, a running coordinator knows: name it with --coordinator" in near.output
    wrong = in_process(*words[:-1], "region ~ eu", "--coordinator", doors.urls.admin)
    assert (
        "where must be an expression on labels; column 8: there is no operator `~`"
        in f"{wrong.output}{wrong.exception}"
    )


@pytest.mark.parametrize("name", REFUSED_BY_THE_ALGORITHM)
def test_what_the_algorithm_refuses_is_refused_alike_at_each_door(doors, name):
    said = {" ".join(door(doors, NEEDED | {name: REFUSED_BY_THE_ALGORITHM[name]}).split()) for door in DOORS}
    assert {f"{name} " in words and "leave" in words.replace("left", "leave") for words in said} == {True}, said
    assert doors.store.tasks() == []


def test_bad_values_are_refused_in_the_same_words_at_each_door(doors):
    asked = 0
    for part, one in every_setting():
        bad = {one.name: BAD[one.kind]}
        if part == "privacy":
            bad = PRIVACY | bad
        settings = NEEDED | ({part: bad} if part else bad)
        wanted = f"{part}: {one.name}" if part else one.name
        for door in set(DOORS) - {Doors.command_elsewhere}:  # which refuses before it asks anybody, as the one here
            if one.kind == "flag" and not part and door.__name__.startswith("command"):
                continue  # whose switch has no value
            said = " ".join(door(doors, settings).split())
            assert f"{wanted} must be {one.allowed}, not " in said or one.kind == "text", (door.__name__, said)
            assert f"{wanted} must be " in said, (door.__name__, said)
            asked += 1
    assert asked > 200
    said = {door.__name__: door(doors, NEEDED | OF_ANOTHER_TASK) for door in DOORS}
    assert all("there is no task 'nope'" in words for words in said.values()), said
    assert doors.store.tasks() == []


def test_what_cannot_be_of_a_plan_of_one_trip_is_refused_alike(doors):
    said = {door.__name__: door(doors, NEEDED | {"same_cohort": True}) for door in DOORS}
    assert all("same_cohort" in words for words in said.values()), said


def test_people_read_the_words_of_the_field_at_each_door(doors):
    listed = squeezed(in_process("task", "create", "--help").stdout)
    keywords = inspect.signature(muster.Coordinator.create).parameters
    helped = squeezed(muster.Coordinator.create.__doc__)
    page = doors.page()
    schemas = httpx2.get(f"{doors.urls.admin}/openapi.json").json()["components"]["schemas"]
    for part, one in every_setting():
        about = f"{part}: {one.about[0].lower()}{one.about[1:]}" if part else one.about
        key = f"{one.name} ({one.facts})" if one.facts else one.name
        assert squeezed(key if part in PAIRS else option_of(one.name)) in listed, one.name
        assert part in PAIRS or squeezed(f"{about} [{one.facts}]" if one.facts else about) in listed, one.name
        assert f'name="{f"{part}.{one.name}".lstrip(".")}"' in page
        assert one.about in page, one.name
        described = [kind["properties"].get(one.name) for name, kind in schemas.items() if "properties" in kind]
        assert any(one.about in json.dumps(found, ensure_ascii=False) for found in described if found), one.name
        if not part:
            assert keywords[one.name].kind is inspect.Parameter.KEYWORD_ONLY
            assert keywords[one.name].default == (inspect.Parameter.empty if one.required else one.default), one.name
            assert squeezed(f"`{one.name}`: {one.about}" + (f" ({one.facts})" if one.facts else "")) in helped
    for group in groups()[1:]:
        assert squeezed(group.about) in listed or group.name not in PAIRS, group.name
        assert group.about in page


@pytest.fixture
def simulation_doors(tmp_path, monkeypatch):
    return SimulationDoors(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "settings",
    [FEDERATED, SAMPLED, SUMMED, POOLED, PERSONAL, TUNED, TABLE],
    ids=["federated", "sampled", "summed", "pooled", "personal", "tuned", "table"],
)
def test_every_setting_of_a_simulation_is_taken_alike_at_each_door(simulation_doors, settings):
    taken = {door.__name__: door(simulation_doors, settings) for door in SIMULATION_DOORS}
    assert len({repr(config) for config in taken.values()}) == 1, taken
    for name, value in settings.items():
        got = getattr(taken["python"], name)
        if isinstance(value, dict):
            got = {key: got[key] if isinstance(got, dict) else getattr(got, key) for key in value}
        got = list(got) if isinstance(value, list) else got
        assert str(got).endswith(value) if name in {"data", "start", "against"} else got == value, name


def test_a_plan_is_taken_alike_where_a_simulation_may_have_one(simulation_doors, tmp_path):
    settings = SIMULATED | {"model": "mlp", "plan": str(make_bundle(tmp_path / "plan").folder)}
    doors = set(SIMULATION_DOORS) - {SimulationDoors.sweep}
    assert len({repr(door(simulation_doors, settings)) for door in doors}) == 1
    assert "mlp" in repr(simulation_doors.python(settings))


def test_no_setting_of_a_simulation_is_left_out_of_these_tests():
    tried = {
        name for settings in (FEDERATED, SAMPLED, SUMMED, POOLED, PERSONAL, TUNED, TABLE) for name in named(settings)
    }
    every = {f"{part}.{one.name}".lstrip(".") for part, one in every_setting(SimulationConfig)}
    assert {"settings" if name.startswith("settings.") else name for name in tried} | {"plan"} == every


def test_bad_values_of_a_simulation_are_refused_alike_at_each_door(simulation_doors):
    asked, named_otherwise = 0, {"model", "dataset", "algorithm", "settings"}
    everything = [*every_setting(SimulationConfig), *(("", one) for one in settings_of(SimulationConfig) if one.part)]
    for part, one in everything:
        bad = {one.name: (BAD | NO_TEXT)[one.kind]}
        settings = SIMULATED | ({part: bad} if part else bad)
        wanted = f"{part}: {one.name}" if part else one.name
        for door in SIMULATION_DOORS:
            if door is SimulationDoors.command and (one.kind in NO_TEXT or (one.kind == "flag" and not part)):
                continue  # all words are texts, and a switch has no value
            if door is SimulationDoors.python and not part and one.name in named_otherwise:
                continue  # which may be objects
            said = " ".join(str(door(simulation_doors, settings)).split())
            assert f"{wanted} must be {one.allowed}, not " in said, (door.__name__, said)
            asked += 1
    assert asked > 120


def test_people_read_the_words_of_a_simulations_fields_at_each_door():
    listed, helped = squeezed(in_process("simulate", "--help").stdout), squeezed(muster.simulate.__doc__)
    keywords = inspect.signature(muster.simulate).parameters
    for part, one in every_setting(SimulationConfig):
        about = f"{part}: {one.about[0].lower()}{one.about[1:]}" if part else one.about
        assert one.about, one.name
        assert squeezed(f"{one.name} ({one.facts})" if one.facts else one.name) in listed or part not in PAIRS, one.name
        default = "" if one.name == "model" else one.facts  # which a file may have
        assert part in PAIRS or squeezed(option_of(one.name)) in listed
        assert part in PAIRS or squeezed(f"{about} [{default}]" if default else about) in listed, one.name
        if not part and one.name not in {"model", "dataset", "algorithm", "settings"}:
            assert keywords[one.name].default == one.default or one.default is None, one.name
            assert squeezed(f"`{one.name}`: {one.about}" + (f" ({one.facts})" if one.facts else "")) in helped
    assert {one.name for one in settings_of(SimulationConfig)} - {"dataset"} <= set(keywords)


@pytest.mark.parametrize(("name", "kind"), [("tasks", TaskSettings), ("simulations", SimulationConfig)])
def test_every_setting_is_on_the_site_with_its_words_and_values(name, kind):
    text = made(f"settings of {name}") + made("settings of tasks")
    for part, one in every_setting(kind):
        about, allowed = (words.replace("|", "\\|") for words in (one.about, one.allowed))
        assert f"| `{part}{'.' * bool(part)}{one.name}` | {about} | {allowed} |" in text or one.part
    assert re.findall(r"ESTIMATORS|`\w+` \|  \|", text) == []
