"""Texts of simulated users: read from files, kept as devices keep them, and made tokens before the engine trains."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from export.huggingface.folder import Pretrained, spec_of
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.datasets.shakespeare import MARKS
from simulator.errors import DatasetError
from simulator.population import Population, as_bytes
from simulator.simulation import Overrides, simulate
from simulator.studies.pretrained_adapters import generated, tiny
from simulator.texts import with_tokens


def said(users, client):
    return [row.tobytes().rstrip(b"\0").decode() for row in users.shard(users.clients.index(client))["text"]]


def test_texts_of_files_are_bytes_as_long_as_the_longest(tmp_path):
    np.savez(tmp_path / "ann.npz", text=np.array(["na, gut", "ça va"]), label=np.array([0, 1]))
    columns = {"text": ["日本語のとても長い文です", "x"], "label": [2, 0], "user": ["bob", "eve"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "others.parquet")
    users = datasets.load(str(tmp_path))
    assert users.kinds == {"label": "int64[]", "text": f"uint8[{len(columns['text'][0].encode())}]"}
    assert [said(users, name) for name in ("ann", "bob", "eve")] == [["na, gut", "ça va"], [columns["text"][0]], ["x"]]
    assert users.classes == 3


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
