"""Released models take texts, in Python and TypeScript: they predict with them, and become personal on them."""

import json
import sys

import numpy as np
import pytest
from msgspec import structs

from device_runtime.errors import InputRefused, ModelRefused
from device_runtime.examples import open_examples
from device_runtime.models.model import Model as OnDevice
from export.huggingface.folder import load
from export.model import Model
from fedcore.algorithms import create
from fedcore.plan import BlobRef, Tokenizer
from tests.device_runtime.personal import away, owning, taken
from tests.device_runtime.released import NAME
from tests.device_runtime.test_models_of_export import offered, predicting
from tests.device_runtime.test_texts import VECTORS, WORD_PIECE, field, tokens
from tests.export.test_huggingface import FAMILIES
from tests.export.test_huggingface_texts import folder_of

TOKENS = 12
TEXTS = [text for text in VECTORS["texts"] if text.strip()][:6]
TOPICS = ("quick brown fox", "12,345 reasons")


def rows_of(texts):
    return np.array([np.frombuffer(text.encode().ljust(200, b"\0"), np.uint8) for text in texts])


@pytest.fixture
def mine():
    """Texts of two topics, which differ in their words."""
    texts = [f"{TOPICS[place % 2]}, {word}" for place, word in enumerate([*"abcdefghijklmnopqrst"] * 6)]
    return {"text": rows_of(texts), "label": np.arange(len(texts)) % 2}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The parameters of a tiny model of texts, its plan, and the plan's blobs."""
    pytest.importorskip("transformers")
    sizes, task = FAMILIES["Bert"]
    with pytest.MonkeyPatch.context() as patch:
        # Weights as small as they usually are drawn tell no text from another.
        patch.setitem(FAMILIES, "Bert", ({**sizes, "initializer_range": 0.3}, task))
        spec = load(folder_of("Bert", tmp_path_factory.mktemp("texts"), patch), rank=4, tokens=TOKENS)
    model = Model(spec, 3)
    algorithm = create("fedavg", {"epochs": 10, "client_lr": 0.1, "batch_size": 4})
    return model.initial, *predicting(model, algorithm, "onnx")


@pytest.fixture
def release(coordinator, exported):
    """Release a tiny model of texts."""
    offered(coordinator, *exported)


@pytest.fixture
def by_tokens(tmp_path):
    """The tokens of some texts, as a training would make them."""

    def made(texts):
        np.savez(tmp_path / "texts.npz", text=rows_of(texts))
        return tokens(open_examples(tmp_path / "texts.npz"), field(TOKENS, 521, 520), WORD_PIECE)[0]

    return made


def test_an_app_gives_texts_and_gets_what_their_tokens_give(coordinator, config, release, by_tokens, mine, elsewhere):
    owned = owning(config, mine)
    with taken(owned) as model:
        found = model.predict({"text": TEXTS})["output"]
        for given in (by_tokens(TEXTS), np.array(TEXTS)):
            np.testing.assert_array_equal(found, model.predict({"text": given})["output"])
    with OnDevice(away(owned), NAME) as offline:
        np.testing.assert_array_equal(offline.predict({"text": tuple(TEXTS)})["output"], found)
    with elsewhere() as node:
        assert node.refresh() == (True, 1)
        np.testing.assert_allclose(node.answers({"text": TEXTS}), found.ravel(), atol=1e-5)
        assert node.answers({"text": by_tokens(TEXTS)}) == node.answers({"text": TEXTS})
    calls = len(coordinator.calls)
    with elsewhere() as offline:
        np.testing.assert_allclose(offline.answers({"text": TEXTS}), found.ravel(), atol=1e-5)
    assert len(coordinator.calls) == calls


def test_apps_get_vectors_of_single_texts_in_both_runtimes(coordinator, config, mine, tmp_path, monkeypatch, elsewhere):
    pytest.importorskip("transformers")
    spec = load(folder_of("Bert", tmp_path, monkeypatch), task="embedding", rank=4, tokens=TOKENS)
    model = Model(spec, 3)
    offered(coordinator, model.initial, *predicting(model, create("fedavg", {}), "onnx"))
    with taken(owning(config, mine)) as model:
        vectors = model.predict({"anchor": TEXTS})["output"]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    with elsewhere() as node:
        assert node.refresh() == (True, 1)
        np.testing.assert_allclose(node.answers({"anchor": TEXTS}), vectors.ravel(), atol=1e-5)


def test_models_of_texts_become_personal_in_both_runtimes(config, release, mine, elsewhere):
    with taken(owning(config, mine)) as model:
        outcome = model.personalise()
        assert (outcome.kept, model.personal) == (True, True)
        assert outcome.after < 0.5 * outcome.before
        found = model.predict({"text": [f"{topic}, z" for topic in TOPICS]})["output"]
        assert found.argmax(axis=1).tolist() == [0, 1]
    with elsewhere() as node:
        node.refresh()
        answer = node.ask("personalise")
        assert (answer["kept"], answer["examples"], answer["leftOut"]) == (True, outcome.examples, outcome.left_out)
        np.testing.assert_allclose([answer["before"], answer["after"]], [outcome.before, outcome.after], rtol=1e-2)
        theirs = node.answers({"text": [f"{topic}, z" for topic in TOPICS]})
        np.testing.assert_allclose(theirs, found.ravel(), atol=1e-2)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("fox", "input 'text' takes a list of texts, or an array of their tokens"),
        ([b"fox"], "input 'text' takes a list of texts"),
        (["half \ud800"], "fails at the text of example 0"),
        ([], "examples; all must hold the same number, at least 1"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(config, release, mine, texts, words):
    with taken(owning(config, mine)) as model, pytest.raises(InputRefused, match=words) as caught:
        model.predict({"text": texts})
    assert "\n" not in str(caught.value)


def test_a_text_is_refused_where_no_library_is_and_tokens_are_not(config, release, mine, by_tokens, monkeypatch):
    ids = by_tokens(TEXTS)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with taken(owning(config, mine)) as model:
        with pytest.raises(InputRefused, match=r"pip install 'muster-fl\[text\]'"):
            model.predict({"text": TEXTS})
        assert len(model.predict({"text": ids})["output"]) == len(TEXTS)


def test_a_version_whose_tokenizer_does_not_load_is_refused_on_trial(coordinator, config, mine, exported, elsewhere):
    params, plan, blobs = exported
    text, *others = plan.examples.fields
    broken = json.loads(blobs[text.tokenizer.blob])
    del broken["model"]
    data = json.dumps(broken).encode()
    text = structs.replace(text, tokenizer=Tokenizer(BlobRef.of(data), 0))
    plan = structs.replace(plan, examples=structs.replace(plan.examples, fields=(text, *others)))
    offered(coordinator, params, plan, blobs | {BlobRef.of(data): data})
    with OnDevice(owning(config, mine), NAME) as one, pytest.raises(ModelRefused, match="does not load"):
        one.refresh()
    with elsewhere() as node:
        answer = node.ask("refresh")
        assert "does not load" in answer["detail"]
