"""`muster export --normalise`: the answer of devices in front of a model, and what the bundle then says."""

import json

import pytest

COLUMNS = ("field", "element", "mean", "deviation", "values")


@pytest.fixture
def answer(tmp_path):
    """A file of `muster ask normaliser x --json`."""
    path = tmp_path / "answer.json"
    path.write_text(json.dumps({"columns": COLUMNS, "rows": [["x", None, 0.3, 0.2, 640]], "devices": 20}))
    return path


def test_bundles_say_which_input_they_normalise(typed, answer, tmp_path):
    plan = tmp_path / "plan"
    code, out, _ = typed("export", "logreg", "--normalise", answer, "--out", plan, "--json")
    assert (code, json.loads(out)["normalised"]) == (0, ["x"])
    assert json.loads(typed("plan", "show", plan, "--json")[1])["normalised"] == ["x"]
    assert typed("plan", "verify", plan)[0] == 0
    assert "normalised" not in json.loads(typed("export", "logreg", "--out", tmp_path / "other", "--json")[1])


def test_answers_that_do_not_fit_are_one_line(typed, answer, tmp_path):
    answer.write_text(answer.read_text().replace('"x"', '"pixels"'))
    code, _, err = typed("export", "logreg", "--normalise", answer, "--out", tmp_path / "plan")
    assert code != 0
    assert err.splitlines()[-1].startswith("error: logreg has no input 'pixels' to normalise; there are x")
    code, _, err = typed("export", "--all", "--normalise", answer, "--out", tmp_path / "plan")
    assert code == 2
    assert "name the one model whose input it is" in err
