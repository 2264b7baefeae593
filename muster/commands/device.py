"""`muster device`: one device and its examples, on this machine. It needs no more than a phone has."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device_runtime.sandbox.kernel import hide_memory
from fedcore.validation import offered
from muster.plain import Lines, emit, say, show_fields, show_table

if TYPE_CHECKING:
    from device_runtime.conditions import Requirements
    from device_runtime.state.records import Entry
    from fedcore.plan import Field


class _Parser(argparse.ArgumentParser):
    """A parser that names an option it does not have before those that are missing."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of argparse. Ends the process with exit code 2 for a strange option."""
        known = self._option_string_actions
        strange = [word.partition("=")[0] for word in args or () if word.startswith("--")]
        if self._subparsers is None and (found := [name for name in strange if name not in known and name != "--"]):
            self.error(f"no option {found[0]}; {offered(found[0], [name for name in known if name[:2] == '--'])}")
        return super().parse_known_args(args, namespace)


class Group:
    """Commands under one name. Parsed arguments have the command's function as `act`.

    `usage` of parsed arguments says what is wrong with them, and ends the process with exit code 2.
    """

    def __init__(self, name: str, about: str, parser: argparse.ArgumentParser | None = None) -> None:
        self.parser = parser or _Parser(prog=name, description=about, allow_abbrev=False)
        self._commands = self.parser.add_subparsers(metavar="COMMAND", required=True)

    def command(self, act: Callable[[argparse.Namespace], Any], name: str = "") -> argparse.ArgumentParser:
        """A command that runs `act`, with --json; its name is that of the function if not given."""
        about = inspect.cleandoc(act.__doc__ or "")
        parser = self._commands.add_parser(
            name or act.__name__.replace("_", "-"),
            help=about.partition("\n")[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object on standard output and nothing else there."
        )
        parser.set_defaults(act=act, usage=parser.error)
        return parser

    def group(self, name: str, about: str) -> Group:
        """A group inside this one."""
        return Group(name, about, self._commands.add_parser(name, help=about, description=about))

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parsed arguments. Raises SystemExit: with 2, after saying what is wrong with them; with 0 after help."""
        return self.parser.parse_args(arguments)


def at_least_one(text: str) -> int:
    """A whole number from 1 on. Raises argparse.ArgumentTypeError."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return number


def add_examples(top: Group) -> None:
    """Add the group of these commands."""
    group = top.group("examples", "Examples of a device, in a store that stays on this machine.")
    importing = group.command(import_, "import")
    importing.add_argument("file", type=Path, metavar="FILE", help="A file *.npz, *.jsonl or *.csv.")
    importing.add_argument("--collection", default="default", metavar="NAME", help="The one to add to.  [%(default)s]")
    importing.add_argument(
        "--field",
        type=_field,
        action="append",
        metavar="NAME:DTYPE[:SHAPE[:HIGH]]",
        help="A field, like x:float32:28x28 or y:int64::10.",
    )
    keeping = group.command(keep)
    keeping.add_argument("--collection", default="default", metavar="NAME", help="It must be there.  [%(default)s]")
    keeping.add_argument("--max-age-s", type=float, metavar="S", help="Keep no example for longer, in seconds.")
    keeping.add_argument("--max-count", type=at_least_one, metavar="N", help="Keep no more examples than this.")
    keeping.add_argument(
        "--max-bytes", type=at_least_one, metavar="N", help="Keep no more bytes of examples than this."
    )
    deleting = group.command(delete)
    deleting.add_argument("--collection", metavar="NAME", help="Delete this collection.")
    deleting.add_argument(
        "--before", type=_time, metavar="TIME", help="Delete older examples, in local time: 2026-01-31[T12:00[:00]]."
    )
    deleting.add_argument("--all", action="store_true", help="Delete all collections.")
    for command in (importing, group.command(list_, "list"), keeping, deleting):
        command.add_argument("--store", type=Path, required=True, metavar="DIR", help="The folder of the store.")


def import_(options: argparse.Namespace) -> None:
    """Add all examples of a file, or none if one is refused. The store is made when missing.

    A new collection needs a --field for each of its fields, unless the file is an .npz.
    """
    from device_runtime.examples import ExampleStore, import_file

    fields = tuple(options.field or ()) or None
    done = import_file(ExampleStore.open(options.store), options.file, options.collection, fields)
    if options.json:
        return emit(done)
    aside = {"damaged store kept as": done.put_aside} if done.put_aside else {}
    return show_fields({"added": done.added, "removed by retention": done.removed, **aside})


def list_(options: argparse.Namespace) -> None:
    """Collections: how many examples, how large, how old, how long they are kept."""
    import msgspec

    from device_runtime.examples import ExampleStore
    from device_runtime.examples.database import words
    from device_runtime.examples.store import FILE

    holdings = ExampleStore(options.store / FILE).holdings()
    if options.json:
        return emit({"collections": holdings})
    columns = ["collection", "examples", "bytes", "oldest", "newest", "fields", "kept at most"]
    rows = [
        (
            h.collection,
            h.examples,
            h.bytes,
            _day(h.oldest),
            _day(h.newest),
            words(h.fields),
            msgspec.structs.asdict(h.retention),
        )
        for h in holdings
    ]
    return show_table(columns, rows)


def keep(options: argparse.Namespace) -> None:
    """Set how long a collection keeps its examples. The rest goes now, and after every append; oldest first.

    A limit that is not given is none: without any option, all examples are kept.
    """
    from device_runtime.examples import ExampleStore, Retention
    from device_runtime.examples.store import FILE

    retention = Retention(max_age_s=options.max_age_s, max_count=options.max_count, max_bytes=options.max_bytes)
    removed = ExampleStore(options.store / FILE).retain(options.collection, retention)
    if options.json:
        return emit({"collection": options.collection, "retention": retention, "removed": removed})
    return show_fields({"removed": removed})


def delete(options: argparse.Namespace) -> None:
    """Delete a collection, or examples older than a time, in one collection or all. The bytes are overwritten.

    Give --collection, --before, or both; or only --all.
    """
    from device_runtime.examples import ExampleStore
    from device_runtime.examples.store import FILE

    if options.all == (options.collection is not None or options.before is not None):
        options.usage("give --collection, --before, or both; or only --all")
    before = None if options.before is None else options.before.timestamp()
    removed = ExampleStore(options.store / FILE).delete(options.collection, before)
    return emit({"removed": removed}) if options.json else show_fields({"removed": removed})


def _field(text: str) -> Field:
    """`name:dtype[:shape[:high]]` as a field. Raises argparse.ArgumentTypeError."""
    from device_runtime.examples.database import to_field

    name, dtype, shape, high, *more = [*text.split(":"), "", "", ""][: max(4, text.count(":") + 1)]
    try:
        sizes = [int(size) for size in shape.split("x")] if shape else []
        raw = {"name": name, "dtype": dtype, "shape": sizes, "high": int(high) if high else None}
        if more:
            raise ValueError(f"{len(more)} parts too many")
        return to_field(raw)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like x:float32:28x28 or y:int64::10: {error}") from error


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2026-01-31 or 2026-01-31T12:00") from error


def _day(at: float | None) -> str | None:
    return None if at is None else f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M}"


STATE = Path("device")
CODES = {"reported": 0, "rejected": 75, "not-needed": 75, "not-now": 75}


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands; its exit code. Raises SystemExit for help and for arguments that are none."""
    hide_memory()
    parsed = parser().parse_args(arguments)
    code: int | None = parsed.act(parsed)
    return code or 0


def parser() -> Group:
    """All that follows `muster device`."""
    top = Group("muster device", "Run a device.")
    _add_run(top)
    journal = top.command(log)
    _add_state(journal, "The device's state folder.")
    journal.add_argument(
        "--last", type=at_least_one, default=20, metavar="N", help="Number of entries, the newest.  [%(default)s]"
    )
    _add_model(top)
    _add_state(top.command(conditions), "The device's state folder, whose disk counts.")
    build = top.command(build_executorch)
    build.add_argument("--arch", help="x86_64 or aarch64; this machine's if not given.")
    build.add_argument("--out", type=Path, metavar="DIR", help="The folder to write.  [where devices look]")
    add_examples(top)
    return top


def run(options: argparse.Namespace) -> int:
    """Check in, train when selected, report; again and again unless --once. Examples never leave the device.

    Times to come back are honoured across restarts; --once runs its session now. What is required must be known to
    hold: `muster device conditions` shows what this machine tells.

    With --once the exit code is 0 when the session reported, 75 when there was no work now or conditions ended it, 1
    when it failed.
    """
    from device_runtime.conditions import linux, trace
    from device_runtime.device import Device
    from device_runtime.errors import Outcome
    from fedcore.labels import labels_of

    try:
        labels = labels_of(options.label or [])
    except ValueError as error:
        options.usage(str(error))
    device = Device(
        options.coordinator,
        options.population,
        options.examples,
        options.state,
        policy=options.policy,
        conditions=linux(storage=options.state) if options.conditions is None else trace(options.conditions),
        requirements=_together(options.require or []),
        backend=options.backend,
        enrolment_secret=options.enrolment_secret_file,
        labels=labels,
    )

    def tell(outcome: Outcome) -> None:
        if options.json:
            return emit(outcome)
        place = f"task {outcome.task} round {outcome.round}" if outcome.task else ""
        say(" ".join(filter(None, [outcome.outcome, outcome.reason, place, outcome.detail])))
        for notice in outcome.notices:
            say(f"  {notice}")
        if outcome.reason == "unreachable":
            say(f"  does a coordinator run at {options.coordinator}, and is that its port for devices?")
        return None

    if not options.once:
        device.run_forever(threading.Event(), tell)
        return 0
    outcome = device.run_once()
    tell(outcome)
    return 75 if outcome.reason == "conditions" else CODES.get(outcome.outcome, 1)


def log(options: argparse.Namespace) -> None:
    """Show the device's journal: every session with its task, times, bytes sent and outcome."""
    from device_runtime.state.records import read_journal

    entries = read_journal(options.state)[-options.last :]
    if options.json:
        return emit(entries)
    return show_table(["when", "how it ended", "for whom", "trained", "sent"], map(_cells, entries))


def model(options: argparse.Namespace) -> int:
    """Fetch the version of a released model that this device is to use, and predict with it.

    With --personalise it first trains that version on the examples, and uses the result if it is better there.
    The exit code is 0 when there is a version, 75 when there is none yet, and 1 when something failed.
    """
    from device_runtime.device import Device
    from device_runtime.examples.source import NpzFile

    device = Device(
        options.coordinator,
        options.population,
        options.personalise or options.state,
        options.state,
        policy=options.policy,
        backend=options.backend,
    )
    with device.model(options.name) as opened:
        swapped = not options.offline and opened.refresh()
        personalised = opened.personalise() if options.personalise else None
        inputs = None if options.predict is None or opened.version is None else NpzFile(options.predict).columns()
        outputs = None if inputs is None else opened.predict(inputs)
        lists = {name: values.tolist() for name, values in (outputs or {}).items()}
        if options.json:
            facts = {"version": opened.version, "swapped": swapped, "personal": opened.personal}
            emit({"model": options.name, **facts, "personalised": personalised, "outputs": lists})
        else:
            kind = "personal, " if opened.personal else ""
            version = f"{kind}version {opened.version}" if opened.version else "no version is here yet"
            say(f"{options.name}: {version}")
            if personalised:
                show_fields(dataclasses.asdict(personalised))
            show_fields(lists)
        return 0 if opened.version else CODES["rejected"]


def conditions(options: argparse.Namespace) -> None:
    """What this machine tells of charging, use, network, battery, space, memory and heat."""
    import msgspec

    from device_runtime.conditions import linux

    now = linux(storage=options.state)()
    if options.json:
        return emit(now)
    values = msgspec.structs.asdict(now)
    return show_fields({name: "unknown" if value is None else value for name, value in values.items()})


def build_executorch(options: argparse.Namespace) -> None:
    """Build what `--backend executorch` needs, with pip and a C++ compiler: see docs/backends.md."""
    from device_runtime.backends.executorch import build

    library = build(options.arch, options.out)
    if options.json:
        return emit(library)
    say(str(library.folder))
    sizes = library.files | {"together": library.size_bytes}
    return show_fields({name: f"{size / 1000:,.0f} kB" for name, size in sizes.items()})


def _add_model(top: Group) -> None:
    command = top.command(model)
    command.add_argument("name", metavar="NAME", help="The model's name.")
    _add_device(command)
    command.add_argument(
        "--predict", type=Path, metavar="FILE", help="Inputs: an .npz file with an array for each input of the model."
    )
    command.add_argument("--offline", action="store_true", help="Ask nobody: use the version that is here.")
    command.add_argument(
        "--personalise", type=Path, metavar="PATH", help="Train it on these first: an .npz file, or an example store."
    )


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--coordinator", required=True, metavar="URL", help="The coordinator's URL.")
    command.add_argument("--population", required=True, metavar="NAME", help="The population to serve.")
    _add_state(command, "Where the device keeps its identity, journal and plans.")
    command.add_argument(
        "--backend", default="onnxruntime", help="What runs the graphs: onnxruntime or executorch.  [%(default)s]"
    )
    command.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="What this device may do, see docs/device.md.  [policy.toml in the state folder]",
    )


def _add_run(top: Group) -> None:
    command = top.command(run)
    _add_device(command)
    command.add_argument(
        "--examples", type=Path, required=True, metavar="PATH", help="Local examples: an .npz file, or a store."
    )
    command.add_argument(
        "--require",
        type=_requirements,
        action="append",
        metavar="NAME[=LEAST],…",
        help="What must hold before and during training: charging, idle, unmetered, min_battery=0.5, "
        "min_free_storage_bytes=…, min_free_memory_bytes=…, min_thermal_headroom_c=…; may be repeated.  [nothing]",
    )
    command.add_argument(
        "--conditions",
        type=Path,
        metavar="TRACE",
        help="Made-up conditions: a JSON file of seconds and values.  [this machine's]",
    )
    command.add_argument(
        "--enrolment-secret-file",
        type=Path,
        metavar="FILE",
        help="A file with the secret that the coordinator wants devices to know.  [none]",
    )
    command.add_argument(
        "--label",
        action="append",
        metavar="NAME=VALUE",
        help="What the device is, like region=eu; told if the policy's labels list the name; may be repeated.  [none]",
    )
    command.add_argument("--once", action="store_true", help="Run one session and end.")


def _add_state(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--state", type=Path, default=STATE, metavar="DIR", help=f"{what}  [%(default)s]")


def _requirements(text: str) -> dict[str, object]:
    """`charging,min_battery=0.5` as settings of Requirements. Raises argparse.ArgumentTypeError."""
    from fedcore.conditions import to_requirements

    pairs = [word.strip().partition("=") for word in text.split(",")]
    settings: dict[str, object] = {name: least if equals else True for name, equals, least in pairs}
    try:
        to_requirements(settings)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return settings


def _together(settings: Sequence[Mapping[str, object]]) -> Requirements:
    from fedcore.conditions import to_requirements

    all_of_them = {name: value for settings_of_one in settings for name, value in settings_of_one.items()}
    return to_requirements(all_of_them)


def _cells(entry: Entry) -> list[object]:
    """An entry for people: the table's columns, of several lines each."""
    ended = [entry.outcome, f"×{entry.times}" if entry.times > 1 else "", entry.reason and f"({entry.reason})"]
    for_whom = entry.target and f"for devices with {entry.target}"
    trained = f"{entry.examples:,} examples, {entry.steps:,} steps, {entry.compute_s:.2f} s"
    return [
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.opened)),
        _lines(" ".join(filter(None, ended)), entry.receipt and f"receipt {entry.receipt[:12]}", entry.detail),
        _lines(entry.population, entry.coordinator, f"{entry.task} round {entry.round}" if entry.round else entry.task),
        _lines(entry.told, entry.purpose, for_whom, entry.plan, entry.plan_sha256[:12], trained if entry.steps else ""),
        _lines(f"{entry.bytes_up:,} B up", f"{entry.bytes_down:,} B down") if entry.coordinator else "–",
    ]


def _lines(*parts: str) -> Lines:
    return Lines(filter(None, parts))
