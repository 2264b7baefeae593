"""Questions to devices from Python: of a coordinator's population, or of the clients of a data set."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fedcore.questions.answer import Answer
from fedcore.signing import SigningKey
from muster.asking import (
    MINIMUM_DEVICES,
    ROUNDS,
    TIMEOUT_S,
    Terms,
    begin,
    compiled,
    fields_in,
    fields_of,
    promise_of,
    read_answer,
    settings_of_question,
    wait_for,
)
from muster.python.arguments import of_kind, speaking_python
from muster.releasing import released_for
from simulator import datasets
from simulator.population import Population
from simulator.questions import ask_population

if TYPE_CHECKING:
    from muster.python.operating import Coordinator

COORDINATOR = "a muster.Coordinator, with the name of its population"
DATASET = "the name of a data set, or a muster.Population"


@speaking_python
def ask(  # noqa: PLR0913  # one keyword for each choice
    question: str,
    *names: str,
    dataset: str | Population | None = None,
    coordinator: Coordinator | None = None,
    population: str | None = None,
    minimum_devices: int = MINIMUM_DEVICES,
    epsilon: float | None = None,
    delta: float | None = None,
    users: int | None = None,
    release_key: SigningKey | None = None,
    timeout: float = TIMEOUT_S,
    **settings: Any,
) -> Answer:
    """Ask devices what they hold; the answer is a table, with `dataframe()` for pandas.

    question: SQL, such as "SELECT y, COUNT(*) FROM examples GROUP BY y", or the name of one, such as "labels", with
    `names` of fields. dataset: whose clients answer at once. coordinator, population: whose devices do, as soon as they
    come, within `timeout` seconds. minimum_devices: of a group that is shown. epsilon, delta, users: answer with noise,
    for such a promise over so many devices. release_key: signs a question with `secagg`. settings: of the task, such as
    goal, rounds and secagg.

    Raises QuestionError, with the place in the text; Unanswered when no answer comes in time.
    """
    of_kind("question", question, (str,), "a text: SQL, or the name of a question")
    of_kind("dataset", dataset, (str, Population, type(None)), DATASET)
    terms = Terms(minimum_devices, epsilon is not None, settings.get("secagg") is not None)
    if dataset is not None:
        held = dataset if isinstance(dataset, Population) else datasets.load(dataset, None, None, None)
        asked = compiled([question, *names], fields_in(held), terms)
        return ask_population(asked, held, rounds=settings.get("rounds", ROUNDS), epsilon=epsilon, delta=delta)
    if coordinator is None or population is None:
        raise TypeError(f"name who is asked: dataset is {DATASET}; or give coordinator, {COORDINATOR}")
    store = coordinator.store
    asked = compiled([question, *names], fields_of(store, population), terms)
    privacy = None if epsilon is None else promise_of(epsilon, delta, users)
    chosen = settings_of_question(asked, {"population": population, **settings}, privacy)
    sign = None
    if release_key is not None:
        sign = partial(_released, coordinator, release_key)
    task = begin(store, asked, chosen, lambda note: None, sign=sign)
    wait_for(store, task, timeout, lambda note: None)
    return read_answer(store, task.id)


def _released(coordinator: Coordinator, key: SigningKey, bundle: Any, chosen: Any, of: Any) -> Any:
    return released_for(coordinator.store, bundle, chosen, key, ())
