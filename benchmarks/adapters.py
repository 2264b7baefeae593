"""The engine on adapters of a pretrained model, against plain torch with `peft`: the same clients, in turns.

The shape is that of MiniLM-L6 (Wang et al., "MiniLM", NeurIPS 2020): 6 layers of 384, 12 heads, 30,522 words. Its
weights are drawn, as nothing is downloaded. Clients have 32 texts of 32 tokens, and train adapters of rank 8 on queries
and values, and a head, for an epoch in batches of 8. Plain torch trains one client after the other, as `peft` has it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.runner import AdaptersOptions
from benchmarks.usage import in_turns
from export.huggingface.folder import Pretrained, spec_of, unadapted
from export.model import Model
from fedcore.algorithms import create
from muster.output import Say
from simulator.engine import Engine
from simulator.engines.memory import keep_freed_memory
from simulator.population import Population

SHAPE = {
    "vocab_size": 30_522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CLASSES, RANK, TOKENS, TEXTS, BATCH, CLIENT_LR = 4, 8, 32, 32, 8, 0.1
TARGETS = {"to_peft": 0.9}


def run(options: AdaptersOptions, say: Say) -> dict[str, Any]:
    """CPU seconds of rounds, after one of each that warms caches, and the ratio of their medians.

    values: that are trained. Raises InvalidModel without the extra `huggingface`.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="muster-adapters-") as place:
        say("draw the weights")
        given = Pretrained(_saved(Path(place), {**SHAPE, **options.shape}), classes=CLASSES, rank=RANK, tokens=TOKENS)
        users, cohort, numbers = _users(options.clients), list(range(options.clients)), count(1)
        model = Model(spec_of(given))
        plain = _Plain(given, users)
    engine = Engine(model, create("fedavg", {"batch_size": BATCH, "client_lr": CLIENT_LR}), users)
    keep_freed_memory()
    works = {"engine": lambda: engine.run_round(next(numbers), cohort), "peft": lambda: plain.round(cohort)}
    say(f"{options.rounds} rounds")
    engine_s, peft_s = (spent[1:] for spent in in_turns(works, options.rounds + 1).values())
    return {
        "clients": options.clients,
        "values": model.schema.size,
        "engine_s": engine_s,
        "peft_s": peft_s,
        "to_peft": statistics.median(engine_s) / statistics.median(peft_s),
        "targets": TARGETS,
    }


def _saved(folder: Path, shape: dict[str, Any]) -> str:
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained(folder)
    return str(folder)


def _users(clients: int) -> Population:
    random, rows = np.random.default_rng(0), clients * TEXTS
    fields: dict[str, NDArray[Any]] = {
        "tokens": random.integers(1, 200, (rows, TOKENS)).astype(np.int32),
        "label": random.integers(0, CLASSES, rows),
    }
    return Population(tuple(map(str, range(clients))), fields, TEXTS * np.arange(clients + 1))


class _Plain:
    """FedAvg on the adapters of `peft`, written as one would."""

    def __init__(self, given: Pretrained, users: Population) -> None:
        import peft

        config = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=RANK,
            lora_alpha=RANK,
            target_modules=["query", "value"],
            modules_to_save=["classifier"],
        )
        self._model = peft.get_peft_model(unadapted(given), config)
        self._users = users
        self._trained = [one for one in self._model.parameters() if one.requires_grad]

    def round(self, cohort: Sequence[int]) -> None:
        """Train each client from the same start, and take the mean."""
        start = [one.detach().clone() for one in self._trained]
        mean = [torch.zeros_like(one) for one in start]
        for client in cohort:
            self._set(start)
            self._train({name: torch.from_numpy(values) for name, values in self._users.shard(client).items()})
            for total, one in zip(mean, self._trained, strict=True):
                total.add_(one.detach(), alpha=1 / len(cohort))
        self._set(mean)

    def _train(self, shard: dict[str, torch.Tensor]) -> None:
        optimizer = torch.optim.SGD(self._trained, lr=CLIENT_LR)
        for first in range(0, TEXTS, BATCH):
            ids, label = (shard[name][first : first + BATCH].long() for name in ("tokens", "label"))
            logits = self._model(input_ids=ids, attention_mask=(ids != 0).long()).logits
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, label).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for one, value in zip(self._trained, values, strict=True):
                one.copy_(value)
