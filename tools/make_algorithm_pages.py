"""`make algorithms`: the table in docs/algorithms.md, and the pages in docs/algorithms/, from the code and results.

Run it when an algorithm comes, goes, or has other settings, sizes, words or learning curves. What stands before the
first section of a page is written by hand: what the family is, and when to use it. tests/test_docs.py holds the pages
against the code and the results of `muster bench curves`.
"""

import re
import statistics
from pathlib import Path

from benchmarks.curves import Curve, Curves, final
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.facts import AlgorithmFacts, facts_of, total
from fedcore.decoding import decoder
from muster.pictures.curves import draw_ranges
from muster.pictures.picture import Picture
from muster.tables import markdown

ROOT = Path(__file__).parents[1]
INDEX, PAGES = ROOT / "docs" / "algorithms.md", ROOT / "docs" / "algorithms"
TABLE = re.compile(r"(?<=\n## The algorithms\n)(.*?\n\n)\|.*?\n(?=\n[^|])", re.DOTALL)
RESULTS, PICTURES = ROOT / "benchmarks" / "results", PAGES / "curves"
YARDSTICK = "fedavg"
_CURVES = decoder(Curves)
CURVES = """## Learning curves

Means over three seeds, in bands from the lowest to the highest. [How they were made](../algorithms.md#learning-curves).

"""


def page_of(facts: AlgorithmFacts) -> Path:
    """The page of an algorithm's family."""
    return PAGES / f"{facts.family.replace(' ', '-')}.md"


def index(everything: list[AlgorithmFacts]) -> str:
    """The table of all algorithms, with links to the pages."""
    rows = []
    for facts in everything:
        what = facts.summary.partition(": ")[2].removesuffix(".") or facts.summary
        link = f"[`{facts.name}`](algorithms/{page_of(facts).name}#{facts.name})"
        sizes = [", ".join(map(str, facts.down)), ", ".join(map(str, facts.up)), str(total(facts.state))]
        kept = str(total(facts.kept)) if facts.kept else "–"
        rows.append([link, what, facts.family, *sizes, kept, facts.paper or "–"])
    return markdown(["algorithm", "in short", "family", "down", "up", "server state", "device keeps", "paper"], rows)


def chapter(facts: AlgorithmFacts) -> str:
    """The section of an algorithm: its docstring and its settings."""
    rows = [[f"`{setting.name}`", str(setting.value), setting.values, setting.meaning] for setting in facts.settings]
    settings = markdown(["setting", "default", "may be", "meaning"], rows)
    return f"## `{facts.name}`\n\n{facts.summary}\n\n{facts.equations}\n\n{settings}"


def results() -> list[Curves]:
    """The newest results of `muster bench curves`, one for each data set."""
    newest = {path.name.split("-")[1]: path for path in sorted(RESULTS.glob("curves-*.json"))}
    return [_CURVES.decode(path.read_bytes()) for path in newest.values()]


def of_family(result: Curves, family: str) -> list[Curve]:
    """The curves of a family, after that of the yardstick; none of a family that trains nothing."""
    if not any(curve.family == family for curve in result.curves):
        return []
    return [curve for curve in result.curves if curve.algorithm == YARDSTICK or curve.family == family]


def picture_of(result: Curves, page: Path) -> Path:
    """The picture of a family's curves on one data set."""
    return PICTURES / f"{page.stem}-{result.dataset}.svg"


def pictures() -> dict[Path, Picture]:
    """Every picture of the pages."""
    drawn = {}
    for page, family in pages().items():
        for result in results():
            curves = {curve.algorithm: curve.accuracies for curve in of_family(result, family)}
            if not curves:
                continue
            drawn[picture_of(result, page)] = draw_ranges(curves, result.every, f"{family}, {result.dataset}")
    return drawn


def learning(result: Curves, page: Path, family: str) -> str:
    """A family's curves on one data set: the picture, and the figures as a table."""
    curves = of_family(result, family)
    base = [final(curve) for curve in curves[0].accuracies]
    rows = []
    for curve in curves:
        ends = [final(accuracies) for accuracies in curve.accuracies]
        gain = 100 * statistics.fmean(ours - theirs for ours, theirs in zip(ends, base, strict=True))
        shown = f"{gain:+.1f}".replace("-", "−") if curve.algorithm != YARDSTICK else "–"
        span = f"{statistics.fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
        rows.append([f"`{curve.algorithm}`", ", ".join(tuned(curve)), span, shown])
    columns = ["algorithm", "settings, and what else was tried", "accuracy (lowest to highest)", "points over FedAvg"]
    names = ", ".join(curve.algorithm for curve in curves)
    alt = f"Accuracy on unseen users of {result.dataset} over {result.rounds} rounds: {names}"
    return f"![{alt}](curves/{picture_of(result, page).name})\n\n{markdown(columns, rows)}"


def tuned(curve: Curve) -> list[str]:
    """The settings that were chosen, with the other values of the grid."""
    words = []
    for name, value in curve.settings.items():
        others = sorted({point.settings[name] for point in curve.tried} - {value})
        words.append(f"`{name}` {value:g} ({', '.join(f'{other:g}' for other in others)})")
    return words


def pages() -> dict[Path, str]:
    """The family of every page."""
    return {page_of(facts): facts.family for facts in map(facts_of, map(create, ALGORITHMS))}


def documents() -> dict[Path, str]:
    """Every document with its parts made anew. A new family gets a page that lacks the words by hand."""
    everything = [facts_of(create(name)) for name in ALGORITHMS]
    files = {INDEX: TABLE.sub(lambda match: match[1] + index(everything), INDEX.read_text())}
    for page, family in pages().items():
        ours = [facts for facts in everything if facts.family == family]
        title = f"# {family.capitalize()}\n\n"
        head = page.read_text().partition("## ")[0] if page.exists() else title
        curves = "\n".join(learning(result, page, family) for result in results() if of_family(result, family))
        files[page] = head + (f"{CURVES}{curves}\n" if curves else "") + "\n".join(map(chapter, ours))
    return files


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    files = documents() | {path: picture.svg for path, picture in pictures().items()}
    for path, text in files.items():
        path.write_text(text)
        print(f"wrote {path}")
