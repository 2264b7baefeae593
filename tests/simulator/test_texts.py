"""Texts of simulated users: read from files, kept as devices keep them, and made tokens before the engine trains."""

import json
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from msgspec.structs import replace

from export.huggingface.folder import Pretrained, spec_of
from export.questions.builtin import BuiltIn, compile_built_in
from muster.asking import fields_in
from research.pretrained_adapters import generated, tiny
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.datasets.bundled import MARKS
from simulator.errors import DatasetError
from simulator.population import Population, as_bytes
from simulator.questions import as_devices_hold, ask_population, with_tokens
from simulator.simulation import Overrides, simulate


def said(users, client):
    return [text.decode() for text in users.shard(users.clients.index(client))["text"]]


def test_texts_of_files_are_bytes_as_long_as_the_longest(tmp_path):
    np.savez(tmp_path / "ann.npz", text=np.array(["na, gut", "ça va"]), label=np.array([0, 1]))
    columns = {"text": ["日本語のとても長い文です", "x"], "label": [2, 0], "user": ["bob", "eve"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "others.parquet")
    users = datasets.load(str(tmp_path))
    assert users.kinds == {"label": "int64[]", "text": f"uint8[{len(columns['text'][0].encode())}]"}
    assert [said(users, name) for name in ("ann", "bob", "eve")] == [["na, gut", "ça va"], [columns["text"][0]], ["x"]]
    assert users.classes == 3


def test_a_long_text_among_short_ones_costs_its_own_bytes_alone():
    notes = [["a short note about the train"] * 30 for _ in range(100)] + [["x" * 200_000]]
    shards = [{"text": np.array(texts, object), "label": np.zeros(len(texts), np.int64)} for texts in notes]
    tracemalloc.start()
    users = Population.of([f"user-{number}" for number in range(101)], shards)
    some = users.subset(range(1, 101)).pooled()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert (users.kinds["text"], sum(map(len, some.fields["text"]))) == ("uint8[200000]", 99 * 30 * 28 + 200_000)
    assert as_devices_hold(users.shard(0))["text"].shape == (30, 28)
    assert as_devices_hold(users.shard(100))["text"].shape == (1, 200_000)


def test_questions_of_users_with_texts_read_their_bytes_or_leave_them_out():
    shards = [{"text": np.array(["ab", "", "ab"]), "label": np.array([0, 1, 2])} for _ in range(3)]
    users = Population.of(["ann", "bob", "eve"], shards)
    fields = fields_in(users, "mine").fields
    asked = compile_built_in(BuiltIn("labels", ("label",)), fields, minimum_devices=1)
    assert [list(row[:2]) for row in ask_population(asked, users).rows] == [[0, 3], [1, 3], [2, 3]]
    text = next(field for field in fields if field.name == "text")
    assert (text.dtype, text.shape, text.high) == ("uint8", (2,), 256)
    spec = SimpleNamespace(fields=(text,), tokenizers=())
    assert with_tokens(users, spec).shard(0)["text"].tolist() == [[97, 98], [0, 0], [97, 98]]
    with pytest.raises(DatasetError, match="field 'text' has a text of 2 bytes; the model reads 1"):
        with_tokens(users, SimpleNamespace(fields=(replace(text, shape=(1,)),), tokenizers=()))


def test_a_role_says_sentences_and_the_marks_that_end_them(tmp_path):
    lines = ["Who goes there? Stand, and unfold\nyourself. Ha!", "Long live the king! and then no mark"]
    (tmp_path / "shakespeare").mkdir()
    path = tmp_path / "shakespeare" / "clients.jsonl"
    roles = [{"client": "Guard", "lines": lines}, {"client": "Ghost", "lines": ["Swear."]}]
    path.write_text("\n".join(map(json.dumps, roles)))
    users = datasets.load("shakespeare_marks", tmp_path)
    assert users.clients == ("Guard",)
    assert said(users, "Guard") == ["Who goes there", "Stand, and unfold yourself", "Long live the king"]
    assert [MARKS[mark] for mark in users.fields["label"]] == ["?", ".", "!"]
    path.write_text(json.dumps(roles[1]))
    with pytest.raises(DatasetError, match="no role says a sentence of 3 words or more"):
        datasets.load("shakespeare_marks", tmp_path)


def test_a_pretrained_model_learns_from_texts_of_users(tmp_path):
    pytest.importorskip("transformers")
    model = f"hf:{tiny(tmp_path)},classes=3,tokens=6"
    settings = {"client_lr": 0.03, "epochs": 10, "client_optimizer": "adam"}
    config = SimulationConfig(model=model, settings=settings, rounds=5, cohort=8, processes=1)
    result = simulate(config, given=Overrides(users=generated()))
    assert result.test_accuracy > 0.95


def test_a_head_of_its_own_is_all_that_is_trained_without_adapters(tmp_path):
    pytest.importorskip("transformers")
    model = f"hf:{tiny(tmp_path)},classes=3,tokens=6,rank=0"
    config = SimulationConfig(model=model, rounds=1, cohort=2, processes=1)
    assert simulate(config, given=Overrides(users=generated())).parameters == 3 * 16 + 3


def test_a_text_that_is_no_utf_8_is_named(tmp_path):
    pytest.importorskip("transformers")
    spec = spec_of(Pretrained(str(tiny(tmp_path)), classes=3, tokens=6))
    shard = {"text": np.frombuffer(b"who\xff", np.uint8).reshape(2, 2), "label": np.zeros(2, np.int64)}
    with pytest.raises(DatasetError, match="field 'text' of example 1 is not text in UTF-8"):
        with_tokens(Population.of(["a"], [shard]), spec)


def test_what_is_no_text_is_named():
    with pytest.raises(DatasetError, match="the text of example 1 has half a character"):
        as_bytes(np.array(["fine", "\ud800"]))
    with pytest.raises(DatasetError, match="example 1 has a NoneType in the place of a text"):
        Population.of(["a"], [{"text": np.array(["fine", None], object)}])
