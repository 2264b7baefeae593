"""What commands print: tables, plots, and where it goes."""

import json
import re
import struct
import sys

import pytest

from coordinator.rules.entities import AssignedDevice
from coordinator.rules.rounds import open_round
from coordinator.store.tasks import open_coordinator_store
from fedcore.errors import NotWritten
from muster import output
from muster.output import latex, plain_markdown
from muster.pictures import COLOURS, Axes, draw_bands, draw_curves, draw_repeated, drawn_in_characters
from simulator.configuration import SimulationConfig
from simulator.runs.reading import Run, grouped, read_run
from simulator.runs.running import start_run
from simulator.simulation import completed
from tests.coordinator.bundles import make_bundle
from tests.forked import COMMAND, forked
from tests.muster.terminal import on_terminal
from tests.muster.test_cli import in_process, muster
from tests.stores import without_rows


@pytest.fixture
def lines(capsys):
    seen = []

    def so_far():
        seen.extend(capsys.readouterr().err.splitlines())
        return seen

    return so_far


def test_progress_without_a_terminal_is_plain_lines(lines, monkeypatch):
    monkeypatch.setattr(output, "LINE_EVERY_S", 0)
    with output.progress() as bar:
        task = bar.add_task("mimelite", total=25, note="")
        assert lines() == ["mimelite 0 of 25"]
        bar.update(task, note="export")
        bar.update(task, completed=7, note="accuracy 0.830 [of users]")
    assert lines()[1:] == ["mimelite 0 of 25, export", "mimelite 7 of 25, accuracy 0.830 [of users]"]


def test_lines_of_progress_are_seconds_apart_and_the_last_state_is_told(lines, monkeypatch):
    monkeypatch.setattr(output, "LINE_EVERY_S", 3600)
    with output.doing("sessions") as say:
        for number in range(1000):
            say(f"round {number}", 1)
        assert lines() == ["sessions"]
    assert lines() == ["sessions", "sessions 1000, round 999"]


def test_lines_of_progress_tell_the_time_left(lines, monkeypatch):
    monkeypatch.setattr(output, "LINE_EVERY_S", 0)
    with output.progress() as bar:
        passed = iter(range(0, 10_000, 90))
        monkeypatch.setattr(bar, "get_time", lambda: next(passed))
        task = bar.add_task("mimelite", total=100, note="")
        for number in (51, 52, 53, 100):  # of a run that was resumed
            bar.update(task, completed=number)
    assert "left" not in lines()[1]
    assert re.fullmatch(r"mimelite 53 of 100, \d:\d\d:\d\d left", lines()[3])
    assert lines()[-1] == "mimelite 100 of 100"


TABLE = "from muster.plain import show_table; show_table(['name', 'what it says'], [['a', %r], ['b', None]])"
DIGEST = re.compile("[0-9a-f]{64}")
LONG = " ".join(f"word{number}" for number in range(40))


def printed(program):
    return forked(COMMAND).run([sys.executable, "-c", program]).stdout


def test_in_a_pipe_a_row_is_one_line_however_long():
    lines = printed(TABLE % LONG).splitlines()
    assert [line.split() for line in lines[2:]] == [["a", *LONG.split()], ["b", "–"]]
    assert lines[0].index("what") == lines[2].index("word0")


@pytest.mark.parametrize("columns", [30, 80])
def test_on_a_terminal_long_cells_go_on_in_the_next_line(columns):
    status, out = on_terminal(columns, program=("-c", TABLE % LONG))
    assert status == 0
    assert max(map(len, out.splitlines())) <= columns
    assert [word for word in out.split() if word.startswith("word")] == LONG.split()
    assert out.splitlines()[0].split() == ["name", "what", "it", "says"]


def test_a_table_that_cannot_fit_becomes_one_field_a_line():
    program = "from muster.plain import show_table; show_table(list('abc'), [[n * 30 for n in 'xyz']] * 2)"
    _, out = on_terminal(80, program=("-c", program))
    assert out == 2 * f"a  {30 * 'x'}\nb  {30 * 'y'}\nc  {30 * 'z'}\n\n"


@pytest.fixture
def task(tmp_path):
    """A task with a round of two passes that has metrics, and one in which devices gave up; where it is kept."""
    where = ["--db", without_rows(tmp_path / "muster.db"), "--blobs", tmp_path / "blobs"]
    open_coordinator_store(where[1], where[3]).close()
    words = ["--plan", make_bundle(tmp_path / "plan").folder, "--population", "p", "--goal", 3, "--rounds", 2]
    task = json.loads(in_process("task", "create", *words, *where, "--json").stdout)["task"]
    metrics = {f"{one}.{what}": 0.123456789 for one in ("train", "sweep") for what in ("loss", "accuracy")}
    with open_coordinator_store(where[1], where[3]) as store, store.database.writing() as records:
        for number, reasons in ((1, ()), (2, ("plan-refused", "invalid-examples"))):
            row_id, _ = records.add_round(task, number, open_round(records.task(task).settings.policy, 0.0))
            drawn = [AssignedDevice(f"{number}-{slot}", slot, f"d{slot}") for slot in range(26)]
            records.add_assignments(row_id, drawn)
            for slot, reason in enumerate(reasons):
                records.move_assignment(records.assignment(f"{number}-{slot}"), "aborted", "device", reason)
            records.finish_round(row_id, records.task(task).initial, {} if reasons else metrics)
    return task, where


@pytest.mark.parametrize("command", ["list", "show", "metrics", "history"])
def test_tables_of_tasks_fit_eighty_columns_and_are_whole_in_a_pipe(task, command):
    name, where = task
    words = ["task", command, *([] if command == "list" else [name]), *where]
    status, narrow = on_terminal(80, *words)
    assert status == 0
    assert max(len(line) for line in narrow.splitlines() if not DIGEST.search(line)) <= 80
    status, piped, _ = muster(*words, COLUMNS="80")
    assert status == 0
    parts = [sorted(re.findall(r"\w[\w.:-]*", out)) for out in (narrow, piped)]
    assert parts[0] == parts[1]


def test_metrics_are_one_line_a_round_in_a_pipe(task):
    _, out, _ = muster("task", "metrics", task[0], *task[1], COLUMNS="80")
    rounds, wrong = ([re.split(r"\s{2,}", line) for line in part.splitlines()] for part in out.split("\n\n"))
    names = ["train loss", "train accuracy", "sweep loss", "sweep accuracy"]
    assert rounds[0] == ["round", "attempt", "state", "reported", "seconds", *names]
    assert rounds[2:] == [
        ["1", "1", "selecting", "0 of 0", "–", *4 * ["0.1235"]],
        ["2", "1", "selecting", "0 of 0", *5 * "–"],
    ]
    assert wrong[2:] == [["2", "1", *4 * ["0"], "–", "invalid-examples=1, plan-refused=1"]]


@pytest.mark.parametrize("command", [["doctor"], ["coordinator", "config"], ["task", "create", "--help"]])
def test_no_table_is_wider_than_the_terminal(command):
    _, out = on_terminal(80, *command)
    assert [line for line in out.splitlines() if len(line) > 80 and len(line.split()) > 2] == []
    assert len(out.splitlines()) < 120


def test_no_character_of_a_cell_is_markup_in_markdown_or_latex():
    column, cell = "client_lr", "a|b*c<d>\\e\n50% & $2 #{~^}–"
    assert plain_markdown([column], [[cell]]) == ("| client\\_lr |\n|---|\n| a\\|b\\*c\\<d\\>\\\\e 50% & $2 #{~^}– |\n")
    row = r"a|b*c<d>\textbackslash{}e 50\% \& \$2 \#\{\textasciitilde{}\textasciicircum{}\}--"
    assert latex([column], [[cell]]).splitlines() == [
        *(r"\begin{tabular}{l}", r"\hline", r"client\_lr \\", r"\hline"),
        *(rf"{row} \\", r"\hline", r"\end{tabular}"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of four rounds, measured at the second and fourth."""
    tmp_path = tmp_path_factory.mktemp("plot")
    for name, seed in (("first", 0), ("second", 1)):
        config = SimulationConfig(model="logreg", rounds=4, cohort=3, evaluate_every=2, engine="torch", seed=seed)
        start_run(tmp_path / "runs" / name, config)
    return [tmp_path / "runs" / "first", tmp_path / "runs" / "second"]


def test_a_series_adds_up_what_rounds_took(runs):
    run = read_run(runs[0])
    examples = [point["examples"] for point in run.points]
    assert run.series("rounds", "train.loss") == ([1, 2, 3, 4], [point["train.loss"] for point in run.points])
    assert run.series("rounds", "test.accuracy") == ([2, 4], [point["test.accuracy"] for point in run.result.curve])
    assert run.series("examples", "test.loss")[0] == [sum(examples[:2]), sum(examples)]
    assert run.series("seconds", "test.loss")[0][-1] == pytest.approx(sum(point["seconds"] for point in run.points))


def test_runs_of_other_seeds_are_one_curve_in_a_band(runs, typed, tmp_path, font):
    out = tmp_path / "curves.svg"
    status, _, err = typed("plot", *runs, "--out", out)
    assert (status, f"curves: {out}" in err) == (0, True), err
    picture = out.read_text()
    shown = ("logreg, fedavg", "logreg on digits, mean and range of 2 seeds", "rounds", "test.accuracy", ".serie-0 .no")
    assert [word for word in shown if word not in picture] == []
    assert "first" not in picture
    assert not re.search(r"<text[^>]*>[23]\.\d", picture)  # rounds are whole
    status, _, err = typed("plot", runs[0].parents[1], "--out", out)  # a folder with runs
    assert (status, out.read_text()) == (0, picture), err
    out = tmp_path / "curves.png"
    assert typed("plot", *runs, "--x", "seconds", "--y", "train.loss", "--out", out)[0] == 0
    head = out.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1080, 630)


def test_a_mean_goes_as_far_as_all_repetitions_do():
    repeated = {"lr=1": [[(1, 0.0), (2, 0.0)], [(1, 1.0), (2, 0.5), (3, 1.0)]], "lr=2": [[(1, 0.3), (2, 0.4)]]}
    bands = {"lr=1": [(1, 0.0, 0.5, 1.0), (2, 0.0, 0.25, 0.5)], "lr=2": [(1, 0.3, 0.3, 0.3), (2, 0.4, 0.4, 0.4)]}
    axes = Axes(x="rounds", y="test.accuracy")
    assert draw_repeated(repeated, axes) == draw_bands(bands, axes, COLOURS[1:])


@pytest.mark.parametrize("count", [1, 3])
def test_the_legend_lies_within_the_picture(count):
    drawn = draw_curves({f"curve {at}": [(1, at), (2, 0)] for at in range(count)}, Axes(x="x", y="y")).svg
    assert int(re.search(r'translate\(\d+, (\d+)\)" class="legends"', drawn)[1]) < 400


def test_labels_name_only_the_settings_that_differ(tmp_path):
    def label(*options):
        runs = [
            Run(tmp_path / str(at), completed(SimulationConfig(model="mlp", cohort=5, **one)), [], None)
            for at, one in enumerate(options)
        ]
        groups = grouped(runs, [run.path.name for run in runs])
        return {name: [int(run.path.name) for run in group] for name, group in groups.items()}

    rates = [{"settings": {"client_lr": rate}, "seed": seed} for rate in (0.1, 0.3) for seed in (0, 1)]
    assert label(*rates) == {"client_lr=0.1": [0, 1], "client_lr=0.3": [2, 3]}
    # A rate of the server of 1 or 0.03 goes with the algorithm.
    assert list(label({}, {"algorithm": "fedadam"})) == ["algorithm=fedavg", "algorithm=fedadam"]
    uniform = {"weighting": "uniform"}
    assert list(label({"settings": uniform}, {"settings": uniform | {"clip_norm": 1, "clip_quantile": 0.5}})) == [
        "clip_norm=–, clip_quantile=–, clip_lr=–",
        "clip_norm=1, clip_quantile=0.5, clip_lr=0.2",
    ]
    assert list(label({}, {"partition": "shards:2", "processes": 2})) == ["partition=–", "partition=shards:2"]
    assert list(label({}, {})) == ["mlp, fedavg, 0", "mlp, fedavg, 1"]


def test_a_run_without_the_figure_is_left_out_and_named(runs, typed, tmp_path):
    def stop(number, point):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_run(tmp_path / "young", SimulationConfig(model="logreg", rounds=4, cohort=3, engine="torch"), stop)
    out = tmp_path / "curves.svg"
    status, _, err = typed("plot", tmp_path / "young", runs[1], "--out", out)
    assert (status, "young has no figure 'test.accuracy' yet" in err) == (0, True), err
    assert "young" not in out.read_text()
    assert typed("plot", tmp_path / "young", "--out", out)[0] == 2


def test_what_cannot_be_drawn_is_named_with_what_can(runs, typed, tmp_path):
    for words, says in (
        (["--y", "test.acuracy"], "has no figure 'test.acuracy' yet; did you mean test.accuracy?"),
        (["--x", "epochs"], "there is no axis 'epochs'; there are rounds, examples, seconds"),
        (["--out", tmp_path / "curves.jpeg"], "must end in .svg or .png"),
        ([tmp_path / "nothing"], "nothing is not the folder of a run"),
    ):
        status, _, err = typed("plot", runs[0], *words)
        assert (status, says in " ".join(err.split())) == (2, True), err


def test_a_png_file_without_a_font_is_refused_and_not_drawn_without_words(tmp_path, without_fonts):
    with pytest.raises(NotWritten, match=r"curves\.png cannot be written: no font is installed; install DejaVu Sans"):
        draw_curves({"one": [(1, 2), (2, 3)]}, Axes(x="x", y="y")).save(tmp_path / "curves.png")


def test_more_curves_than_colours_lie_in_bands_of_their_own(tmp_path):
    bands = {f"curve {at}": [(1, 0.1 * at, 0.2 * at, 0.3 * at), (2, 0, 0, 1)] for at in range(12)}
    drawn = draw_bands(bands, Axes(x="x", y="y")).svg
    assert sum(f".serie-{at} .nofill{{fill:" in drawn for at in range(12)) == 12


def test_two_rows_of_cells_are_one_line_of_characters():
    assert drawn_in_characters([[0, 1, 0, 1], [0, 0, 1, 1]]) == [" ▀▄█"]
