"""`muster privacy`: bounds on what models reveal of the devices that trained them, and budgets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from fedcore.errors import PrivacyError
from fedcore.privacy.settings import CertifiedLedger, Noise, certificate_file
from fedcore.validation import build
from muster.commands.stores import with_store
from muster.options import Data, parse_key_values, with_settings
from muster.output import Json, Settings, answer, emit, loading, progress, remark, say, show_fields, show_table
from simulator.configuration import SimulationConfig

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.budget import BudgetReport, TaskSpending
    from fedcore.privacy.accounting import Deployment, MechanismPlan
    from fedcore.privacy.verification import Verdict
    from simulator.audit import AuditResult


@with_store
def budget(
    *,
    population: Annotated[str, typer.Option(metavar="NAME", help="The population.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Set the budget: the most that all tasks may say of a device, with --delta.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Chance that --epsilon leaves open, below 1 / users.")] = None,
    minimum_devices: Annotated[
        int, typer.Option(min=1, help="With a budget: refuse questions that show groups of fewer devices.")
    ] = 1,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the budget; what is spent stays counted.")] = False,
    store: TaskStore,
    json: Json = False,
) -> None:
    """Show, set or remove the privacy budget of a population.

    All tasks of a population share it: trainings, evaluations and questions. With a budget, a task that would exceed
    it, or promises no privacy, is refused when it is created. A running task counts with all rounds that it may still
    do, an ended one with those that it did. For example:

    \b
      muster privacy budget --population phones
      muster privacy budget --population phones --epsilon 8 --delta 1e-7 --minimum-devices 20
    """
    if remove and (epsilon, delta) != (None, None):
        raise typer.BadParameter("a budget is set or removed: leave --epsilon and --delta out", param_hint="--remove")
    if (epsilon is None) != (delta is None) or (minimum_devices > 1 and epsilon is None):
        raise typer.BadParameter("a budget is an epsilon and a delta: give both", param_hint="--epsilon, --delta")
    if remove:
        report = store.remove_budget(population)
    elif epsilon is not None and delta is not None:
        report = store.set_budget(population, epsilon, delta, minimum_devices)
    else:
        report = store.budget(population)
    if json:
        emit(report)
    else:
        _show(report)


def _show(report: BudgetReport) -> None:
    from coordinator.rules.budget import CLAIM, in_words

    columns = ("task", "name", "what", "state", "rounds", "ε alone", "ε it adds")
    show_table(columns, [_row(one) for one in report.tasks])
    at = "" if report.delta is None else f" at δ {report.delta:g}"
    say()
    show_fields(
        {
            "spent or reserved": f"ε {in_words(report.epsilon)}{at}",
            "budget": report.budget.words if report.budget else "none is set: no task is refused",
            "left": None if report.left is None else f"ε {report.left:.4g}",
            "of": CLAIM,
        }
    )


def _row(one: TaskSpending) -> tuple[object, ...]:
    from coordinator.rules.budget import in_words

    rounds = f"{one.released} of {one.rounds}" if one.mechanism else ""
    return one.task, one.name, one.kind, one.state, rounds, in_words(one.epsilon), in_words(one.adds)


privacy_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Plan private training, audit it, verify certificates; budgets.",
)
privacy_app.command()(budget)


_SIGNER_UNNAMED = 3
"""The exit code for a certificate that holds if its signer can be trusted, which no --signer says."""


@privacy_app.command()
def verify(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The model, from `muster task checkpoint`; or the folder of a private simulation."
        ),
    ],
    signer: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The coordinator's public lineage key, ed25519:…, which must have signed."),
    ] = None,
    json: Json = False,
) -> None:
    """Check a privacy certificate, or the ε of a simulation, from files.

    Every claim is computed again from FILE and FILE.privacy.json.

    The check covers the signature, both digests, ε, and every row of the ledger against the certificate's promise. What
    does not hold is named, and the exit code is then 1. Anybody can sign a certificate: name the key that the
    coordinator's operator published with --signer. Without it, the exit code is 3 where all else holds.

    For a simulation, ε is computed again from the noise, the sampling and δ in its result. Simulations are not signed.
    """
    if checkpoint.is_dir():
        if signer is not None:
            raise typer.BadParameter("simulations are not signed: leave it out", param_hint="--signer")
        return _verify_run(checkpoint, json)
    from fedcore.privacy.verification import verify as check

    verdict = check(checkpoint.read_bytes(), CertifiedLedger.decode(certificate_file(checkpoint).read_bytes()), signer)
    if json:
        emit(verdict)
    else:
        _show_verdict(verdict)
    for problem in verdict.wrong:
        remark(f"error: {problem}")
    if verdict.wrong:
        raise typer.Exit(1)
    if not verdict.demanded:
        remark(
            f"error: anybody can sign a certificate, and {verdict.signer} signed this one: name the key that the "
            "coordinator's operator published (--signer)"
        )
        raise typer.Exit(_SIGNER_UNNAMED)
    return None


def _show_verdict(verdict: Verdict) -> None:
    certificate, privacy = verdict.certificate, verdict.certificate.privacy
    facts: dict[str, object] = {
        "task": certificate.task,
        "round": certificate.round,
        "epsilon": f"{verdict.epsilon:.6g} at δ {privacy.delta:g}",
        "budget": privacy.epsilon,
        "mechanism": privacy.mechanism,
        "noise_multiplier": privacy.noise_multiplier,
        "noisy sums": certificate.rounds,
        "rounds between participations": f"{privacy.min_separation_rounds} at least",
        "signer": verdict.signer,
        "holds": "no" if verdict.wrong else "yes" if verdict.demanded else "if the signer is the coordinator",
    }
    for one in certificate.ancestors[:1]:
        private = "" if verdict.total.private else ", which is not private"
        facts["began at"] = f"the model of task {one.task}, round {one.round}{private}"
        facts["with the tasks before"] = verdict.total.words
    show_fields(facts)


def _verify_run(folder: Path, json: bool) -> None:
    """Compute a simulation's ε again from its folder; the exit code is 1 if its result says another."""
    with loading():
        from fedcore.privacy.verification import same_epsilon
        from simulator.runs.reading import read_run

    run = read_run(folder)
    if run.result is None:
        raise typer.BadParameter(f"the run in {folder} has not ended; go on with muster simulate --resume {folder}")
    stated, privacy, rounds = run.result.epsilon, run.result.privacy, len(run.points)
    if stated is None or privacy is None:
        raise typer.BadParameter(f"the run in {folder} is not private: it was made without --privacy")
    epsilon, wrong = privacy.spent(rounds), []
    if rounds != run.result.rounds:
        wrong.append(f"rounds: {rounds} were run, the result says {run.result.rounds}")
    if not same_epsilon(epsilon, stated):
        wrong.append(f"epsilon: the rounds spend {epsilon:.6g}, the result says {stated:.6g}")
    if json:
        emit({"privacy": privacy, "rounds": rounds, "epsilon": epsilon, "wrong": wrong})
    else:
        facts = msgspec.structs.asdict(privacy) | {"budget": privacy.epsilon, "rounds": rounds, "epsilon": epsilon}
        show_fields(facts | {"holds": not wrong})
    for problem in wrong:
        remark(f"error: {problem}")
    if wrong:
        raise typer.Exit(1)


@privacy_app.command()
@with_settings(Noise)
def epsilon(
    *,
    settings: dict[str, Any],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of which is noised.")],
    delta: Annotated[float, typer.Option(help="δ, above 0 and below 1.")],
    json: Json = False,
) -> None:
    """Compute the ε that rounds spend.

    The same accountant keeps the ledger of a task. Neighbours differ in one device's reports, which are zeros in one of
    them, and a device is in the worst rounds that the separation allows. With distributed, the steps of masked values
    are taken as fine. For example:

    \b
      muster privacy epsilon --noise-multiplier 1.1 --rounds 1000 --delta 1e-5 --sampling-probability 0.01
      muster privacy epsilon --noise-multiplier 8 --rounds 64 --delta 1e-6 --mechanism tree
    """
    from fedcore.privacy.accounting import spent

    try:
        noise = build(Noise, settings, text=True)
    except PrivacyError as error:
        raise typer.BadParameter(str(error)) from error
    spending = spent([noise] * rounds, delta)
    return answer(msgspec.structs.asdict(noise) | {"rounds": rounds, "delta": delta, "epsilon": spending}, json)


@privacy_app.command()
def plan(
    population: Annotated[int, typer.Option(min=1, help="Devices that may take part, all of them together.")],
    cohort: Annotated[int, typer.Option(min=1, help="Reports in the sum of a round.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of which is noised.")],
    epsilon: Annotated[float, typer.Option(help="ε that all rounds together may spend. From 1 to 10 is usual.")],
    delta: Annotated[
        float | None, typer.Option(help="δ, below 1 / population.  [default: a tenth of 1 / population]")
    ] = None,
    min_separation_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds from one participation of a device to its next, at least; 1 is no rule.")
    ] = 1,
    model: Annotated[str | None, typer.Option(help="A model to train with this noise: what it costs.")] = None,
    dataset: Annotated[str, typer.Option(help="The data set to train it on.")] = "digits",
    data: Data = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Find the noise that keeps a task within a budget.

    With --model also its cost in accuracy.

    Devices come when they can, so nothing is saved by chance (no amplification by sampling). What helps is a larger
    cohort, fewer rounds, and rounds between two participations of a device. Noise is given in units of clip_norm, the
    bound on a report: a round's noise is on every value of its mean; the model's is what all rounds leave in it.

    With --model, fedavg trains for so many rounds, without noise and with the noise of each mechanism on the mean. The
    cohorts are as large as the data set allows. For example:

    \b
      muster privacy plan --population 1000000 --cohort 2000 --rounds 500 --epsilon 4
      muster privacy plan --population 50000 --cohort 500 --rounds 60 --epsilon 8 --min-separation-rounds 20 --model mlp
    """
    with loading():
        from fedcore.privacy.accounting import Deployment, ways

    planned = Deployment(population, cohort, rounds, epsilon, delta or 0.1 / population, min_separation_rounds)
    if min_separation_rounds * cohort > population:
        raise typer.BadParameter(
            f"{min_separation_rounds} rounds of {cohort} different devices need {min_separation_rounds * cohort:,}, "
            f"and the population has {population:,}",
            param_hint="--min-separation-rounds",
        )
    plans = ways(planned)
    costs = _costs(planned, plans, model, (dataset, data), parse_key_values(settings)) if model else {}
    if json:
        return emit({"planned": planned, "ways": plans, "accuracy": costs})
    return _show_ways(planned, plans, costs)


def _show_ways(planned: Deployment, plans: list[MechanismPlan], costs: dict[str, float]) -> None:
    """The plans as a table, and the task of the best one as a command."""
    show_table(
        ("mechanism", "bands", "noise_multiplier", "noise of a round", "noise of the model"),
        [
            (
                way.mechanism,
                way.bands,
                f"{way.noise_multiplier:.4g}",
                f"{way.round_noise:.3g}",
                f"{way.model_noise:.3g}",
            )
            for way in plans
        ],
    )
    best = plans[0]
    bands = f" --privacy bands={best.bands}" if best.bands > 1 else ""
    say()
    say(f"δ is {planned.delta:g}. The least noise in the model has {best.mechanism}:")
    say(
        f"  muster task create … --goal {planned.cohort} --rounds {planned.rounds} "
        f"--min-separation-rounds {planned.min_separation_rounds} "
        f"--privacy epsilon={planned.epsilon:g} --privacy delta={planned.delta:g} --privacy users={planned.population} "
        f"--privacy mechanism={best.mechanism}{bands}"
    )
    if costs:
        say()
        show_fields({name: f"accuracy {value:.3f}" for name, value in costs.items()})


def _costs(
    planned: Deployment,
    plans: list[MechanismPlan],
    model: str,
    named: tuple[str, Path | None],
    settings: dict[str, object],
) -> dict[str, float]:
    """The accuracy of a short training without noise, and with the noise of every plan."""
    with loading():
        from simulator.audit import accuracy_of

    costs: dict[str, float] = {}
    with progress() as bar:
        task = bar.add_task("simulations", total=len(plans) + 1)
        for way in (None, *plans):
            costs[way.mechanism if way else "no noise"] = accuracy_of(planned, way, model, *named, settings)
            bar.advance(task)
    return costs


_AUDITED = {"model": "logreg", "rounds": 20, "privacy": {"epsilon": 2.0, "delta": 1e-5}}
_OPTIONS = ("model", "dataset", "data", "settings", "privacy", "rounds", "cohort", "seed")


@privacy_app.command()
@with_settings(SimulationConfig, only=_OPTIONS, defaults=_AUDITED)
def audit(
    *,
    settings: dict[str, Any],
    canaries: Annotated[int, typer.Option(min=2, help="Made-up reports, each included with a chance of ½.")] = 400,
    without_noise: Annotated[
        bool, typer.Option("--without-noise", help="Add no noise, whatever is claimed; the audit must notice.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure a lower bound on the noise in a training.

    A simulation trains with canaries: made-up reports of the greatest length, in directions of their own, each added
    by the toss of a coin. An observer of all noisy sums guesses which were added. `estimate` is the ε of Gaussian noise
    under which they would stand out as much: near the claim where the noise is as claimed, and far above without.
    lower_bound is an ε that the guesses show whatever the noise is. The exit code is 1 if lower_bound, or the least
    that the estimate may be, is above the claim, each with 95 % confidence. By default the claim is ε = 2 at δ = 10⁻⁵.
    For example:

    \b
      muster privacy audit
      muster privacy audit --without-noise
      muster privacy audit --rounds 64 --privacy epsilon=2 --privacy delta=1e-5 --privacy mechanism=tree
    """
    with loading():
        from simulator.audit import audit as run

    own = {"weighting": "uniform", "clip_norm": 0.5} | settings.get("settings", {})
    config = build(SimulationConfig, _AUDITED | settings | {"settings": own}, text=True)
    _tell(run(config, canaries, noisy=not without_noise), json)


def _tell(audit: AuditResult, json: bool) -> None:
    """Show what an audit found; exit code 1 where the claim does not hold."""
    if json:
        emit(audit)
    else:
        show_fields(dataclasses.asdict(audit))
    if not audit.holds:
        shown = max(audit.lower_bound, audit.estimate_at_least)
        remark(f"error: ε is {shown:.3g} or more, and {audit.claimed:.3g} is claimed")
        raise typer.Exit(1)
