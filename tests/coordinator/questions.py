"""Tasks that ask, with bundles made by hand, and answers of their devices."""

import msgspec
import numpy as np

from fedcore import algorithms, checkpoint
from fedcore.algorithms.algorithm import trips_of
from fedcore.params import ParamSchema, TensorSpec
from fedcore.report import ReportLayout, Segment
from tests.coordinator.bundles import make_bundle, make_plan
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import assign, put
from tests.questions.labels import labels


def make_question_bundle(folder, question=None):
    """A bundle that asks a question, by default about labels."""
    question = question or labels()
    settings = {"question": question.encode()} | ({"clip_norm": question.clip} if question.private else {})
    algorithm, half = algorithms.create("question", settings), 1 + sum(question.block_sizes.values())
    (trip,) = trips_of(algorithm)
    state = algorithm.init(np.zeros(2 * half, np.float32))
    ranges = getattr(algorithm, "ranges", {})
    segments = [
        *(
            Segment(name, size, "mean", range=ranges.get(name, msgspec.UNSET))
            for name, size in question.block_sizes.items()
        ),
        Segment("weight", 1, "sum"),
    ]
    plan = msgspec.structs.replace(
        make_plan(),
        name="question-question",
        schema=ParamSchema((TensorSpec("high", (half,)), TensorSpec("low", (half,)))),
        broadcast=checkpoint.specs_of(trip.broadcast(state)),
        report=ReportLayout(tuple(segments), "uniform", question.private),
        question=question.text,
    )
    return make_bundle(folder, plan, "question", settings, state=state)


def answer_values(question, **blocks):
    """The unweighted report (V + 1,) of a device: the numbers of its blocks by name, others 0, and the weight."""
    parts = [np.broadcast_to(np.float32(blocks.get(name, 0)), size) for name, size in question.block_sizes.items()]
    norms = {name: block.norm for block in question.blocks for name in question.vectors(block)}
    if question.private:
        parts = [part / norms[name] for part, name in zip(parts, question.block_sizes, strict=True)]
    return np.concatenate([*parts, [1]]).astype(np.float32)


def answer_body(question, **blocks):
    """The same as the body of an upload."""
    return checkpoint.encode({"report": answer_values(question, **blocks)})


def ask(urls, question, answers, start=0):
    """Let the devices of one round of the one task answer: the blocks of each."""
    with speaking_to(urls.devices, 70) as client:
        drawn = assign(client, *(f"asked-{start + one}" for one in range(len(answers))))
        for one, blocks in zip(drawn, answers, strict=True):
            put(client, one.assignment, answer_body(question, **blocks))
