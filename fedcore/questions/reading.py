"""The answer that a task's model holds, whichever algorithm asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcore.algorithms import create
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.question import QUESTION, Ask
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError
from fedcore.questions.answer import Answer, answer


def answer_of(algorithm: AlgorithmRef, tensors: Mapping[str, Any], noise_multiplier: float = 0.0) -> Answer:
    """The answer in a model, by the names of its tensors.

    noise_multiplier: of the sum of all rounds: its noise over the clip. Raises QuestionError for an algorithm that asks
    nothing, and for the model of another question.
    """
    made = create(algorithm.name, algorithm.settings)
    asking, clip = (made.inner, made.clipping.clip_norm) if isinstance(made, Clipped) else (made, 0.0)
    if asking.family != QUESTION:
        raise QuestionError(f"{algorithm.name} trains or evaluates a model, and asks no question")
    if not isinstance(asking, Ask) or not {"high", "low"} <= tensors.keys():
        raise QuestionError("the model is not one of this question")
    return answer(asking.asked, np.concatenate([tensors["high"], tensors["low"]]), noise_multiplier * clip)
