"""`muster key`: keys that sign plans and releases; and `muster plan log`, the log of releases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import UNSET

from muster.commands.stores import HeadFile, with_store
from muster.output import Json, emit, remark, say, say_next, show_fields, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.operations import TaskStore
    from fedcore.release import Release, Signed, TreeHead


key_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make and show keys that sign plans and releases."
)


@key_app.command()
def new(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the private key; must not exist.")],
    json: Json = False,
) -> None:
    """Write a new private key, and print the public key.

    Only its owner may read the file. A device's policy names the public key, and then the device runs only plans that
    the key signed, and takes part only in secure rounds that it released. Keep the file away from the coordinator.
    """
    from fedcore.signing import SigningKey

    signer = SigningKey.new(out).signer
    if json:
        emit({"file": str(out), "signer": signer})
    else:
        say(signer)
        say_next("sign a plan with it", ["muster", "plan", "sign", "plan", "--key", out])
        task = ["--plan", "plan", "--population", "phones", "--goal", 10, "--rounds", 20]
        say_next("start a secure task with it", ["muster", "task", "create", *task, "--secagg", "--release-key", out])
        remark("on devices, in policy.toml:")
        remark(f'  signers = ["{signer}"]')


@key_app.command()
def show(
    key: Annotated[Path, typer.Argument(metavar="FILE", help="The file of a private key, from `muster key new`.")],
    json: Json = False,
) -> None:
    """Print the public key of a private one."""
    from fedcore.signing import SigningKey

    signer = SigningKey.load(key).signer
    if json:
        emit({"file": str(key), "signer": signer})
    else:
        say(signer)


@with_store
def log(*, head_file: HeadFile = None, store: TaskStore, json: Json = False) -> None:
    """Show and verify the log of releases for secure rounds.

    Every signature is checked, and the log's root computed. With --head-file the log must begin with the one whose head
    the file holds. A head that a device was shown can be compared in the same way. The exit code is 1 for a broken log.
    """
    from fedcore.release import Release, TreeHead, decode_head
    from fedcore.signing import verified

    saved = decode_head(head_file.read_text()) if head_file is not None and head_file.exists() else None
    signed = store.releases()
    releases = [verified(one, Release) for one in signed]
    _demand_grown(signed, saved)
    head = TreeHead(size=len(signed), root=_root(signed))
    if head_file is not None:
        head_file.write_bytes(msgspec.json.encode(head))
    if json:
        entries = [{"signer": entry.signer, "digest": entry.digest, "text": entry.text} for entry in signed]
        emit({"head": head, "releases": entries})
        return
    rows = [
        (place, release.population, release.plan[:12], _evaluation(release), release.counter, entry.signer)
        for place, (release, entry) in enumerate(zip(releases, signed, strict=True))
    ]
    show_table(("place", "population", "plan", "evaluated by", "counter", "signer"), rows)
    show_fields({"releases": head.size, "root": head.root})


def _evaluation(release: Release) -> str:
    """The first digits of the plan that may evaluate the models of a release; empty where none may."""
    return "" if release.evaluation is UNSET else release.evaluation.plan[:12]


def _demand_grown(signed: Sequence[Signed], saved: TreeHead | None) -> None:
    """Raise BadRelease unless the log begins with the releases of an earlier head."""
    from fedcore.errors import BadRelease

    if saved is not None and (len(signed) < saved.size or _root(signed[: saved.size]) != saved.root):
        raise BadRelease(
            f"the log has {len(signed)} releases, and its first {saved.size} are not those of the saved head: it was "
            "changed, and devices were shown something else"
        )


def _root(signed: Sequence[Signed]) -> str:
    """The root over these releases in hex; zeros if there are none."""
    from secagg.graph import EMPTY, Tree

    return (Tree([entry.leaf for entry in signed]).root if signed else EMPTY).hex()
