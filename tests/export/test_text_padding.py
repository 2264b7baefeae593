"""Padding is told from a text by a number that no text has: what a text says counts, whatever token fills others."""

import json

import numpy as np
import pytest
import torch
from msgspec import UNSET

from device_runtime.backends import BACKENDS, FORMATS
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.examples import open_examples
from device_runtime.state.folder import BlobCache
from device_runtime.trainer import InProcess, Limits, Texts
from device_runtime.work import Worker
from export.build import export_bundle
from export.errors import InvalidModel
from export.huggingface.folder import load
from export.huggingface.modules import LastToken
from export.model import GradientOracle, Model
from fedcore.algorithms import create
from fedcore.plan import PREDICT, BlobRef, ExampleSpec
from tests.device_runtime.test_releases import assignment
from tests.export.test_huggingface import CLASSIFIES, CONTINUES, EMBEDS, FAMILIES, OF_TOKENS, SEVERAL, WORDS, saved
from tests.export.test_huggingface_texts import FILES, with_tokenizer
from tests.export.test_predict import outputs_of
from tests.export.test_pretrained_weights import configured, folder_of
from tests.sampled import sampled

END = 0
"""<|endoftext|> of the tokenizer."""
LENGTH = 12
SIZES = {"vocab_size": 520, "pad_token_id": None, "bos_token_id": None}
DECODERS = ("GPT2", "Llama", "Qwen3", "Mamba")
TEXTS = ["a fox!", "a fox!<|endoftext|>", "a<|endoftext|>fox!"]


@pytest.fixture(autouse=True, scope="module")
def libraries():
    pytest.importorskip("transformers")


def decoder(path, family="Llama", kind="AutoModelForCausalLM", **sizes):
    """A tiny decoder whose token 0 ends texts, and a word of which is the token 0 if `sizes` says that another does."""
    folder, _ = folder_of(path, family, kind, **SIZES | {"eos_token_id": END, "initializer_range": 0.3} | sizes)
    with_tokenizer(folder, FILES["qwen"])
    return folder


def tokens_of(model, folder, texts):
    """The tokens (n, T) that a device makes of texts, and those of each without padding."""
    import tokenizers

    field, (data,) = model.spec.inputs[0], model.spec.tokenizers
    rows = np.array([np.frombuffer(text.encode().ljust(60, b"\0"), np.uint8) for text in texts])
    np.savez(folder / "texts.npz", **{field.name: rows})
    made = Texts({BlobRef.of(data): data}.__getitem__, InProcess(OnnxRuntime()), Limits(10**9, 60.0), lambda: True)
    found = open_examples(folder / "texts.npz").load(ExampleSpec((field,)), tokenize=made.tokenize)[field.name]
    plain = [tokenizers.Tokenizer.from_str(data.decode()).encode(text).ids for text in texts]
    return torch.from_numpy(found), [torch.tensor([ids]) for ids in plain]


def entropies(folder, ids):
    """Cross-entropy of each token but the first, as transformers has it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")


@pytest.mark.parametrize("eos", [END, [501, 502], None])
@pytest.mark.parametrize("family", DECODERS)
def test_the_loss_of_a_text_is_that_of_all_its_tokens(family, eos, tmp_path):
    folder = decoder(tmp_path / "model", family, eos_token_id=eos)
    model = Model(load(folder, task=CONTINUES, tokens=LENGTH)).evaluating()
    rows, plain = tokens_of(model, folder, TEXTS)
    assert [END in ids for ids in plain] == [False, True, True]
    found = model.measure({}, {"text": rows}, torch.ones(len(rows)))["loss"]
    wanted = torch.stack([entropies(folder, ids).mean() for ids in plain])
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-5)


def test_the_loss_of_weights_in_few_bits_counts_every_token_too(tmp_path):
    folder = decoder(tmp_path / "model")
    model = Model(load(folder, task=CONTINUES, tokens=LENGTH, bits=8))
    rows, _ = tokens_of(model, folder, TEXTS)
    deferred, plain = (one.measure({}, {"text": rows}, torch.ones(len(rows))) for one in (model, model.evaluating()))
    for name, values in plain.items():
        torch.testing.assert_close(deferred[name], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_class_is_told_from_the_last_token_of_a_text_whatever_that_is(family, tmp_path):
    import transformers

    kind = "AutoModelForSequenceClassification"
    folder = decoder(tmp_path / "model", family, kind, pad_token_id=END, num_labels=3)
    model = Model(load(folder, classes=3, tokens=LENGTH)).evaluating()
    rows, plain = tokens_of(model, folder, TEXTS)
    theirs = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()
    theirs.config.pad_token_id = None  # so it takes the last token
    assert isinstance(model.module, LastToken)
    with torch.no_grad():
        wanted = torch.cat([theirs(ids).logits for ids in plain])
        torch.testing.assert_close(model.predict({}, {"text": rows})["output"], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Roberta", "ModernBert", "DebertaV2"])
@pytest.mark.parametrize("task", [CLASSIFIES, SEVERAL, OF_TOKENS, EMBEDS])
def test_tokens_of_apps_are_filled_with_the_folders_padding_or_beyond(family, task, tmp_path):
    folder = saved(family, tmp_path / "model")
    own = json.loads((folder / "config.json").read_text())["pad_token_id"]
    model = Model(load(folder, task=task, tokens=LENGTH)).evaluating()
    name, text = model.spec.inputs[0].name, torch.tensor([[5, 9, 7, 11]])
    rows = torch.full((2, LENGTH), own)
    rows[1] = model.spec.inputs[0].high - 1
    rows[:, :4] = text
    assert model.spec.inputs[0].high == WORDS + 1
    found, alone = (model.predict({}, {name: ids})["output"] for ids in (rows, text))
    for one in found:
        torch.testing.assert_close(one[: len(alone[0])], alone[0], rtol=0, atol=1e-5)


def test_what_a_model_makes_of_padding_itself_may_be_anything(tmp_path):
    import transformers

    sizes = FAMILIES["DebertaV2"][0] | {"relative_attention": False, "num_hidden_layers": 2}
    transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes)).save_pretrained(tmp_path)
    assert Model(load(tmp_path, task=OF_TOKENS, tokens=LENGTH)).module.padding.ids == (WORDS, 0)


@pytest.mark.parametrize("kind", ["pad_token_id", "sep_token_id"])
def test_a_token_of_padding_with_another_use_fills_no_text(kind, tmp_path):
    folder = saved("Llama", tmp_path / "model")
    configured(folder, pad_token_id=7, **({"eos_token_id": [5, 7]} if kind == "pad_token_id" else {kind: 7}))
    model = Model(load(folder, task=CONTINUES, tokens=4)).evaluating()
    every = torch.tensor([[5, 7, 7, WORDS]])
    found = model.measure({}, {"tokens": every}, torch.ones(1))["loss"]
    torch.testing.assert_close(found.detach(), entropies(folder, every[:, :3]).mean()[None], rtol=1e-5, atol=1e-5)


def test_a_word_at_the_place_of_padding_is_no_padding_of_tokens(tmp_path):
    """BERT's padding is 0 unless its config.json says another; here the tokenizer has a word there."""
    folder, _ = folder_of(tmp_path / "model", vocab_size=520)
    with_tokenizer(folder, FILES["gpt2"] | {"added_tokens": []})
    spec = load(folder, task=OF_TOKENS, tokens=4)
    assert spec.inputs[0].tokenizer is UNSET
    assert spec.make().padding.ids == (520,)


@pytest.mark.parametrize("has_file", [True, False])
def test_a_token_of_padding_that_stands_for_unknown_words_fills_no_text(has_file, tmp_path):
    folder, _ = folder_of(tmp_path / "model", vocab_size=520, pad_token_id=1)
    noted = {"0": {"content": "[PAD]", "special": True}, "1": {"content": "[UNK]", "special": True}}
    kind = "BertTokenizer" if has_file else "LlamaTokenizer"
    with_tokenizer(folder, FILES["word_piece"], added_tokens_decoder=noted, unk_token="[UNK]", tokenizer_class=kind)
    if not has_file:
        (folder / "tokenizer.json").unlink()
    assert load(folder, task=OF_TOKENS, tokens=4).make().padding.ids == (520,)
    configured(folder, pad_token_id=0)
    assert load(folder, task=OF_TOKENS, tokens=4).make().padding.ids == (520, 0)


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_a_model_that_sees_the_next_token_cannot_learn_to_tell_it(family, tmp_path):
    folder, _ = folder_of(tmp_path / "model", family)
    with pytest.raises(InvalidModel, match=r"looks at tokens that follow, .*; causal-lm needs a decoder"):
        Model(load(folder, task=CONTINUES, tokens=8))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("FNet", {}),
        ("MobileBert", {"num_attention_heads": 2}),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                    "original_max_position_embeddings": 3,
                },
                "num_attention_heads": 2,
            },
        ),
    ],
)
def test_a_model_in_which_padding_counts_is_refused(family, sizes, tmp_path):
    """MobileBERT's reads the token that follows; a table of positions may be another one for long texts."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=24,
        max_position_embeddings=16,
        initializer_range=0.3,
        **sizes,
    )
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    for parameter in model.parameters():  # MobileBERT's embedding of padding is drawn as zeros, as trained ones are not
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidModel, match=f"padding changes what {family}ForSequenceClassification makes of a text"):
        Model(load(tmp_path / "model", tokens=8, rank=0))


def test_a_model_that_pools_tokens_with_padding_is_refused(tmp_path):
    """Funnel pools pairs, so padding counts in texts of an odd length alone."""
    import transformers

    sizes = {"vocab_size": WORDS, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.FunnelConfig(**sizes, block_sizes=[1, 1], num_decoder_layers=1, separate_cls=False)
    transformers.FunnelForTokenClassification(config).save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidModel, match="padding changes what FunnelForTokenClassification makes of a text"):
        Model(load(tmp_path / "model", task=OF_TOKENS, tokens=16, rank=0))


@pytest.mark.parametrize("task", sampled([CONTINUES, CLASSIFIES], [CONTINUES]))
def test_both_formats_step_and_predict_as_torch_does_on_texts_that_end(task, tmp_path, executorch):
    """A batch of the plan has a place without a text, too."""
    folder = decoder(tmp_path / "model", eos_token_id=[501, END])
    model, algorithm = (
        Model(load(folder, task=task, tokens=LENGTH)),
        create("fedavg", {"batch_size": 4, "client_lr": 1}),
    )
    bundle = export_bundle(model, algorithm, tmp_path / "plan", targets=tuple(FORMATS))
    rows, plain = tokens_of(model, folder, TEXTS)
    examples = {"text": rows.numpy()} | {item.name: np.arange(3) % 2 for item in model.spec.fields[1:]}
    np.savez(tmp_path / "examples.npz", **examples)
    batch = {name: torch.from_numpy(values) for name, values in examples.items()}
    _, gradient_D, _ = GradientOracle(model, batch, torch.ones(3))(torch.from_numpy(model.initial))
    cache = BlobCache(tmp_path / "blobs", lambda ref, part: part.append(bundle.read(ref)))
    given = assignment(plan=bundle.manifest.plan, checkpoint=bundle.manifest.state)
    for form, ref in bundle.plan.predict.graphs.items():
        backend = BACKENDS[FORMATS[form]]()
        worker = Worker(InProcess(backend), open_examples(tmp_path / "examples.npz"), cache, lambda: True)
        change_D = worker.train(given, bundle.plan, Limits(4_000_000_000, 600.0)).values[: model.schema.size]
        torch.testing.assert_close(torch.from_numpy(change_D), -gradient_D, rtol=1e-4, atol=1e-6)
        graph = backend.load(bundle.read(ref), PREDICT)
        for row, ids in zip(examples["text"], plain, strict=True):
            found = outputs_of(graph, bundle.plan.predict, model, model.initial, {"text": row[None]})["output"][0]
            wanted = model.predict({}, {"text": ids})["output"][0].detach().numpy()
            np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=0, atol=1e-5)
