"""`muster model release` and its siblings: models that devices use, version by version."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.commands.model import model_app
from muster.commands.stores import Blobs, Database, Remote, given_again, open_store, with_store
from muster.output import Json, answer, at_utc, emit, remark, say, say_next, show_fields, show_table

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.model_gate import Gate
    from coordinator.rules.roll_outs import Model, ModelVersion, RollOut

__all__ = ["model_app"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]
Numbered = Annotated[
    str, typer.Argument(metavar="NAME[@NUMBER]", help="The model, and the version.  [default: the last]")
]
Population = Annotated[
    str | None, typer.Option(help="The population, if models of several have the name.  [default: the only one]")
]
Share = Annotated[str, typer.Option(metavar="SHARE", help="Of the devices, as 20% or 0.2; 100% is all.")]
Trained = Annotated[
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
ForbidOlder = Annotated[
    bool, typer.Option("--forbid-older", help="Devices that see this version never go back to an earlier one.")
]


@model_app.command()
def release(
    source: Trained,
    name: NewName,
    key: Key,
    share: FirstShare = None,
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
    first = None if share is None else _share(share)
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
        version = store.release_model(signing.sign_model_release(made))
        if first is not None:
            store.promote_model(made.population, name, version.number, first, gate)
        answer(_facts(version) | {"gate": compared, "share": first}, json)
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
    show_fields(dict(zip(("current", "share", "others"), _now(model), strict=True)))
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
    _tell(store.promote_model(model.population, name, number or model.versions, _share(share), gate), json)


@model_app.command("roll-back")
@with_store
def roll_back(
    *,
    name: Name,
    to: Annotated[
        int | None, typer.Option(min=1, help="The version to return to.  [default: the one that all had before]")
    ] = None,
    population: Population = None,
    store: TaskStore,
    json: Json = False,
) -> None:
    """Give all devices an earlier version of a model.

    Devices take it when they next ask. It needs no key: the earlier version was signed. One that the key has since
    forbidden, by `release --forbid-older`, is refused. Where all devices had no version before, the version is
    withdrawn: devices that took it keep it, and no other is given it.
    """
    model = _model(store, name, population)
    _tell(store.roll_back_model(model.population, name, to), json)


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
            (at_utc(one.at), one.kind, one.number, _percent(one.share), one.actor, one.gate or None)
            for one in roll_outs
        ]
        show_table(("when", "what", "version", "share", "who", "gate"), rows)


def _gate(text: str | None, evaluation: str | None) -> Gate | None:
    """The gate that was asked for, which compares the figures of an evaluation."""
    from coordinator.rules.model_gate import Gate

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
        remark(f"{_percent(done.share)} of the devices are given version {done.number} when they next ask")
