"""Rules that are easy to write wrong, each against torch, at batch sizes that the trace did not see."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

from export.capture import Port, capture
from export.errors import UnsupportedOperator
from export.onnx import to_onnx

X, INDEX = Port("x", (4, 6), batched=True), Port("i", (4,), torch.int64, batched=True)

FUNCTIONS = {
    "slices with negative and absent bounds": lambda x, i: x[:, -3:-1, ::2],
    "the last index": lambda x, i: x[:, -1, -2],
    "squeeze of an axis that is not of size one": lambda x, i: x.squeeze(1) + x.unsqueeze(-1).squeeze(-1),
    "the batch size as a number": lambda x, i: x.sum() / x.shape[0] + x.numel(),
    "integer division gives floats": lambda x, i: i / 4,
    "integers and floats promote": lambda x, i: x * i.unsqueeze(-1) + 1,
    "comparison of an integer with a float": lambda x, i: (i > 1.5).to(torch.float32),
    "reduction over all axes": lambda x, i: x.sum() + x.amax((0, 1, 2)),
    "reduction over several axes, kept": lambda x, i: x.mean((0, -1), keepdim=True) - x,
    "softmax over a middle axis": lambda x, i: x.softmax(1),
    "pads on two axes, unequal": lambda x, i: functional.pad(x, (1, 2, 0, 3), value=0.5),
    "clamp on one side": lambda x, i: x.clamp(min=-0.2).clamp(max=0.7),
    "gather along the last axis": lambda x, i: x.gather(2, i.unsqueeze(-1)),
    "scatter of one number": lambda x, i: x.scatter(2, i.unsqueeze(-1), 9.0),
    "repeated indices add up": lambda x, i: torch.zeros_like(x).scatter_add(
        2, i.unsqueeze(-1).expand(-1, -1, 6) * 0, x
    ),
    "new leading axis by expand": lambda x, i: x[:, :1].expand(-1, 5, -1),
    "powers": lambda x, i: x.abs() ** 0.5 + x**2 + x.abs() ** 1.7 + (x.abs() + 1) ** -1,
    "concatenation of an integer with a float": lambda x, i: torch.cat([i.to(torch.float32).unsqueeze(-1), x], -1),
    "average with weights by batched product": lambda x, i: x.transpose(1, 2) @ x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_computes_what_torch_computes(name):
    function = FUNCTIONS[name]
    graph = to_onnx(capture(lambda values: {"out": function(values["x"], values["i"])}, [X, INDEX]))
    session = onnxruntime.InferenceSession(graph)
    for batch in (2, 3, 11):
        random = np.random.default_rng(batch)
        feed = {"x": random.normal(size=(batch, 4, 6)).astype(np.float32), "i": random.integers(0, 4, (batch, 4))}
        (found,) = session.run(None, feed)
        expected = function(*map(torch.from_numpy, feed.values())).numpy()
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, i: torch.addmm(x[0], x[0, :, :4], x[0], alpha=2.0), "alpha=2.0"),
        (lambda x, i: torch.add(x, x, alpha=3), "alpha=3"),
        (lambda x, i: x.scatter(1, i.unsqueeze(-1)[:, :1], x), "another shape than the indices"),
        (lambda x, i: x.cumsum(1), "cumsum"),
        (lambda x, i: x.argmax().to(torch.float32), "over all axes"),
    ],
)
def test_what_a_rule_does_not_cover_is_refused_instead_of_written_wrong(function, words):
    with pytest.raises(UnsupportedOperator, match=words):
        to_onnx(capture(lambda values: {"out": function(values["x"], values["i"])}, [X, INDEX]))
