"""Documents are checked as code is: what exists is documented, and what is documented exists."""

import base64
import dataclasses
import functools
import inspect
import itertools
import re
import shlex
import subprocess
import typing
from xml.etree import ElementTree

import msgspec
import pytest
import typer

from coordinator.operations import OPERATIONS
from coordinator.rules.progress import Reason
from coordinator.rules.task_settings import TaskSettings
from export.model import Model
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import keeps_client_state
from fedcore.algorithms.rehearsal import moves_by_participation
from fedcore.plan import PLAN_VERSION
from fedcore.wire.messages import PROBLEMS, WIRE_VERSION, AbortReason, Assignment, RejectionReason
from muster.app import app
from muster.commands.device import parser as device_parser
from muster.python.operating import Task
from secagg.messages import Invite
from simulator.fleet.profile import Kind
from tests.tree import ROOT, files
from tools.pages import MAKERS, SECURITY, facts, made, marked, passages, pattern_of, whole

MACHINE_PATH = re.compile(r"(?<![\w.:~\-/}])/(?:home|root|work|Users|mnt)/\w+")
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:\w+=\S+ )*(muster \S.*)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def read(name):
    return (ROOT / name).read_text()


def rows(text):
    """The cells of every table row, without back-ticks."""
    lines = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.split("|")] for line in lines]


def section(text, start):
    """From the heading that begins with `start` to the next one of its level."""
    return re.split(r"^## ", text.split(f"## {start}", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@functools.cache
def parsers():
    """What parses commands: of the framework, and of devices."""
    return typer.main.get_command(app), device_parser().parser


def commands(text):
    """The commands of Muster that a document shows in blocks or names in a sentence."""
    text = text.replace("\\\n", "")
    blocks = [block for language, block in FENCE.findall(text) if language == "sh"]
    shown = "\n".join(blocks).splitlines() + re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
    named = re.findall(r"`(muster [^`]+)`", FENCE.sub("", text))
    return [found[1] for line in shown + named if (found := COMMAND.fullmatch(" ".join(line.split("\n"))))]


DOCUMENTS = [str(path.relative_to(ROOT)) for path in files(".md")]
WITH_COMMANDS = [name for name in DOCUMENTS if commands(read(name))]


def test_every_problem_type_is_documented_with_its_status_and_no_other():
    table = {row[0]: row[1] for row in rows(section(read("docs/spec/wire.md"), "§7")) if row[1].isdecimal()}
    assert table == {slug: str(kind.status) for slug, kind in PROBLEMS.items()}


@pytest.mark.parametrize(("start", "reasons"), [("§3", RejectionReason), ("§6", AbortReason)])
def test_every_reason_is_documented_and_no_other(start, reasons):
    listed = [row[0] for row in rows(section(read("docs/spec/wire.md"), start))][2:]
    assert sorted(listed) == sorted(typing.get_args(reasons))


def test_every_reason_to_abandon_a_round_is_documented():
    sources = "".join(path.read_text() for path in (ROOT / "coordinator").rglob("*.py"))
    found = set(re.findall(r'(?:_abandon\(.*?|Abandon\(|abandon_unfinished_rounds\(.*?, )"([a-z-]+)"', sources))
    listed = {row[0] for row in rows(section(read("docs/spec/rounds.md"), "§4"))[2:]}
    assert found
    assert found == listed


def test_every_test_that_the_algorithms_page_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", read("docs/algorithms.md")))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert not named - set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))


def test_every_field_that_a_coordinator_sends_is_bound_or_said_free():
    table = rows(section(read("docs/spec/wire.md"), "§8"))
    names = [row[0] for row in table]
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    tests = set(re.findall(r"^def (\w+)", sources, re.MULTILINE))
    for header, fields in (
        ("field of the assignment", Assignment.__struct_fields__),
        ("M0 says", [one.name for one in dataclasses.fields(Invite)]),
    ):
        first = names.index(header) + 2
        assert names[first : first + len(fields)] == list(fields)
        for _, said, *held_to, named in table[first : first + len(fields)]:
            assert set(named.replace(",", "").split()) <= tests
            assert named or (said.startswith("no") and held_to == ["–"])


def test_every_algorithm_whose_clients_keep_vectors_is_documented():
    table = rows(section(read("docs/algorithms.md"), "Vectors that devices keep"))
    asks = {name: ("no", "yes")[moves_by_participation(create(name))] for name in ALGORITHMS}
    documented = {row[0]: row[2] for row in table[2:]}
    assert documented == {name: asks[name] for name, cls in ALGORITHMS.items() if keeps_client_state(cls())}


def test_every_algorithm_is_on_the_site_with_a_sentence_and_its_settings():
    listed = {row[0].split("]")[0].strip("["): row[1] for row in rows(made("algorithms"))[2:]}
    assert listed.keys() == ALGORITHMS.keys()
    for one in facts():
        assert len(listed[one.name].split()) > 4, one.name
        text = section(made(f"algorithms of {one.family}").replace("#### ", "## "), f"`{one.name}`")
        documented = {row[0]: row[3] for row in rows(text)[2:] if len(row) == 4}
        assert {name: words for name, words in documented.items() if not words} == {}
        assert {setting.name for setting in one.settings} <= documented.keys(), one.name


def test_pictures_of_learning_curves_are_whole_and_small():
    made_of = "".join(made(f"algorithms of {one.family}") for one in facts())
    drawn = set(re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', made_of))
    assert len(drawn) == 16
    for picture in drawn:
        assert len(picture) < 60_000
        ElementTree.fromstring(base64.b64decode(picture))


def test_every_family_of_algorithms_says_when_to_use_it():
    text = section(read("docs/algorithms.md"), "Families")
    chapters = re.findall(r"^### .+?\n\n(.*?)<!-- made: algorithms of ([\w -]+) -->$", text, re.MULTILINE | re.DOTALL)
    assert [family for _, family in chapters] == list(dict.fromkeys(family for _, family in chapters))
    assert {family for _, family in chapters} == {one.family for one in facts()}
    for by_hand, family in chapters:
        assert len(by_hand.split()) > 40, f"{family}: say what the family is, and when to use it"
        assert set(re.findall(r"`(\w+)`", by_hand)) & set(ALGORITHMS), family


def test_what_the_site_makes_is_asked_for_once_and_by_its_name():
    asked = [name for path in files(".md") for name in re.findall(r"<!-- made: (.+?) -->", path.read_text())]
    asked.remove("NAME")  # how CONTRIBUTING.md says it
    studies = {f"results of {path.stem}" for path in (ROOT / "docs" / "studies").glob("*.json")}
    assert sorted(asked) == sorted([*MAKERS, *studies, *{f"algorithms of {one.family}" for one in facts()}])
    assert "| FedAvg | 0.727 ± 0.025 |" in made("results of drift-on-users")
    for name in ("something else", "results of nothing"):
        with pytest.raises(KeyError):
            whole(f"<!-- made: {name} -->")


@pytest.mark.security("more devices than a task's group_size … is summed in groups")
def test_every_setting_of_a_round_is_documented_with_its_default():
    table = {row[0]: row[1] for row in rows(section(read("docs/spec/rounds.md"), "§2"))[2:]}
    defaults = {field.name: field.default for field in dataclasses.fields(TaskSettings)}
    numbers = {name: float(default) for name, default in table.items() if default.replace(".", "").isdecimal()}
    assert numbers == {name: defaults[name] for name in numbers}
    assert numbers.keys() >= {"over_selection", "selection_timeout_s", "reporting_deadline_s", "max_attempts"}


def test_a_tasks_methods_in_python_say_what_the_operations_say():
    sentences = {one.name: one.sentence for one in OPERATIONS if one.method == "POST" and "{task}" in one.path}
    assert sentences == {name: inspect.getdoc(getattr(Task, name)) for name in sentences}


def test_every_reason_for_where_a_task_is_is_documented_and_no_other():
    documented = {row[0]: row[1] for row in rows(section(read("docs/operations.md"), "Progress"))[2:]}
    assert documented == {reason.value: "yes" if reason.stalled else "no" for reason in Reason}


def test_every_key_of_a_fleet_profile_is_documented_with_its_default():
    documented = {row[0]: row[1] for row in rows(section(read("docs/emulators.md"), "Profiles"))[2:] if len(row) == 3}
    in_words = {"conditions": "unknown", "bandwidth": "no limit", "arch": "this machine's"}
    in_words |= dict.fromkeys(("requirements", "labels"), "none")
    actual = {}
    for field in msgspec.structs.fields(Kind):
        value = "–" if field.required else field.default
        value = list(value) if isinstance(value, tuple) else value
        actual[field.name] = in_words.get(field.name, f"{value:g}" if isinstance(value, float) else str(value))
    assert documented == actual


def test_the_versions_in_the_specifications_are_those_of_the_code():
    assert f"Version {WIRE_VERSION}." in read("docs/spec/wire.md")
    assert f"| `version` | {PLAN_VERSION}." in read("docs/spec/plan.md")


def anchors(path):
    titles = re.findall(r"^#+ (.*)$", whole(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", files(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_are_there(path):
    for target in LINK.findall(path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_documents_and_sections_that_sources_cite_exist():
    missing = []
    for path in files(".py"):
        for name, number in re.findall(r"(docs/[\w/\-]+\.md)(?: (§\d))?", path.read_text()):
            if not (ROOT / name).is_file() or (number and f"## {number}" not in read(name)):
                missing.append(f"{path.relative_to(ROOT)}: {name} {number}")
    assert missing == []


def test_no_file_names_a_path_of_one_machine():
    sources = [*files(".py", ".md", ".toml", ".json", ".yml", ".cfg", ".sh", "Makefile"), ROOT / ".ci" / "run"]
    assert [str(path) for path in sources if MACHINE_PATH.search(path.read_text())] == []


def test_every_make_target_that_documents_name_exists():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = set(re.findall(r"^\s*make ([a-z][a-z-]*)|`make ([a-z][a-z-]*)", read(name), re.MULTILINE))
        assert {target for pair in named for target in pair if target} <= targets


def test_the_readme_opens_with_the_two_commands():
    assert re.search(r"^    make demo\n    make test\n$", read("README.md"), re.MULTILINE)


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_command_in_a_document_exists_with_its_options(name):
    for line in commands(read(name)):
        assert_command(shlex.split(line, comments=True))


def assert_command(line):
    """That Muster has the command of these words, with every option in them."""
    words = [word for word in line[1:] if word != "…"]
    if words[0] == "device":
        assert_device_command(words[1:])
        return
    command, _ = parsers()
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, line


def test_the_readme_uses_one_algorithm_and_one_set_of_settings():
    lines = [
        shlex.split(line)
        for line in commands(read("README.md"))
        if line.startswith(("muster export", "muster simulate"))
    ]
    chosen = {
        tuple(value for option, value in itertools.pairwise(words) if option in ("--algorithm", "--set"))
        for words in lines
        if {"--model", "--out"} & set(words) and not {"--all", "--plan"} & set(words)
    }
    assert len(lines) >= 4
    assert len(chosen) == 1


def test_git_ignores_what_the_readme_makes_and_nothing_that_is_kept():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.split()

    made = ["muster.db", "muster.db-wal", "muster.db.keys", "muster-blobs/ab", "plan/manifest.json", "tiny/blobs/ab"]
    made += [
        "model.safetensors",
        "device/device.db",
        "mine.npz",
        "my_models.py",
        "enrolment.secret",
        "me.pem",
        "me.key",
    ]
    assert git("check-ignore", *made) == made
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def assert_device_command(words):
    _, parser = parsers()
    while words and parser._subparsers is not None:
        (action,) = parser._subparsers._group_actions
        assert words[0] in action.choices, words
        parser = action.choices[words.pop(0)]
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= set(parser._option_string_actions)


def test_the_model_in_the_readme_can_be_built():
    (program,) = [block for language, block in FENCE.findall(read("README.md")) if language == "python"]
    names: dict[str, typing.Any] = {}
    exec(compile(program, "README.md", "exec"), names)
    assert Model(names["tiny"]()).schema.size == 64 * 32 + 32 + 32 * 10 + 10


@functools.cache
def known_tests():
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    return sources.keys() | set(re.findall(r"^def (test_\w+)", "".join(sources.values()), re.MULTILINE))


BESIDE = {"SECURITY.md": "Reporting", "docs/threat-model.md": "Tabletop"}
"""The section of each document on security that promises nothing, or names its tests itself."""
NO_PROMISES = [
    "Predict graphs and tokenizers of released models run in the app's own process",
    "A person who may write the database and the files needs no token",
    "Run it on a network that you trust",
    "Secure aggregation protects reports from some parties and not from others",
    "The person with the release key is trusted to have read the plan",
    "some points of the table below hold with limits",
    "Against one that lies, it protects as far as the operator makes the two good",
    "server: in mode active lie to anybody in any message",
    "enrolment authority: decide who is a device, draw beacons",
    "network: read, change and replay everything",
    "A server that lies in its offers",
    "The sum itself is not protected unless devices add noise",
    "No more devices are corrupt than that",
    "The number of devices is public, and who takes part",
    "Devices round and draw as they should",
    "A device that enrols anew is outside that, and an operator may raise a budget",
    "The author of a plan chooses what runs on a device",
    "a limit on memory (macOS): fill the memory",
    "Under qemu-user a sandbox lacks both",
    "A server that forms the roster by its wishes",
    "A page from who runs the coordinator",
    "Memory of the process",
    "Post-quantum adversaries",
    "The text is the asker's word",
]
"""Passages that assume something, or say what is not protected."""


@pytest.mark.security("Tests hold these sentences")
@pytest.mark.parametrize("name", SECURITY)
def test_every_passage_on_security_is_held_by_tests_or_promises_nothing(name):
    left = passages(read(name).replace(section(read(name), BESIDE[name]), ""))
    said = [pattern_of(words) for words in [*marked("security"), *NO_PROMISES]]
    assert len(left) > 20
    assert [passage for passage in left if not any(words.search(passage) for words in said)] == []


def test_tests_on_security_hold_words_that_are_still_said():
    said = [passage for name in SECURITY for passage in passages(read(name))]
    held = [*marked("security"), *NO_PROMISES]
    assert [words for words in held if not any(pattern_of(words).search(passage) for passage in said)] == []
    assert len(marked("security")) > 110


def test_promises_of_the_service_are_on_the_site_with_their_tests():
    listed = dict(rows(made("promises")))
    assert len(marked("promise")) > 30
    for words, held in (marked("promise") | marked("security")).items():
        assert listed[words.replace("`", "")].replace("`", "").split(", ") == [one.rpartition("::")[2] for one in held]


def test_every_attack_of_the_tabletop_names_tests_that_exist():
    table = re.findall(r"^\|.*\| ([^|]+) \|$", section(read("docs/threat-model.md"), "Tabletop"), re.MULTILINE)[2:]
    assert len(table) > 80
    for held in table:
        named = set(re.findall(r"`([^`]+)`", held))
        assert named, held
        assert named <= known_tests(), named - known_tests()
