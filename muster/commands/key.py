"""`muster key`: keys that sign plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.output import Json, emit

key_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make keys that sign plans.")


@key_app.command()
def new(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the private key; must not exist.")],
    json: Json = False,
) -> None:
    """Write a new private key, and print the public key.

    Only its owner may read the file. A device's policy names the public key.
    """
    from fedcore.signing import SigningKey

    signer = SigningKey.new(out).signer
    if json:
        emit({"file": str(out), "signer": signer})
    else:
        typer.echo(signer)
