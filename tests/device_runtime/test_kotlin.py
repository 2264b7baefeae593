"""The device runtime in Kotlin trains to Python's reports, bit for bit."""

import hashlib
import json
import subprocess
from contextlib import contextmanager

import pytest

from export.model import Model
from export.models import MODELS, load
from fedcore.algorithms import create
from tests.device_runtime.kotlin import kotlin_command
from tests.device_runtime.local_work import BATCH, LocalWork, drawn

pytestmark = pytest.mark.long


@contextmanager
def blocks():
    """A JVM that does blocks of work (`device_runtime/android/jvm/src/test/kotlin/Blocks.kt`); gives what asks it."""
    words = kotlin_command("BlocksKt")
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(**what):
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with process:
        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def ask():
    with blocks() as asks:
        yield asks


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def assert_equal_reports(ask, work, folder, kept=None):
    """Train on a work in both languages; the vectors to keep that Python made."""
    work.write(folder, kept)
    for one in ({"load": str(folder)}, {"graphs": None}, {"train": None}):
        ask(**one)
    found, expected = ask(digests=None), work.train(kept)
    assert (found["steps"], found["report"]) == (expected.steps, sha256(work.body(expected)))
    assert found["kept"] == {name: sha256(vector.tobytes()) for name, vector in expected.kept.items()}
    return expected.kept


@pytest.mark.parametrize("name", MODELS)
def test_kotlin_trains_to_the_same_report_bit_for_bit(name, ask, tmp_path):
    model = Model(load(name))
    algorithm = create("mimelite", {"batch_size": BATCH})
    assert_equal_reports(ask, LocalWork.of(model, algorithm, drawn(model.spec.fields)), tmp_path)


@pytest.mark.parametrize("kind", ["adapted", "in_8_bits", "in_4_bits"])
def test_kotlin_trains_beside_what_is_frozen(kind, ask, tmp_path):
    model = Model(load(f"tests.export.models:digits_{kind}"))
    algorithm = create("mimelite", {"batch_size": BATCH})
    assert_equal_reports(ask, LocalWork.of(model, algorithm, drawn(model.spec.fields)), tmp_path)


def test_kotlin_keeps_what_python_does_from_round_to_round(ask, tmp_path):
    model = Model(load("digits_cnn"))
    work = LocalWork.of(model, create("scaffold", {"batch_size": BATCH}), drawn(model.spec.fields))
    kept = assert_equal_reports(ask, work, tmp_path)
    assert kept
    assert_equal_reports(ask, work, tmp_path, dict(kept))


@pytest.mark.parametrize("compress", ["rotation,bits=1", "rotation,subsample=0.3,bits=4", "bits=8", "count_sketch=0.5"])
def test_kotlin_compresses_to_the_same_bytes(compress, ask, tmp_path):
    model = Model(load("digits_cnn"))
    algorithm = create("fedavg", {"batch_size": BATCH})
    assert_equal_reports(ask, LocalWork.of(model, algorithm, drawn(model.spec.fields), compress), tmp_path)
