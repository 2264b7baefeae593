"""`make algorithms`: the table in docs/algorithms.md, and equations and settings in docs/algorithms/, from the code.

Run it when an algorithm comes, goes, or has other settings, sizes or words. What stands before the first algorithm of a
page is written by hand: what the family is, and when to use it. tests/test_docs.py holds the pages against the code.
"""

import re
from pathlib import Path

from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.facts import AlgorithmFacts, facts_of, total

ROOT = Path(__file__).parents[1]
INDEX, PAGES = ROOT / "docs" / "algorithms.md", ROOT / "docs" / "algorithms"
TABLE = re.compile(r"(?<=\n## The algorithms\n)(.*?\n\n)\|.*?\n(?=\n[^|])", re.DOTALL)
FIRST = "## `"


def page_of(facts: AlgorithmFacts) -> Path:
    """The page of an algorithm's family."""
    return PAGES / f"{facts.family.replace(' ', '-')}.md"


def table(columns: list[str], body: list[list[str]]) -> str:
    """A table in Markdown; a cell may hold a bar."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- |", "|---|").replace(" --- |", "---|")
    )


def index(everything: list[AlgorithmFacts]) -> str:
    """The table of all algorithms, with links to the pages."""
    rows = []
    for facts in everything:
        what = facts.summary.partition(": ")[2].removesuffix(".") or facts.summary
        link = f"[`{facts.name}`](algorithms/{page_of(facts).name}#{facts.name})"
        sizes = [", ".join(map(str, facts.down)), ", ".join(map(str, facts.up)), str(total(facts.state))]
        reach = "no" if facts.simulated_only else "yes"
        rows.append([link, what, facts.family, *sizes, reach, facts.paper or "–"])
    return table(["algorithm", "in short", "family", "down", "up", "server state", "on devices", "paper"], rows)


def chapter(facts: AlgorithmFacts) -> str:
    """The section of an algorithm: its docstring and its settings."""
    rows = [[f"`{one.name}`", str(one.value), one.values, one.meaning] for one in facts.settings]
    settings = table(["setting", "default", "may be", "meaning"], rows)
    return f"{FIRST}{facts.name}`\n\n{facts.summary}\n\n{facts.equations}\n\n{settings}"


def documents() -> dict[Path, str]:
    """Every document with its parts made anew. A new family gets a page that lacks the words by hand."""
    everything = [facts_of(create(name)) for name in ALGORITHMS]
    made = {INDEX: TABLE.sub(lambda found: found[1] + index(everything), INDEX.read_text())}
    for page in dict.fromkeys(map(page_of, everything)):
        ours = [facts for facts in everything if page_of(facts) == page]
        title = f"# {ours[0].family.capitalize()}\n\n"
        head = page.read_text().partition(FIRST)[0] if page.exists() else title
        made[page] = head + "\n".join(map(chapter, ours))
    return made


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for path, text in documents().items():
        path.write_text(text)
        print(f"wrote {path}")
