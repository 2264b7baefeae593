"""A private fleet: devices add noise under secure aggregation until the budget is spent, and the claim is verified.

Devices are processes of the real device runtime, the coordinator is a process of its own. When the task has ended, its
checkpoint and certificate are copied into an empty folder, and `muster privacy verify` runs there, in a process that
is told nothing else. It must also refuse a copy of the ledger that lacks a row.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.options import PrivateFleetOptions
from coordinator.lineage import lineage_key
from coordinator.rules.states import RoundState, TaskState
from coordinator.settings import Settings
from coordinator.store.tasks import PrivacyBudget, Secagg, TaskSettings
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.privacy.certificate import CertifiedLedger, certificate_file
from fedcore.signing import SigningKey
from muster.local.server import LocalCoordinator, local_coordinator
from muster.output import Say
from simulator import datasets
from simulator.course import overall
from simulator.engine import evaluate
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.summary import Session
from simulator.population import Population

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

    def on_session(session: Session) -> None:
        say(f"{session.client}: {session.ending}", 1)

    users, held_out = datasets.users(DATASET, options.data, options.devices)
    model = Model(load(MODEL), options.seed)
    with tempfile.TemporaryDirectory(prefix="muster-private-") as place:
        folder = Path(place)
        bundle = export_bundle(model, ALGORITHM, folder / "plan")
        key = SigningKey.new(folder / "release.pem")
        with local_coordinator(folder / "coordinator", secure=True) as local:
            task = local.create_task(bundle, _settings(options), key).id
            started = time.monotonic()
            _fleet(options, users, local, key, folder / "devices").run(on_session)
            seconds = time.monotonic() - started
            kept = folder / "published" / "model.safetensors"
            kept.parent.mkdir()
            certified = _publish(local, task, kept)
            signer = certified.certificate.signer
            verified, epsilon = _verify(kept, signer)
            certificate_file(kept).write_bytes(CertifiedLedger(certified.certificate, certified.ledger[:-1]).encode())
            damage_found = not _verify(kept, signer)[0]
            store, rounds = local.store, [one for one in local.store.rounds(task) if one.state is RoundState.COMMITTED]
            last, privacy = rounds[-1].number, _privacy(options)
            accuracies = [
                overall(evaluate(model, store.checkpoint(task, number)["params"], held_out)["accuracy"], held_out)
                for number in (0, last)
            ]
            ended, state = store.history(task)[-1].cause, store.task(task).state
    one_row_each = [row.round for row in certified.ledger] == [one.number for one in rounds]
    stopped = state is TaskState.COMPLETED and ended == "privacy-budget-spent" and epsilon <= privacy.epsilon
    return PrivateFleetOutcome(
        devices=options.devices,
        rounds=len(rounds),
        rows=len(certified.ledger),
        seconds=seconds,
        ended=ended,
        epsilon=epsilon,
        budget=privacy.epsilon,
        delta=privacy.delta,
        noise_multiplier=options.noise_multiplier,
        counted_least=min(one.reported for one in rounds),
        accuracy_before=accuracies[0],
        accuracy=accuracies[1],
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
    return TaskSettings(
        population="private",
        goal=options.devices,
        minimum=max(8, options.devices * 7 // 10),
        rounds=MOST_ROUNDS,
        over_selection=1.0,
        selection_timeout_s=3 * options.phase_s,
        reporting_deadline_s=10 * options.phase_s,  # five phases follow the training
        seed=options.seed,
        secagg=Secagg(clip_norm=CLIP_NORM, bits=options.bits, phase_s=options.phase_s),
        privacy=_privacy(options),
    )


def _fleet(
    options: PrivateFleetOptions, users: Population, local: LocalCoordinator, key: SigningKey, folder: Path
) -> Fleet:
    config = FleetConfig(
        coordinator=local.url,
        population="private",
        folder=folder,
        concurrency=options.devices,
        wait_s=4 * options.phase_s,
        seed=options.seed,
        policy=Policy(signers=(key.signer,), require_secure_aggregation=True),
    )
    return Fleet(config, users)


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
