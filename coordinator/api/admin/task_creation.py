"""Creation of tasks from bundles whose blobs are stored, for the admin API and for the form of the dashboard."""

from __future__ import annotations

import tempfile
from pathlib import Path

from coordinator.api.service import Service
from coordinator.errors import InvalidTask
from coordinator.operations import NewTask
from coordinator.rules.entities import Task
from fedcore.bundle import Bundle, Manifest
from fedcore.plan import Plan


class TaskCreation:
    """The way from a manifest to a task. It reads and writes blobs, and so runs in threads."""

    def __init__(self, service: Service) -> None:
        self._store = service.store
        self._has_authority = service.settings.authority is not None

    def create(self, new: NewTask, by: str) -> Task:
        """Register a task, for whoever `by` names. Raises UnknownBlob, and what `register_task` of the store does."""
        if new.settings.secagg is not None and not self._has_authority:
            raise InvalidTask(
                "secure rounds need an enrolment authority, and this coordinator goes by none: run `muster authority "
                "serve`, and start the coordinator with --authority and --authority-url"
            )
        with tempfile.TemporaryDirectory(prefix="muster-bundle-") as folder:
            bundle = Bundle.write(Path(folder), new.manifest, self._blobs(new.manifest))
            return self._store.register_task(bundle, new.settings, new.release, by, name=new.name)

    def _blobs(self, manifest: Manifest) -> list[bytes]:
        get = self._store.blobs.get
        plan = get(manifest.plan.sha256)
        named = {ref.sha256 for ref in Plan.decode(plan).blob_refs}
        return [plan, get(manifest.state.sha256), get(manifest.certificate.sha256), *map(get, sorted(named))]
