"""Certificates of private models: written beside the model, and computed again from the two files alone."""

from __future__ import annotations

import json
import re

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from coordinator.errors import InvalidTask
from fedcore import checkpoint
from fedcore.privacy.accounting import spent
from fedcore.privacy.settings import CertifiedLedger, decode_certificate, ledger_digest
from fedcore.signing import SigningKey
from tests.coordinator.bundles import make_private_bundle
from tests.coordinator.conftest import committed
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, put
from tests.muster.test_cli import in_process
from tests.muster.test_remote import (
    create,
    failure,
    served as served,  # noqa: PLC0414 - a fixture
)

PROMISE = [word for part in ("epsilon=4", "delta=1e-6", "users=1000") for word in ("--privacy", part)]
REPORT = checkpoint.encode({"report": np.array([1, 0, 0, 0, 1], np.float32)})


def trained(served, tmp_path, *more):
    """A private task with two rounds; answers its id."""
    _, there, store, devices = served
    bundle = make_private_bundle(tmp_path / "plan")
    made = create(bundle.folder, there, "--rounds", 3, "--over-selection", 1, *PROMISE, *more, "--json")
    assert made.exit_code == 0, made.output
    task = json.loads(made.stdout)["task"]
    for number in (1, 2):
        for one in assign(devices, "a", "b"):
            put(devices, one.assignment, REPORT)
        committed(store, task, number)
    return task


@pytest.mark.security("anybody can check that the ledger spends what it says")
def test_certificate_is_written_and_verified_here_and_over_http(served, tmp_path):
    here, there, store, _ = served
    task = trained(served, tmp_path)
    for where in (here, there):
        model = tmp_path / "model.safetensors"
        facts = json.loads(in_process("task", "checkpoint", task, "--out", model, "--force", "--json", *where).stdout)
        assert facts["certificate"] == f"{model}.privacy.json"
        signer = CertifiedLedger.decode((tmp_path / "model.safetensors.privacy.json").read_bytes()).certificate.signer
        done = in_process("privacy", "verify", model, "--signer", signer, "--json")
        assert done.exit_code == 0, done.output
        verdict = json.loads(done.stdout)
        assert verdict["wrong"] == []
        assert verdict["epsilon"] == store.spent(task)[-1].epsilon
        assert (verdict["certificate"]["round"], verdict["certificate"]["rounds"]) == (2, 2)
    early = tmp_path / "early.safetensors"
    in_process("task", "checkpoint", task, "--round", 1, "--out", early, *there)
    first = json.loads(in_process("privacy", "verify", early, "--json").stdout)
    assert (first["certificate"]["rounds"], first["epsilon"]) == (1, store.spent(task)[0].epsilon)
    like = ("task", "create", "--like", task, "--starts-from", f"{task}@1", *there)
    begun = json.loads(in_process(*like, "--json").stdout)
    assert (begun["starts_from"], begun["spent_before"]) == (f"{task}@1", f"ε {first['epsilon']:.6g} at δ 1e-06")
    child = tmp_path / "child.safetensors"
    in_process("task", "checkpoint", begun["task"], "--out", child, *here)
    told = in_process("privacy", "verify", child).stdout
    assert re.search(rf"began at +the model of task {task}, round 1\n", told)
    assert re.search(rf"with the tasks before +ε {first['epsilon']:.6g} at δ 2e-06", told)
    shown = json.loads(in_process("task", "show", task, *there, "--json").stdout)
    assert shown["privacy_spent"] == {"rounds": 2, "epsilon": store.spent(task)[-1].epsilon}


def test_noise_is_the_least_that_lasts_for_all_rounds(served, tmp_path):
    _, there, store, devices = served
    task = trained(served, tmp_path)
    for one in assign(devices, "a", "b"):
        put(devices, one.assignment, REPORT)
    until(lambda: len(store.spent(task)) == 3)
    assert store.spent(task)[-1].epsilon == pytest.approx(4, rel=1e-6)
    refused = create(tmp_path / "plan", there, *PROMISE, "--privacy", "delta=0.5")
    assert failure(refused) == (InvalidTask, "privacy: delta must be below 1 / users, which is 0.001, not 0.5")
    refused = create(tmp_path / "plan", there, "--privacy", "epsilonn=4")
    assert failure(refused)[0] is InvalidTask
    assert failure(refused)[1].startswith("privacy: there is no 'epsilonn'; did you mean epsilon")


@pytest.fixture
def certified(served, tmp_path):
    """A model with its certificate: both files, and the certificate decoded."""
    model = tmp_path / "model.safetensors"
    in_process("task", "checkpoint", trained(served, tmp_path), "--out", model, *served[1])
    beside = tmp_path / "model.safetensors.privacy.json"
    return model, beside, CertifiedLedger.decode(beside.read_bytes())


@pytest.mark.security("anybody can check that the ledger spends what it says")
def test_every_damage_is_named_and_ends_with_exit_code_1(certified):
    model, beside, good = certified
    text = json.loads(good.certificate.text)

    def wrong(certificate=good.certificate, ledger=good.ledger):
        beside.write_bytes(CertifiedLedger(certificate, tuple(ledger)).encode())
        done = in_process("privacy", "verify", model, "--json")
        assert done.exit_code == 1
        return [one.partition(":")[0] for one in json.loads(done.stdout)["wrong"]]

    def forged(**changed):
        """The statement with other values, and the digest of a ledger that may have changed with them."""
        return msgspec.structs.replace(good.certificate, text=json.dumps(text | changed))

    first, second = good.ledger
    assert wrong(ledger=[first]) == ["ledger", "rounds", "epsilon"]
    louder = msgspec.structs.replace(second, noise_multiplier=9.0)
    assert wrong(ledger=[first, louder]) == ["ledger", "noise_multiplier", "epsilon"]
    assert wrong(ledger=[second, first]) == ["ledger", "rounds"]
    assert wrong(forged(epsilon=1.0)) == ["signature", "epsilon"]
    three = [first, second, msgspec.structs.replace(second, round=3)]
    assert wrong(forged(ledger=ledger_digest(three), rounds=3, round=3), three) == ["signature", "epsilon"]
    quiet = text["privacy"] | {"epsilon": 1.0}
    assert wrong(forged(privacy=quiet)) == ["signature", "budget"]
    tensors = safetensors.numpy.load(model.read_bytes())
    model.write_bytes(safetensors.numpy.save({name: tensor + 1 for name, tensor in tensors.items()}))
    assert wrong() == ["model"]


def test_a_certificate_that_anybody_signed_does_not_hold(certified, tmp_path):
    model, beside, good = certified
    stranger = SigningKey.new(tmp_path / "stranger.pem")
    (row, _), statement = good.ledger, decode_certificate(good.certificate.text)
    modest = msgspec.structs.replace(statement, rounds=1, epsilon=spent([row], 1e-6), ledger=ledger_digest([row]))
    beside.write_bytes(CertifiedLedger(stranger.sign_statement(modest), (row,)).encode())
    done = in_process("privacy", "verify", model)
    assert done.exit_code == 3
    assert "yes" not in done.stdout
    assert f"anybody can sign a certificate, and {stranger.signer} signed this one" in done.stderr
    in_words = json.loads(in_process("privacy", "verify", model, "--json").stdout)
    assert (in_words["wrong"], in_words["signer"], in_words["demanded"]) == ([], stranger.signer, False)
    assert in_process("privacy", "verify", model, "--signer", good.certificate.signer).exit_code == 1
    wrong = in_process("privacy", "verify", tmp_path / "plan" / "manifest.json")
    assert wrong.exit_code not in (0, 3)


def test_certificate_of_another_signer_is_refused_where_one_is_demanded(certified):
    model, _, good = certified
    done = in_process("privacy", "verify", model, "--signer", good.certificate.signer)
    assert done.exit_code == 0
    assert re.search(r"^holds +yes$", done.stdout, re.MULTILINE)
    done = in_process("privacy", "verify", model, "--signer", "ed25519:another")
    assert done.exit_code == 1
    assert "signed it, not ed25519:another" in done.output


def test_file_that_is_no_certificate_is_named(certified):
    model, beside, _ = certified
    beside.write_bytes(b"{}")
    done = in_process("privacy", "verify", model)
    assert done.exit_code == 1
    assert "this is no certificate with its ledger" in str(done.exception)
