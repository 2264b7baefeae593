"""`muster export` and `muster plan`: make, show, verify and sign plan bundles."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import UNSET

from muster.commands.task import FIRST_TASK
from muster.options import parse_key_values
from muster.output import Json, Settings, answer, emit, progress, remark, say, say_next, show_fields, show_table
from simulator.configuration import COMPRESS, HOLD_OUT, LOCAL, ON_HELD_OUT

if TYPE_CHECKING:
    from fedcore.algorithms.algorithm import Algorithm
    from fedcore.batching import HoldOut
    from fedcore.bundle import Bundle, Certificate, Evidence
    from fedcore.compression import Compression
    from fedcore.plan import Field, PassPlan, Plan
    from fedcore.signing import SigningKey
    from simulator.configuration import SimulationConfig

plan_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look into a plan bundle, check one, or sign it."
)
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder written by `muster export`.")]
ModelSource = Annotated[
    str | None,
    typer.Argument(help="A built-in model (see --list), or your own as package.module:function or file.py:function."),
]
AlgorithmSource = Annotated[
    str,
    typer.Option(help="An algorithm (`muster algorithms list`), or your own as package.module:Class or file.py:Class."),
]
Formats = Annotated[
    list[str] | None,
    typer.Option("--format", help="onnx or executorch; may be repeated.  [default: onnx; with --all both]"),
]

Normalise = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Normalise an input: --json of `muster ask normaliser`; may be repeated."),
]
OfRun = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The model, sized for its data, and the algorithm of a run of `muster simulate`."),
]


def export(
    model: ModelSource = None,
    named: Annotated[str | None, typer.Option("--model", help="The same, as `muster simulate` has it.")] = None,
    algorithm: AlgorithmSource = "fedavg",
    settings: Settings = None,
    formats: Formats = None,
    out: Annotated[Path, typer.Option(help="The folder to write; made when missing.")] = Path("plan"),
    every: Annotated[bool, typer.Option("--all", help="Every built-in model, each in a folder of its own.")] = False,
    list_models: Annotated[bool, typer.Option("--list", help="List built-in models, algorithms and formats.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the initial weights.")] = 0,
    sign: Annotated[Path | None, typer.Option(metavar="KEYFILE", help="Sign the plan with this private key.")] = None,
    compress: Annotated[str, typer.Option(metavar="STEPS", help=COMPRESS)] = "",
    hold_out_examples: Annotated[float, typer.Option(metavar="SHARE", help=HOLD_OUT)] = 0.0,
    on_held_out_examples: Annotated[bool, typer.Option("--on-held-out-examples", help=ON_HELD_OUT)] = False,
    local: Annotated[str, typer.Option(metavar="PATTERNS", help=LOCAL)] = "",
    normalise: Normalise = None,
    run: OfRun = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the plan that is in the folder.")] = False,
    json: Json = False,
) -> None:
    """Turn a torch model and an algorithm into a plan bundle.

    The bundle holds training graphs of the model, its loss and the algorithm, as plain ONNX for stock ONNX Runtime or
    as ExecuTorch programs. Each format is compared with torch on the runtime that devices have. Your own model is a
    function without arguments that returns an export.model.ModelSpec: see docs/models.md.

    A pretrained model of Hugging Face is hf:FOLDER,task=TASK: classification, multi-label, token-classification,
    causal-lm or embedding, with the settings classes, tokens, rank, layers, freeze_a and bits.
    """
    from fedcore.algorithms import module_of

    # Wrong options are reported before torch is loaded, which takes seconds.
    if named is not None and model is not None:
        raise typer.BadParameter(f"the model is {model} already; leave one of them out", param_hint="--model")
    named, given, config = model or named, parse_key_values(settings), None
    if run is not None:
        asked = named, given, compress, hold_out_examples, on_held_out_examples, local, every, list_models
        config = _config_of(run, given=any(asked) or algorithm != "fedavg")
        named, algorithm, given, compress, local = (getattr(config, name) for name in _OF_RUN)
        hold_out_examples, on_held_out_examples = config.hold_out_examples, config.on_held_out_examples
    chosen, compression = _checked(algorithm, given, compress)
    from fedcore.batching import HoldOut

    hold_out = HoldOut.asked(hold_out_examples, on_held_out=on_held_out_examples)
    if not (force or every or list_models):
        _refuse_to_replace(out)
    from export.models import MODELS
    from export.predict import FORMATS

    if list_models:
        return _list(json)
    if every == (named is not None):
        raise typer.BadParameter("name a model or pass --all; --list shows the built-in ones", param_hint="MODEL")
    from fedcore.signing import SigningKey
    from fedcore.validation import own_name

    key = None if sign is None else SigningKey.load(sign)
    if every and normalise:
        raise typer.BadParameter("name the one model whose input it is", param_hint="--normalise")
    form = tuple(formats or (FORMATS if every else ("onnx",)))
    order = _Order(chosen, form, seed, key, compression, hold_out, local, tuple(normalise or ()), config)
    if named is not None:
        _describe(_exported(order, own_name(named), out)[0], json)
        return None if json else _say_next(out, module_of(algorithm))
    for name in () if force else MODELS:
        _refuse_to_replace(out / name)
    return _export_all(order, out, json)


_OF_RUN = ("model", "algorithm", "settings", "compress", "local")


def _config_of(run: Path, *, given: bool) -> SimulationConfig:
    """The configuration of a run. given: whether options say what is exported too. Raises BadParameter, RunError."""
    from simulator.runs.reading import read_config

    if given:
        raise typer.BadParameter("the run says what is exported: leave the options of that out", param_hint="--run")
    config = read_config(run)
    if config.plan is not None:
        raise typer.BadParameter(f"the run trained the plan in {config.plan}, which is there", param_hint="--run")
    if config.baseline is not None:
        raise typer.BadParameter(f"the run is the baseline {config.baseline}, which no device runs", param_hint="--run")
    return config


def _checked(algorithm: str, settings: dict[str, Any], compress: str) -> tuple[Algorithm, Compression]:
    """The algorithm and the compression that were named, for devices."""
    from fedcore.algorithms import create, module_of

    chosen = create(algorithm, settings, [module_of(algorithm)])
    from fedcore.compression import Compression  # loads NumPy

    return chosen, Compression.parse(compress)


def _list(json: bool) -> None:
    from export.models import MODELS
    from export.predict import FORMATS
    from fedcore.algorithms import ALGORITHMS

    listing = {"models": list(MODELS), "algorithms": list(ALGORITHMS), "formats": list(FORMATS)}
    answer(listing, json)


def _say_next(folder: Path, module: str) -> None:
    """module: of a user's own algorithm, which a coordinator must be told to trust; else empty."""
    muster = [f"MUSTER_ALGORITHMS={module}", "muster"] if module else ["muster"]
    task = [*muster, "task", "create", "--plan", folder, *FIRST_TASK]
    say_next("start a coordinator, unless one runs", [*muster, "coordinator", "serve", "--accept-unattested"])
    say_next("create a task beside it, in another terminal", task)


def _refuse_to_replace(folder: Path) -> None:
    if (folder / "manifest.json").exists():
        raise typer.BadParameter(
            f"{folder} holds a plan already; name another folder, or replace the plan with --force", param_hint="--out"
        )


@dataclass(frozen=True, slots=True)
class _Order:
    """What to make of a model."""

    algorithm: Algorithm
    formats: tuple[str, ...]
    seed: int
    key: SigningKey | None
    compression: Compression
    hold_out: HoldOut | None
    local: str
    normalise: tuple[Path, ...] = ()
    run: SimulationConfig | None = None


def _exported(order: _Order, model: str, out: Path) -> tuple[Bundle, dict[str, float]]:
    """The bundle, and the CPU seconds that each format took."""
    from export.build import export_bundle
    from export.layers import untrained
    from export.model import Model
    from export.models import load
    from export.normalising import normalised

    seconds: dict[str, float] = defaultdict(float)
    with progress() as bar:
        task = bar.add_task(model, total=None, note="")
        current, since = "", process_time()

        def note(form: str, doing: str) -> None:
            nonlocal current, since
            seconds[current] += process_time() - since
            current, since = form, process_time()
            bar.update(task, note=f"{form} {doing}".strip())

        if order.run is None:
            spec = load(model)
        else:
            from simulator.simulation import model_of

            spec = model_of(order.run).spec
        source = Model(normalised(spec.with_local(order.local), order.normalise), order.seed)
        for path in untrained(source.module):
            remark(f"warning: the statistics of {path} were never trained: means are 0 and variances 1; load them")
        made = source, order.algorithm, out, model, order.formats, note
        bundle = export_bundle(*made, compression=order.compression, hold_out=order.hold_out)
        note("", "done")
    return (bundle if order.key is None else bundle.sign(order.key)), seconds


def _export_all(order: _Order, out: Path, json: bool) -> None:
    """Export every built-in model; those that fail are named at the end."""
    from export.errors import ExportError
    from export.models import MODELS

    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for model in MODELS:
        try:
            bundle, seconds = _exported(order, model, out / model)
        except ExportError as error:
            failed[model] = str(error)
            continue
        formats = bundle.certificate.formats
        rows += [_row(model, name, evidence, seconds[name]) for name, evidence in formats.items()]
    if json:
        emit(rows)
    else:
        columns = ("model", "format", "from torch", "allowed", "CPU s", "kB", "step CPU ms", "peak RSS MB")
        show_table(columns, map(_cells, rows))
    for model, reason in failed.items():
        remark(f"error: {reason}" if model in reason else f"error: {model}: {reason}")
    if failed:
        raise typer.Exit(1)


def _row(model: str, name: str, evidence: Evidence, seconds: float) -> dict[str, Any]:
    """The row of one model in one format."""
    return {
        "model": model,
        "format": name,
        "parity_l2": evidence.worst,
        "tolerance": evidence.tolerance,
        "float64_l2": max(parity.float64 for parity in evidence.parity),
        "single_l2": max((parity.single for parity in evidence.parity if parity.single is not None), default=None),
        "seconds": round(seconds, 2),
        "bytes": evidence.footprint.graph_bytes,
        "step_cpu_ms": evidence.footprint.step_cpu_ms,
        "peak_rss_mb": evidence.footprint.peak_rss_mb,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["model"],
        row["format"],
        f"{row['parity_l2']:.1e}",
        f"{row['tolerance']:.0e}",
        f"{row['seconds']:.1f}",
        f"{row['bytes'] / 1e3:.0f}",
        f"{row['step_cpu_ms']:.3g}",
        f"{row['peak_rss_mb']:.0f}",
    )


@plan_app.command()
def show(bundle: BundlePath, json: Json = False) -> None:
    """Show a bundle's contents and what it needs of a device."""
    from fedcore.bundle import Bundle

    opened = Bundle(bundle)
    for _ in opened.blobs():  # which checks their digests
        pass
    _describe(opened, json)


@plan_app.command()
def verify(
    bundle: BundlePath,
    model: Annotated[
        str | None,
        typer.Option(help="A model of your own, as package.module:function or file.py:function."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="An algorithm of your own, as package.module:Class or file.py:Class.")
    ] = None,
    json: Json = False,
) -> None:
    """Check a bundle's digests, signature and graphs.

    The graphs are compared with the model's source again, on this machine's runtime.
    """
    from export.build import verify_bundle
    from fedcore.bundle import Bundle

    opened = Bundle(bundle)
    signer = opened.signer
    certificate = verify_bundle(opened, model, algorithm)
    if json:
        emit({"bundle": str(bundle), "ok": True, "signer": signer, "certificate": certificate})
    else:
        rows = [
            (
                *(name, parity.graph, parity.steps, f"{parity.l2:.1e}", f"{evidence.tolerance:.0e}"),
                *(f"{parity.float64:.1e}", None if parity.single is None else f"{parity.single:.1e}"),
            )
            for name, evidence in certificate.formats.items()
            for parity in evidence.parity
        ]
        show_table(("format", "graph", "steps", "from torch", "allowed", "torch from float64", "one example"), rows)
        runtimes = ", ".join(evidence.runtime for evidence in certificate.formats.values())
        say(f"ok: {runtimes} agrees with {certificate.reference} to {certificate.worst:.1e} (relative l2)")
        say(f"signed by {signer}" if signer else "not signed")


@plan_app.command()
def sign(
    bundle: BundlePath,
    key: Annotated[Path, typer.Option(metavar="KEYFILE", help="The private key, from `muster key new`.")],
    json: Json = False,
) -> None:
    """Sign a bundle's plan, in place of any signature that it has."""
    from fedcore.bundle import Bundle
    from fedcore.signing import SigningKey

    signed = Bundle(bundle).sign(SigningKey.load(key))
    facts = {"bundle": str(bundle), "plan_sha256": signed.manifest.plan.sha256, "signer": signed.signer}
    answer(facts, json)


def _of_bits(certificate: Certificate) -> dict[str, object]:
    """The cost of weights in few bits, if there are any."""
    cost = certificate.quantisation
    if cost is UNSET:
        return {}
    return {"frozen_bits": cost.bits, "loss_in_few_bits": cost.loss, "loss_of_exact_weights": cost.exact_loss}


def _describe(bundle: Bundle, json: bool) -> None:
    plan, manifest = bundle.plan, bundle.manifest
    facts = {
        "bundle": str(bundle.folder),
        "plan": plan.name,
        "model": manifest.model,
        "algorithm": manifest.algorithm.name,
        "settings": manifest.algorithm.settings,
        "parameters": plan.schema.size,
        **({"local": list(plan.schema.local)} if plan.schema.local else {}),
        "frozen_bytes": plan.frozen.blob.size if plan.frozen else 0,
        **({"normalised": list(plan.normalised)} if plan.normalised else {}),
        **_of_trip(plan),
        "examples": {field.name: kind_of(field) for field in plan.examples.fields},
        "hold_out": plan.examples.hold_out,
        "predict": {item.name: kind_of(item) for item in plan.predict.outputs} if plan.predict else None,
        **({"no_predict": manifest.no_predict} if manifest.no_predict else {}),
        **({"class_names": manifest.class_names} if manifest.class_names else {}),
        "parity_l2": bundle.certificate.worst,
        **_of_bits(bundle.certificate),
        "plan_sha256": manifest.plan.sha256,
        "signer": bundle.signer,
    }
    facts |= {f"second_{name}": fact for trip in plan.trips[1:] for name, fact in _of_trip(trip).items()}
    evidence = bundle.certificate.formats
    if json:
        emit(facts | {"formats": evidence})
        return
    names = ("passes", "second_passes")
    passes = {name: [_sweeps(item) for item in trip.passes] for name, trip in zip(names, plan.trips, strict=False)}
    show_fields(facts | passes | {"hold_out": _share(plan.examples.hold_out)})
    say()
    columns = ("format", "from torch", "allowed", "step CPU ms", "peak RSS MB", "graphs kB")
    show_table(
        columns,
        [
            (
                name,
                f"{proof.worst:.1e}",
                f"{proof.tolerance:.0e}",
                f"{proof.footprint.step_cpu_ms:.3g}",
                f"{proof.footprint.peak_rss_mb:.0f}",
                f"{proof.footprint.graph_bytes / 1e3:.0f}",
            )
            for name, proof in evidence.items()
        ],
    )


def _of_trip(plan: Plan) -> dict[str, Any]:
    """The facts about one trip of a plan."""
    from fedcore.compression import upload_bytes

    return {
        "down_bytes": 4 * sum(vector.size for vector in plan.broadcast),
        "up_bytes": upload_bytes(plan.report),
        "uncompressed_up_bytes": upload_bytes(plan.report.decoded),
        "graph_bytes": {fmt: sum(ref.size for ref in graphs.values()) for fmt, graphs in plan.graphs.items()},
        "passes": {item.name: item.loop for item in plan.passes},
        "segments": {segment.name: segment.size for segment in plan.report.segments},
    }


def kind_of(field: Field) -> str:
    """A field's type and shape, as `muster device examples import --field` takes them."""
    return ":".join(filter(None, [field.dtype, "x".join(map(str, field.shape))]))


def _share(hold_out: HoldOut | None) -> str | None:
    return None if hold_out is None else f"{hold_out.share:g} of each device's examples; runs on {hold_out.side}"


def _sweeps(item: PassPlan) -> str:
    loop = item.loop
    parts = [f"{loop.epochs} × all examples in batches of {loop.batch_size}"]
    parts += [f"at most {loop.steps} steps"] if loop.steps else []
    return f"{item.name} ({'; '.join(parts)})"
