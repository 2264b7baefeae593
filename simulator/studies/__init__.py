"""Studies: questions of papers, put to our data sets. `muster study` runs them."""

from fedcore.names import offered
from simulator.errors import StudyError
from simulator.studies.pseudo_gradients import PSEUDO_GRADIENTS
from simulator.studies.study import Study

STUDIES = {study.name: study for study in (PSEUDO_GRADIENTS,)}


def find(name: str) -> Study:
    """The study called `name`. Raises StudyError when there is none."""
    if name not in STUDIES:
        raise StudyError(f"no study is called {name!r}; {offered(name, STUDIES)}")
    return STUDIES[name]
