"""Sweeps and studies."""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import muster
from muster.pictures import draw_heat_map
from research.studies import STUDIES
from research.study import REPORT, RESULTS, Findings, Grid, Plot, Report, Table, cell, pictures, results, write
from simulator.errors import RunError
from simulator.runs.running import start_run
from simulator.runs.sweeping import means_over_seeds, read_sweep, run_sweep
from simulator.simulation import simulate

OPTIONS = '[options]\nmodel = "logreg"\nrounds = 2\ncohort = 3\nengine = "torch"\n'
GRID = "[grid]\nseed = [0, 1]\nsettings.client_lr = [0.1, 0.3]\n"


@pytest.fixture
def sweep(tmp_path):
    """The runs of a file with such text."""

    def read(text):
        (tmp_path / "sweep.toml").write_text(text)
        return read_sweep(tmp_path / "sweep.toml")

    return read


def test_a_grid_is_every_combination_over_what_all_runs_share(sweep):
    runs = sweep(OPTIONS + 'settings.epochs = 3\n[grid]\nseed = [0, 1]\nalgorithm = ["fedavg", "fedadam"]\n')
    assert [run.name for run in runs] == [
        f"seed={seed},algorithm={algorithm}" for seed in (0, 1) for algorithm in ("fedavg", "fedadam")
    ]
    assert {(run.config.rounds, run.config.settings["epochs"], run.config.processes) for run in runs} == {(2, 3, 1)}
    assert [run.config.settings.get("tau") for run in runs] == [None, 0.001, None, 0.001]


def test_baselines_can_be_swept(sweep):
    text = '[options]\nmodel = "logreg"\n[grid]\nbaseline = ["local", "pooled"]\n'
    assert [run.config.processes for run in sweep(text)] == [None, 1]


def test_draws_lie_in_their_intervals_and_stay_when_there_are_more(sweep):
    random = '[random]\nsettings.client_lr = {low = 0.001, high = 1.0, scale = "log"}\n'
    random += 'settings.epochs = {low = 1, high = 3}\nalgorithm = ["fedavg", "fedprox"]\n'
    few, many = (sweep(f"draws = {draws}\n{OPTIONS}{random}[grid]\nseed = [5, 6]\n") for draws in (3, 200))
    assert len(few) == 6
    assert {run.name for run in few} <= {run.name for run in many}
    drawn = [run.varied for run in many if run.varied["seed"] == 5]
    assert Counter(one["settings.epochs"] for one in drawn).keys() == {1, 2, 3}
    assert Counter(one["algorithm"] for one in drawn).keys() == {"fedavg", "fedprox"}
    rates = sorted(one["settings.client_lr"] for one in drawn)
    assert 0.001 <= rates[0] < 0.01
    assert 0.02 < rates[100] < 0.05  # half of them are below the geometric mean
    assert 0.1 < rates[-1] < 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 1\n" + OPTIONS, "unknown field `colour`"),
        (OPTIONS, "a sweep varies something"),
        (OPTIONS + "[grid]\nseed = 3\n", "grid.seed must be a list of values, not 3"),
        (OPTIONS + "[grid]\nsead = [3]\n", r"the run sead=3 cannot be: there is no 'sead'; did you mean seed"),
        (OPTIONS + "[grid]\nepochs = [3]\n", "cannot be: epochs is a setting of fedavg: write settings.epochs = 3"),
        (
            OPTIONS + "[grid]\nschedule.warmup = [3]\n",
            "the run warmup=3 cannot be: schedule: there is no 'warmup'; did you mean warmup_rounds",
        ),
        (OPTIONS + '[grid]\npartition = ["shard:2"]\n', "cannot be: no partition is called 'shard'"),
        (OPTIONS + '[grid]\ndataset = ["digit"]\n', "the run dataset=digit cannot be: no data set is called"),
        (OPTIONS + '[grid]\nmodel = ["logrec"]\n', "the run model=logrec cannot be: no model is called 'logrec'"),
        (OPTIONS + "settings = 3\n[grid]\nsettings.epochs = [1]\n", "options.settings must be a table, as settings.e"),
        ("draws = 1\n" + OPTIONS + "[random]\nseed = [1]\n[grid]\nseed = [2]\n", r"seed is in \[grid\] and in \[rand"),
        (OPTIONS + '[grid]\nmodel = ["x:y_z", "x_y:z"]\n', "two runs would share the folder model=x_y_z"),
        (OPTIONS + "[grid]\nsettings = [{epochs = 2}]\n", r"settings can vary over texts, .* not {'epochs': 2}; vary"),
        ("draws = 1\n" + OPTIONS + "[random]\nseed = [[1]]\n", r"seed can vary over texts, .* not \[1\]"),
        (OPTIONS + "processes = 2\n[grid]\nseed = [1]\n", "the run seed=1 cannot have 2 processes: the runs of a"),
        (OPTIONS + "device = 'cuda:all'\n[grid]\nseed = [1]\n", "the run seed=1 cannot have all GPUs: every run of a"),
        (
            OPTIONS + "[grid]\ncohort = [0]\n",
            r"the run cohort=0 cannot be: cohort must be .* from 1 to 2\^63 - 1, not 0",
        ),
        (
            OPTIONS + '[grid]\nrounds = ["x"]\n',
            r"the run rounds=x cannot be: rounds must be a whole number .*, not 'x'",
        ),
        (OPTIONS + "[grid]\nsettings.client_lr = [-1]\n", "client_lr=-1 cannot be: fedavg: client_lr must be a number"),
        ("draws = 2\n" + OPTIONS + "[random]\nseed = 3\n", "random.seed must be a list, or an interval"),
        ("draws = 2\n" + OPTIONS + "[random]\nseed = {low = 3, high = 1}\n", "random.seed: low must be below high"),
        (OPTIONS + "[random]\nseed = [1, 2]\n", "`draws` how often"),
        ("model", "cannot read"),
    ],
)
def test_a_sweep_that_cannot_be_is_named_before_any_run(sweep, text, words):
    with pytest.raises(RunError, match=words):
        sweep(text)


def test_runs_of_a_sweep_are_those_of_simulate_and_are_kept(sweep, tmp_path):
    runs = sweep(OPTIONS + GRID)
    start_run_and_stop(runs[1], tmp_path)
    outcomes = run_sweep(runs, tmp_path, processes=2)
    assert [outcome.run for outcome in outcomes] == runs
    assert [outcome.status for outcome in outcomes] == ["done"] * 4
    assert outcomes[1].result == simulate(runs[1].config)
    (tmp_path / "runs" / runs[0].name / "metrics.jsonl").unlink()  # a run that is done is not looked at again
    assert run_sweep(runs, tmp_path, processes=2) == outcomes
    first, second = means_over_seeds(outcomes)
    assert (first["settings.client_lr"], first["seeds"], first["without a result"]) == (0.1, 2, 0)
    pair = [outcome.result.test_accuracy for outcome in (outcomes[0], outcomes[2])]
    assert first["test_accuracy"] == pytest.approx(sum(pair) / 2)
    assert first["deviation"] == pytest.approx(abs(pair[0] - pair[1]) / 2**0.5)
    assert second["settings.client_lr"] == 0.3


def test_a_sweep_refuses_the_folder_of_one_with_other_options(sweep, tmp_path):
    grid = "[grid]\nseed = [0]\n"
    run_sweep(sweep(OPTIONS + grid), tmp_path, processes=1)
    others = sweep(OPTIONS.replace("rounds = 2", "rounds = 3") + grid)
    with pytest.raises(RunError, match=r"seed=0 is of a sweep with other options; .* differ in rounds \(2 and 3\)"):
        run_sweep(others, tmp_path, processes=1)


def test_users_that_a_run_cannot_have_are_named_before_any_run(sweep, tmp_path):
    runs = sweep(OPTIONS + "[grid]\nseed = [0]\ncohort = [4, 400]\n")
    with pytest.raises(RunError, match="cohort=400 cannot be: a cohort of 400"):
        run_sweep(runs, tmp_path / "out", processes=1)
    runs = sweep(OPTIONS + f'data = "{tmp_path}/none"\n[grid]\ndataset = ["wisdm"]\n')
    with pytest.raises(RunError, match=r"the run dataset=wisdm cannot be: .*none"):
        run_sweep(runs, tmp_path / "out", processes=1)
    assert not (tmp_path / "out").exists()


def test_a_second_sweep_in_the_same_folder_is_refused(sweep, tmp_path):
    runs, said = sweep(OPTIONS + "[grid]\nseed = [0]\n"), []

    def on_end(outcome):
        with pytest.raises(RunError) as refused:
            run_sweep(runs, tmp_path, processes=1)
        said.append(str(refused.value))

    run_sweep(runs, tmp_path, 1, on_end)
    assert said == [f"{tmp_path} is in use by process {os.getpid()}; wait for its end, or end it"]


def start_run_and_stop(run, folder):
    class Stop(Exception):
        pass

    def on_round(number, point):
        raise Stop

    (folder / "runs").mkdir()
    with pytest.raises(Stop):
        start_run(folder / "runs" / run.name, run.config, on_round, checkpoint_after_s=0)


def test_a_killed_run_and_a_diverged_one_leave_the_others_alone(typed, tmp_path, monkeypatch, font):
    (tmp_path / "deadly.py").write_text("import os, signal\ndef model():\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = OPTIONS.replace('model = "logreg"\n', "") + '[grid]\nmodel = ["logreg", "deadly:model"]\n'
    (tmp_path / "sweep.toml").write_text(text + "settings.client_lr = [0.1, 1e38]\n")
    status, out, err = typed("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out", "--processes", 2, "--json")
    assert status == 1
    found = [row["status"] for row in json.loads(out)["runs"]]
    assert found == ["done", "diverged", "failed", "failed"]
    assert "model=deadly_model,client_lr=0.1 failed: a process of the engine ended with exit code -9" in err
    assert "model=logreg,client_lr=1e+38 diverged: round 1: " in err
    header, *rows = (tmp_path / "out" / "table.csv").read_text().splitlines()
    assert header.startswith("model,settings.client_lr,status,rounds,ended_by,test_accuracy")
    assert [row.split(",")[2] for row in rows] == found
    assert json.loads((tmp_path / "out" / "table.json").read_text()) == json.loads(out)
    markdown, tex = ((tmp_path / "out" / f"table.{ending}").read_text().splitlines() for ending in ("md", "tex"))
    assert markdown[0].startswith(r"| model | settings.client\_lr | seeds |")
    assert markdown[2].startswith("| logreg | 0.1 | 1 |")
    assert tex[2].startswith(r"model & settings.client\_lr & seeds &")
    assert (len(markdown), len(tex)) == (6, 10)
    picture = (tmp_path / "out" / "heat-map.svg").read_text()
    assert "settings.client_lr" in picture
    assert picture.count("–") == 3  # cells without a result
    assert (tmp_path / "out" / "heat-map.png").read_bytes().startswith(b"\x89PNG")


def test_the_heat_map_of_a_model_without_accuracy_says_loss(typed, tmp_path, monkeypatch):
    options = OPTIONS.replace('"logreg"', '"least_squares"\ndataset = "quadratics"')
    (tmp_path / "sweep.toml").write_text(options + "[grid]\nrounds = [1, 2]\ncohort = [2, 3]\n")
    monkeypatch.setattr("muster.pictures.find_spec", lambda name: None)  # as where resvg is not installed
    status, _, err = typed("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out")
    assert status == 0, err
    assert "PNG files need resvg-py: pip install 'muster-fl[plot]'" in err
    assert not (tmp_path / "out" / "heat-map.png").exists()
    assert ">loss, unseen users<" in (tmp_path / "out" / "heat-map.svg").read_text()


def test_without_a_font_a_sweep_says_so_and_keeps_its_results(typed, tmp_path, without_fonts):
    (tmp_path / "sweep.toml").write_text(OPTIONS + "[grid]\nrounds = [1, 2]\ncohort = [2, 3]\n")
    status, _, err = typed("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out")
    assert (status, "PNG files need a font: install DejaVu Sans" in err) == (0, True), err
    assert {path.suffix for path in (tmp_path / "out").glob("heat-map.*")} == {".svg"}


def test_edges_of_the_heat_map_are_options_that_vary(typed, tmp_path):
    (tmp_path / "sweep.toml").write_text(OPTIONS + GRID)
    for edges, words in (("seed,rounds", "no option 'rounds' varies"), ("seed,seed", "name two options")):
        status, _, err = typed("sweep", tmp_path / "sweep.toml", "--out", tmp_path / "out", "--heat-map", edges)
        assert (status, words in err) == (2, True), err
    assert not (tmp_path / "out").exists()


def test_a_setting_in_the_grid_of_python_is_told_its_place():
    with pytest.raises(TypeError) as refused:
        muster.sweep("logreg", grid={"client_lr": [0.1, 0.2]})
    words = "client_lr is a setting of fedavg: grid={'settings': {'client_lr': [0.1, 0.2]}}"
    assert str(refused.value) == f"sweep(): {words}"


PAGES = Path(__file__).parents[2] / "docs" / "studies"
REPORTS = sorted(PAGES.glob("*.json"))
FINDINGS = Findings(
    setup="Nothing was trained.",
    tables=[Table(title="Numbers", columns=["name", "number"], rows=[["a", [1.0, 3.0]], ["b", 2.5]])],
    grids=[
        Grid(
            title="A grid", row_name="r", rows=[1, 2], column_name="c", columns=[0.1], values=[[[0.5, None]], [[0.25]]]
        )
    ],
    plots=[
        Plot(title="A plot", x="x", y="y", curves={"one": [(1, [1.0, 2.0]), (10, [3.0, None])]}, log_x=True, log_y=True)
    ],
)
REPORT_OF_TWO = Report(
    study="a-study",
    question="Why?",
    paper="A, *B*, 2021",
    command="muster study a-study --seeds 2",
    date="2026-01-02",
    machine="x86_64",
    seeds=[0, 1],
    quick=False,
    cpu_minutes=1.0,
    findings=FINDINGS,
)


def test_study_prints_tables_and_writes_page_pictures_and_json(typed, tmp_path, font):
    code, output, words = typed("study", "pseudo-gradients", "--quick", "--seeds", 1, "--out", tmp_path)
    assert code == 0, words
    assert "Mean cosine of the deltas of two users" in output
    report = REPORT.decode((tmp_path / "pseudo-gradients.json").read_bytes())
    assert report.command == "muster study pseudo-gradients --seeds 1 --quick"
    assert report.seeds == [0]
    page = (tmp_path / "pseudo-gradients.md").read_text()
    assert page.endswith(results(report))
    assert "smallest sizes" in page
    for name, picture in pictures(report).items():
        assert f"]({name})" in page
        assert (tmp_path / name).read_text() == picture.svg
        assert (tmp_path / name).with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_studies_are_listed(typed):
    code, output, _ = typed("study", "list", "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(output)] == list(STUDIES)


def test_an_unknown_study_and_a_folder_that_cannot_be_are_named_at_once(typed, tmp_path):
    code, _, words = typed("study", "large-cohort")
    assert code == 2
    assert "no study is called 'large-cohort'" in words
    (tmp_path / "file").touch()
    code, _, words = typed("study", "pseudo-gradients", "--out", tmp_path / "file" / "out")
    assert (code, words.splitlines()[-1]) == (1, f"error: {tmp_path}/file/out: Not a directory")


def test_words_by_hand_stay_when_a_page_is_made_again(tmp_path):
    page = write(REPORT_OF_TWO, tmp_path)
    assert page.read_text().startswith(f"# A study\n\n{RESULTS}")
    page.write_text("# Mine\n\nMy words.\n\n## Results\n\nold\n")
    write(REPORT_OF_TWO, tmp_path)
    assert page.read_text() == "# Mine\n\nMy words.\n\n" + results(REPORT_OF_TWO)
    assert "| a | 2.00 ± 1.41 |" in page.read_text()
    page.write_text("# Mine\n\n## Results\n\n<!-- made: results of a-study -->\n")
    write(REPORT_OF_TWO, tmp_path)
    assert page.read_text() == "# Mine\n\n" + results(REPORT_OF_TWO, tables=False)
    assert "| a |" not in page.read_text()


def test_pictures_of_a_report_are_well_formed():
    drawn = pictures(REPORT_OF_TWO)
    assert list(drawn) == ["a-study-1.svg", "a-study-2.svg"]
    heat_map, curves = (ElementTree.fromstring(picture.svg) for picture in drawn.values())
    words = [words for words in heat_map.itertext() if words.strip()]
    assert words[2:5:2] == ["–", "0.25"]  # one seed of the first cell diverged
    assert {"A plot", "x", "y", "one", "1", "10"} <= set(curves.itertext())  # 1 and 10 label an axis by powers of ten
    lines = [
        path.get("d") for path in curves.iter("{http://www.w3.org/2000/svg}path") if "reactive" in path.get("class")
    ]
    band, line = ([float(place[1]) for place in re.findall(r"([\d.]+) ([\d.]+)", found)] for found in lines[-2:])
    assert (band[-1] - line[0]) / (band[-1] - band[0]) == pytest.approx(math.log10(1.5) / math.log10(2))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("words", "words"),
        (2.0, "2"),
        ([0.5, 0.7], "0.600 ± 0.141"),
        ([-120.0, -122.0], "−121 ± 1"),
        ([0.5, None], "0.500 (none for 1 of 2)"),
        ([2e-9, 4e-9], "(3.00 ± 1.41) · 10^−9"),
        ([None], "none"),
        ([0.0, 0.0], "0.00 ± 0.00"),
    ],
)
def test_cells_show_mean_deviation_and_what_is_missing(value, shown):
    assert cell(value) == shown


def test_heat_map_is_darkest_at_the_largest_number_and_white_without():
    root = ElementTree.fromstring(draw_heat_map("<t>", ("a", ["1"]), ("b", ["1", "2", "3"]), [[0.1, None, 0.9]]).svg)
    fills = [box.get("fill") for box in root if box.tag.endswith("rect")]
    light, none, dark = (sum(bytes.fromhex(fill[1:])) for fill in fills)
    assert dark < light < none == 3 * 255


def test_every_study_has_a_page_and_every_page_the_results_of_its_json():
    assert {path.stem for path in REPORTS} >= set(STUDIES)
    for path in REPORTS:
        report = REPORT.decode(path.read_bytes())
        assert not report.quick
        if study := STUDIES.get(report.study):
            assert (report.question, report.paper) == (study.question, study.paper)
        by_hand, _, made = path.with_suffix(".md").read_text().partition(RESULTS)
        assert RESULTS + made == results(report, tables=False), f"run `muster study {report.study} --out docs/studies`"
        assert {"What the paper found", "What we found"} <= set(by_hand.split("**")), path.stem
        assert {name: (PAGES / name).read_text() for name in pictures(report)} == {
            name: picture.svg for name, picture in pictures(report).items()
        }
