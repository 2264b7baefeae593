"""Models that make vectors of texts, from pairs of texts of one user."""

import json

import pytest
import torch

from export.build import export_bundle
from export.errors import InvalidModel
from export.huggingface.folder import Pretrained, load, spec_of
from export.huggingface.modules import pooling_of
from export.huggingface.written import Values, write_merged
from export.inference.making import inference_model
from export.model import GradientOracle, Model
from fedcore.algorithms import create
from tests.export.test_huggingface import EMBEDS, WORDS, pretrained, saved
from tests.export.test_inference import trained
from tests.sampled import sampled


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("transformers")
    return Model(spec_of(pretrained("Bert", tmp_path, EMBEDS)))


def tokens(count, seed=0):
    return torch.randint(5, WORDS, (count, 10), generator=torch.manual_seed(seed))


def pairs(count):
    return {"anchor": tokens(count).int(), "positive": tokens(count, 1).int()}


def measured(model, batch, mask):
    return model.measure(model.tensors(torch.from_numpy(model.initial)), batch, torch.tensor(mask))


def test_the_loss_is_that_of_ranking_partners_among_those_of_the_batch(model):
    batch = pairs(4)
    first, second = (model.module(batch[name]) for name in ("anchor", "positive"))
    scores = 20 * torch.nn.functional.cosine_similarity(first[:, None], second[None], dim=2)
    found, own = measured(model, batch, [1.0] * 4), torch.arange(4)
    torch.testing.assert_close(found["loss"], torch.nn.functional.cross_entropy(scores, own, reduction="none"))
    assert found["accuracy"].tolist() == (scores.argmax(1) == own).float().tolist()


def test_padding_is_no_negative(model):
    whole, mask = pairs(5), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    fewer = {name: values[:3] for name, values in whole.items()}
    padded, alone = GradientOracle(model, whole, mask), GradientOracle(model, fewer, torch.ones(3))
    params_D = torch.from_numpy(model.initial)
    torch.testing.assert_close(padded(params_D), alone(params_D))
    torch.testing.assert_close(padded.sums, alone.sums)


def test_padding_of_zeros_has_a_finite_gradient(model):
    batch = {name: torch.cat((values, torch.zeros(2, 10).int())) for name, values in pairs(3).items()}
    oracle = GradientOracle(model, batch, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    assert oracle(torch.from_numpy(model.initial))[1].isfinite().all()


def test_a_pair_alone_is_found_and_teaches_nothing(model):
    oracle = GradientOracle(model, pairs(1), torch.ones(1))
    _, gradient_D, _ = oracle(torch.from_numpy(model.initial))
    assert (oracle.sums[-1].item(), gradient_D.abs().max().item()) == (1, pytest.approx(0, abs=1e-6))


def test_padding_within_a_text_changes_no_vector(model):
    ids = tokens(2)
    ids[:, 6:] = 0
    torch.testing.assert_close(model.module(ids), model.module(ids[:, :6]))


def test_an_app_gives_one_text_and_gets_a_vector_of_length_1(model, tmp_path):
    bundle = export_bundle(model, create("fedavg", {}), tmp_path / "plan")
    assert bundle.plan.predict.inputs == ("anchor",)
    vectors = model.predict({}, {"anchor": tokens(3)})["output"]
    assert vectors.shape == (3, 16)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("to", sampled(["onnx", "torch", "executorch"], ["onnx", "executorch"]))
def test_a_file_for_apps_takes_one_text(to, model, executorch):
    work = trained(model, model.initial)
    assert inference_model(work, to, source=model.spec).data
    assert list(work.drawn(1)) == ["anchor"]


OWN = "sentence_transformers.own:"
"""In front of a module of a folder's own code."""


def noted(folder, pooling, *more):
    types = ["models.Transformer", "models.Pooling", *more]
    modules = [{"type": f"sentence_transformers.{type_}".removeprefix(OWN), "path": "1_Pooling"} for type_ in types]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"embedding_dimension": 16}, "mean"),
    ],
)
def test_the_pooling_is_that_of_sentence_transformers(pooling, expected, tmp_path):
    noted(tmp_path, pooling, "models.Normalize")
    assert pooling_of(tmp_path) == expected


def test_the_first_token_is_the_vector_where_the_folder_says_so(tmp_path):
    pytest.importorskip("transformers")
    folder = saved("Bert", tmp_path / "bert")
    noted(folder, {"pooling_mode_cls_token": True})
    module = Model(load(folder, task=EMBEDS, tokens=10)).module
    values = module.model(tokens(2)).last_hidden_state[:, 0]
    torch.testing.assert_close(module(tokens(2)), torch.nn.functional.normalize(values))


def test_merged_weights_are_written_with_their_pooling(tmp_path):
    pytest.importorskip("transformers")
    noted(saved("Bert", tmp_path / "bert"), {"pooling_mode_cls_token": True})
    given = Pretrained(str(tmp_path / "bert"), EMBEDS, tokens=10)
    model = Model(spec_of(given))
    write_merged(given, Values(model.schema, model.initial, model.frozen_vectors), tmp_path / "merged")
    merged = Model(load(tmp_path / "merged", task=EMBEDS, tokens=10)).module
    torch.testing.assert_close(merged(tokens(2)), model.module(tokens(2)))


@pytest.mark.parametrize(
    ("pooling", "more", "words"),
    [
        ({"pooling_mode_max_tokens": True}, (), "has pooling_mode_max_tokens; known are"),
        ({"pooling_mode_max_tokens": 1, "pooling_mode_cls_token": 1}, (), "max_tokens and pooling_mode_cls_token"),
        ({}, ("models.Dense",), "has the module Dense; known are"),
        ({}, ("own:code_st.Transformer",), "has the module code_st.Transformer; known are"),
        ({}, ("own:code_st.Normalize",), "has the module code_st.Normalize; known are"),
        (3, (), "is not as sentence-transformers writes it"),
    ],
)
def test_a_pooling_that_is_not_known_is_refused_by_name(pooling, more, words, tmp_path):
    noted(tmp_path, pooling, *more)
    with pytest.raises(InvalidModel, match=words) as caught:
        pooling_of(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("sentence_bert_config.json", {"do_lower_case": True}),
        ("sentence_xlm-roberta_config.json", {"do_lower_case": True}),
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}, "default_prompt_name": "query"}),
    ],
)
def test_a_folder_by_which_texts_are_changed_first_is_refused(file, setting, tmp_path):
    noted(tmp_path, {})
    (tmp_path / file).write_text(json.dumps(dict.fromkeys(setting)))
    assert pooling_of(tmp_path) == "mean"
    (tmp_path / file).write_text(json.dumps(setting))
    with pytest.raises(InvalidModel, match=f"has .* in {file}: sentence-transformers changes every text by it"):
        pooling_of(tmp_path)
