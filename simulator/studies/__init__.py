"""Studies: questions of papers, put to our data sets. `muster study` runs them."""

from fedcore.names import offered
from simulator.errors import StudyError
from simulator.studies.asking_first import ASKING_FIRST
from simulator.studies.client_drift import CLIENT_DRIFT
from simulator.studies.client_optimizers import CLIENT_OPTIMIZERS
from simulator.studies.cohort_scaling import COHORT_SCALING
from simulator.studies.cohort_size import COHORT_SIZE
from simulator.studies.compression import COMPRESSION
from simulator.studies.drift_on_users import DRIFT_ON_USERS
from simulator.studies.federated_optimization import FEDERATED_OPTIMIZATION
from simulator.studies.learning_rates import LEARNING_RATES
from simulator.studies.local_steps import LOCAL_STEPS
from simulator.studies.masked_compression import MASKED_COMPRESSION
from simulator.studies.over_selection import OVER_SELECTION
from simulator.studies.personal_models import PERSONAL_MODELS
from simulator.studies.pretrained_adapters import PRETRAINED_ADAPTERS
from simulator.studies.private_training import PRIVATE_TRAINING
from simulator.studies.pseudo_gradients import PSEUDO_GRADIENTS
from simulator.studies.retry_windows import RETRY_WINDOWS
from simulator.studies.round_time import ROUND_TIME
from simulator.studies.study import Study
from simulator.studies.time_to_accuracy import TIME_TO_ACCURACY
from simulator.studies.training_failures import TRAINING_FAILURES
from simulator.studies.user_split import USER_SPLIT
from simulator.studies.weighting import WEIGHTING

STUDIES = {
    study.name: study
    for study in (
        ASKING_FIRST,
        CLIENT_DRIFT,
        CLIENT_OPTIMIZERS,
        COHORT_SCALING,
        COHORT_SIZE,
        COMPRESSION,
        DRIFT_ON_USERS,
        FEDERATED_OPTIMIZATION,
        LEARNING_RATES,
        LOCAL_STEPS,
        MASKED_COMPRESSION,
        OVER_SELECTION,
        PERSONAL_MODELS,
        PRETRAINED_ADAPTERS,
        PRIVATE_TRAINING,
        PSEUDO_GRADIENTS,
        RETRY_WINDOWS,
        ROUND_TIME,
        TIME_TO_ACCURACY,
        TRAINING_FAILURES,
        USER_SPLIT,
        WEIGHTING,
    )
}


def find(name: str) -> Study:
    """The study called `name`. Raises StudyError when there is none."""
    if name not in STUDIES:
        raise StudyError(f"no study is called {name!r}; {offered(name, STUDIES)}")
    return STUDIES[name]
