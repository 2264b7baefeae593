"""Every frozen tensor of a pretrained model is the folder's own, or the folder is refused by name."""

import builtins
import json
import shutil

import pytest
import torch

from export.build import export_bundle, verify_bundle
from export.errors import InvalidModel, ParityFailed
from export.huggingface.folder import Pretrained, load, spec_of
from export.huggingface.written import Values, write_adapters, write_merged
from export.model import Model
from export.models import load as load_any
from fedcore.algorithms import create
from muster.commands.model import _write_folder
from tests.export.test_huggingface import CLASSIFIES, CONTINUES, EMBEDS, FAMILIES, OF_TOKENS, SEVERAL, SIZES, WORDS
from tests.export.test_inference import trained
from tests.sampled import sampled

TASKS = (CLASSIFIES, SEVERAL, OF_TOKENS, EMBEDS)


@pytest.fixture(autouse=True, scope="module")
def libraries():
    pytest.importorskip("transformers")


def folder_of(path, family="Bert", kind="AutoModelForMaskedLM", dtype=torch.float32, **sizes):
    """A tiny model of two layers, written as its authors would, and its tensors."""
    import transformers

    torch.manual_seed(0)
    layers = {"n_layer" if family == "GPT2" else "num_hidden_layers": 2}
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family][0], **layers, **sizes})
    model = getattr(transformers, kind).from_config(config)
    model.to(dtype).save_pretrained(path)
    return path, model.state_dict()


def renamed(folder, change):
    """Write the folder's tensors anew, each under the name that `change` gives it, or not at all."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items()}
    tensors.pop(None, None)
    save_file(tensors, path, {"format": "pt"})


def configured(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def module_of(folder, task, **settings):
    return Model(load(folder, task=task, tokens=8, **settings)).module.model


def test_all_but_a_head_is_the_folders(tmp_path):
    for task in TASKS:
        folder, tensors = folder_of(tmp_path / task)
        found = module_of(folder, task).state_dict()
        prefix = "" if task == EMBEDS else "bert."
        own = {name.removeprefix("bert."): tensor for name, tensor in tensors.items() if name.startswith("bert.")}
        assert len(own) == 37
        assert all(torch.equal(found[prefix + name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name: f"_orig_mod.{name}", "36 other tensors of .*: its names begin with _orig_mod.; save the model"),
        (lambda name: f"module.{name}", "36 other tensors of .*: its names begin with module.; save the model"),
        (lambda name: None if "layer.1." in name else name, r"lacks .*encoder\.layer\.1\..* and 15 other tensors of"),
        (lambda name: name.replace("word_emb", "emb"), r"lacks .*embeddings\.word_embeddings\.weight of Bert"),
        (lambda name: name.replace("encoder", "encoder._orig_mod"), "lacks .*encoder.layer.0"),
    ],
)
def test_tensors_that_the_files_lack_are_named(task, change, words, tmp_path):
    folder, _ = folder_of(tmp_path / "bert")
    renamed(folder, change)
    with pytest.raises(InvalidModel, match=words) as caught:
        module_of(folder, task)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", [CLASSIFIES, EMBEDS])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"vocab_size": WORDS + 3},
            r"word_embeddings.weight in the size \[61, 16\], and its config.json says \[64, 16",
        ),
        ({"hidden_size": 32}, r"in the size \[16\], and its config.json says \[32\]"),
        ({"intermediate_size": 12}, r"dense.bias and 5 other tensors in the size \[24\]"),
        ({"max_position_embeddings": 40}, "has .*position_embeddings.weight in the size"),
        ({"num_hidden_layers": 3}, r"lacks .*encoder\.layer\.2\..* and 15 other tensors"),
        ({"num_hidden_layers": 1}, r"has .*encoder\.layer\.1\..* and 15 other tensors, for which Bert.* has no place"),
    ],
)
def test_a_configuration_of_other_sizes_is_refused(task, value, words, tmp_path):
    folder, _ = folder_of(tmp_path / "bert")
    configured(folder, **value)
    with pytest.raises(InvalidModel, match=words):
        module_of(folder, task)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_become_floats_of_the_same_values(dtype, tmp_path):
    folder, tensors = folder_of(tmp_path / "bert", dtype=dtype)
    found = module_of(folder, CLASSIFIES).state_dict()["bert.embeddings.word_embeddings.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, tensors["bert.embeddings.word_embeddings.weight"].float())


def test_a_head_of_other_classes_is_a_new_one_and_one_of_as_many_is_kept(tmp_path):
    folder, tensors = folder_of(tmp_path / "bert", kind="AutoModelForSequenceClassification", num_labels=3)
    assert module_of(folder, CLASSIFIES, classes=5).classifier.weight.shape == (5, 16)
    assert torch.equal(module_of(folder, CLASSIFIES, classes=3).classifier.weight, tensors["classifier.weight"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own call
@pytest.mark.parametrize("bits", [32, 8])
def test_a_pooler_that_the_files_lack_is_trained_with_the_head(bits, tmp_path):
    import peft
    import transformers

    given = Pretrained(str(folder_of(tmp_path / "bert")[0]), tokens=8, bits=bits)
    model = Model(spec_of(given))
    assert [spec.name for spec in model.schema.tensors if "lora" not in spec.name] == [
        f"model.{layer}.{kind}" for layer in ("bert.pooler.dense", "classifier") for kind in ("weight", "bias")
    ]
    values = Values(model.schema, model.initial + 0.1, model.frozen_vectors)
    write_adapters(given, values, tmp_path / "adapters")
    write_merged(given, values, tmp_path / "merged")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(given.folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[5, 9, 7, 11]])
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-6)
    if bits == 32:
        torch.testing.assert_close(model.trained(values.params).module(ids), merged(ids).logits, rtol=0, atol=1e-5)


def test_vectors_need_no_pooler_and_carry_none_that_was_drawn(tmp_path):
    folder, _ = folder_of(tmp_path / "bert")
    assert not any("pooler" in name for name in Model(load(folder, task=EMBEDS, tokens=8)).frozen_vectors)


def test_layers_of_logits_that_are_tied_are_those_of_the_embeddings(tmp_path):
    folder, tensors = folder_of(tmp_path / "tied", "Llama", "AutoModelForCausalLM", tie_word_embeddings=True)
    assert torch.equal(module_of(folder, CONTINUES).lm_head.weight, tensors["model.embed_tokens.weight"])
    configured(folder, tie_word_embeddings=False)
    with pytest.raises(InvalidModel, match=r"lacks lm_head\.weight of LlamaForCausalLM"):
        module_of(folder, CONTINUES)


def test_a_language_model_takes_no_folder_of_another_task(tmp_path):
    folder, _ = folder_of(
        tmp_path / "llama", "Llama", "AutoModelForSequenceClassification", tie_word_embeddings=True, num_labels=2
    )
    with pytest.raises(InvalidModel, match=r"has score\.weight, for which LlamaForCausalLM .* has no place"):
        module_of(folder, CONTINUES)


def test_adapters_of_layers_with_one_weight_are_not_merged_into_it(tmp_path):
    import transformers

    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    mamba = {"mamba_d_state": 4, "mamba_headdim": 16, "n_mamba_heads": 2, "mamba_ngroups": 1, "num_mem_blocks": 1}
    kinds = {"num_hidden_layers": 2, "layers_block_type": ["hybrid", "hybrid"], "initializer_range": 0.3}
    config = transformers.Zamba2Config(**sizes, **mamba, **kinds)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    given = Pretrained(str(tmp_path / "model"), CONTINUES, tokens=8, layers=("v_proj",))
    model = Model(spec_of(given))
    values = Values(model.schema, model.initial + 1, model.frozen_vectors)
    with pytest.raises(InvalidModel, match="weights cannot hold what its adapters do, as when layers share one; write"):
        write_merged(given, values, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_merged_folder_says_its_task_and_no_padding_that_it_lacks(tmp_path):
    folder, _ = folder_of(tmp_path / "model", "Llama", "AutoModelForSequenceClassification", num_labels=1)
    configured(folder, problem_type="regression", pad_token_id=None)
    given = Pretrained(str(folder), tokens=8)
    model = Model(spec_of(given))
    write_merged(given, Values(model.schema, model.initial, model.frozen_vectors), tmp_path / "merged")
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written["problem_type"] == "single_label_classification"
    assert written.get("pad_token_id") is None
    assert written["use_cache"]


@pytest.mark.parametrize(
    ("other", "to"), sampled([(SEVERAL, "peft"), (OF_TOKENS, "transformers")], [(SEVERAL, "peft")])
)
def test_adapters_are_written_only_for_the_task_they_were_trained_for(other, to, tmp_path):
    """Both have the same tensors as a classifier. The length of texts changes no weight, and need not be named."""
    folder, _ = folder_of(tmp_path / "model", "ModernBert", "AutoModel")
    model = Model(load(folder, task=other, tokens=8))
    with pytest.raises(InvalidModel, match="another model than the plan's: name it as it was exported"):
        _write_folder(to, Pretrained(str(folder), tokens=8), trained(model, model.initial), tmp_path / "other")
    _write_folder(to, Pretrained(str(folder), other), trained(model, model.initial), tmp_path / "same")
    assert (tmp_path / "same").exists() > (tmp_path / "other").exists()


def quantised(folder):
    configured(folder, quantization_config={"quant_method": "fp8"})


def adapted(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')


def of_many(folder):
    (folder / "model.safetensors").rename(folder / "shard-00001-model-00001-of-00001.safetensors")


def indexed(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"bert.embeddings.word_embeddings.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def changed(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def twice(folder):
    """Under two names, of which the library takes one."""
    name = "embeddings.word_embeddings.weight"
    changed(folder, lambda tensors: tensors.update({name: tensors[f"bert.{name}"] + 1}))


def stale(folder):
    """Shards of a later version beside a whole file."""
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")


@pytest.mark.parametrize("bits", [32, 8])
def test_adapters_are_written_only_for_the_folder_they_were_trained_on(bits, tmp_path):
    folder, _ = folder_of(tmp_path / "bert")
    given = Pretrained(str(folder), tokens=8, bits=bits, freeze_a=True)
    model = Model(spec_of(given), seed=3)
    values = Values(model.schema, model.initial, model.frozen_vectors)
    write_adapters(given, values, tmp_path / "adapters")
    changed(folder, lambda tensors: tensors["bert.encoder.layer.1.output.dense.weight"].mul_(1.01))
    for write in (write_adapters, write_merged):
        with pytest.raises(InvalidModel, match=r"has other weights than the plan's, in .*encoder\.layer\.1\.output"):
            write(given, values, tmp_path / "written")


def test_a_plan_of_other_weights_than_the_folders_is_not_verified(tmp_path):
    """A random A is of no folder."""
    source = f"hf:{folder_of(tmp_path / 'bert')[0]},tokens=8,freeze_a=true"
    bundle = export_bundle(Model(load_any(source), 3), create("fedavg", {}), tmp_path / "plan", source)
    assert verify_bundle(bundle, source).worst <= 1e-5
    changed(tmp_path / "bert", lambda tensors: tensors["bert.encoder.layer.1.output.dense.weight"].mul_(1.01))
    with pytest.raises(ParityFailed, match=r"frozen .*encoder\.layer\.1\.output.* is not that of model hf:"):
        verify_bundle(bundle, source)


def prompted(folder):
    changed(folder, lambda tensors: tensors.update({"bert.prompt.weight": torch.ones(4, 16)}))


def whole(folder):
    name = "bert.encoder.layer.0.output.dense.weight"
    changed(folder, lambda tensors: tensors.update({name: (100 * tensors[name]).to(torch.int8)}))


def whole_bias(folder):
    name = "bert.encoder.layer.0.output.dense.bias"
    changed(folder, lambda tensors: tensors.update({name: (100 * tensors[name] + 1).to(torch.int8)}))


def elsewhere(folder):
    """Weights of integers, in a shard of another name."""
    whole(folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = dict.fromkeys(folder_of(folder / "names")[1], "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def renamed_file(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    configured(folder, transformers_weights="other.safetensors")


def infinite(folder):
    name = "bert.encoder.layer.1.output.dense.weight"
    changed(folder, lambda tensors: tensors[name].fill_(torch.nan))


def fewer(folder):
    """One of two shards has no name in the index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for place, names in enumerate((sorted(tensors)[:20], sorted(tensors)[20:])):
        file = f"model-{place + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file) if place == 0 else {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (quantised, r"has quantised weights \(fp8\); give the folder of the exact ones"),
        (adapted, "has a file adapter_config.json, of adapters; merge them into their model"),
        (of_many, "has a file shard-00001-model-.*, of a checkpoint by several processes"),
        (indexed, "has no weights for classification: .*model-00002-of-00002.safetensors"),
        (fewer, "lacks bert.encoder.layer"),
        (infinite, "encoder.layer.1.output.dense.weight hold a number that is not finite"),
        (twice, "twice: bert.embeddings.word_embeddings.weight in .*, and embeddings.word_embeddings.weight in"),
        (stale, "twice: .* in model-00001-of-00001.safetensors, and .* in model.safetensors; remove one"),
        (prompted, "has bert.prompt.weight, for which BertForSequenceClassification of its config.json has no place"),
        (whole, "has bert.encoder.layer.0.output.dense.weight in model.safetensors as I8; weights are floating"),
        (whole_bias, "has bert.encoder.layer.0.output.dense.bias in model.safetensors as I8; weights are floating"),
        (elsewhere, "has bert.encoder.layer.0.output.dense.weight in part.safetensors as I8; weights are floating"),
        (renamed_file, "/config.json says that weights are in other.safetensors; write them with save_pretrained"),
    ],
)
def test_weights_that_are_not_plain_or_not_whole_are_refused(harm, words, tmp_path):
    folder, _ = folder_of(tmp_path / "bert")
    harm(folder)
    with pytest.raises(InvalidModel, match=words) as caught:
        module_of(folder, CLASSIFIES)
    assert "\n" not in str(caught.value)


def test_a_model_that_changes_its_own_weights_is_refused(tmp_path):
    """RWKV halves some before its first forward pass, and would again where they were written back."""
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "rescale_every": 1}
    transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(InvalidModel, match=r"RwkvForCausalLM changes its weight rwkv\..* when it runs, so"):
        module_of(tmp_path, CONTINUES, layers=("key",))


@pytest.mark.security("No data is run as code. … There is no pickle")
@pytest.mark.parametrize("type_", ["telepathy", "bert"])
def test_code_of_a_folder_is_not_run_and_nobody_is_asked(type_, tmp_path, monkeypatch):
    folder, _ = folder_of(tmp_path / "bert")
    classes = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    configured(folder, model_type=type_, auto_map=classes)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    asked = []
    monkeypatch.setattr(builtins, "input", lambda words="": asked.append(words) or "y")
    if type_ == "bert":
        module_of(folder, CLASSIFIES)
    else:
        with pytest.raises(InvalidModel, match="is of no architecture that is known here"):
            module_of(folder, CLASSIFIES)
    assert (asked, (tmp_path / "ran").exists()) == ([], False)
