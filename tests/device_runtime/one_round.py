"""A real coordinator that wants one report, for tests of devices in other languages.

    python -m tests.device_runtime.one_round FOLDER

The first line of output is its URL, for devices of population `phones` that tell an `app_version` of 3.2 or newer.
Where the folder has the file `android.toml`, only phones by it are taken. Once standard input ends, the next line has
the metrics and the number of reports of each committed round, as JSON.
"""

import json
import sys
import time
from pathlib import Path

from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.local.server import local_coordinator

COMMITTING_S = 30.0
"""How long a report may wait to be counted."""


def main(folder: Path) -> None:
    """Serve until standard input ends."""
    bundle = export_bundle(Model(load("logreg")), create("fedavg", {"batch_size": 5}), folder / "plan")
    android = folder / "android.toml"
    attested = {"android_file": android, "accept_unattested": False} if android.exists() else {}
    with local_coordinator(folder, **attested) as local:
        settings = TaskSettings(population="phones", goal=1, rounds=1, over_selection=1.0, where="app_version >= 3.2")
        task = local.store.register_task(bundle, settings).id
        print(local.url, flush=True)
        sys.stdin.read()
        end = time.monotonic() + COMMITTING_S
        while not local.committed(task) and time.monotonic() < end:
            time.sleep(0.05)
        rounds = [record.metrics | {"reported": record.reported} for record in local.committed(task)]
        print(json.dumps(rounds), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
