"""Progress where there is no terminal: plain lines, at once and not too many."""

import re

import pytest

from muster import output


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
