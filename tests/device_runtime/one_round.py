"""A real coordinator that wants one report of a phone, for tests of devices in other languages.

    python -m tests.device_runtime.one_round FOLDER

The first line of output is its URL, for devices of population `phones` that tell an `app_version` of 3.2 or newer; the
second the key that signs plans and models. Where the folder has the file `android.toml`, only phones by it are taken.
Where it has `secure`, the round is secure and for all, and devices in Python take part in it too. For each line of
input the model after the round is released as `digits`, and a line printed. Once standard input ends, the next line has
the metrics and the number of reports of each committed round, as JSON.
"""

import json
import sys
import time
from pathlib import Path
from threading import Thread

from coordinator.store.tasks import Secagg, TaskSettings
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.signing import SigningKey
from muster.local.server import local_coordinator
from muster.releasing_models import Source, keep, next_release, plan_of
from simulator import datasets
from simulator.fleet.fleet import Fleet, FleetConfig

COMMITTING_S = 60.0
"""How long a report may wait to be counted."""
OTHERS = 7
"""Devices in Python in a secure round."""


def committed(local, task):
    """The committed rounds, once there is one, or it took too long."""
    end = time.monotonic() + COMMITTING_S
    while not local.committed(task) and time.monotonic() < end:
        time.sleep(0.05)
    return local.committed(task)


def release(local, task, key):
    """Release the model after the round to all phones."""
    source = Source(task, committed(local, task)[0].number)
    params_D = local.store.checkpoint(*source)["params"]
    plan = plan_of(local.store, task, None)
    made, parameters = next_release(
        local.store, source, "digits", plan, params_D, key, evaluation={}, forbid_older=False
    )
    keep(local.store, parameters)
    version = local.store.release_model(key.sign_statement(made))
    local.store.promote_model("phones", "digits", version.number, 1.0)


def others(local, folder, key):
    """Start devices in Python, which take part until the task is over."""
    users, _ = datasets.users("digits", None, OTHERS)
    policy = Policy(signers=(key.signer,))
    config = FleetConfig(
        coordinator=local.url, population="phones", folder=folder / "devices", concurrency=OTHERS, policy=policy
    )
    Thread(target=Fleet(config, users).run, daemon=True).start()


def main(folder: Path) -> None:
    """Serve until standard input ends."""
    bundle = export_bundle(Model(load("logreg")), create("fedavg", {"batch_size": 5}), folder / "plan")
    key = SigningKey.new(folder / "release.pem")
    android, secure = folder / "android.toml", (folder / "secure").exists()
    attested = {"android_file": android, "accept_unattested": False} if android.exists() else {}
    secagg = Secagg(clip_norm=4.0, max_examples=400, phase_s=60) if secure else None
    with local_coordinator(folder, secure=secure, **attested) as local:
        settings = TaskSettings(
            population="phones",
            goal=1 + OTHERS * secure,
            rounds=1,
            over_selection=1.0,
            secagg=secagg,
            where="" if secure else "app_version >= 3.2",
        )
        task = local.create_task(bundle, settings, key).id
        print(local.url, key.signer, sep="\n", flush=True)
        if secure:
            others(local, folder, key)
        for _ in sys.stdin:
            release(local, task, key)
            print("released", flush=True)
        rounds = [record.metrics | {"reported": record.reported} for record in committed(local, task)]
        print(json.dumps(rounds), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
