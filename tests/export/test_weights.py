"""Frozen weights in 8 and 4 bits: codes, graphs in both formats, memory, and what they cost."""

import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from export.build import build_plan, export_bundle, verify_bundle
from export.errors import InvalidModel
from export.huggingface.folder import Pretrained, load, spec_of, unadapted
from export.huggingface.written import Values, write_merged
from export.model import GradientOracle, Model, ModelSpec, cross_entropy
from export.parity import footprint
from export.trial_examples import cost_of_bits
from export.weights import BLOCK, Codes, DenseInFewBits, in_few_bits, lora
from fedcore.algorithms import create
from fedcore.checkpoint import decode, decode_frozen, encode, encode_frozen, frozen_specs_of
from fedcore.errors import SchemaError
from fedcore.plan import Field
from tests.export import models
from tests.export.test_huggingface import FAMILIES, pretrained
from tests.sampled import sampled

WORDS = 300


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer, as in language models."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS, bias=False)
        self.inner, self.own = nn.Linear(64, 64), nn.Linear(WORDS, 5)
        self.last.weight = self.words.weight

    def forward(self, places):
        return self.own(self.last(self.inner(self.words(places.long())).tanh()).mean(1))


def tied(bits):
    def make():
        module = Tied()
        if bits < 32:
            in_few_bits(module, bits, lambda path: path != "own")
        return lora(module, 2, ["inner"], ["own.*"])

    inputs, label = (Field("words", "int32", (6,), WORDS),), Field("y", "int64", (), 5)
    return ModelSpec("tied", make, cross_entropy, inputs, label, exact=lambda: tied(32).make())


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_a_number_is_within_half_a_step_of_its_weight(bits, most):
    weight = torch.randn(7, 128, generator=torch.manual_seed(0)) * torch.logspace(-6, 6, 7)[:, None]
    weight[3] = 0
    codes = Codes(weight, bits)
    assert codes.codes.numel() == 7 * 128 * bits // 8
    size = 128 if bits == 8 else BLOCK
    steps = weight.reshape(7, -1, size).abs().amax(-1, keepdim=True) / most
    apart = (codes.numbers - weight).reshape(7, -1, size).abs()
    assert (apart <= 0.5001 * steps).all()
    assert (codes.numbers[3] == 0).all()
    assert torch.equal(codes.rows(torch.tensor([6, 0])), codes.numbers[[6, 0]])


def test_a_weight_whose_inputs_make_no_blocks_takes_8_bits():
    layer = in_few_bits(nn.Sequential(nn.Linear(96, 40)), 4)[0]
    assert (layer.weight_in_bits.bits, layer.weight.shape) == (8, (40, 96))


def test_a_layer_alone_is_refused():
    with pytest.raises(InvalidModel, match="put it into a module"):
        in_few_bits(nn.Linear(64, 64), 8)


def test_small_weights_stay_as_they_are():
    module = in_few_bits(nn.Sequential(nn.Linear(8, 4), nn.Linear(64, 64)), 8)
    assert [type(layer) for layer in module] == [nn.Linear, DenseInFewBits]


def test_a_layer_with_two_paths_stays_one():
    layer = nn.Linear(64, 64)
    first, second = in_few_bits(nn.Sequential(layer, layer), 8)
    assert isinstance(first, DenseInFewBits)
    assert first is second


def test_layers_that_do_more_stay_as_they_are():
    module = nn.Sequential(nn.Embedding(64, 64, max_norm=0.5), nn.Linear(64, 64), nn.Linear(64, 64))
    module[1].register_forward_hook(lambda layer, inputs, output: 3 * output)
    module[2].register_forward_pre_hook(lambda layer, inputs: (3 * inputs[0],))
    before = module(torch.arange(64))
    torch.testing.assert_close(in_few_bits(module, 8)(torch.arange(64)), before)


@pytest.mark.parametrize("bits", [3, 16, 32])
def test_other_bits_are_refused(bits, tmp_path):
    with pytest.raises(InvalidModel, match=f"weights in {bits} bits; there are 8 and 4"):
        in_few_bits(nn.Sequential(nn.Linear(64, 64)), bits)
    if bits != 32:
        with pytest.raises(InvalidModel, match=f"weights in {bits} bits; there are 32, 8 and 4"):
            Pretrained.parse(f"hf:{tmp_path},bits={bits}")


@pytest.mark.parametrize(("bits", "most"), sampled([(8, 0.29), (4, 0.19)], [(4, 0.19)]))
def test_a_tied_weight_travels_once_in_few_bits_and_trains_as_in_torch(bits, most, tmp_path, executorch):
    exact = sum(vector.nbytes for vector in Model(tied(32)).frozen_vectors.values())
    bundle = export_bundle(Model(tied(bits)), create("fedavg"), tmp_path, targets=("onnx", "executorch"))
    assert {one.name: one.dtype for one in bundle.plan.frozen.vectors} == {
        "inner.bias": "float32",
        **{
            f"{name}.weight_in_bits.{part}": kind
            for name in ("words", "inner")
            for part, kind in (("codes", "uint8"), ("scales", "float32"))
        },
    }
    assert bundle.plan.frozen.blob.size <= most * exact
    assert bundle.certificate.worst <= 1e-5
    cost = bundle.certificate.quantisation
    assert cost.bits == bits
    assert 0 < abs(cost.loss - cost.exact_loss) < 0.1


def test_the_cost_of_bits_is_that_of_the_weights_which_the_seed_draws():
    cost = cost_of_bits(Model(tied(8), 5))
    assert abs(cost.loss - cost.exact_loss) < 0.01


def test_a_bundle_in_few_bits_is_verified(tmp_path):
    name = "tests.export.models:digits_in_4_bits"
    bundle = export_bundle(Model(models.digits_in_4_bits()), create("fedavg"), tmp_path, name)
    assert verify_bundle(bundle, name).worst <= 1e-5


@pytest.mark.long
def test_a_graph_holds_no_more_than_some_weights_as_floats_at_once(tmp_path):
    def make(bits):
        body = [layer for _ in range(24) for layer in (nn.Linear(512, 512), nn.Tanh())]
        chosen = in_few_bits(nn.Sequential(*body), bits) if bits < 32 else body
        return lora(nn.Sequential(*chosen, nn.Linear(512, 5)), 2, ["0"], ["48.*"])

    peaks = {}
    for bits in (32, 8):
        field = Field("x", "float32", (512,))
        spec = ModelSpec("deep", lambda bits=bits: make(bits), cross_entropy, (field,), Field("y", "int64", (), 5))
        algorithm = create("fedavg", {"batch_size": 4})
        bundle = export_bundle(Model(spec), algorithm, tmp_path / str(bits))
        peaks[bits] = bundle.certificate.formats["onnx"].footprint.peak_rss_mb
    # As floats the weights are 25 MB, in bytes 6; a graph that makes all of them first would hold 31.
    assert peaks[8] <= peaks[32] - 8, peaks


def test_nothing_is_made_of_codes_or_scales_before_a_value_needs_it():
    """Else a runtime makes it of all layers first, and holds it until the backward pass."""
    plan, graphs = build_plan(Model(tied(4)), create("fedavg"), ("onnx",))
    (outer,) = (onnx.load_from_string(graphs[ref]).graph for name, ref in plan.graphs["onnx"].items() if "step" in name)
    (step,) = [node for node in outer.node if node.op_type in ("Loop", "Scan")]
    body = next(one.g for one in step.attribute if one.name == "body")
    known = {item.name for item in (*outer.initializer, *body.initializer)}
    known |= {item.name for item in outer.input if "_in_bits" in item.name}
    assert len([name for name in known if "_in_bits" in name]) == 4
    early = set()
    for node in (*outer.node, *body.node):
        if node.input and {*node.input} <= known:
            known |= {*node.output}
            early.add(node.op_type)
    assert early <= {"Reshape", "Unsqueeze"}, early


def test_the_gradient_through_panels_is_that_of_the_whole_product(monkeypatch):
    layer = in_few_bits(nn.Sequential(nn.Linear(64, 100)), 4)[0]
    x = torch.randn(3, 5, 64, generator=torch.manual_seed(1), requires_grad=True)
    monkeypatch.setattr("export.weights.PANEL", 64 * 30)
    (by_panels,) = torch.autograd.grad(layer(x).square().sum(), x)
    plain = (x @ layer.weight.T + layer.bias).square().sum()
    torch.testing.assert_close(by_panels, torch.autograd.grad(plain, x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "GPT2", "Llama"])
def test_a_folder_in_few_bits_is_written_back_with_its_exact_weights(family, tmp_path):
    import transformers

    given = pretrained(family, tmp_path, bits=8, freeze_a=True)
    model = Model(spec_of(given), seed=3)
    assert any(vector.dtype == np.uint8 for vector in model.frozen_vectors.values())
    params_D = 0.1 * np.random.default_rng(0).standard_normal(model.initial.size).astype(np.float32)
    write_merged(given, Values(model.schema, params_D, model.frozen_vectors), tmp_path / "merged")
    kind = transformers.AutoModelForSequenceClassification if given.task == "classification" else None
    kind = kind or transformers.AutoModelForCausalLM
    ids = torch.randint(5, 30, (4, 10), generator=torch.manual_seed(0))
    with torch.no_grad():
        found = kind.from_pretrained(tmp_path / "merged").eval()(ids, attention_mask=torch.ones_like(ids)).logits
        exact = Model(spec_of(replace(given, bits=32)), seed=3)
        exact.freeze({**exact.frozen_vectors, **{k: v for k, v in model.frozen_vectors.items() if k in exact.frozen}})
        torch.testing.assert_close(found, exact.trained(params_D).module(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_loss_without_logits_is_that_of_logits(bits, family, tmp_path, monkeypatch):
    monkeypatch.setattr("export.weights.PANEL", 16 * 11)
    model = Model(spec_of(pretrained(family, tmp_path, bits=bits)), seed=2)
    assert model.module.without_logits
    generator = torch.manual_seed(0)
    tokens, following = (torch.randint(0, 30, (3, 10), generator=generator, dtype=torch.int32) for _ in range(2))
    batch, params_D = {"tokens": tokens, "next": following}, torch.from_numpy(model.initial)
    params_D = params_D + 0.3 * torch.randn(params_D.shape, generator=generator)
    found = []
    for without in (True, False):
        model.module.without_logits = without
        oracle = GradientOracle(model, batch, torch.tensor([1.0, 1.0, 0.0]))
        loss, gradient_D, _ = oracle(params_D)
        found.append((loss, gradient_D, oracle.sums))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert found[0][1].norm() > 0.01


@pytest.mark.long
def test_a_step_without_logits_holds_a_panel_of_them(tmp_path):
    """Of 128 tokens; a panel has 4,096 words. Four times the words are 12.6 MB of logits more, and 6.3 MB of codes."""
    import transformers

    shape = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}

    def peak(words, *, without_logits=True):
        folder = tmp_path / str(words)
        config = transformers.LlamaConfig(vocab_size=words, pad_token_id=0, tie_word_embeddings=True, **shape)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        model = Model(spec_of(Pretrained(str(folder), "causal-lm", rank=2, tokens=32, bits=8)))
        model.module.without_logits = without_logits
        plan, graphs = build_plan(model, create("fedavg", {"batch_size": 4}), ("onnx",))
        return footprint(plan, "onnx", graphs).peak_rss_mb

    few, many, plain = peak(8192), peak(32768), peak(32768, without_logits=False)
    assert many - few < 6.3 + 10, "less than one array of logits more"
    assert plain - many > 3 * 12.6, "of which a plain loss holds four"


def test_logits_that_are_not_plain_products_are_made(tmp_path):
    assert not Model(spec_of(pretrained("Bert", tmp_path, bits=8))).module.without_logits
    assert not Model(spec_of(pretrained("Llama", tmp_path))).module.without_logits


def test_logits_of_few_positions_are_plain_products_too(tmp_path):
    import transformers

    sizes = FAMILIES["GPT2"][0] | {"n_positions": 8}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    assert Model(load(tmp_path, task="causal-lm", tokens=8, bits=8)).module.without_logits


def test_scaled_logits_are_made_whatever_token_is_padding(tmp_path):
    """The embedding of padding is 0, and so are its logits, whatever is done to them."""
    import transformers

    for padding in range(2):
        folder = tmp_path / str(padding)
        sizes = FAMILIES["Llama"][0] | {"pad_token_id": padding, "logits_scaling": 4.0}
        transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes)).save_pretrained(folder)
        assert not Model(spec_of(Pretrained(str(folder), "causal-lm", rank=2, tokens=8, bits=8))).module.without_logits


BART = {"vocab_size": 61, "d_model": 16, "scale_embedding": True, "decoder_layers": 1, "decoder_attention_heads": 2}


@pytest.mark.parametrize(("family", "sizes"), [("Gemma3Text", FAMILIES["Gemma3Text"][0]), ("Bart", BART)])
def test_an_embedding_with_a_scale_shares_its_weight_in_few_bits(family, sizes, tmp_path):
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    given = Pretrained(str(tmp_path), "causal-lm", rank=2, tokens=8, bits=8, layers=("q_proj",))
    model = Model(spec_of(given)).evaluating().module.model
    own, logits = model.get_input_embeddings(), model.get_output_embeddings()
    assert own.weight_in_bits is logits.weight_in_bits
    ids = torch.arange(5, 13)[None]
    torch.testing.assert_close(own(ids), 4 * logits.weight[ids], rtol=0, atol=0)  # the root of its size
    plain = unadapted(given)
    plain.get_input_embeddings().weight.data.copy_(own.weight)
    torch.testing.assert_close(own(ids), plain.get_input_embeddings()(ids), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_few_bits_exports_in_both_formats(family, tmp_path, executorch):
    model = Model(spec_of(pretrained(family, tmp_path, bits=8)))
    bundle = export_bundle(model, create("fedavg", {}), tmp_path / "plan", targets=("onnx", "executorch"))
    assert bundle.manifest.no_predict == ""
    assert bundle.certificate.quantisation.bits == 8
    assert bundle.certificate.worst <= 1e-5


def test_codes_are_read_as_their_spec_says_or_refused():
    vectors = {"a": np.arange(5, dtype=np.uint8), "b": np.ones(3, np.float32)}
    data, specs = encode_frozen(vectors), frozen_specs_of(vectors)
    assert {name: value.tolist() for name, value in decode_frozen(data, specs).items()} == {
        "a": [0, 1, 2, 3, 4],
        "b": [1, 1, 1],
    }
    with pytest.raises(SchemaError, match=r"vector 'a' is uint8\[5\], expected float32\[5\]"):
        decode(data, specs)
    with pytest.raises(SchemaError, match=r"vector 'a' is uint8\[5\], expected float32"):
        encode(vectors)
    assert math.isclose(len(data), 8 + 5 + 12, abs_tol=150)
