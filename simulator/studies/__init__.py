"""Studies: questions of papers, put to our data sets. `muster study` runs them."""

from fedcore.names import offered
from simulator.errors import StudyError
from simulator.studies.client_drift import CLIENT_DRIFT
from simulator.studies.cohort_size import COHORT_SIZE
from simulator.studies.drift_on_users import DRIFT_ON_USERS
from simulator.studies.federated_optimization import FEDERATED_OPTIMIZATION
from simulator.studies.pseudo_gradients import PSEUDO_GRADIENTS
from simulator.studies.study import Study
from simulator.studies.user_split import USER_SPLIT

STUDIES = {
    study.name: study
    for study in (
        CLIENT_DRIFT,
        COHORT_SIZE,
        DRIFT_ON_USERS,
        FEDERATED_OPTIMIZATION,
        PSEUDO_GRADIENTS,
        USER_SPLIT,
    )
}


def find(name: str) -> Study:
    """The study called `name`. Raises StudyError when there is none."""
    if name not in STUDIES:
        raise StudyError(f"no study is called {name!r}; {offered(name, STUDIES)}")
    return STUDIES[name]
