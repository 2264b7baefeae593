"""A private fleet: devices add noise under secure aggregation until the budget is spent, and the claim is verified.

Devices are processes of the real device runtime, the coordinator is a process of its own. When the task has ended, its
checkpoint and certificate are copied into an empty folder, and `muster privacy verify` runs there, in a process that
is told nothing else. It must also refuse a copy of the ledger that lacks a row.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.fleet_training import fleet_training, secure_settings
from benchmarks.options import PrivateFleetOptions
from coordinator.lineage import lineage_key
from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from coordinator.store.tasks import PrivacyBudget, Secagg, TaskSettings
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.privacy.certificate import CertifiedLedger, certificate_file
from muster.local.server import LocalCoordinator
from muster.output import Say
from simulator import datasets

MODEL, DATASET = "mlp", "wisdm"
CLIP_NORM = 0.5
ALGORITHM = create(
    "fedavg", {"weighting": "uniform", "client_lr": 0.1, "epochs": 2, "batch_size": 20, "clip_norm": CLIP_NORM}
)
MOST_ROUNDS = 10_000
"""Rounds of the task, far more than its budget lasts for."""


class PrivateFleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome: the rounds that the budget lasted for, what they spent, and whether others can compute that.

    ended: the last cause in the task's history. rows: of the ledger. epsilon: spent, as the verifier computed it, of
    `budget` at `delta`. counted_least: the fewest devices in a sum. accuracy: of the last model on held-out users, and
    `accuracy_before` that of the first. verified: whether `muster privacy verify` accepts the two files. damage_found:
    whether it refuses them without a row. sound: whether all of this is as it should be.
    """

    devices: int
    rounds: int
    rows: int
    seconds: float
    ended: str
    epsilon: float
    budget: float
    delta: float
    noise_multiplier: float
    counted_least: int
    accuracy_before: float
    accuracy: float
    verified: bool
    damage_found: bool
    sound: bool


def run(options: PrivateFleetOptions, say: Say) -> PrivateFleetOutcome:
    """Train until the budget is spent, and verify what is left. Raises SimulatorError as a fleet does."""
    users, unseen = datasets.users(DATASET, options.data, options.devices)
    model, settings = Model(load(MODEL), options.seed), _settings(options)
    with fleet_training(model, ALGORITHM, users, secure=True) as frame:
        training = frame.run(settings, say, wait_s=4 * options.phase_s)
        local, task = frame.local, training.task
        published = frame.folder / "published" / "model.safetensors"
        published.parent.mkdir()
        certified = _publish(local, task, published)
        signer = certified.certificate.signer
        verified, epsilon = _verify(published, signer)
        damaged = CertifiedLedger(certified.certificate, certified.ledger[:-1])
        certificate_file(published).write_bytes(damaged.encode())
        damage_found = not _verify(published, signer)[0]
        rounds = local.committed(task)
        before, after = (
            frame.accuracy(local.store.checkpoint(task, number)["params"], unseen) for number in (0, rounds[-1].number)
        )
        ended, state = local.store.history(task)[-1].cause, local.store.task(task).state
    privacy = _privacy(options)
    one_row_each = [row.round for row in certified.ledger] == [record.number for record in rounds]
    stopped = state is TaskState.COMPLETED and ended == "privacy-budget-spent" and epsilon <= privacy.epsilon
    return PrivateFleetOutcome(
        devices=options.devices,
        rounds=len(rounds),
        rows=len(certified.ledger),
        seconds=training.seconds,
        ended=ended,
        epsilon=epsilon,
        budget=privacy.epsilon,
        delta=privacy.delta,
        noise_multiplier=options.noise_multiplier,
        counted_least=min(record.reported for record in rounds),
        accuracy_before=before,
        accuracy=after,
        verified=verified,
        damage_found=damage_found,
        sound=verified and damage_found and one_row_each and stopped,
    )


def _privacy(options: PrivateFleetOptions) -> PrivacyBudget:
    return PrivacyBudget(
        epsilon=options.epsilon,
        delta=0.1 / options.devices,
        users=options.devices,
        noise_multiplier=options.noise_multiplier,
        mechanism="distributed",
    )


def _settings(options: PrivateFleetOptions) -> TaskSettings:
    secagg = Secagg(clip_norm=CLIP_NORM, bits=options.bits, phase_s=options.phase_s)
    return secure_settings(options, secagg, population="private", rounds=MOST_ROUNDS, privacy=_privacy(options))


def _publish(local: LocalCoordinator, task: str, model: Path) -> CertifiedLedger:
    """Write the last model and its certificate, as `muster task checkpoint` does."""
    local.store.lineage_key = lambda: lineage_key(Settings(database=local.database).keys_file)
    certified = local.store.certificate(task)
    model.write_bytes(local.store.model_file(task))
    certificate_file(model).write_bytes(certified.encode())
    return certified


def _verify(model: Path, signer: str) -> tuple[bool, float]:
    """Whether `muster privacy verify` accepts the files of that signer, and the ε that it computed."""
    command = [sys.executable, "-m", "muster", "privacy", "verify", model.name, "--signer", signer, "--json"]
    done = subprocess.run(command, cwd=model.parent, capture_output=True, check=False)
    return done.returncode == 0, float(msgspec.json.decode(done.stdout)["epsilon"])
