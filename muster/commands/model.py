"""`muster model`: trained models as files for apps, and their releases, versions and roll-outs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.commands.stores import Blobs, Database, Remote, given_again, open_store, with_store
from muster.output import Json, answer, at_utc, doing, emit, remark, say, say_next, show_fields, show_table

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.roll_outs import Gate, Model, ModelVersion, RollOut
    from export.huggingface.folder import Pretrained
    from export.inference.int8 import Cost
    from export.inference.trained import OutputsByName, Trained
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

    write, fields = {"peft": write_adapters, "transformers": write_merged}[to], trained.plan.examples.fields
    values = Values(trained.plan.schema, trained.params, trained.frozen, fields[-1])
    pretrained = replace(pretrained, tokens=max((2, *fields[0].shape)))  # of the plan's texts; weights have no length
    write(pretrained, values, out)


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
    from export.build import source_of  # needs torch

    return source_of(bundle, named)


def _examples(trained: Trained, path: Path) -> OutputsByName:
    from device_runtime.examples.source import NpzFile
    from fedcore.plan import ExampleSpec

    source = NpzFile(path)
    held = source.columns()
    wanted = [item for item in trained.plan.examples.fields if item.name in (*trained.predict.inputs, *held)]
    return source.load(ExampleSpec(tuple(wanted)))


__all__ = ["model_app"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]
Numbered = Annotated[
    str, typer.Argument(metavar="NAME[@NUMBER]", help="The model, and the version.  [default: the last]")
]
Population = Annotated[
    str | None, typer.Option(help="The population, if models of several have the name.  [default: the only one]")
]
Share = Annotated[str, typer.Option(metavar="SHARE", help="Of the devices, as 20% or 0.2; 100% is all.")]
TrainedSource = Annotated[
    str, typer.Argument(metavar="TASK[@ROUND]", help="The model: a task's, by default after its last round.")
]
NewName = Annotated[str, typer.Option(help="The model's name: lower-case letters, digits, - and _.")]
Key = Annotated[Path, typer.Option(metavar="KEYFILE", help="The private release key, from `muster key new`.")]
FirstShare = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Give it to that share of the devices at once, as 5%.")
]
Evaluation = Annotated[
    str | None,
    typer.Option(metavar="TASK[@ROUND]", help="The task that evaluated it; its figures go into the release."),
]
PlanBundle = Annotated[
    Path | None, typer.Option(help="A bundle that you trust: sign nothing unless the task runs its plan.")
]
GateText = Annotated[
    str | None, typer.Option(metavar="GATE", help="'METRIC >= previous', or <=: refuse a version that is worse.")
]
Where = Annotated[
    str | None, typer.Option(metavar="WHERE", help="The share is of the devices whose labels match this expression.")
]
ForbidOlder = Annotated[
    bool, typer.Option("--forbid-older", help="Devices that see this version never go back to an earlier one.")
]


@model_app.command()
def release(
    source: TrainedSource,
    name: NewName,
    key: Key,
    share: FirstShare = None,
    where: Where = None,
    evaluation: Evaluation = None,
    gate: GateText = None,
    forbid_older: ForbidOlder = False,
    plan: PlanBundle = None,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Release a trained model as the next signed version of a name.

    It is for the devices of the task's population. The coordinator keeps plan, predict graphs and parameters, and
    cannot change them: devices demand the signature of a key that their policy names. No device has the version before
    it is promoted, by --share or by `muster model promote`. A gate compares the interval of 95 % of the new version's
    evaluation with the mean of the version that all devices have. It refuses the release when the whole interval is
    worse. Examples:

    muster model release 4f1c… --name keyboard --key release.pem --share 5%

    muster model release 4f1c…@80 --name keyboard --key release.pem --evaluation 9ab2… --gate 'accuracy >= previous'
    """
    from fedcore.bundle import Bundle
    from fedcore.signing import SigningKey
    from muster.releasing_models import Source, evaluation_of, keep, next_release, pass_gate, plan_of, trained_in

    rule = _gate(gate, evaluation)
    first, target = None if share is None else _share(share), _target(where)
    if first is None and target:
        raise typer.BadParameter("it says of which devices the share is: give --share too", param_hint="--where")
    signing = SigningKey.load(key)
    with open_store(db, blobs, coordinator) as store:
        model = Source.of(store, source)
        known = plan_of(store, model.task, None if plan is None else Bundle(plan))
        trained = trained_in(store, model.task, model.round)
        figures = {} if evaluation is None else evaluation_of(store, evaluation, model)
        made, parameters = next_release(
            store, model, name, known, trained.params, signing, evaluation=figures, forbid_older=forbid_older
        )
        compared = None if rule is None else pass_gate(store, rule, made)
        keep(store, parameters)
        version = store.release_model(signing.sign_statement(made))
        if first is not None:
            store.promote_model(made.population, name, version.number, first, gate, where=target)
        answer(_facts(version) | {"gate": compared, "share": first} | ({"where": target} if target else {}), json)
    if not json and first is None:
        again = given_again(db=db, blobs=blobs, coordinator=coordinator)
        say_next("give it to devices", ["muster", "model", "promote", name, "--share", "5%", *again])


@model_app.command("list")
@with_store
def list_models(*, store: TaskStore, json: Json = False) -> None:
    """List every released model, and which version devices have now."""
    models = store.models()
    if json:
        emit([asdict(model) for model in models])
    else:
        rows = [(one.name, one.population, one.versions, *_now(one)) for one in models]
        show_table(("model", "population", "versions", "current", "share", "others"), rows)


@model_app.command()
@with_store
def show(*, name: Name, population: Population = None, store: TaskStore, json: Json = False) -> None:
    """Show a model's versions, their figures and counted check-ins."""
    model = _model(store, name, population)
    versions, counts = store.model_versions(model.population, name), store.model_counts(model.population, name)
    if json:
        counted = [asdict(count) for count in counts]
        emit({**asdict(model), "released": [_facts(version) for version in versions], "counts": counted})
        return
    facts: dict[str, Any] = dict(zip(("current", "share", "others"), _now(model), strict=True))
    show_fields(facts | ({"share of": model.wanted} if model.target else {}))
    for version in versions:
        say()
        show_fields(_facts(version))
    if counts:
        say()
        rows = [(one.day, one.number, one.check_ins, one.refused) for one in counts]
        show_table(("day, UTC", "version", "check-ins that have it", "refused it"), rows)


@model_app.command()
@with_store
def promote(
    *,
    name: Numbered,
    share: Share,
    where: Where = None,
    gate: GateText = None,
    population: Population = None,
    store: TaskStore,
    json: Json = False,
) -> None:
    """Give a released version of a model to a share of the devices.

    The devices are picked by a hash of their ids, so 5% and then 20% keeps the first 5%. The others have the version
    that all had before, or none. A gate compares as that of `muster model release` does, and the history keeps what.
    """
    name, number = _numbered(name)
    model = _model(store, name, population)
    version, target = number or model.versions, _target(where)
    _tell(store.promote_model(model.population, name, version, _share(share), gate, where=target), json)


@model_app.command("roll-back")
@with_store
def roll_back(
    *,
    name: Name,
    to: Annotated[
        int | None, typer.Option(min=1, help="The version to return to.  [default: the one that all had before]")
    ] = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Where no version was before: give no device any.")
    ] = False,
    population: Population = None,
    store: TaskStore,
    json: Json = False,
) -> None:
    """Give all devices an earlier version of a model.

    Devices take it when they next ask. It needs no key: the earlier version was signed. One that the key has since
    forbidden, by `release --forbid-older`, is refused. Devices that took a version that is withdrawn keep it.
    """
    model = _model(store, name, population)
    _tell(store.roll_back_model(model.population, name, to, withdraw), json)


@model_app.command()
@with_store
def history(*, name: Name, population: Population = None, store: TaskStore, json: Json = False) -> None:
    """Show what was given to which share of the devices, and when."""
    model = _model(store, name, population)
    roll_outs = store.model_history(model.population, name)
    if json:
        emit([asdict(one) for one in roll_outs])
    else:
        rows = [
            (at_utc(one.at), one.kind, one.number, _percent(one.share), one.target or None, one.actor, one.gate or None)
            for one in roll_outs
        ]
        show_table(("when", "what", "version", "share", "where", "who", "gate"), rows)


def _gate(text: str | None, evaluation: str | None) -> Gate | None:
    """The gate that was asked for, which compares the figures of an evaluation."""
    from coordinator.rules.roll_outs import Gate

    if text is not None and evaluation is None:
        raise typer.BadParameter("a gate compares figures: name the task that evaluated it", param_hint="--evaluation")
    return None if text is None else Gate.parse(text)


def _model(store: TaskStore, name: str, population: str | None) -> Model:
    """The model of a name. Raises UnknownModel."""
    from coordinator.errors import UnknownModel

    models = [one for one in store.models() if one.name == name and population in (None, one.population)]
    if not models:
        where = "" if population is None else f" in population {population!r}"
        raise UnknownModel(f"there is no model {name!r}{where}; `muster model list` has them")
    if len(models) > 1:
        held = ", ".join(one.population for one in models)
        raise typer.BadParameter(f"populations {held} have a model {name!r}: name one", param_hint="--population")
    return models[0]


def _numbered(text: str) -> tuple[str, int | None]:
    name, at, number = text.partition("@")
    if at and not (number.isdecimal() and int(number)):
        raise typer.BadParameter(f"{text!r} names no version: give NAME or NAME@NUMBER", param_hint="NAME")
    return name, int(number) if at else None


def _share(text: str) -> float:
    """A share, of `5%` or `0.05`. Raises InvalidModel for one that no promotion may have."""
    from coordinator.errors import InvalidModel
    from coordinator.rules.roll_outs import check_share, share_of

    try:
        share = share_of(text)
    except InvalidModel as error:
        raise typer.BadParameter(str(error), param_hint="--share") from error
    check_share(share)
    return share


def _target(where: str | None) -> str:
    """The canonical text of a target. Raises InvalidModel for one that does not parse."""
    from coordinator.errors import InvalidModel
    from coordinator.rules.task_settings import canonical

    return canonical(where or "", InvalidModel)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.6g} %"


def _now(model: Model) -> tuple[int | None, str | None, int | None]:
    return model.current, _percent(model.share), model.others


def _facts(version: ModelVersion) -> dict[str, Any]:
    signed = version.statement
    return {
        "model": version.name,
        "population": version.population,
        "version": version.number,
        "released": at_utc(version.created_at),
        "signer": version.release.signer,
        "origin": f"{signed.origin.task}@{signed.origin.round}" if signed.origin else None,
        "counter": signed.counter,
        "plan_sha256": signed.plan.sha256,
        "parameters_sha256": signed.parameters.sha256,
        "evaluation": signed.evaluation,
    }


def _tell(done: RollOut, json: bool) -> None:
    """Say what devices are given from now on."""
    if json:
        emit(asdict(done))
    else:
        show_fields({"model": done.name, "population": done.population, "version": done.number})
        if done.gate:
            remark(done.gate)
        if not done.share:
            remark("it is withdrawn: devices that took it keep it, and no device is given any from now on")
            return
        from coordinator.rules.task_settings import wanted

        which = wanted(done.target) or "devices"
        remark(f"{_percent(done.share)} of the {which} are given version {done.number} when they next ask")
