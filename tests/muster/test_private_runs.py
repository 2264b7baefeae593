"""The folder of a private simulation holds all that its ε is computed from, and `muster privacy verify` does so."""

import json
import math

import dp_accounting
import pytest

from tests.muster.test_cli import in_process

TRAINED = [
    *("--model", "logreg", "--clients", 100, "--cohort", 20, "--rounds", 4, "--engine", "torch", "--processes", 1),
    *("--set", "clip_norm=0.5", "--privacy", "delta=1e-4"),
]
FED_AVG = ["--set", "weighting=uniform"]
DISTRIBUTED = [
    *("--privacy", "epsilon=50", "--privacy", "mechanism=distributed"),
    *("--secagg", "--clip-norm", "0.5", "--bits", "10"),
]


def run(folder, *options):
    done = in_process("simulate", *TRAINED, *options, "--out", folder)
    assert done.exit_code == 0, done.output
    return json.loads((folder / "result.json").read_bytes())


def verify(folder):
    done = in_process("privacy", "verify", folder, "--json")
    return done.exit_code, json.loads(done.stdout)


def test_a_folder_tells_every_number_of_its_epsilon(tmp_path):
    result = run(tmp_path / "run", *FED_AVG, "--privacy", "noise_multiplier=2", "--privacy", "poisson=true")
    told = result["privacy"]
    assert (told["mechanism"], told["noise_multiplier"], told["delta"]) == ("gaussian", 2.0, 1e-4)
    assert told["sampling_probability"] == 20 / result["train_users"] == 20 / told["users"]
    accountant = dp_accounting.pld.PLDAccountant()
    gaussian = dp_accounting.GaussianDpEvent(told["noise_multiplier"])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(told["sampling_probability"], gaussian), result["rounds"])
    assert result["epsilon"] == pytest.approx(accountant.get_epsilon(told["delta"]), rel=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        [*FED_AVG, "--privacy", "epsilon=3"],
        [*FED_AVG, "--privacy", "epsilon=3", "--privacy", "mechanism=tree", "--privacy", "min_separation_rounds=3"],
        ["--algorithm", "mime", "--same-cohort", "--privacy", "epsilon=3", "--privacy", "poisson=true"],
        [*FED_AVG, *DISTRIBUTED],
    ],
)
def test_the_epsilon_of_a_run_is_computed_again_from_its_folder(tmp_path, options):
    result = run(tmp_path / "run", *options)
    code, verdict = verify(tmp_path / "run")
    assert (code, verdict["wrong"], verdict["epsilon"]) == (0, [], result["epsilon"])
    said = in_process("privacy", "verify", tmp_path / "run").stdout
    assert "holds" in said
    assert str(result["privacy"]["delta"]) in said


def test_an_epsilon_that_the_rounds_do_not_spend_is_named(tmp_path):
    good = run(tmp_path / "run", *FED_AVG, "--privacy", "noise_multiplier=2")
    for changed in (
        {"epsilon": good["epsilon"] / 2},
        {"privacy": good["privacy"] | {"noise_multiplier": 4.0}},
        {"privacy": good["privacy"] | {"delta": 1e-5}},
        {"rounds": 3},
    ):
        (tmp_path / "run" / "result.json").write_text(json.dumps(good | changed))
        code, verdict = verify(tmp_path / "run")
        assert (code, len(verdict["wrong"])) == (1, 1), changed
    assert math.isclose(verdict["epsilon"], good["epsilon"])


def test_a_run_that_is_not_private_or_has_not_ended_is_no_claim(tmp_path):
    assert in_process("simulate", *TRAINED[:12], "--rounds", 2, "--out", tmp_path / "plain").exit_code == 0
    done = in_process("privacy", "verify", tmp_path / "plain")
    assert done.exit_code == 2
    assert "is not private" in done.stderr
    run(tmp_path / "run", *FED_AVG, "--privacy", "noise_multiplier=2")
    assert in_process("privacy", "verify", tmp_path / "run", "--signer", "ed25519:a").exit_code == 2
    (tmp_path / "run" / "result.json").unlink()
    done = in_process("privacy", "verify", tmp_path / "run")
    assert done.exit_code == 2
    assert "has not ended" in done.stderr
