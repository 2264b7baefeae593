"""Words have one home: an index of documents, and a glossary, each held against what there is."""

import ast
import re
from pathlib import Path

import pytest

from tests.tree import files
from tools.pages import PACKAGES, made, modules

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
MODULES = [(f"{package}.{name}", path) for package in PACKAGES for name, path in modules(package).items()]
WIDTH = 120
QUESTIONS = ("What ", "Which ", "Who ", "Whose ", "Whether ", "Why ", "When ", "Where ", "How ", "For which ")
GUIDES = [*(path for path in DOCUMENTS if path.parent.name in {"how-to", "tutorials"}), ROOT / "docs" / "operations.md"]
TRANSLATED = re.compile(
    r"in the place of|\bin clear\b|\b(?:some|every|any|no)body\b|\bwhoever\b|\banew\b|\bmeanwhile\b", re.IGNORECASE
)
"""Words by which a sentence reads as translated: English has instead, unencrypted, anyone, again, until then."""
PAST = re.compile(
    r"\b(?:as before|until now|formerly|anymore|used to|since version)\b|"
    r"\b(?:older|earlier|previous) (?:versions|releases) of (?:Muster|this)",
    re.IGNORECASE,
)
"""Words by which a sentence compares with code that is gone."""
CENTRAL = re.split(
    r",\s+",
    """population, device, example, collection, example store, host application, task, algorithm, operator, token,
    plan, graph, format, schema, checkpoint, broadcast, report, segment, weight, receipt, blob, bundle, certificate,
    footprint, budget, signer, release check, enrolment, attestation, credential, check-in, session, eligibility,
    selection, assignment, slot, round, attempt, cohort, aggregate, server state, report goal, over-selection,
    lost device, presence, hold, reporting deadline, retry window, pace steering, participation, progress,
    observation, offer, driver, command, transaction, effect, commit, replica, lease, beat, membership, transition,
    garbage collection, failpoint, policy, guard, journal, outcome, backend, retention, conditions, requirements,
    pass, carry, loop, mask, noise, secure aggregation, secure round, group, roster, position, neighbour, share,
    survivors, unmasking, engine, fleet, fork server, fleet profile, keystone test, replay, agreement,
    reconciliation""",
)


def test_every_document_is_in_the_index_once():
    entry = re.compile(r"^\* \[[^\]]+\]\(([^)]+)\): \w", re.MULTILINE)
    indices = [ROOT / "docs" / "README.md", ROOT / "docs" / "decisions" / "README.md"]
    listed = [(index.parent / target).resolve() for index in indices for target in entry.findall(index.read_text())]
    documents = [*(path for path in DOCUMENTS if path != indices[0]), *(ROOT / "examples").glob("*.ipynb")]
    assert sorted(listed) == sorted(path.resolve() for path in documents)


def test_decisions_are_few_and_short_and_name_files_that_are_there():
    records = {path.name: path.read_text() for path in (ROOT / "docs" / "decisions").glob("0*.md")}
    assert len(records) <= 30
    assert {name: len(text.split()) for name, text in records.items() if len(text.split()) > 250} == {}
    paths = {path for text in records.values() for path in re.findall(r"`([\w/]+/[\w/.]+)`", text)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    sources = [path.read_text() for path in files(".py", ".ts", ".md", ".toml")]
    named = {name for text in sources for name in re.findall(r"decisions/(\d{4}[\w-]*\.md)", text)}
    assert named - set(records) == set()


def test_the_map_of_modules_has_a_sentence_on_each():
    assert made("file map").count("\n| `") == len(MODULES)
    assert re.findall(r"^\| `(.*)` \| {1,2}\|$", made("file map"), re.MULTILINE) == []


def test_no_module_docstring_opens_with_a_question():
    openings = {str(path): ast.get_docstring(ast.parse(path.read_text())) or "Which words?" for _, path in MODULES}
    assert [path for path, words in openings.items() if words.startswith(QUESTIONS)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path):
    prose = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "    ", "!"))]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_guides_do_not_read_as_translated():
    found = {path.name: TRANSLATED.findall(" ".join(path.read_text().split())) for path in GUIDES}
    assert {name: words for name, words in found.items() if words} == {}


def test_text_and_code_speak_of_no_past_of_their_own():
    """What was is in the history of the repository, and from the first release on in the changelog."""
    paths = {*files(".md", ".py", ".ts", ".html")} - {ROOT / "CHANGELOG.md", Path(__file__)}
    plain = {
        path: " ".join(re.sub(r"^\s*(?:[#*]|//) ?", "", path.read_text(), flags=re.MULTILINE).split()) for path in paths
    }
    assert {path.name: PAST.findall(text) for path, text in plain.items() if PAST.search(text)} == {}


def entries():
    """What the glossary says of every term, on one line."""
    return re.findall(r"^\* \*\*([^*]+)\*\*: (.*?)(?=\n\*|\n\n|\Z)", GLOSSARY, re.MULTILINE | re.DOTALL)


def test_glossary_and_architecture_name_code_that_exists():
    known = set()
    for package in (*PACKAGES, "research"):
        for name, path in modules(package).items():
            stem = name.removesuffix(".py").removesuffix("/").replace("/", ".")
            known.add(package if name == "(the package)" else f"{package}.{stem}")
            for node in ast.parse(path.read_text()).body:
                targets = getattr(node, "targets", [getattr(node, "target", node)])
                known |= {getattr(target, "name", None) or getattr(target, "id", None) for target in targets}
    named = [name for _, text in entries() for name in re.findall(r"→\s`([^`]+)`", text)]
    assert len(named) > 60
    named += re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", (ROOT / "docs" / "architecture.md").read_text())
    assert [name for name in named if name not in known] == []


def test_the_glossary_has_the_central_nouns_each_once():
    terms = [term for term, _ in entries()]
    assert [term for term in CENTRAL if term not in terms] == []
    assert len(terms) == len(set(terms))
