"""Devices of both kinds train on texts in real rounds of a real coordinator, each as Python makes tokens of them."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from coordinator.rules.aggregation import aggregate
from coordinator.store.tasks import Secagg, TaskSettings
from device_runtime.backends import open_backend
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.config import DeviceConfig
from device_runtime.examples import open_examples
from device_runtime.permission.policy import Policy
from device_runtime.session import run_session
from device_runtime.state.folder import BlobCache
from device_runtime.trainer import InProcess, Limits
from device_runtime.work import Worker
from export.build import export_bundle
from export.huggingface.folder import load
from export.model import Model
from fedcore import checkpoint
from fedcore.algorithms import create
from fedcore.plan import BlobRef
from fedcore.signing import SigningKey
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.node import command, device_words
from tests.device_runtime.test_releases import assignment
from tests.export.test_huggingface import CLASSIFIES, CONTINUES, EMBEDS, OF_TOKENS, SEVERAL
from tests.export.test_huggingface_texts import VECTORS, folder_of
from tests.sampled import sampled

TEXTS = [*(text for text in VECTORS["texts"] if text.strip()), "a fox"][-16:]
WIDTH, TOKENS = 200, 12
ROW = np.array([np.frombuffer(text.encode().ljust(WIDTH, b"\0"), np.uint8) for text in TEXTS])
COUNTING = np.arange(len(TEXTS) * TOKENS).reshape(len(TEXTS), TOKENS)
ROWS = {
    CLASSIFIES: {"text": ROW, "label": COUNTING[:, 0] % 2},
    SEVERAL: {"text": ROW, "label": np.array([0, 1, -100])[COUNTING[:, :3] % 3]},
    OF_TOKENS: {"tokens": (COUNTING * 7 % 500).astype(np.int32), "label": np.array([0, 1, 2, -100])[COUNTING % 4]},
    EMBEDS: {"anchor": ROW, "positive": np.roll(ROW, 1, 0)},
    CONTINUES: {"text": ROW},
}
CASES = [
    (CLASSIFIES, 2, None),
    *((task, 1, None) for task in (SEVERAL, OF_TOKENS, EMBEDS)),
    (CONTINUES, 1, Secagg(clip_norm=8.0, max_examples=20)),
]
# One batch of all texts, so that their order does not count.
ALGORITHM = create("fedavg", {"batch_size": len(TEXTS), "epochs": 2, "client_lr": 0.3})


@pytest.fixture(autouse=True, scope="module")
def libraries():
    pytest.importorskip("transformers")


def expected(store, task, number, folder):
    """The parameters after a round in which all devices have these texts, and how many texts are cut, by Python."""
    record = store.task(task)
    plan, before = store.plan(record.plan_sha256), store.checkpoint(task, number - 1)
    data = checkpoint.encode(before)
    blobs = lambda ref: data if ref == BlobRef.of(data) else store.blobs.get(ref.sha256)  # noqa: E731
    cache = BlobCache(folder / f"blobs-{number}", lambda ref, part: part.append(blobs(ref)))
    worker = Worker(InProcess(OnnxRuntime()), open_examples(folder / "examples.npz"), cache, lambda: True)
    result = worker.train(assignment(checkpoint=BlobRef.of(data)), plan, Limits(4_000_000_000, 600.0))
    report = plan.report.weigh(result.values, result.weight).astype(np.float64)
    return aggregate(plan.report, ALGORITHM, before, report).state["params"], result.cut


def on_node(folder, url, signer, rows):
    """The outcome of a session on Node."""
    words = device_words(folder, url, "p", rows, **({"signers": [signer]} if signer else {}))
    ran = subprocess.run(
        command("src/node/main.ts", *words), check=True, stdout=subprocess.PIPE, text=True, timeout=120
    )
    return json.loads(ran.stdout)


def in_python(folder, url, signer, rows, **settings):
    """The same in Python, in a sandbox unless settings name another trainer."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "examples.npz", **rows)
    given = {"coordinator": url, "population": "p", "examples": folder / "examples.npz", "state": folder / "state"}
    policy = Policy(signers=(signer,)) if signer else None
    return msgspec.to_builtins(run_session(DeviceConfig(**given, **settings, policy=policy)))


def beside(folder, url, signer, rows):
    """The same in Python without a sandbox, for a cohort that is large enough."""
    return in_python(folder, url, signer, rows, trainer=lambda name: InProcess(open_backend(name)))


@pytest.mark.parametrize(
    ("task", "rounds", "secagg"),
    sampled(CASES, [case for case in CASES if case[0] != SEVERAL]),
)
def test_both_runtimes_commit_what_python_makes_of_texts(task, rounds, secagg, tmp_path, coordinators, monkeypatch):
    """In every run labels that do not count are those of tokens: several labels are read by the same code."""
    family = "Llama" if task == CONTINUES else "Bert"
    head = {} if task in (CONTINUES, EMBEDS) else {"classes": 3}
    spec = load(folder_of(family, tmp_path, monkeypatch), task=task, **head, rank=2, tokens=TOKENS)
    bundle, key = export_bundle(Model(spec, 3), ALGORITHM, tmp_path / "plan"), SigningKey.new(tmp_path / "release.pem")
    rows = ROWS[task]
    others = {f"beside-{index}": beside for index in range(6)} if secagg else {}
    devices = {"node": on_node, "python": in_python} | others
    with coordinators.local(tmp_path, secure=secagg is not None) as local, ThreadPoolExecutor(len(devices)) as pool:
        settings = TaskSettings(population="p", goal=len(devices), rounds=rounds, over_selection=1.0, secagg=secagg)
        task = local.create_task(bundle, settings, key).id
        for number in range(1, rounds + 1):
            running = [
                pool.submit(run, tmp_path / name, local.url, key.signer if secagg else None, rows)
                for name, run in devices.items()
            ]
            outcomes = [one.result() for one in running]
            assert {one["outcome"] for one in outcomes} == {"reported"}, outcomes
            wait_until(lambda done=number: len(local.store.rounds(task)) >= done)
            wait_until(lambda done=number: local.store.rounds(task)[done - 1].state == "committed")
            wanted, cut = expected(local.store, task, number, tmp_path / "python")
            after = local.store.checkpoint(task, number)["params"]
            assert {one["cut"] for one in outcomes} == {cut}
            assert (0 < cut < len(TEXTS) * len(spec.inputs)) == bool(spec.tokenizers)
            np.testing.assert_allclose(after, wanted, atol=1e-5 if secagg is None else 1e-4)
    assert np.abs(wanted - Model(spec, 3).initial).max() > 1e-3
