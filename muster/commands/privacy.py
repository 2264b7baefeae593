"""`muster privacy`: what models say about the devices that trained them, at most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster.output import Json, emit, show_fields

privacy_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Verify the privacy certificate of a model."
)


@privacy_app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(metavar="FILE", help="The model, from `muster task checkpoint`.")],
    signer: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The coordinator's public lineage key, ed25519:…, which must have signed."),
    ] = None,
    json: Json = False,
) -> None:
    """Compute what a model's certificate says again, from its file and FILE.privacy.json alone.

    The signature is checked, both digests, every row of the ledger against what the certificate promises, and ε. What
    does not hold is named, and the exit code is then 1. Without --signer the key is shown: compare it with the one that
    the coordinator's operator published.
    """
    from fedcore.privacy.certificate import CertifiedLedger, certificate_file
    from fedcore.privacy.verification import verify as check

    verdict = check(checkpoint.read_bytes(), CertifiedLedger.decode(certificate_file(checkpoint).read_bytes()), signer)
    certificate, privacy = verdict.certificate, verdict.certificate.privacy
    if json:
        emit(verdict)
    else:
        facts = {
            "task": certificate.task,
            "round": certificate.round,
            "epsilon": f"{verdict.epsilon:.6g} at δ {privacy.delta:g}",
            "budget": privacy.epsilon,
            "mechanism": privacy.mechanism,
            "noise_multiplier": privacy.noise_multiplier,
            "noisy sums": certificate.rounds,
            "rounds between participations": f"{privacy.min_separation_rounds} at least",
            "signer": verdict.signer,
            "holds": not verdict.wrong,
        }
        show_fields(facts)
    for one in verdict.wrong:
        typer.echo(f"error: {one}", err=True)
    if verdict.wrong:
        raise typer.Exit(1)
