"""`muster export` and `muster plan`: make a plan bundle, look into one, check one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.output import Json, Settings, emit, parse_settings, show_fields, show_table

if TYPE_CHECKING:
    from fedcore.bundle import Bundle

plan_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into a plan bundle, or check one.")
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder written by `muster export`.")]


def export(
    model: Annotated[
        str | None, typer.Argument(help="A built-in model (see --list), or your own as package.module:function.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="The federated algorithm.")] = "fedavg",
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="The folder to write; made when missing.")] = Path("plan"),
    list_models: Annotated[bool, typer.Option("--list", help="List built-in models and algorithms.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the initial weights.")] = 0,
    json: Json = False,
) -> None:
    """Turn a torch model, its loss and an algorithm into a plan bundle of ONNX training graphs.

    Your own model is a function without arguments that returns an export.model.ModelSpec: see docs/models.md.
    """
    from export.build import export_bundle
    from export.model import Model
    from export.models import MODELS, load
    from fedcore.algorithms import ALGORITHMS, create

    if list_models:
        listing = {"models": list(MODELS), "algorithms": list(ALGORITHMS)}
        return emit(listing) if json else show_fields({key: ", ".join(names) for key, names in listing.items()})
    if model is None:
        raise typer.BadParameter("name a model, or pass --list to see the built-in ones", param_hint="MODEL")
    chosen = create(algorithm, parse_settings(settings))
    bundle = export_bundle(Model(load(model), seed), chosen, out, source=model)
    return _describe(bundle, json)


@plan_app.command()
def show(bundle: BundlePath, json: Json = False) -> None:
    """Say what a bundle contains and what it demands of a device."""
    from fedcore.bundle import Bundle

    _describe(Bundle(bundle), json)


@plan_app.command()
def verify(
    bundle: BundlePath,
    model: Annotated[
        str | None,
        typer.Option(help="Where to import a model that is not built in: package.module:function."),
    ] = None,
    json: Json = False,
) -> None:
    """Check every digest, and compare the graphs with the model's source again on this machine's runtime."""
    from export.verify import verify_bundle
    from fedcore.bundle import Bundle

    certificate = verify_bundle(Bundle(bundle), model)
    if json:
        emit({"bundle": str(bundle), "ok": True, "certificate": certificate})
    else:
        rows = [
            (name, parity.graph, parity.steps, f"{parity.l2:.1e}", f"{parity.float64:.1e}", f"{evidence.tolerance:.0e}")
            for name, evidence in certificate.formats.items()
            for parity in evidence.parity
        ]
        show_table(("format", "graph", "steps", "from torch", "torch from float64", "allowed"), rows)
        runtimes = ", ".join(evidence.runtime for evidence in certificate.formats.values())
        typer.echo(f"ok: {runtimes} agrees with {certificate.reference} to {certificate.worst:.1e} (relative l2)")


def _describe(bundle: Bundle, json: bool) -> None:
    plan, manifest = bundle.plan, bundle.manifest
    facts = {
        "bundle": str(bundle.folder),
        "plan": plan.name,
        "model": manifest.model,
        "algorithm": manifest.algorithm.name,
        "settings": manifest.algorithm.settings,
        "parameters": plan.schema.size,
        "down_bytes": 4 * sum(vector.size for vector in plan.broadcast),
        "up_bytes": 4 * plan.report.size,
        "graph_bytes": {fmt: sum(ref.size for ref in graphs.values()) for fmt, graphs in plan.graphs.items()},
        "passes": {item.name: item.loop for item in plan.passes},
        "segments": {segment.name: segment.size for segment in plan.report.segments},
        "examples": {field.name: f"{field.dtype}{list(field.shape)}" for field in plan.examples.fields},
        "parity_l2": bundle.certificate.worst,
        "plan_sha256": manifest.plan.sha256,
    }
    if json:
        emit(facts)
    else:
        show_fields(facts)
