"""`muster plot`: the curves of runs in a picture."""

import re
import struct

import pytest

from fedcore.errors import NotWritten
from muster.pictures.curves import COLOURS, Axes, draw_bands, draw_curves, draw_repeated, drawn_in_characters
from simulator.configuration import SimulationConfig
from simulator.runs.reading import Run, grouped, read_run
from simulator.runs.running import start_run
from simulator.simulation import completed


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
