"""`muster study`: published studies, rerun on small data sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from muster.options import Data
from muster.output import Json, emit, header, loading, progress, remark, say, show_table

if TYPE_CHECKING:
    from research.study import Report, Study

QUICK = "The smallest sizes, in seconds: they show only that the study runs."
OUT = "The folder of the page, pictures (SVG and PNG) and JSON; finished trials are kept in its trials/."


def add_to(app: typer.Typer) -> None:
    """Add `study` to an application."""
    app.command()(study)


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A study, or `list` for all of them.")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds of every trial.")] = 3,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("studies"),
    data: Data = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time.  [default: one for each core]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK)] = False,
    json: Json = False,
) -> None:
    """Rerun a published study on small data sets.

    It prints tables, and writes a page with pictures, PNG files and JSON. An interrupted study resumes.
    """
    with loading():
        from research import studies

    if name == "list":
        return _list(list(studies.STUDIES.values()), json)
    from research.study import summary, write

    chosen = studies.find(name)
    out.mkdir(parents=True, exist_ok=True)  # before the hours of training
    report = _run(chosen, Sizes(seeds, quick, data), out, processes)
    page = write(report, out)
    if json:
        return emit(report)
    for title, columns, rows in summary(report):
        say()
        say(title)
        say()
        show_table(columns, rows)
    remark(f"The page is {page}.")
    return None


class Sizes(NamedTuple):
    """The size of a study. seeds: their number. quick: take the smallest sizes. data: the folder of data sets."""

    seeds: int
    quick: bool
    data: Path | None


def _list(studies: list[Study], json: bool) -> None:
    if json:
        return emit([{"name": study.name, "question": study.question, "paper": study.paper} for study in studies])
    return show_table(("study", "question", "paper"), [(study.name, study.question, study.paper) for study in studies])


def _run(study: Study, sizes: Sizes, out: Path, processes: int | None) -> Report:
    """Run the trials, and show progress."""
    from research.study import Report, Trials
    from simulator.engines.processes import usable_cores

    words = ["muster", "study", study.name, f"--seeds {sizes.seeds}"]
    words += ["--data DIR"] * (sizes.data is not None) + ["--quick"] * sizes.quick
    with progress() as bar:
        task = bar.add_task(study.name, total=None, note="")
        trials = Trials(
            out / "trials",
            seeds=range(sizes.seeds),
            quick=sizes.quick,
            data=sizes.data,
            processes=processes or usable_cores(),
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        findings = study.find(trials)
    about = header(study.name)
    return Report(
        study=study.name,
        question=study.question,
        paper=study.paper,
        command=" ".join(words),
        date=str(about["date"]),
        machine=str(about["machine"]),
        seeds=list(trials.seeds),
        quick=sizes.quick,
        cpu_minutes=trials.cpu_s / 60,
        findings=findings,
    )
