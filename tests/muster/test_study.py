"""`muster study`: the command, its page and pictures; and the pages in docs/studies."""

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from muster.pictures.grids import draw_heat_map
from research.report import REPORT, RESULTS, Report, cell, pictures, results, write
from research.studies import STUDIES
from research.study import Findings, Grid, Plot, Table

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
