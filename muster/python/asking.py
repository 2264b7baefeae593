"""Questions to devices from Python: of a coordinator's population, or of the clients of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcore.questions.answer import Answer
from fedcore.signing import SigningKey
from muster import asking
from muster.python.arguments import of_kind, speaking_python
from muster.python.operating import Coordinator, signing
from simulator import datasets
from simulator.population import Population
from simulator.questions import ask_population

DATASET = "the name of a data set, or a muster.Population"
COORDINATOR = "a muster.Coordinator"


@speaking_python
def ask(  # noqa: PLR0913  # one keyword for each choice
    question: str,
    *names: str,
    dataset: str | Population | None = None,
    coordinator: Coordinator | None = None,
    population: str | None = None,
    field: Sequence[str] = (),
    like: str | None = None,
    data: Path | str | None = None,
    minimum_devices: int = asking.MINIMUM_DEVICES,
    epsilon: float | None = None,
    delta: float | None = None,
    users: int | None = None,
    release_key: SigningKey | None = None,
    timeout: float = asking.TIMEOUT_S,
    **settings: Any,
) -> Answer:
    """Ask devices what they hold; the answer is a table, with `dataframe()` for pandas.

    question: SQL, such as "SELECT y, COUNT(*) FROM examples GROUP BY y", or the name of one, such as "labels", with
    `names` of fields. dataset: whose clients answer at once; data: the folder of those on disk. coordinator,
    population: whose devices do, as soon as they come, within `timeout` seconds. field, like: the fields of their
    examples, as "y:uint8:10", or those of a task; by default those of the population's last tasks. minimum_devices: of
    a group that is shown. epsilon, delta, users: answer with noise, for such a promise over so many devices.
    release_key: signs a question with `secagg`. settings: of its task, such as goal, rounds and secagg, as
    `Coordinator.create` has them.

    Raises QuestionError, with the place in the text; InvalidTask for settings that cannot be; Unanswered when no answer
    comes in time, with the id of its `task`, whose `answer()` may come later.
    """
    for name, value in (("question", question), *(("names", name) for name in names)):
        of_kind(name, value, (str,), "a text: SQL, or the name of a question and its fields")
    of_kind("dataset", dataset, (str, Population, type(None)), DATASET)
    of_kind("coordinator", coordinator, (Coordinator, type(None)), COORDINATOR)
    of_kind("release_key", release_key, (SigningKey, type(None)), "a SigningKey")
    words, terms = (
        (question, *names),
        asking.Terms(minimum_devices, epsilon is not None, settings.get("secagg") is not None),
    )
    if dataset is not None:
        if coordinator is not None or population is not None:
            raise TypeError("dataset answers at once: leave coordinator and population out")
        asking.check_at_once(settings)
        fields, users_of = _clients(dataset, data)
        return ask_population(asking.compiled(words, fields, terms), users_of, epsilon=epsilon, delta=delta)
    if coordinator is None or population is None:
        raise TypeError(f"name who is asked: dataset, {DATASET}; or coordinator, {COORDINATOR}, and its population")
    store = coordinator.store
    fields = asking.fields_named(field) if field else asking.fields_of(store, population, like)
    asked = asking.compiled(words, fields, terms)
    privacy = None if epsilon is None else asking.promise_of(epsilon, delta, users)
    chosen = asking.settings_of_question(asked, {"population": population, **settings}, privacy)
    task = asking.begin(store, asked, chosen, lambda note: None, sign=signing(store, release_key))
    asking.wait_for(store, task.id, timeout, lambda note: None)
    return asking.as_answer(asking.read_answer(store, task.id))


def _clients(dataset: str | Population, data: Path | str | None) -> tuple[asking.Fields, Population]:
    """The fields of a data set, and its users."""
    if isinstance(dataset, Population):
        return asking.fields_in(dataset, "the population"), dataset
    population = datasets.load(dataset, data)
    return asking.fields_in(population, f"data set {dataset}"), population
