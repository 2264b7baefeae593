"""All studies by name."""

from fedcore.validation import offered
from research.compression import COMPRESSION, MASKED_COMPRESSION
from research.forecasts import OVER_SELECTION, RETRY_WINDOWS, TIME_TO_ACCURACY
from research.personal_models import PERSONAL_MODELS
from research.pretrained_adapters import PRETRAINED_ADAPTERS
from research.study import Study
from research.training import PRIVATE_TRAINING, PSEUDO_GRADIENTS, WEIGHTING
from simulator.errors import StudyError

STUDIES = {
    study.name: study
    for study in (
        COMPRESSION,
        MASKED_COMPRESSION,
        OVER_SELECTION,
        PERSONAL_MODELS,
        PRETRAINED_ADAPTERS,
        PRIVATE_TRAINING,
        PSEUDO_GRADIENTS,
        RETRY_WINDOWS,
        TIME_TO_ACCURACY,
        WEIGHTING,
    )
}


def find(name: str) -> Study:
    """The study called `name`. Raises StudyError when there is none."""
    if name not in STUDIES:
        raise StudyError(f"no study is called {name!r}; {offered(name, STUDIES)}")
    return STUDIES[name]
