"""Frozen parameters, the checkpoint that a model starts from, adapters of low rank, and examples of one's own."""

import hashlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from export.build import export_bundle, verify_bundle
from export.errors import InvalidModel, ParityFailed
from export.model import Model
from export.trial import Trial
from export.weights import Checkpoint, lora
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from fedcore.errors import DigestMismatch
from fedcore.plan import Field, Plan
from tests.device_runtime import linear
from tests.export import models


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """FedDane, whose trips share what is frozen, on a model whose frozen tensors were drawn under another seed."""
    folder = tmp_path_factory.mktemp("frozen")
    return export_bundle(
        Model(models.digits_adapted(), 5), create("feddane"), folder, "tests.export.models:digits_adapted"
    )


def test_only_what_is_trained_is_in_the_vector_and_the_rest_in_one_blob(bundle):
    plan, model = bundle.plan, Model(models.digits_adapted(), 5)
    assert [one.name for one in plan.schema.tensors] == [
        "2.lora_down.weight",
        "2.lora_up.weight",
        "4.weight",
        "4.bias",
    ]
    sizes = {one.name: one.size for one in plan.frozen.vectors}
    assert sizes == {
        "0.0.weight": 54, "0.1.weight": 6, "0.1.bias": 6, "2.weight": 12288, "2.bias": 32,
        "0.1.running_mean": 6, "0.1.running_var": 6,
    }  # fmt: skip
    stored = safetensors.torch.load(bundle.read(plan.frozen.blob))
    assert all(np.array_equal(stored[name], vector) for name, vector in model.frozen_vectors.items())
    graphs = sum(ref.size for trip in plan.trips for ref in trip.graphs["onnx"].values())
    assert graphs < plan.frozen.blob.size
    assert bundle.certificate.formats["onnx"].footprint.graph_bytes == graphs + plan.frozen.blob.size


def test_a_bundle_with_frozen_vectors_is_verified_whatever_the_seed(bundle):
    assert verify_bundle(bundle, "tests.export.models:digits_adapted").worst <= 1e-5


def test_an_altered_frozen_blob_is_noticed(bundle, tmp_path):
    blobs = [data for _, data in bundle.blobs()]
    copied = Bundle.write(tmp_path, bundle.manifest, blobs)
    path = tmp_path / "blobs" / bundle.plan.frozen.blob.sha256
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(DigestMismatch):
        list(copied.blobs())


def test_a_plan_without_the_member_frozen_has_nothing_frozen():
    raw = msgspec.json.decode(linear.plan().encode())
    assert raw.pop("frozen") is None
    assert Plan.decode(msgspec.json.encode(raw)) == linear.plan()


def saved(tensors, folder):
    data = safetensors.torch.save(tensors)
    (folder / "weights.safetensors").write_bytes(data)
    return Checkpoint(folder / "weights.safetensors", hashlib.sha256(data).hexdigest())


def with_a_new_head():
    return nn.Sequential(models.backbone(2), nn.Flatten(), nn.Linear(378, 5))


def backbone_tensors():
    torch.manual_seed(1)
    return {f"0.{name}": value.clone() for name, value in models.backbone(2).state_dict().items()}


def test_a_model_starts_from_its_checkpoint_and_draws_what_is_new(tmp_path):
    given = backbone_tensors()
    model = Model(replace(models.spec(with_a_new_head), checkpoint=saved(given, tmp_path)))
    for name, value in given.items():
        torch.testing.assert_close(model.module.state_dict()[name], value)
    np.testing.assert_array_equal(model.frozen_vectors["0.0.weight"], given["0.0.weight"].flatten())
    assert {one.name for one in model.schema.tensors} == {"2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given | {"0.9.weight": torch.ones(2)}, "has tensors that the model lacks: 0.9.weight"),
        (
            lambda given: given | {"0.0.weight": torch.ones(6, 1, 3, 3)},
            r"float32\[6, 1, 3, 3\], the model as float32\[6, 2",
        ),
        (lambda given: given | {"0.0.weight": torch.ones(6, 2, 3, 3).int()}, "has 0.0.weight as int32"),
        (
            lambda given: {"0.1.weight": given["0.1.weight"]},
            "lacks tensors that are not trained: 0.0.weight, .* and 2 more",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(change, words, tmp_path):
    with pytest.raises(InvalidModel, match=words):
        Model(replace(models.spec(with_a_new_head), checkpoint=saved(change(backbone_tensors()), tmp_path)))


def test_a_checkpoint_file_that_is_missing_changed_or_damaged_is_refused(tmp_path):
    made = models.spec(with_a_new_head)
    with pytest.raises(InvalidModel, match="absent cannot be read"):
        Model(replace(made, checkpoint=Checkpoint(tmp_path / "absent", "00")))
    kept = saved(backbone_tensors(), tmp_path)
    with pytest.raises(InvalidModel, match=f"SHA-256 {kept.sha256}, expected is 00"):
        Model(replace(made, checkpoint=replace(kept, sha256="00")))
    (tmp_path / "text").write_bytes(b"text")
    with pytest.raises(InvalidModel, match="not a safetensors file"):
        Model(replace(made, checkpoint=Checkpoint(tmp_path / "text", hashlib.sha256(b"text").hexdigest())))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))

    def forward(self, x):
        return self.body(self.attention(x, x, x)[0])


def test_adapters_start_from_the_module_as_it_is_and_keep_its_names():
    module, x = Attentive(), torch.randn(3, 4, 8)
    before, names = module(x), set(module.state_dict())
    adapted = lora(module, 2, layers=("body.*",), train=("body.1.bias",))
    torch.testing.assert_close(adapted(x), before)
    assert names < set(adapted.state_dict())
    trained = {name: tuple(value.shape) for name, value in adapted.named_parameters() if value.requires_grad}
    assert trained == {
        "body.0.lora_down.weight": (2, 8), "body.0.lora_up.weight": (6, 2), "body.1.bias": (5,),
        "body.1.lora_down.weight": (2, 6), "body.1.lora_up.weight": (5, 2),
    }  # fmt: skip


def test_an_adapted_layer_computes_the_papers_sum():
    torch.manual_seed(0)
    for plain, x in ((nn.Linear(4, 3), torch.randn(2, 4)), (nn.Conv2d(4, 3, 3, 2, 1), torch.randn(2, 4, 5, 5))):
        before = plain(x)
        layer = lora(plain, 2, scale=0.5)
        nn.init.normal_(layer.lora_up.weight)
        weight = torch.einsum("or,ri...->oi...", layer.lora_up.weight.flatten(1), layer.lora_down.weight)
        change = x @ weight.t() if x.dim() == 2 else nn.functional.conv2d(x, weight, None, 2, 1)
        torch.testing.assert_close(layer(x), before + 0.5 * change)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "rank 0; the least is 1"),
        (
            {"rank": 1, "layers": ("attention.out_proj",)},
            "no layer that can be adapted .* 'attention.out_proj'; there are body.0, body.1",
        ),
        ({"rank": 1, "train": ("head.*",)}, "no parameter is called 'head"),
    ],
)
def test_adapters_that_cannot_be_are_refused_by_name(settings, words):
    with pytest.raises(InvalidModel, match=words):
        lora(Attentive(), **settings)


def logarithms(**more):
    return replace(
        models.spec(lambda: models.Dense(lambda self, x: x.log()), inputs=(Field("x", "float32", (126,)),)), **more
    )


def positive(count, random):
    return {"x": random.uniform(0.1, 1.0, (count, 126)), "y": random.integers(0, 5, count)}


def test_a_model_of_logarithms_is_certified_on_its_own_examples(tmp_path):
    with pytest.raises(ParityFailed, match=r"not finite.*ModelSpec `examples`"):
        export_bundle(Model(logarithms()), create("fedavg"), tmp_path)
    export_bundle(Model(logarithms(examples=positive)), create("fedavg"), tmp_path)


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        (lambda count, random: 1 / 0, r"examples\(.*, generator\) fails with ZeroDivisionError"),
        (lambda count, random: {"x": np.zeros(count)}, "gives x; expected x, y"),
        (lambda count, random: positive(count + 1, random), r"gives x as float64\[.*; expected float32\[.*, 126\]"),
        (
            lambda count, random: positive(count, random) | {"y": np.full(count, 5)},
            "y from 5 to 5; the field says 0 … 4",
        ),
        (lambda count, random: positive(count, random) | {"y": np.full(count, 0.5)}, "gives y as float64"),
    ],
)
def test_examples_that_are_not_the_models_fields_are_refused(examples, words):
    with pytest.raises(InvalidModel, match=words):
        Trial.draw(Model(logarithms(examples=examples)), create("fedavg"))
