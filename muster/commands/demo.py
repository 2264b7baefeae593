"""`muster demo`: export, coordinator, devices and replay on one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.output import Json, emit, loading, progress, remark, say, show_table

if TYPE_CHECKING:
    from coordinator.rules.private_sums import ReportBytes
    from muster.local.demo_app import AppResult
    from muster.local.demo_tasks import DemoResult, OnProgress

ROUNDS, DEVICES = 25, 20
ACROSS, WIDTH = 5, 15
"""Digits in a line of output, and the width of each."""
ROUNDS_AT_PAGE, AT_PAGE = 3, 16
MASKED = (
    "What the coordinator saw: who took part and when, public keys, sealed shares, reports under masks that look "
    "random, and of every round the sum. It saw no report, weight or loss of a single device. An enrolment authority, "
    "a process of its own, said who is a device (docs/threat-model.md). --plain turns masking off."
)
OUT = (
    "A new folder that keeps a run of each algorithm, as `muster simulate --out` does, with its plan and model. The "
    "picture goes there too, and to the working folder without it."
)
PICTURE, TITLE = Path("learning-curves.svg"), "Handwritten digits, non-IID devices"
BROWSER = (
    "Devices on Node, and a web page in a real Chromium with a phone's screen, on which digits are drawn: --devices in "
    f"all, by default {AT_PAGE}, and --rounds secure rounds, by default {ROUNDS_AT_PAGE}, with the first algorithm. "
    "page.png, in the folder of --out, shows the page."
)
IN_CLEAR = "What the coordinator saw: every report in the clear, with its weight and its loss. It kept only their sums."


def demo(
    algorithms: Annotated[
        str, typer.Option(help="Which to run, by commas; your own as package.module:Class or file.py:Class.")
    ] = "mimelite,fedadam",
    rounds: Annotated[int | None, typer.Option(min=1, help=f"Rounds per algorithm.  [default: {ROUNDS}]")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=60, help=f"Devices per round, of 60.  [default: {DEVICES}]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=OUT)] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, and of the order of examples.")] = 0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without secure aggregation: the coordinator sees every report.")
    ] = False,
    browser: Annotated[bool, typer.Option("--browser", help=BROWSER)] = False,
    json: Json = False,
) -> None:
    """Train a digit recogniser on 60 emulated devices.

    They speak HTTP to a real coordinator. Real handwritten digits are split non-IID over 60 devices and 15 held-out
    users. For each algorithm: export the plan, run the rounds with a process for every session that is open, measure
    accuracy on the held-out users, and replay the first rounds in the vectorised engine, which must reach the same
    model ("agreement", relative). With 8 devices or more, reports are summed under secure aggregation, whose rounding
    limits the agreement. Then the devices of the held-out users evaluate the best model, it is released to all devices,
    and one of them reads ten digits with it.
    """
    if browser:
        _in_a_browser(algorithms.partition(",")[0], rounds, devices, seed, out, plain=plain, json=json)
        return
    rounds, devices = rounds or ROUNDS, devices or DEVICES
    from fedcore.algorithms import create, module_of
    from muster.pictures.curves import draw_measured
    from secagg.parameters import LEAST_COHORT

    # Wrong options are reported before torch is loaded, which takes seconds.
    names = tuple(dict.fromkeys(name.strip() for name in algorithms.split(",")))
    for name in names:
        create(name, None, [module_of(name)])
    secure = devices >= LEAST_COHORT and not plain
    result = _trained(names, rounds, devices, seed, secure=secure, out=out)
    picture = (out or Path()) / PICTURE
    draw_measured({run.algorithm: run.points for run in result.algorithms}, TITLE).save(picture)
    if json:
        emit(_summary(result, picture) | {"secure_aggregation": secure})
    else:
        _show(result, picture)
        remark(MASKED if secure else IN_CLEAR)


def _in_a_browser(
    algorithm: str, rounds: int | None, devices: int | None, seed: int, out: Path | None, *, plain: bool, json: bool
) -> None:
    """Train with a page and devices on Node, keep a picture of the page, and show what came of it."""
    from secagg.parameters import LEAST_COHORT

    at_page = devices or AT_PAGE
    if plain or at_page < LEAST_COHORT:
        raise typer.BadParameter(
            f"its rounds are secure, with {LEAST_COHORT} devices or more, and without --plain", param_hint="--browser"
        )
    folder = out or Path()
    folder.mkdir(parents=True, exist_ok=True)
    with loading():
        from muster.local.browser_demo import run_browser_demo
    result = run_browser_demo(algorithm, rounds or ROUNDS_AT_PAGE, at_page - 1, seed, folder / "page.png")
    if json:
        emit(dataclasses.asdict(result))
        return
    columns = ("rounds", "devices on Node", "rounds with the page's report", "accuracy, unseen users")
    show_table(columns, [(result.rounds, result.devices, result.counted, f"{result.test_accuracy:.3f}")])
    remark(f"the page said: {result.page}")
    remark(f"a picture of the page: {result.picture}")


def _trained(
    names: tuple[str, ...], rounds: int, devices: int, seed: int, *, secure: bool, out: Path | None
) -> DemoResult:
    """Run all algorithms, and show how far they are."""
    from muster.python.demonstrating import trained

    with ExitStack() as stack:

        def begin() -> OnProgress:
            """The libraries are loaded: show a line for each algorithm."""
            bar = stack.enter_context(progress())
            lines = {name: bar.add_task(name, total=rounds, note="") for name in names}
            return lambda name, number, note: bar.update(lines[name], completed=number, note=note)

        return trained(names, rounds, devices, seed, secure=secure, out=out, loading=loading, begin=begin)


def _summary(result: DemoResult, picture: Path) -> dict[str, object]:
    return {
        "algorithms": {run.algorithm: dataclasses.asdict(run) for run in result.algorithms},
        "app": dataclasses.asdict(result.app),
        "round_steps": result.round_steps,
        "agreement": max(run.agreement for run in result.algorithms),
        "learning_curves": str(picture),
    }


def _size(report: ReportBytes) -> str:
    sent, uncompressed = (f"{size / 1e3:.1f}" for size in (report.sent, report.uncompressed))
    return f"{sent} kB" if sent == uncompressed else f"{sent} kB, {uncompressed} in float32"


def _show(result: DemoResult, picture: Path) -> None:
    columns = ("algorithm", "rounds", "accuracy", "report", "up", "down", "seconds", "agreement")
    rows = [
        (
            run.algorithm,
            run.rounds,
            f"{run.test_accuracy:.3f}",
            _size(run.report),
            f"{run.bytes_up_per_device / 1e6:.2f} MB",
            f"{run.bytes_down_per_device / 1e6:.2f} MB",
            f"{run.seconds:.1f}",
            f"{run.agreement:.1e}",
        )
        for run in result.algorithms
    ]
    show_table(columns, rows)
    _show_app(result.app)
    remark(f"learning curves: {picture}")


def _show_app(app: AppResult) -> None:
    """What held-out devices measured, and what one of them read."""
    from muster.pictures.curves import drawn_in_characters

    say()
    interval = f"95 %: {app.low:.3f} to {app.high:.3f}"
    say(f"{app.algorithm} on {app.devices} held-out devices: accuracy {app.accuracy:.3f} ({interval})")
    say(f"Released to all as {app.name}, version {app.version}. One of these devices reads with it:")
    for start in range(0, len(app.digits), ACROSS):
        row = app.digits[start : start + ACROSS]
        say()
        for line in zip(*(drawn_in_characters(one.levels) for one in row), strict=True):
            say(_across(line))
        say(_across([f"a {one.read}" + (f", is {one.digit}" if one.read != one.digit else "") for one in row]))


def _across(cells: Sequence[str]) -> str:
    return "".join(cell.ljust(WIDTH) for cell in cells).rstrip()
