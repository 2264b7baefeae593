"""`muster key`: keys that sign plans and releases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.output import Json, emit, remark, say, say_next

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
