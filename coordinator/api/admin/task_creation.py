"""Creation of tasks from bundles whose blobs are stored, for the admin API and for the form of the dashboard."""

from __future__ import annotations

import tempfile
from pathlib import Path

from coordinator.api.service import Service
from coordinator.errors import InvalidTask
from coordinator.operations import NewTask
from coordinator.rules.entities import NOT_BOTH, Evaluates, Regularly, Task
from fedcore.bundle import Bundle, Manifest
from fedcore.plan import Plan


def create_task(service: Service, new: NewTask, by: str) -> Task:
    """Register a task that `by` asked for. Raises UnknownBlob, and what `register_task` of the store does.

    It reads and writes blobs, so it runs in a thread.
    """
    if new.settings.secagg is not None and service.settings.authority is None:
        raise InvalidTask(
            "secure rounds need an enrolment authority, and this coordinator has none: run `muster authority "
            "serve`, and start the coordinator with --authority and --authority-url"
        )
    with tempfile.TemporaryDirectory(prefix="muster-bundle-") as folder:
        bundle = _bundle(service, new.manifest, Path(folder, "plan"))
        evaluation: Evaluates | Regularly | None = new.evaluates
        if new.evaluation is not None:
            if evaluation is not None:
                raise InvalidTask(NOT_BOTH)
            by_bundle = _bundle(service, new.evaluation.bundle, Path(folder, "evaluation"))
            evaluation = Regularly(new.evaluation.every, by_bundle)
        return service.store.register_task(
            bundle,
            new.settings,
            new.release,
            by,
            name=new.name,
            evaluation=evaluation,
        )


def _bundle(service: Service, manifest: Manifest, folder: Path) -> Bundle:
    """The bundle with a manifest, in a folder. Raises UnknownBlob, and fedcore's errors."""
    get = service.store.blobs.get
    plan = get(manifest.plan.sha256)
    named = sorted({ref.sha256 for ref in Plan.decode(plan).blob_refs})
    return Bundle.write(
        folder, manifest, [plan, get(manifest.state.sha256), get(manifest.certificate.sha256), *map(get, named)]
    )
