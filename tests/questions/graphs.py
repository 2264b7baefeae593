"""Many questions in one plan, so that graphs of hundreds are made and run in little time."""

import json

import numpy as np
import torch
from msgspec.structs import replace

from export.build import build_plan
from export.model import Model
from export.questions.asked import CompiledQuestion
from fedcore import checkpoint
from fedcore.batching import StreamKey
from fedcore.questions.question import MOST_BLOCKS, Block, Cell, Column, Question, Rows
from tests.questions.pooled import FIELDS

MOST_NUMBERS = 3000
KEY = StreamKey(seed=3, round=1, slot=0)


def together(questions):
    """One question that has the rows and blocks of all, under names of their own."""
    rows, blocks = [Rows("all")], [Block("all", "all", "any", 0, 1)]
    for index, asked in enumerate(questions):
        rows += [replace(one, name=f"q{index}_{one.name}") for one in asked.question.rows]
        blocks += [replace(one, name=f"q{index}_{one.name}", of=f"q{index}_{one.of}") for one in asked.question.blocks]
    question = Question(
        text="many questions",
        rows=tuple(rows),
        blocks=tuple(blocks),
        columns=(Column("all", Cell("all")),),
        voters="all",
    )

    def numbers(fields):
        one = torch.ones_like(fields["x"]).unsqueeze(-1)
        return torch.cat([one, *(asked.rows(fields) for asked in questions)], 1)

    return CompiledQuestion(question, FIELDS, numbers)


def packed(questions):
    """Questions in as few lists as fit one plan each."""
    lists, blocks, numbers = [[]], 1, 1
    for asked in questions:
        blocks += len(asked.question.blocks)
        numbers += asked.question.row_numbers
        if lists[-1] and (blocks > MOST_BLOCKS or numbers > MOST_NUMBERS):
            lists.append([])
            blocks, numbers = 1 + len(asked.question.blocks), 1 + asked.question.row_numbers
        lists[-1].append(asked)
    return lists


def planned(asked, form):
    """The plan of a question in a format, its graphs by name as bytes, and its broadcast."""
    model, algorithm = Model(asked.spec()), replace_batch(asked)
    plan, blobs = build_plan(model, algorithm, (form,))
    state = {name: vector.numpy() for name, vector in algorithm.init(torch.from_numpy(model.initial)).items()}
    broadcast = {name: np.asarray(vector) for name, vector in algorithm.broadcast(state).items()}
    return plan, {name: blobs[ref] for name, ref in plan.graphs[form].items()}, broadcast


def replace_batch(asked, batch_size=5):
    """The algorithm with small batches, so that devices take several steps."""
    from dataclasses import replace

    return replace(asked.algorithm(), batch_size=batch_size)


def values_of(plan, values):
    """The vectors of a report by name."""
    parts, start = {}, 0
    for segment in plan.report.segments:
        parts[segment.name] = values[start : start + segment.size]
        start += segment.size
    return parts


def apart(questions, vectors):
    """The report of each question from that of all together."""
    found = []
    for index, asked in enumerate(questions):
        names = [name for block in asked.question.blocks for name in asked.question.vectors(block)]
        found.append({name: vectors[f"q{index}_{name}"] for name in names})
    return found


def write(folder, plan, graphs, broadcast, examples):
    """A folder for `tests/train.ts` of the device runtime in TypeScript."""
    (folder / "graphs").mkdir(parents=True)
    for name, graph in graphs.items():
        (folder / "graphs" / name).write_bytes(graph)
    (folder / "plan.json").write_bytes(plan.encode())
    (folder / "checkpoint.safetensors").write_bytes(checkpoint.encode(broadcast))
    (folder / "frozen.safetensors").write_bytes(checkpoint.encode({}))
    (folder / "key.json").write_text(json.dumps({"seed": str(KEY.seed), "round": "1", "slot": "0"}))
    np.savez(folder / "examples.npz", **examples)
