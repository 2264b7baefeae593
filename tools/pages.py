"""What the site of the documents has from the code: it stands where a document says `<!-- made: NAME -->`.

`make docs` puts it there (docs/conf.py); `python -m tools.pages NAME` prints it. None of it is in git.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import typer

from muster.output import markdown

if TYPE_CHECKING:
    import sqlalchemy

    from benchmarks.curves import Curve, Curves
    from coordinator.dashboard.new_task import Group
    from fedcore.algorithms.facts import AlgorithmFacts
    from fedcore.validation import Setting

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "fedcore",
    "secagg",
    "export",
    "ingress",
    "authority",
    "coordinator",
    "device_runtime",
    "simulator",
    "muster",
)
SECURITY = ("SECURITY.md", "docs/threat-model.md")
"""The documents on security, whose sentences tests hold."""
RESULTS = ROOT / "benchmarks" / "results"
YARDSTICK = "fedavg"
_MARK = re.compile(r"^<!-- made: ([\w -]+) -->$", re.MULTILINE)


def whole(text: str) -> str:
    """A document with what is made for it."""
    return _MARK.sub(lambda mark: made(mark[1]), text)


@cache
def made(name: str) -> str:
    """A table, or several, in Markdown. Raises KeyError for a name that is none."""
    if name.startswith("results of "):
        return results_of(name.removeprefix("results of "))
    family = name.removeprefix("algorithms of ")
    return algorithms_of(family) if family != name else MAKERS[name]()


def results_of(study: str) -> str:
    """What a study measured."""
    from research.study import REPORT, numbers

    path = ROOT / "docs" / "studies" / f"{study}.json"
    if not path.exists():
        raise KeyError(study)
    return numbers(REPORT.decode(path.read_bytes()))


def file_map() -> str:
    """Every module of the packages, with the first sentence of its docstring."""
    tables = (
        f"### `{package}`\n\n" + markdown(["file", "is"], [[f"`{name}`", phrase(path)] for name, path in found.items()])
        for package, found in ((package, modules(package)) for package in PACKAGES)
    )
    return "\n".join(tables)


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by their names in the map; a folder stands for its `__init__.py`."""
    paths = (ROOT / package).rglob("*.py")
    in_order = sorted(paths, key=lambda path: (path.parent.parts, path.name != "__init__.py", path))
    named = ((str(path.relative_to(ROOT / package)).removesuffix("__init__.py"), path) for path in in_order)
    return {name or "(the package)": path for name, path in named}


def phrase(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"\.(?: |$)", summary, maxsplit=1)[0]


def failpoints() -> str:
    """Every failpoint of a coordinator."""
    from coordinator.failpoints import FAILPOINTS

    return markdown(["failpoint", "what has happened"], [[f"`{name}`", what] for name, what in FAILPOINTS.items()])


def tables() -> str:
    """Every table of the database, with its columns."""
    from coordinator.store.tables import METADATA

    return "\n".join(
        f"### {table.name}\n\n{table.comment}.\n\n"
        + markdown(["column", "type", "meaning"], [[f"`{c.name}`", _kind(c), c.comment or ""] for c in table.columns])
        for table in sorted(METADATA.tables.values(), key=lambda table: table.name)
    )


def _kind(column: sqlalchemy.Column[Any]) -> str:
    marks = [f"→ {key.column}" for key in column.foreign_keys]
    marks += ["key"] * column.primary_key + ["or null"] * bool(column.nullable)
    return " ".join([str(column.type).lower(), *marks])


def settings_of_the_service() -> str:
    """Every setting of a coordinator."""
    from coordinator.settings import Settings

    def shown(value: Any) -> str:
        empty = "–" if value in (None, "") else str(value).lower() if isinstance(value, bool) else ""
        return empty or (f"{value:g}" if isinstance(value, float) else str(value))

    rows = [[f"`{name}`", shown(one.default), one.description or ""] for name, one in Settings.model_fields.items()]
    return markdown(["setting", "default", "meaning"], rows)


def problems() -> str:
    """Every problem type of the admin API."""
    from coordinator.api.http import ADMIN_PROBLEMS

    rows = [[f"`{slug}`", str(kind.status), kind.title] for slug, kind in ADMIN_PROBLEMS.items()]
    return markdown(["type", "status", "meaning"], rows)


def operations() -> str:
    """Every operation of the admin API."""
    from coordinator.operations import OPERATIONS, PREFIX

    rows = [
        [f"`{one.method} {PREFIX}{one.path}`", f"{one.role}{', not limited' * one.whole}", one.sentence]
        for one in OPERATIONS
    ]
    return markdown(["operation", "role", "does"], rows)


def metrics() -> str:
    """Every metric of a coordinator."""
    from prometheus_client.metrics import MetricWrapperBase

    from coordinator.monitoring import Metrics

    rows = []
    for one in vars(Metrics()).values():
        if isinstance(one, MetricWrapperBase):
            name = one._name + ("_total" if one._type == "counter" else "")
            rows.append([f"`{name}`", one._type, ", ".join(one._labelnames) or "–", one._documentation])
    return markdown(["metric", "kind", "labels", "meaning"], rows)


def settings_of_tasks() -> str:
    """The settings of a task, a table for its own and one for each part."""
    from coordinator.dashboard.new_task import groups

    return "\n".join(settings_of(group) for group in groups())


def settings_of_simulations() -> str:
    """The settings of a simulation; of a part that tasks have too, a reference to it."""
    from coordinator.dashboard.new_task import groups
    from simulator.configuration import SimulationConfig

    of_tasks = [group.settings for group in groups()]
    return "\n".join(
        f"{_head(group, ' of a simulation')}Its settings are those of [a task's `{group.name}`](#{group.name}).\n"
        if group.settings in of_tasks
        else settings_of(group, " of a simulation")
        for group in groups(SimulationConfig)
    )


def settings_of(group: Group, whose: str = "") -> str:
    """The table of a group, below its words."""
    rows = [
        [f"`{setting.name}`", setting.about, setting.allowed, "required" if setting.required else _default(setting)]
        for setting in group.settings
    ]
    return _head(group, whose) + markdown(["setting", "what", "may be", "default"], rows)


def _head(group: Group, whose: str) -> str:
    words = [group.about, "By default there is none." if group.optional else ""]
    return f"### `{group.name}`{whose}\n\n{' '.join(filter(None, words))}\n\n" if group.name else ""


def _default(setting: Setting) -> str:
    return f"{setting.default}".lower() if setting.kind == "flag" else setting.shown_default or "–"


@cache
def facts() -> list[AlgorithmFacts]:
    """Of every algorithm, in their order."""
    from fedcore.algorithms import ALGORITHMS, create
    from fedcore.algorithms.facts import facts_of

    return [facts_of(create(name)) for name in ALGORITHMS]


def algorithms() -> str:
    """The table of all algorithms, with links to their equations."""
    from fedcore.algorithms.facts import total

    rows = []
    for one in facts():
        what = one.summary.partition(": ")[2].removesuffix(".") or one.summary
        sizes = [", ".join(map(str, one.down)), ", ".join(map(str, one.up)), str(total(one.state))]
        kept = str(total(one.kept)) if one.kept else "–"
        rows.append([f"[`{one.name}`](#{one.name})", what, one.family, *sizes, kept, one.paper or "–"])
    return markdown(["algorithm", "in short", "family", "down", "up", "server state", "device keeps", "paper"], rows)


def algorithms_of(family: str) -> str:
    """The equations and settings of a family's algorithms, and its learning curves."""
    ours = [chapter(one) for one in facts() if one.family == family]
    if not ours:
        raise KeyError(family)
    curves = [learning(result, family) for result in results() if of_family(result, family)]
    return "\n".join([*ours, *curves])


def chapter(one: AlgorithmFacts) -> str:
    """The section of an algorithm: its docstring and its settings."""
    rows = [[f"`{setting.name}`", str(setting.value), setting.values, setting.meaning] for setting in one.settings]
    settings = markdown(["setting", "default", "may be", "meaning"], rows)
    return f"#### `{one.name}`\n\n{one.summary}\n\n{one.equations}\n\n{settings}"


@cache
def results() -> list[Curves]:
    """The newest results of `muster bench curves`, one for each data set."""
    from benchmarks.curves import decode_curves

    newest = {path.name.split("-")[1]: path for path in sorted(RESULTS.glob("curves-*.json"))}
    return [decode_curves(path.read_bytes()) for path in newest.values()]


def of_family(result: Curves, family: str) -> list[Curve]:
    """The curves of a family, after that of the yardstick; none of a family that trains nothing."""
    if not any(curve.family == family for curve in result.curves):
        return []
    return [curve for curve in result.curves if curve.algorithm == YARDSTICK or curve.family == family]


def learning(result: Curves, family: str) -> str:
    """A family's curves on one data set: the picture, and the figures as a table."""
    from benchmarks.curves import final
    from muster.pictures import draw_ranges

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
    drawn = draw_ranges({curve.algorithm: curve.accuracies for curve in curves}, result.every, result.dataset)
    names = ", ".join(curve.algorithm for curve in curves)
    alt = f"Accuracy on unseen users of {result.dataset} over {result.rounds} rounds: {names}"
    data = base64.b64encode(drawn.svg.encode()).decode()
    return (
        f'```{{raw}} html\n<img alt="{alt}" src="data:image/svg+xml;base64,{data}">\n```\n\n{markdown(columns, rows)}'
    )


def tuned(curve: Curve) -> list[str]:
    """The settings that were chosen, with the other values of the grid."""
    words = []
    for name, value in curve.settings.items():
        others = sorted({point.settings[name] for point in curve.tried} - {value})
        words.append(f"`{name}` {value:g} ({', '.join(f'{other:g}' for other in others)})")
    return words


@cache
def marked(kind: str) -> dict[str, list[str]]:
    """The tests, or whole files of tests, with a mark of a kind, `promise` or `security`, by its words."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                marks, where = node.decorator_list, f"{name}::{node.name}"
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks, where = getattr(node.value, "elts", [node.value]), name
            else:
                continue
            for mark in marks:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{kind}":
                    found.setdefault(ast.literal_eval(mark.args[0]), []).append(where)
    return found


def promises() -> str:
    """What the service promises and what the documents on security say, each with the tests that hold it."""
    parts = ["## The service", "", _held(marked("promise"))]
    for title, name in zip(("SECURITY.md", "The threat model"), SECURITY, strict=True):
        text = "\n".join(passages((ROOT / name).read_text()))
        places = {words: place.start() for words in marked("security") if (place := pattern_of(words).search(text))}
        parts += [
            f"## {title}",
            "",
            _held({words: marked("security")[words] for words in sorted(places, key=places.get)}),
        ]
    return "\n".join(parts)


def _held(found: dict[str, list[str]]) -> str:
    rows = [[words, ", ".join(f"`{one.rpartition('::')[2]}`" for one in held)] for words, held in found.items()]
    return markdown(["it says", "held by"], rows)


def passages(text: str) -> list[str]:
    """Every paragraph, item and row of a table, but for the tables' heads, on a line; cells with a colon between."""
    text = re.sub(r"^\|.*\|\n\|[-|]+\|\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\| (.*) \|$", lambda row: "\n" + row[1].replace(" | ", ": ") + "\n", text, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|^\* ", re.sub(r"^#.*$", "\n", text, flags=re.MULTILINE), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]+)\]\([^)]+\)|[*`]", r"\1", block) for block in blocks)  # no bold, code or links
    return [" ".join(block.split()) for block in plain if block.strip()]


def pattern_of(words: str) -> re.Pattern[str]:
    """The pattern of a mark's words, in which … stands for others."""
    return re.compile(".*".join(re.escape(part) for part in words.split(" … ")))


def commands() -> str:
    """The help of every command."""
    from muster.app import app  # as the command line has it

    os.environ["COLUMNS"] = "100"
    command = typer.main.get_command(app)
    return "\n".join(_help(command, click.Context(command, info_name="muster", max_content_width=100)))


def _help(command: click.Command, context: click.Context) -> Iterator[str]:
    path = context.command_path
    said = _help_of_device() if path == "muster device" else command.get_help(context)
    yield f"## {path}\n\n```text\n{said.rstrip()}\n```\n"
    for name, inner in getattr(command, "commands", {}).items():
        yield from _help(inner, click.Context(inner, info_name=name, parent=context))


def _help_of_device() -> str:
    """Of the one command that is not made with the others' framework."""
    from muster.commands import device

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        device.main(["--help"])
    return printed.getvalue()


def promises_of_devices() -> str:
    """What every runtime of a device keeps, from the conformance suite."""
    from tests.conformance import plain, promises, secure  # noqa: F401  # they make promises

    return promises.table()


MAKERS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "commands": commands,
    "failpoints": failpoints,
    "file map": file_map,
    "metrics": metrics,
    "operations of the admin API": operations,
    "problems of the admin API": problems,
    "promises": promises,
    "promises of devices": promises_of_devices,
    "settings of the service": settings_of_the_service,
    "settings of tasks": settings_of_tasks,
    "settings of simulations": settings_of_simulations,
    "tables": tables,
}

if __name__ == "__main__":
    print(made(" ".join(sys.argv[1:])))
