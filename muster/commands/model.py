"""`muster model`: trained models as files for apps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.commands.stores import Blobs, Database, Remote, open_store
from muster.output import Json, answer, doing, remark

if TYPE_CHECKING:
    from export.huggingface.folder import Pretrained
    from export.inference.int8 import Cost
    from export.inference.trained import Trained
    from export.outputs import Arrays
    from fedcore.bundle import Bundle

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A task's id, or a bundle's folder with --checkpoint.")]
Form = Annotated[str, typer.Option(help="onnx, executorch or torch; of a pretrained model peft or transformers.")]
Int8 = Annotated[bool, typer.Option("--int8", help="Weights in a byte each, by ONNX Runtime; says the cost.")]
Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Examples to measure what --int8 costs: an .npz, as devices have it."),
]
Out = Annotated[
    Path | None, typer.Option(help="The file to write, or the folder.  [default: model.onnx, .pte, .pt2, or model]")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file that is there.")]
Round = Annotated[int | None, typer.Option("--round", help="The task's round whose model it is.  [default: the last]")]
CheckpointFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The model, from `muster task checkpoint`.")]
ModuleSource = Annotated[
    str | None,
    typer.Option(help="But for onnx: the model's source, as package.module:function, or as hf:FOLDER of a pretrained."),
]

model_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Use trained models in apps.")


@model_app.callback()
def models() -> None:
    """Use trained models in apps."""


@model_app.command()
def export(
    source: Source,
    to: Form = "onnx",
    int8: Int8 = False,
    data: Data = None,
    out: Out = None,
    force: Force = False,
    round_number: Round = None,
    checkpoint: CheckpointFile = None,
    model: ModuleSource = None,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Write a trained model as a file that apps load without Muster.

    The weights are inside, dropout is off. onnx: any batch size, inputs named as the fields of an example, for stock
    ONNX Runtime. executorch: one example a call. torch: for torch.export.load. Before the file is written, its outputs
    are compared with those of the model that it is made of. peft: a folder with the adapters of a pretrained model.
    transformers: one with all of its weights, adapters included. Examples:

    muster model export 4f1c… --round 20 --int8 --data test.npz

    muster model export plan --checkpoint model.safetensors --to torch

    muster model export 4f1c… --to peft --model hf:models/smollm,task=causal-lm --out adapters
    """
    from export.inference.making import FOLDERS, SUFFIXES, check_form, inference_model

    check_form(to, int8=int8)
    out = out or Path(f"model{SUFFIXES.get(to, '')}")
    if out.exists() and not force and to not in FOLDERS:
        raise typer.BadParameter(f"{out} exists; name another file, or replace it with --force", param_hint="--out")
    if data is not None and not int8:
        raise typer.BadParameter("examples are for measuring what --int8 costs", param_hint="--data")
    with doing("export") as note:
        note("read the model")
        bundle: Bundle | None = None
        if (Path(source) / "manifest.json").is_file():
            trained, bundle = _of_bundle(Path(source), checkpoint)
        else:
            if checkpoint is not None:
                raise typer.BadParameter(f"{source} is not a plan bundle; a task has a --round", param_hint="SOURCE")
            from muster.releasing_models import trained_in

            with open_store(db, blobs, coordinator) as store:
                trained = trained_in(store, source, round_number)
        if to in FOLDERS:
            note(f"write for {to}")
            _write_folder(to, _pretrained(model), trained, out)
            answer({"folder": str(out), "to": to, "files": sorted(file.name for file in out.iterdir())}, json)
            return
        examples = None if data is None else _examples(trained, data)
        note(f"write for {to}")
        made = inference_model(trained, to, source=_module(to, bundle, model), int8=int8, examples=examples)
    out.write_bytes(made.data)
    _report({"file": str(out), "to": to, "bytes": len(made.data)}, trained, made.cost, json)


def _pretrained(source: str | None) -> Pretrained:
    """The pretrained model that was named."""
    from export.huggingface.folder import FOLDER, Pretrained

    if source is None or not source.startswith(FOLDER):
        raise typer.BadParameter("name the pretrained model as it was exported: hf:FOLDER,…", param_hint="--model")
    return Pretrained.parse(source)


def _write_folder(to: str, pretrained: Pretrained, trained: Trained, out: Path) -> None:
    """Write a trained model as a folder of Hugging Face's libraries."""
    from export.huggingface.written import Values, write_adapters, write_merged

    write = {"peft": write_adapters, "transformers": write_merged}[to]
    write(pretrained, Values(trained.plan.schema, trained.params, trained.frozen), out)


def _report(facts: dict[str, Any], trained: Trained, cost: Cost | None, json: bool) -> None:
    from muster.commands.export import kind_of

    read = [item for item in trained.plan.examples.fields if item.name in trained.predict.inputs]
    for side, items in {"inputs": read, "outputs": trained.predict.outputs}.items():
        facts[side] = {item.name: kind_of(item) for item in items}
    if cost is not None:
        facts |= {
            "examples": cost.examples,
            "largest_difference": cost.largest,
            "largest_output": cost.largest_output,
        }
        if cost.accuracy is not None:
            facts |= dict(zip(("accuracy_float", "accuracy_int8"), cost.accuracy, strict=True))
    answer(facts, json)
    if cost is not None and cost.accuracy is None and not json:
        remark("accuracy needs --data with labels of classes")


def _of_bundle(folder: Path, checkpoint: Path | None) -> tuple[Trained, Bundle]:
    import safetensors
    import safetensors.numpy

    from export.inference.trained import Trained
    from fedcore.bundle import Bundle
    from fedcore.errors import SchemaError

    if checkpoint is None:
        raise typer.BadParameter("a bundle has no trained model; name its file", param_hint="--checkpoint")
    bundle = Bundle(folder)
    try:
        return Trained.of_bundle(bundle, safetensors.numpy.load(checkpoint.read_bytes())), bundle
    except safetensors.SafetensorError as error:
        raise SchemaError(f"{checkpoint} is not a file of `muster task checkpoint`: {error}") from error
    except SchemaError as error:
        raise SchemaError(f"{checkpoint} is of another model than the plan in {folder}: {error}") from error


def _module(to: str, bundle: Bundle | None, named: str | None) -> str | None:
    """The source of the torch module, where the form is made of one."""
    if to == "onnx" or bundle is None:
        return named
    from export.planned_model import source_of  # needs torch

    return source_of(bundle, named)


def _examples(trained: Trained, path: Path) -> Arrays:
    from device_runtime.examples.source import NpzFile
    from fedcore.plan import ExampleSpec

    source = NpzFile(path)
    held = source.columns()
    wanted = [item for item in trained.plan.examples.fields if item.name in (*trained.predict.inputs, *held)]
    return source.load(ExampleSpec(tuple(wanted)))
