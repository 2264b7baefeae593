"""Hold-outs as people ask for them: the options of an export, and what a bundle says of them."""

import json

import pytest

import muster
from export.verify import verify_bundle
from fedcore.bundle import Bundle
from fedcore.errors import PlanError
from fedcore.hold_out import HoldOut
from tests.muster.test_cli import in_process


@pytest.mark.parametrize("side", ["train", "held-out"])
def test_command_and_python_export_the_same_hold_out(tmp_path, side):
    words = ["--hold-out-examples", 0.2, *(["--on-held-out-examples"] if side == "held-out" else [])]
    made = in_process("export", "logreg", *words, "--out", tmp_path / "command")
    assert made.exit_code == 0, made.output
    bundle = muster.export(
        "logreg", out=tmp_path / "python", hold_out_examples=0.2, on_held_out_examples=side == "held-out"
    )
    assert bundle.plan.examples.hold_out == HoldOut(0.2, side)
    assert Bundle(tmp_path / "command").plan == bundle.plan
    assert verify_bundle(bundle)
    shown = in_process("plan", "show", bundle.folder).stdout
    assert f"0.2 of each device's examples; runs on {side}" in shown
    told = json.loads(in_process("plan", "show", bundle.folder, "--json").stdout)
    assert told["hold_out"] == {"share": 0.2, "side": side}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hold_out_examples": 1.0}, "hold_out_examples must be a number, at least 0 and below 1, not 1.0"),
        ({"hold_out_examples": -0.1}, "hold_out_examples must be a number, at least 0 and below 1, not -0.1"),
        ({"on_held_out_examples": True}, "on_held_out_examples must be left out without hold_out_examples"),
    ],
)
def test_a_hold_out_that_cannot_be_is_refused_before_any_trace(tmp_path, given, words):
    options = [f"--{name.replace('_', '-')}" for name in given] + [
        str(one) for one in given.values() if one is not True
    ]
    made = in_process("export", "logreg", *options, "--out", tmp_path / "plan")
    assert made.exit_code != 0
    assert words in " ".join(f"{made.output}{made.exception}".split())
    with pytest.raises(PlanError, match=words):
        muster.export("logreg", out=tmp_path / "plan", **given)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("command", [["export", "logreg"], ["task", "create", "--plan", "plan"]])
def test_a_percentage_is_no_share(command):
    option = "--hold-out-examples" if command[0] == "export" else "--hold-out-devices"
    needed = [] if command[0] == "export" else ["--population", "p", "--goal", "1", "--rounds", "1"]
    made = in_process(*command, *needed, option, "120%")
    assert made.exit_code != 0
    assert "120%" in f"{made.output}{made.exception}" or option in made.output


def test_a_share_of_another_type_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="hold_out_examples"):
        muster.export("logreg", out=tmp_path / "plan", hold_out_examples="0.2")
