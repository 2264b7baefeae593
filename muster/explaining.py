"""Explanations of a question: its cost on a device and what it may say of one, before any is asked."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from muster.asking import export_question

if TYPE_CHECKING:
    from export.questions.asked import Asked, Asks
    from export.questions.heavy_hitters import AskedHitters
    from fedcore.bundle import Bundle
    from fedcore.questions.question import Question


_DIFFERENCES = (
    "two answers, two columns or two pieces of a sum may be subtracted, or weights make a row outweigh all others, and "
    "what is left may be one device's; only noise (--epsilon) hides that"
)
"""What no threshold hides, for people."""


class Explained(NamedTuple):
    """What is known of a question. facts: by name. blocks: of the numbers that a device sends, one for each block."""

    facts: dict[str, Any]
    blocks: list[dict[str, Any]]


def explained(asked: Asks, settings: Mapping[str, Any], formats: Sequence[str], source: str) -> Explained:
    """A question as a task with these settings asks it. source: who says which fields there are.

    Raises InvalidTask for settings that cannot be, and what an export raises.
    """
    from coordinator.rules.packed_segments import report_bytes
    from coordinator.rules.private_sums import with_least_noise
    from coordinator.rules.task_settings import TaskSettings
    from fedcore.validation import build

    chosen = with_least_noise(build(TaskSettings, settings, text=True))
    noise = (chosen.privacy.noise_multiplier or 0.0) if chosen.privacy else 0.0
    deviation = noise * asked.clip * math.sqrt(chosen.rounds / asked.rounds)
    kind, blocks = _of_kind(asked, deviation)
    with tempfile.TemporaryDirectory(prefix="muster-question-") as folder:
        bundle = export_question(asked, Path(folder, "plan"), formats)
        plan, proofs = bundle.plan, bundle.certificate.formats if bundle.certificate else {}
        operators = _operators(bundle)
    (only,) = plan.passes
    facts = {
        "owners_read": asked.text,
        "fields": [f"{field.name} {field.dtype}" for field in asked.fields],
        "fields_from": source,
        **kind,
        "rounds": chosen.rounds,
        "minimum_devices": asked.minimum_devices,
        "not_hidden": None if plan.report.bounded else _DIFFERENCES,
        "numbers_sent": sum(block["numbers"] for block in blocks),
        "report": report_bytes(plan.report, chosen).words,
        "plan_bytes": len(plan.encode()),
        "graph_bytes": {name: one.footprint.graph_bytes for name, one in proofs.items()},
        "operators": operators,
        "examples_of_a_step": only.loop.batch_size,
        "steps": only.loop.steps,
        "step_cpu_ms": {name: round(one.footprint.step_cpu_ms, 3) for name, one in proofs.items()},
        "sensitivity": asked.clip if plan.report.bounded else None,
        "noise_multiplier": noise or None,
        "noise_of_a_number": deviation or None,
    }
    return Explained(facts, blocks)


def _of_kind(asked: Asks, deviation: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What only one kind of question has, and the numbers that a device sends, block by block."""
    from export.questions.heavy_hitters import AskedHitters

    if isinstance(asked, AskedHitters):
        return {"rows_of_a_device": asked.hitters.values}, _votes(asked, deviation)
    question = cast("Asked", asked).question
    return {"rows_of_a_device": question.most_rows, "groups": question.groups}, _blocks(question, deviation)


def _blocks(question: Question, deviation: float) -> list[dict[str, Any]]:
    """The bounds of every block on one device, and how far noise moves each of its sums with 95 %."""
    from fedcore.questions.answer import TIMES

    return [
        {
            "block": block.name,
            "kind": block.kind,
            "numbers": sum(question.block_sizes[name] for name in question.vectors(block)),
            "low": 0 if block.kind != "sum" else block.low,
            "high": 1 if block.kind != "sum" else block.high,
            "norm": block.norm if question.private else None,
            "error": TIMES * deviation * block.norm if deviation else None,
        }
        for block in question.blocks
    ]


def _votes(asked: AskedHitters, deviation: float) -> list[dict[str, Any]]:
    """The same of the votes of heavy hitters. deviation: of a round, as no count is of two."""
    from fedcore.questions.answer import TIMES

    votes = {"block": "votes", "kind": "any", "numbers": asked.hitters.tree.cell_count, "low": 0, "high": 1}
    norm, error = (asked.clip, TIMES * deviation) if asked.private else (None, None)
    return [votes | {"norm": norm, "error": error if deviation else None}]


def _operators(bundle: Bundle) -> dict[str, int]:
    """How many operators of each kind a step has, where there is a graph of it in ONNX."""
    import onnx

    from export.inference.onnx_model import all_nodes
    from fedcore.plan import loop_graph

    graphs = bundle.plan.graphs.get("onnx")
    if graphs is None:
        return {}
    (only,) = bundle.plan.passes
    step = onnx.load_from_string(bundle.read(graphs[loop_graph(graphs, only.name)]))
    return dict(Counter(node.op_type for node in all_nodes(step.graph)).most_common())
