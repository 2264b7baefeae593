"""`muster bench`: one benchmark, against a peer in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.output import Json, doing, emit, show_fields, show_table

bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run one benchmark. Each compares with a peer in the same run; --json prints one line to keep.",
)


@bench_app.command("demo")
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per algorithm.")] = 25,
    json: Json = False,
) -> None:
    """Where the time of `muster demo` goes.

    It is run as a stranger runs it. Wall and CPU seconds of the command with all that it starts, then mean seconds of
    the phases of a session on the device, and of the steps of a round in the coordinator. It takes as long as the demo
    does.
    """
    from muster.bench.demo import run

    result = run(rounds)
    if json:
        emit(result)
        return
    accuracy = {name: one["test_accuracy"] for name, one in result.demo["algorithms"].items()}
    show_fields({"wall_s": result.wall_s, "cpu_s": result.cpu_s, "accuracy": accuracy} | result.phases)


@bench_app.command("device_step")
def device_step(
    models: Annotated[
        list[str] | None, typer.Option("--model", help="A built-in model; may be repeated.  [default: all]")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="onnx or executorch; may be repeated.  [default: both]"),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Turns of each runtime; the least time counts.")] = 10,
    json: Json = False,
) -> None:
    """A local step on devices' runtimes, against torch.

    Forward, backward and update on ONNX Runtime and ExecuTorch, on one thread: CPU milliseconds at batch 20, and their
    ratio to torch's. All models in both formats take several minutes, of which most goes into exporting.
    """
    from export.formats import FORMATS
    from export.models import MODELS
    from muster.bench.device_step import run

    chosen = list(models or MODELS)
    with doing("device_step") as say:
        result = run(chosen, list(formats or FORMATS), blocks, say)
    if json:
        emit(result)
        return
    rows = [
        (
            step.model,
            step.backend,
            f"{step.cpu_ms:.3g}",
            f"{step.ratio_to_eager:.2f}",
            step.target,
            None if step.export_cpu_s is None else f"{step.export_cpu_s:.1f}",
        )
        for step in result.steps
    ]
    show_table(("model", "runtime", "CPU ms", "to torch", "target", "export CPU s"), rows)


@bench_app.command("device_footprint")
def device_footprint(json: Json = False) -> None:
    """What a device weighs.

    Megabytes installed, CPU seconds to import, memory while it trains.

    It installs the device extra into an empty folder, so it needs pip and PyPI, and takes half a minute.
    """
    from muster.bench.device_footprint import run

    with doing("device_footprint") as say:
        result = run(say)
    if json:
        return emit(result)
    figures = {
        "installed_mb": result.installed_mb,
        "bytecode_mb": result.bytecode_mb,
        "import_cpu_s": result.import_cpu_s,
        "train_rss_mb": result.train_rss_mb,
        "train_rss_executorch_mb": result.train_rss_executorch_mb,
    }
    rows = [(name, f"{value:.3g}", result.targets.get(name)) for name, value in figures.items()]
    return show_table(("what", "is", "at most"), rows)


@bench_app.command("hostile_fleet")
def hostile_fleet(
    profile: Annotated[Path, typer.Option(help="The fleet's profile.")] = Path("examples/fleet-hostile.toml"),
    devices: Annotated[int, typer.Option(min=4, help="How many there are, all awake.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to complete, each with a quarter of the devices.")] = 20,
    dataset: Annotated[str, typer.Option(help="Whose users' examples the devices hold.")] = "digits",
    data: Annotated[Path | None, typer.Option(help="The folder that holds data sets on disk.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the fleet and of the task.")] = 0,
    json: Json = False,
) -> None:
    """Devices that fall silent, die and are unplugged.

    They run against a real coordinator, then all accounts are compared. The coordinator's rows, the devices' journals
    and the fleet's own count must agree, and the engine must reach the same model from the reports that were counted.
    The exit code is 1 when that is not so. It takes a few minutes.
    """
    from dataclasses import asdict

    from msgspec import structs

    from muster.bench.hostile_fleet import HostileConfig, run

    config = HostileConfig(profile=profile, devices=devices, rounds=rounds, dataset=dataset, data=data, seed=seed)
    with doing("sessions") as say:
        result = run(config, lambda session: say(f"{session.client}: {session.ending}", 1))
    if json:
        emit(result)
    else:
        fields = {name: value for name, value in structs.asdict(result).items() if name not in {"kinds", "reconcile"}}
        show_fields(fields | asdict(result.reconcile))
    raise typer.Exit(0 if result.sound else 1)


@bench_app.command("secagg_fleet")
def secagg_fleet(
    devices: Annotated[int, typer.Option(min=10, help="How many there are; every round selects all.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to complete.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the fleet, of the model and of the task.")] = 0,
    json: Json = False,
) -> None:
    """Devices that are killed in mid secure aggregation.

    Every sum is then recomputed, bit for bit. A fleet of device processes trains on handwritten digits under secure
    aggregation, and a fifth of it is killed in five rounds. Sums must be those of the survivors' quantised reports,
    failed rounds must release no share, and the accuracy must be that of the same training without masks. The exit code
    is 1 when that is not so. A hundred devices take about ten minutes on two cores.
    """
    from msgspec import structs

    from muster.bench.secagg_fleet import SecureFleetConfig, run

    config = SecureFleetConfig(devices=devices, rounds=rounds, seed=seed)
    with doing("sessions") as say:
        result = run(config, lambda session: say(f"{session.client}: {session.ending}", 1))
    if json:
        emit(result)
    else:
        show_fields(structs.asdict(result))
    raise typer.Exit(0 if result.sound else 1)


@bench_app.command("secagg")
def secagg(
    n: Annotated[int, typer.Option(min=8, help="Devices in the session.")] = 100,
    dim: Annotated[int, typer.Option(min=0, help="Length of a device's vector.")] = 1_000_000,
    dropout: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of the devices that is lost after it shared its secrets.")
    ] = 0.1,
    honest: Annotated[bool, typer.Option("--honest", help="Without signatures, as simulations run it.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs; the least time counts.")] = 5,
    json: Json = False,
) -> None:
    """CPU time and bytes of a secure aggregation.

    One device and the server of protocol SA1, on one thread. Also how fast masks are added against AES-256-CTR alone.
    1000 devices take a minute.
    """
    from muster.bench.secagg import Workload, run

    with doing("secagg") as say:
        result = run(Workload(n, dim, dropout, not honest), repeats, say)
    if json:
        return emit(result)
    figures = ("client_ms", "server_s", "receive_ms", "bytes_up", "bytes_down", "ctr_fraction", "mask_gb_s")
    rows = [(name, f"{getattr(result, name):.4g}", result.targets.get(name)) for name in figures]
    return show_table(("what", "is", "target"), rows)


@bench_app.command("pacing")
def pacing(
    days: Annotated[int, typer.Option(min=1, help="How long; from the third day on it counts.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the arrivals into this SVG file.")] = None,
    json: Json = False,
) -> None:
    """A simulated week of check-ins, paced and not.

    With pace steering, and with a fixed window of 5 to 30 seconds.

    Populations of 1,000 and 1,000,000, of which 10 to 40 percent can come, by the hour of the day. It takes minutes.
    """
    from muster.bench.pacing import draw, run

    result = run(days=days, seed=seed)
    if plot is not None:
        plot.write_text(draw(result))
    if json:
        return emit(result)
    figures = ("check_ins", "in_vain", "peak_to_mean_hour", "peak_to_mean_minute", "rounds", "fill_s_p50", "fill_s_p99")
    rows = [
        (f"{scene.population:,}", "paced" if one.paced else "fixed", *(f"{getattr(one, name):.4g}" for name in figures))
        for scene, *courses in result.scenes
        for one in courses
    ]
    return show_table(("devices", "windows", *figures), rows)


@bench_app.command("signatures")
def signatures(
    blocks: Annotated[int, typer.Option(min=1, help="Turns of a hundred requests each; the least time counts.")] = 20,
    json: Json = False,
) -> None:
    """What signing requests costs coordinator and device.

    Against the bare signature, on one thread. CPU microseconds of a check-in with a body, for both algorithms that
    devices may sign with. It takes seconds.
    """
    from muster.bench.signatures import run

    with doing("signatures") as say:
        result = run(blocks, say)
    if json:
        return emit(result)
    rows = [
        (
            cost.algorithm,
            f"{cost.gate_us:.0f}",
            f"{cost.verify_us:.0f}",
            f"{cost.gate_to_verify:.2f}",
            f"{cost.sign_request_us:.0f}",
            f"{cost.sign_us:.0f}",
        )
        for cost in result.costs
    ]
    heads = ("algorithm", "authenticator, µs", "bare, µs", "ratio", "sign a request, µs", "bare, µs")
    return show_table(heads, rows)


@bench_app.command("checkin")
def checkin(
    devices: Annotated[int, typer.Option(min=1, help="How many devices check in, in turns.")] = 500,
    blocks: Annotated[int, typer.Option(min=1, help="Turns of each server; the best of each counts.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a turn; a load takes twice as long.")] = 4.0,
    json: Json = False,
) -> None:
    """Check-ins per CPU second of the coordinator.

    They are rejected, and compared with a bare FastAPI route in the same run. The route does nothing but verify and
    parse the same signed requests. Then check-ins come at 50, 100, 200 and once more 50 % of what the coordinator can
    answer: what is too much must be shed with a time to come back.
    """
    from muster.bench.checkin import CheckinConfig, run

    config = CheckinConfig(devices=devices, blocks=blocks, block_s=seconds, load_s=2 * seconds)
    with doing("checkin") as say:
        result = run(config, say)
    if json:
        return emit(result)
    show_fields({name: getattr(result, name) for name in ("per_cpu_second", "bare", "ratio_to_bare", "saturation")})
    columns = ("percent", "offered", "answered", "shed", "failed", "p50_ms", "p99_ms", "shed_p99_ms")
    return show_table(columns, [[f"{getattr(load, name):.4g}" for name in columns] for load in result.loads])


@bench_app.command("report")
def report(
    size: Annotated[list[int] | None, typer.Option(min=1, help="Values in a report; may be given again.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Reports in a round.")] = 400,
    uploading: Annotated[int, typer.Option(min=1, help="How many are sent at a time.")] = 20,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds, and as often the yardstick.")] = 7,
    json: Json = False,
) -> None:
    """CPU seconds of the coordinator for a report.

    The yardstick: its body received, hashed and added with nothing around it. Both in turns in one run; the ratio is
    the median over the pairs.
    """
    from muster.bench.report import TARGETS, ReportConfig, run

    with doing("report") as say:
        sizes = tuple(size or TARGETS)
        config = ReportConfig(sizes=sizes, devices=devices, uploading=uploading, pairs=pairs)
        result = run(config, say)
    if json:
        return emit(result)
    columns = ("size", "ratio", "target", "coordinator_ms", "yardstick_ms", "server_before_mb", "server_peak_mb")
    rows = [[getattr(cost, name) for name in columns] for cost in result.costs]
    return show_table(columns, [["–" if value is None else f"{value:.3g}" for value in row] for row in rows])


@bench_app.command("rounds")
def rounds(
    devices: Annotated[int, typer.Option(min=1, help="How many there are; every round selects all of them.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to complete.")] = 1,
    size: Annotated[int, typer.Option(min=1, help="Values in a report.")] = 1000,
    silent: Annotated[float, typer.Option(min=0, max=0.4, help="Share of devices that never report.")] = 0.0,
    killed: Annotated[float, typer.Option(min=0, max=0.4, help="Share that dies in the middle of an upload.")] = 0.0,
    json: Json = False,
) -> None:
    """Rounds with thousands of light devices.

    The devices run in this process, a coordinator in another: time and memory of each round. The exit code is 1 when a
    round was abandoned or not committed. 10,000 devices take some minutes on two cores.
    """
    from msgspec import structs

    from muster.bench.rounds import RoundsConfig, run

    config = RoundsConfig(devices=devices, rounds=rounds, size=size, silent=silent, killed=killed)
    with doing("rounds") as say:
        result = run(config, say)
    if json:
        emit(result)
    else:
        show_fields({name: value for name, value in structs.asdict(result).items() if name != "rounds"})
    raise typer.Exit(0 if result.sound else 1)


@bench_app.command("soak")
def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="For how long.")] = 30.0,
    devices: Annotated[int, typer.Option(min=6, help="How many devices come and go.")] = 300,
    size: Annotated[int, typer.Option(min=1, help="Values in a report.")] = 10_000,
    json: Json = False,
) -> None:
    """Does the coordinator's process stay as it is for hours.

    Round after round with light devices that fall silent and die. The slope of its memory after a warm-up, open files
    and rows that are left when the last device has gone.
    """
    from msgspec import structs

    from muster.bench.soak import SoakConfig, run

    with doing("soak") as say:
        config = SoakConfig(minutes=minutes, devices=devices, size=size)
        result = run(config, say)
    if json:
        return emit(result)
    return show_fields(structs.asdict(result))
