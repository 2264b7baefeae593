"""Pretrained models of folders: families that export, adapters that peft reads, weights that transformers reads."""

import json
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from export.build import export_bundle
from export.errors import InvalidModel
from export.huggingface.folder import TASKS, Pretrained, load, spec_of, unadapted
from export.huggingface.written import Values, write_adapters, write_merged
from export.model import Model, parameter_count
from export.models import load as load_any
from fedcore.algorithms import create
from muster.commands.export import export
from tests.sampled import sampled

WORDS = 61
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
FEWER = {"num_key_value_heads": 1}
CLASSIFIES, CONTINUES, EMBEDS = "classification", "causal-lm", "embedding"
SEVERAL, OF_TOKENS = "multi-label", "token-classification"
FAMILIES = {
    "Bert": (SIZES, CLASSIFIES),
    "DistilBert": ({"vocab_size": WORDS, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}, CLASSIFIES),
    "Roberta": ({**SIZES, "pad_token_id": 1}, CLASSIFIES),
    "ModernBert": (SIZES, CLASSIFIES),
    "DebertaV2": ({**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, CLASSIFIES),
    "GPT2": ({"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}, CONTINUES),
    "Llama": ({**SIZES, **FEWER}, CONTINUES),
    "Qwen3": ({**SIZES, **FEWER, "head_dim": 8}, CONTINUES),
    "Gemma3Text": ({**SIZES, **FEWER, "head_dim": 8}, CONTINUES),
    "Phi3": ({**SIZES, **FEWER}, CONTINUES),
    "SmolLM3": ({**SIZES, **FEWER}, CONTINUES),
    "Mamba": ({"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}, CONTINUES),
}
"""A tiny configuration of every family, and what it is for."""
KINDS = {
    CLASSIFIES: "AutoModelForSequenceClassification",
    CONTINUES: "AutoModelForCausalLM",
    EMBEDS: "AutoModel",
    SEVERAL: "AutoModelForSequenceClassification",
    OF_TOKENS: "AutoModelForTokenClassification",
}
USUAL = [(name, task) for name, (_, task) in FAMILIES.items()]
OTHER_TASKS = [
    (family, task)
    for family, (_, usual) in FAMILIES.items()
    for task in (EMBEDS, SEVERAL, OF_TOKENS)
    if usual == CLASSIFIES
]
CASES = sampled([*USUAL, *OTHER_TASKS], [("Bert", CLASSIFIES), ("Llama", CONTINUES)])
"""Every family with every task that its models have; every run has one of each kind."""


@pytest.fixture(autouse=True, scope="module")
def libraries():
    """Loaded where a test runs, not where tests are collected, which every worker does: seconds."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")


def saved(family, folder):
    """The family's tiny model with drawn weights, as its authors would have saved it."""
    import transformers

    sizes, task = FAMILIES[family]
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM if task == CONTINUES else transformers.AutoModel
    kind.from_config(getattr(transformers, f"{family}Config")(**sizes)).save_pretrained(folder)
    return folder


def pretrained(family, tmp_path, task="", **settings):
    folder = tmp_path / family
    if not folder.exists():
        saved(family, folder)
    return Pretrained(str(folder), task or FAMILIES[family][1], 3, 2, 10, **settings)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_a_family_exports_with_adapters_and_predicts_in_both_formats(family, task, tmp_path, executorch):
    model = Model(spec_of(pretrained(family, tmp_path, task)))
    bundle = export_bundle(model, create("fedavg", {}), tmp_path / "plan", targets=("onnx", "executorch"))
    assert bundle.manifest.no_predict == ""
    assert sum(vector.size for vector in bundle.plan.frozen.vectors) > 5 * bundle.plan.schema.size
    assert any("lora_down" in tensor.name for tensor in bundle.plan.schema.tensors)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own call
@pytest.mark.parametrize(
    ("family", "task"),
    sampled([*USUAL, *OTHER_TASKS], [*USUAL, *(case for case in OTHER_TASKS if case[0] == "Bert")]),
)
def test_peft_and_transformers_read_what_was_trained(family, task, tmp_path):
    """Every run has each family, and each task of one; the product of both is long."""
    import peft
    import transformers

    given = pretrained(family, tmp_path, task)
    model = Model(spec_of(given), seed=3)
    params_D = 0.1 * np.random.default_rng(0).standard_normal(model.initial.size).astype(np.float32)
    values = Values(model.schema, params_D, model.frozen_vectors)
    write_adapters(given, values, tmp_path / "adapters")
    write_merged(given, values, tmp_path / "merged")
    ids = torch.randint(5, WORDS, (4, 10), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected = model.trained(params_D).module(ids)
        for read in (
            peft.PeftModel.from_pretrained(unadapted(given), tmp_path / "adapters"),
            getattr(transformers, KINDS[task]).from_pretrained(tmp_path / "merged"),
        ):
            found = read.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
            found = torch.nn.functional.normalize(found[0].mean(1)) if task == EMBEDS else found.logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_values_of_other_adapters_are_refused_and_nothing_is_written(tmp_path):
    model = Model(spec_of(pretrained("Bert", tmp_path)))
    other = replace(pretrained("Bert", tmp_path), rank=3)
    with pytest.raises(InvalidModel, match="another model than the plan's: name it as it was exported"):
        write_merged(other, Values(model.schema, model.initial, model.frozen_vectors), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_layer_without_an_influence_gets_no_adapters(tmp_path):
    """An embedding drops what BERT's pooler makes, and attention in MRA is zero where its kernels are not there."""
    import transformers

    schema = Model(spec_of(pretrained("Bert", tmp_path, EMBEDS, layers=("dense",)))).schema
    assert [one.name for one in schema.tensors if "pooler" in one.name] == []
    transformers.MraModel(transformers.MraConfig(**SIZES)).save_pretrained(tmp_path / "mra")
    with pytest.raises(InvalidModel, match="nothing that MraForSequenceClassification gives depends on its layers q"):
        Model(load(tmp_path / "mra", tokens=10))


@pytest.mark.parametrize("family", ["Roberta", "MPNet", "Longformer"])
def test_positions_that_begin_after_padding_leave_fewer_tokens(family, tmp_path):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "pad_token_id": 1})
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidModel, match="reads 30 tokens at most, not 31"):
        Model(load(tmp_path, tokens=31))
    model = Model(load(tmp_path, tokens=30)).evaluating()
    assert model.module(torch.full((1, 30), 7)).shape == (1, 2)


def test_padding_changes_nothing(tmp_path):
    model = Model(spec_of(pretrained("Bert", tmp_path))).trained(Model(spec_of(pretrained("Bert", tmp_path))).initial)
    short = torch.tensor([[5, 9, 7, 0, 0, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model.module(short), model.module(short[:, :4]), rtol=0, atol=1e-6)


def test_loss_of_next_tokens_leaves_padding_out(tmp_path):
    spec = spec_of(pretrained("Llama", tmp_path))
    logits = torch.zeros(1, 10, WORDS)
    logits[0, :2, 7] = 50.0
    tokens = torch.tensor([[5, 7, 7, 0, 0, 0, 0, 0, 0, 0]])
    assert spec.loss(logits, tokens).item() == pytest.approx(0, abs=1e-6)
    assert spec.metrics["accuracy"](logits, tokens).item() == 1


def test_frozen_a_halves_the_report_and_is_in_the_frozen_blob(tmp_path):
    whole, half = (Model(spec_of(pretrained("Llama", tmp_path, freeze_a=frozen))) for frozen in (False, True))
    assert not any("lora_down" in tensor.name for tensor in half.schema.tensors)
    assert any("lora_down" in name for name in half.frozen_vectors)
    assert half.schema.size < 0.6 * whole.schema.size


def test_the_number_of_parameters_is_told_of_a_language_model(tmp_path):
    """As `muster plan verify` asks for it, with no memory for weights."""
    spec = spec_of(pretrained("Llama", tmp_path, bits=8))
    assert parameter_count(spec) == Model(spec).schema.size


def test_shards_are_read_as_one(tmp_path):
    import transformers

    transformers.AutoModel.from_pretrained(saved("Bert", tmp_path / "one")).save_pretrained(
        tmp_path / "many", max_shard_size="4KB"
    )
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (Model(load(tmp_path / name, tokens=10)).frozen_vectors for name in ("one", "many"))
    assert all(np.array_equal(one[name], many[name]) for name in one)


def test_a_source_in_words_is_the_same_model(tmp_path):
    folder = saved("GPT2", tmp_path / "gpt2")
    spec = load_any(f"hf:{folder},task=causal-lm,rank=1,tokens=6,layers=c_attn+c_fc,freeze_a=true")
    names = [tensor.name for tensor in Model(spec).schema.tensors]
    assert [name.split(".")[-3] for name in names] == ["c_attn", "c_fc"]


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def no_config(folder):
    (folder / "config.json").unlink()


def unknown(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "telepathy", "vocab_size": 3}))


def of_images(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


def of_words_for_images(folder):
    import transformers

    transformers.BeitModel(transformers.BeitConfig(**SIZES)).save_pretrained(folder)


def pickled(folder):
    no_weights(folder)
    torch.save({}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("settings", "harm", "message"),
    [
        ("tokens=10", no_weights, "has no weights for classification"),
        ("tokens=10", pickled, "has no weights for classification"),
        ("tokens=10", no_config, "has no config.json"),
        ("tokens=10", unknown, "is of no architecture that is known here"),
        ("tokens=10", of_images, "is a vit, which reads no tokens"),
        ("tokens=10,task=embedding", of_words_for_images, "BeitModel does not run on 10 tokens alone: "),
        ("tokens=64", None, "reads 32 tokens at most, not 64"),
        ("task=poetry", None, "no task is called 'poetry'"),
        ("rank=-1", None, "rank is -1; the least is 0"),
        ("rank=0,layers=query", None, "rank is 0, so there are no adapters for layers and freeze_a"),
        ("rank=4,rank=2", None, "rank is there twice"),
        ("task=embedding,classes=3", None, "embedding has no classes"),
        ("rank=many", None, "rank cannot be 'many'"),
        ("bits=3", None, "weights in 3 bits; there are 32, 8 and 4"),
        ("speed=3", None, "has no setting 'speed'"),
        ("tokens=10,layers=telepathy", None, "no layer that can be adapted"),
    ],
)
def test_bad_folders_and_settings_get_one_line(settings, harm, message, tmp_path):
    folder = saved("Bert", tmp_path / "bert")
    if harm is not None:
        harm(folder)
    with pytest.raises(InvalidModel, match=message) as caught:
        Model(load_any(f"hf:{folder},{settings}"))
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)


def test_the_help_of_export_names_every_task_and_setting():
    words = " ".join((export.__doc__ or "").split())
    settings = {field.name for field in fields(Pretrained)} - {"folder"}
    assert [name for name in (*TASKS, *settings) if name not in words] == []
