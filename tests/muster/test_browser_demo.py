"""`muster demo --browser`: a page in a real Chromium and devices on Node train in a secure round."""

import json

import pytest
from typer.testing import CliRunner

from muster.app import app
from simulator.errors import FleetError


def test_a_page_and_devices_on_node_train_in_a_secure_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--browser", "--rounds", "1", "--devices", "8", "--out", "kept", "--json"])
    if isinstance(done.exception, FleetError):
        pytest.skip(str(done.exception))
    assert done.exit_code == 0, done.exception
    result = json.loads(done.stdout)
    assert (result["rounds"], result["devices"], result["counted"]) == (1, 7, 1)
    assert result["page"] == "Done: round 1, 6 examples, masked: only the sum over many devices can be read."
    assert (tmp_path / "kept" / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [["--plain"], ["--devices", "7"]])
def test_a_demo_in_a_browser_that_could_not_be_secure_is_refused(wrong):
    done = CliRunner().invoke(app, ["demo", "--browser", *wrong])
    assert (done.exit_code, "its rounds are secure" in done.stderr) == (2, True)
