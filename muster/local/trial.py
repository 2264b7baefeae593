"""A trial of secure rounds on one machine: a coordinator's enrolment authority and the key that releases its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from coordinator.keys import Keys
from coordinator.settings import Settings
from coordinator.store.database import Database
from fedcore.signing import SigningKey, key_text
from muster.local.server import starting_authority
from muster.plain import remark

FOLDER = Path("muster-trial")
"""In the working folder: the keys of a trial, which a later one uses again."""
RELEASE_KEY = FOLDER / "release.pem"


@contextmanager
def trial(settings: Settings) -> Iterator[Settings]:
    """The settings with which a coordinator goes by an authority that runs beside it, until the block ends.

    Both take devices without evidence. Raises ServerError.
    """
    with closing(Database(settings.database)) as database:
        server = key_text(Keys.open(settings.keys_file, database).server.public)
    with starting_authority(FOLDER, server, f"http://{settings.host}:{settings.port}") as authority:
        authority.process.ready()
        if not RELEASE_KEY.exists():
            SigningKey.new(RELEASE_KEY)
        remark(
            f"trial: one machine has the keys of coordinator, authority and releases (in {FOLDER}/), and any device "
            "may enrol. Secure rounds run as they do in the field, but protect nobody's reports from this machine"
        )
        given = {"authority": authority.key, "authority_url": authority.url, "accept_unattested": True}
        yield settings.model_copy(update=given)
