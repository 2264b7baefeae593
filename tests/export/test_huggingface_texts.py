"""A folder with a tokenizer makes a plan of texts, which a device trains on as it keeps them."""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.examples import Collection, ExampleStore
from device_runtime.state.folder import BlobCache
from device_runtime.texts import LoadedTokenizer, unknown_in
from device_runtime.trainer import InProcess, Limits
from device_runtime.work import Worker
from export.build import build_plan, export_bundle
from export.errors import InvalidModel
from export.huggingface.folder import Pretrained, load, spec_of
from export.huggingface.written import Values, write_merged
from export.model import Model
from fedcore.algorithms import create
from fedcore.plan import Field
from tests.device_runtime.test_releases import assignment
from tests.export.test_huggingface import CLASSIFIES, CONTINUES, FAMILIES, saved
from tests.sampled import sampled
from tests.tree import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "tokenizers.json").read_text())
FILES = {one["name"]: one["file"] for one in VECTORS["tokenizers"]}
KIND = {"Bert": "word_piece", "Llama": "qwen"}


@pytest.fixture(autouse=True, scope="module")
def libraries():
    pytest.importorskip("transformers")


def folder_of(family, tmp_path, monkeypatch):
    """The family's tiny model, with the vocabulary of its tokenizer."""
    sizes, task = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, ({**sizes, "vocab_size": 520}, task))
    folder = saved(family, tmp_path / family)
    with_tokenizer(folder, FILES[KIND[family]])
    return folder


def with_tokenizer(folder, file, **said):
    """Write a tokenizer's file and what `transformers` shall make of it: by default what it says."""
    (folder / "tokenizer.json").write_text(json.dumps(file))
    said = {"tokenizer_class": "PreTrainedTokenizerFast"} | said
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


@pytest.mark.parametrize("family", sampled(KIND, ["Bert"]))
def test_a_device_trains_on_texts_as_its_app_keeps_them(family, tmp_path, monkeypatch):
    task, folder = FAMILIES[family][1], folder_of(family, tmp_path, monkeypatch)
    model = Model(load(folder, task=task, rank=2, tokens=12))
    bundle = export_bundle(model, create("fedavg", {}), tmp_path / "plan")
    labels = {CLASSIFIES: [Field("label", "int64", (), 2)], CONTINUES: []}[task]
    assert [item.name for item in bundle.plan.examples.fields] == ["text", *(item.name for item in labels)]
    store = ExampleStore.open(tmp_path / "store")
    store.declare(Collection("default", (Field("text", "uint8", (200,)), *labels)))
    store.append_all(
        "default", [{"text": text} | {one.name: 1 for one in labels} for text in VECTORS["texts"] if text.strip()]
    )
    cache = BlobCache(tmp_path / "blobs", lambda ref, part: part.append(bundle.read(ref)))
    worker = Worker(InProcess(OnnxRuntime()), store, cache, lambda: True)
    given = assignment(plan=bundle.manifest.plan, checkpoint=bundle.manifest.state)
    result = worker.train(given, bundle.plan, Limits(4_000_000_000, 600.0))
    assert np.isfinite(result.values).all()
    assert np.abs(result.values[: model.schema.size]).max() > 0
    assert result.cut > 5


def test_a_merged_folder_takes_the_same_texts(tmp_path, monkeypatch):
    given = Pretrained(str(folder_of("Bert", tmp_path, monkeypatch)), tokens=12)
    model = Model(spec_of(given))
    write_merged(given, Values(model.schema, model.initial, model.frozen_vectors), tmp_path / "merged")
    assert load(tmp_path / "merged", tokens=12).fields == model.spec.fields


def test_a_folder_without_a_tokenizer_takes_tokens(tmp_path):
    spec = load(saved("Llama", tmp_path / "llama"), task=CONTINUES, tokens=6)
    assert [item.name for item in spec.fields] == ["tokens"]


def test_a_file_of_an_older_library_is_written_anew_with_a_trial(tmp_path, monkeypatch):
    folder = folder_of("Bert", tmp_path, monkeypatch)
    file = json.loads((folder / "tokenizer.json").read_text())
    del file["model"]["type"]
    file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    spec = load(folder, tokens=12)
    assert json.loads(spec.tokenizers[0]) == FILES["word_piece"]
    trial = spec.fields[0].tokenizer.trial
    assert max(len(ids) for _, ids in trial) > 20
    assert any("[MASK]" in text for text, _ in trial)
    LoadedTokenizer(spec.fields[0], spec.tokenizers[0], 0)


def test_a_models_own_tokenizer_that_devices_do_not_know_is_refused(tmp_path, monkeypatch):
    spec = replace(load(folder_of("Bert", tmp_path, monkeypatch), tokens=12), tokenizers=(b"{}",))
    with pytest.raises(InvalidModel, match="its tokenizer has what devices do not know"):
        build_plan(Model(spec), create("fedavg", {}))


def test_expressions_that_devices_do_not_know_are_refused_by_name():
    for one in VECTORS["expressions"]["refused"]:
        assert one["what"]
        assert unknown_in(one["expression"]) == one["what"]


def test_expressions_of_devices_are_known_and_have_the_librarys_pieces():
    from tokenizers import Regex, pre_tokenizers

    for one in VECTORS["expressions"]["taken"]:
        assert unknown_in(one["expression"]) == ""
        split = pre_tokenizers.Split(Regex(one["expression"]), "isolated")
        for text, pieces in zip(VECTORS["texts"], one["pieces"], strict=True):
            assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces, one["expression"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"do_lower_case": False}, "gives other tokens for .The quick brown fox, .* than BertTokenizer, by which"),
        ({"strip_accents": False}, "gives other tokens for .* than BertTokenizer, by which transformers reads"),
        ({"extra_special_tokens": ["the"]}, "gives other tokens for 'a  the  bthe' than BertTokenizer"),
        ({"split_special_tokens": True}, r"gives other tokens for .*\[PAD\].* than BertTokenizer"),
        ({"truncation_side": "left"}, "its truncation_side is left, and devices cut a text at its end; set it"),
        ({"tokenizer_class": "GPT2Tokenizer"}, "gives other tokens for .* than GPT2Tokenizer"),
        ({"tokenizer_class": "XLNetTokenizer"}, "is no tokenizer for transformers: .*; move the file away"),
    ],
)
def test_a_tokenizer_that_transformers_takes_for_another_is_refused(said, message, tmp_path, monkeypatch):
    folder = folder_of("Bert", tmp_path, monkeypatch)
    with_tokenizer(folder, FILES["word_piece"], tokenizer_class="BertTokenizer")
    load(folder, tokens=12)
    with_tokenizer(folder, FILES["word_piece"], **{"tokenizer_class": "BertTokenizer"} | said)
    with pytest.raises(InvalidModel, match=message) as caught:
        load(folder, tokens=12)
    assert "\n" not in str(caught.value)


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"single_word": True}, "gives other tokens for 'a  <19>  b<19>' than TokenizersBackend, by which"),
        ({"normalized": True}, "looks for '<19>' in other forms of a text than TokenizersBackend, by which"),
    ],
)
def test_each_of_many_added_tokens_is_compared(said, message, tmp_path, monkeypatch):
    folder, file = folder_of("Bert", tmp_path, monkeypatch), copy.deepcopy(FILES["word_piece"])
    words = len(file["model"]["vocab"])
    file["added_tokens"] += [ADDED | {"content": f"<{place}>", "id": words + place} for place in range(520 - words)]
    noted = {one["id"]: {k: v for k, v in one.items() if k != "id"} for one in file["added_tokens"]}
    with_tokenizer(folder, file, added_tokens_decoder=noted)
    load(folder, tokens=12)
    noted[519] |= said
    with_tokenizer(folder, file, added_tokens_decoder=noted)
    with pytest.raises(InvalidModel, match=message):
        load(folder, tokens=12)


def test_words_that_transformers_merges_otherwise_need_no_text(tmp_path, monkeypatch):
    folder, file = folder_of("Llama", tmp_path, monkeypatch), copy.deepcopy(FILES["gpt2"])
    file["model"] |= {"ignore_merges": True}
    with_tokenizer(folder, file)
    load(folder, task=CONTINUES, tokens=12)
    with_tokenizer(folder, file, tokenizer_class="GPT2Tokenizer")
    with pytest.raises(InvalidModel, match="has another model than GPT2Tokenizer, by which transformers reads"):
        load(folder, task=CONTINUES, tokens=12)


def test_every_word_of_the_vocabulary_is_compared(tmp_path, monkeypatch):
    """GPT2Tokenizer splits texts as GPT-2 does, whatever the file says, and no text of the trial has 'd."""
    folder, file = folder_of("Llama", tmp_path, monkeypatch), copy.deepcopy(FILES["qwen"])
    words, merges = file["model"]["vocab"], file["model"]["merges"]
    words["'d"], merges[-1] = words.pop("".join(merges[-1])), ["'", "d"]
    pattern = r"'s|'t|'re|'ve|'m|'ll| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    file |= {"normalizer": None, "model": file["model"] | {"ignore_merges": False}}
    with_tokenizer(folder, file)
    load(folder, task=CONTINUES, tokens=12)
    with_tokenizer(folder, file, tokenizer_class="GPT2Tokenizer")
    with pytest.raises(InvalidModel, match=r"gives other tokens for .*'d.* than GPT2Tokenizer, by which"):
        load(folder, task=CONTINUES, tokens=12)


def test_a_tokenizer_that_gives_tokens_types_is_refused(tmp_path, monkeypatch):
    folder, file = folder_of("Bert", tmp_path, monkeypatch), copy.deepcopy(FILES["word_piece"])
    file["post_processor"]["single"][0]["SpecialToken"]["type_id"] = 2
    with_tokenizer(folder, file)
    load(folder, tokens=12)
    with_tokenizer(folder, file, model_input_names=["input_ids", "token_type_ids"])
    with pytest.raises(InvalidModel, match="gives tokens types other than 0, which devices do not; move the file away"):
        load(folder, tokens=12)


def another(file):
    file["model"]["vocab"]["zebra"] = 9999


def sentence_piece(file):
    file["normalizer"] = {"type": "NFKC"}
    file["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def unigram(file):
    file["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}


def alike(file):
    for place, content in enumerate(("Fox", "fox")):
        token = ADDED | {"content": content, "normalized": True, "id": len(file["model"]["vocab"]) + place}
        file["added_tokens"].append(token)


def single(file):
    file["added_tokens"][0]["single_word"] = True


def repeating(file):
    pattern = {"Regex": "[(a+)+]|(?:a|aa)+b"}
    file["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def removing(file):
    pattern = {"Regex": " "}
    file["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Removed", "invert": False}


def broken(file):
    del file["model"]


@pytest.mark.parametrize(
    ("harm", "tokens", "message"),
    [
        (another, 8, "and the model knows 520; it is another model's"),
        (
            sentence_piece,
            8,
            r"devices do not know: Invalid value 'Metaspace' - at `\$.pre_tokenizer.type`; move the file",
        ),
        (unigram, 8, r"devices do not know: Invalid value 'Unigram' - at `\$.model.type`"),
        (
            removing,
            8,
            r"devices do not know: Invalid enum value 'Removed' - at `\$.pre_tokenizer.behavior`",
        ),
        (alike, 8, "has an added token that normalises to nothing or to another one, which devices do not know; move"),
        (single, 8, r"devices do not know: Invalid enum value True - at `\$.added_tokens\[0\].single_word`"),
        (repeating, 8, "has a group that repeats in the expression .*, which devices do not know"),
        (broken, 8, "is no tokenizer"),
        (None, 2, "adds 2 tokens to every text; 2 leave no room"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_in_one_line(harm, tokens, message, tmp_path, monkeypatch):
    folder = folder_of("Bert", tmp_path, monkeypatch)
    file = json.loads((folder / "tokenizer.json").read_text())
    if harm is not None:
        harm(file)
    (folder / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(InvalidModel, match=message) as caught:
        load(folder, tokens=tokens)
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
