"""Programs compute what their function computes, on any values."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from simulator.engines.recorded import layout as layout_module, program as program_module
from simulator.engines.recorded.layout import writer_of
from simulator.engines.recorded.program import Program, Programs, Workspace
from simulator.engines.recorded.recording import record

CPU = torch.device("cpu")
aten = torch.ops.aten
MASK = torch.tensor([1.0, 0, 1, 1])


def in_place(x, y):
    z = x * 2
    z[:, 1:3].add_(y[:, :2]).clamp_(min=0)
    filled = torch.zeros_like(x)
    filled[1] = z[0]
    return {"z": z, "filled": filled + y}


def joined(x, y):
    gradients = [(x[:3].T @ y[:3]).flatten(), (x * y).sum(0), x[0].clone(), (y @ y.T).T.flatten()]
    flat = torch.cat(gradients)
    return {"flat": flat, "first": gradients[0] * 3, "rows": torch.cat([x[:, :2] + 1, x * y, y], 1)}


def constants(x, y):
    scale = (torch.arange(4.0) + torch.ones(4)) * MASK
    return {"x": x * scale - 0.5 * (y * scale), "scale": scale, "same": x}


def scaled(x, y):
    half = y * 0.5
    return {"both": x - half, "half": half, "sum": 0.1 * x + y, "whole": (x * 4).long() + 2 * (y * 4).long()}


def convolved(x, y):
    images = torch.cat([x, y]).reshape(1, 2, 4, 4)
    pooled, indices = functional.max_pool2d(
        functional.relu(functional.conv2d(images, x.reshape(2, 2, 2, 2))), 2, return_indices=True
    )
    return {"pooled": pooled.flatten(), "indices": indices, "norm": functional.layer_norm(images, (4,))}


def differentiated(x, y):
    leaf = x.detach().requires_grad_()
    loss = functional.cross_entropy(leaf @ y, torch.tensor([1, 0, 2, 3])) + leaf.std(1).sum()
    return {"gradient": torch.autograd.grad(loss, leaf)[0], "loss": loss.detach()}


def parts_twice(x, y):
    z = x * y
    last = torch.stack([x, y])[None].clone(memory_format=torch.channels_last)
    images = torch.cat([last * 2, last - 1], 1)
    grown = torch.cat([torch.empty(0), x * 2], 1)
    return {"twice": torch.cat([z, z[:, :1], z], 1), "images": images, "grown": torch.cat([grown, z - 1], 1)}


def joined_then_written(x, y):
    part, other = x * 2, y * 3
    whole, second = torch.cat([part, y], 1), torch.cat([other, x], 1)
    whole.add_(1)
    other.mul_(2)
    return {"whole": whole, "part": part, "second": second, "other": other}


def turned_in_place(x, y):
    z = x * 2
    before = z[:3] + y[:3]
    return {"before": before, "after": z[:3].t_() @ y[:3] + z.transpose_(0, 1)}


def other_dtypes(x, y):
    small = (x * 4).to(torch.int8)
    bits = x * 2
    whole = torch.cat([bits, y], 1)
    return {"sum": small * 100 + (y * 4).long(), "whole": whole, "bits": bits.view(torch.int16).sum(1)}


def descended(x, y):
    gradient = torch.cat([(x.T @ y).flatten(), (x * y).sum(0), y[0], torch.bmm(x[None], y[None]).flatten()])
    return {"down": torch.cat([x.flatten()] * 2 + [y[:2].flatten()]) - 0.1 * gradient}


def descended_from_what_all_share(x, y):
    gradients = torch.bmm(x.reshape(2, 2, 4), y.reshape(2, 4, 2)).flatten(1)
    return {"up": x[:2].flatten() + 3 * torch.cat([gradients, y.reshape(2, 2, 4).sum(1)], 1)}


def descended_twice(x, y):
    gradient = torch.cat([(x @ y)[:2].flatten(), (x @ y).flatten()])
    other = torch.cat([(y @ x).flatten()])
    return {"down": torch.ones(24) - 0.1 * gradient, "same": gradient, "up": (x.flatten() + other) * other}


def descended_by_what_is_then_written(x, y):
    z = x * 2
    gradient = torch.cat([(z @ y).flatten(), (y @ y).flatten()])
    z.add_(1)
    return {"down": z.repeat(2, 1).flatten() - gradient}


def pair(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator) for _ in range(2)]


FUNCTIONS = [
    in_place, joined, constants, scaled, convolved, differentiated, parts_twice, joined_then_written, turned_in_place,
    other_dtypes, descended, descended_from_what_all_share, descended_twice, descended_by_what_is_then_written,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_program_gives_what_its_function_gives_for_other_values(function):
    x, y = pair(0)
    program = Program(record(lambda: function(x, y), [x, y]), Workspace(CPU), {})
    for seed in (0, 1, 2):
        for argument, values in zip((x, y), pair(seed), strict=True):
            argument.copy_(values)
        found, expected = program.run(), function(x.clone(), y.clone())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
        torch.testing.assert_close([x, y], pair(seed))


def swapped(x, y):
    return {"x": y, "y": x}


def crossed(x, y):
    return {"x": x - 0.1 * y, "y": y + x}


def turned(x, y):
    return {"x": (x @ y).T, "y": y}


@pytest.mark.parametrize("function", [swapped, crossed, turned])
def test_outputs_may_go_where_arguments_are(function):
    (x, y), targets = pair(0), {}
    targets = {"x": x, "y": y}
    program = Program(record(lambda: function(x, y), [x, y]), Workspace(CPU), targets)
    expected = dict(zip("xy", pair(0), strict=True))
    for _ in range(3):
        assert program.run() == {}
        expected = function(**expected)
        torch.testing.assert_close(targets, expected)


def test_targets_of_another_dtype_or_size_take_what_fits_alone():
    x, y = pair(0)
    flags, first = torch.zeros(4, 4), torch.full((3, 4), -1.0)
    targets = {"flags": flags, "first": first[1:2]}

    def function():
        return {"flags": x > y, "first": torch.stack([x[0] * 2, y[0] * 2])[:1]}

    program = Program(record(function, [x, y]), Workspace(CPU), targets)
    for _ in range(2):
        program.run()
        torch.testing.assert_close(flags, (x > y).float())
        torch.testing.assert_close(first, torch.stack([first[0] * 0 - 1, x[0] * 2, first[0] * 0 - 1]))


def counted(x, count):
    x -= 0.5
    count.add_(1)
    return {"y": x * count}


def test_what_a_function_writes_in_place_is_written_once_a_run():
    x, count, programs = torch.ones(3), torch.zeros(()), Programs(CPU)
    for runs in (1, 2, 3):
        found = programs.run("key", lambda: counted(x, count), [x], {})["y"]
        assert (x.tolist(), count.item(), found.tolist()) == ([1 - runs / 2] * 3, runs, [(1 - runs / 2) * runs] * 3)


def test_random_operators_draw_as_if_called_and_are_recorded_once():
    calls = []

    def noisy(x):
        calls.append(1)
        return {"x": x + torch.rand(3)}

    x, programs = torch.ones(3), Programs(CPU)
    torch.manual_seed(0)
    drawn = [programs.run("key", lambda: noisy(x), [x], {})["x"].tolist() for _ in range(3)]
    assert len(calls) == 1
    torch.manual_seed(0)
    assert drawn == [noisy(x)["x"].tolist() for _ in range(3)]


class Spoiled(Program):
    """A program with a fault: it doubles a result, writes past a target, leaves something out, or does not run."""

    def __init__(self, recording, workspace, targets, fault):
        super().__init__(recording, workspace, targets)
        self._target, self._fault = targets["x"], fault

    def run(self):
        if self._fault == "left out":
            self._steps = self._steps[1:]
        outputs = super().run()
        whole = self._target._base
        if self._fault == "doubled":
            self._target.mul_(2)
        elif self._fault == "past":
            whole[-1] = 5
        elif self._fault == "fails":
            raise RuntimeError("wrong shapes")
        return outputs


@pytest.mark.parametrize("fault", ["doubled", "past", "left out", "fails"])
def test_a_program_that_fails_its_trial_is_called_each_time(monkeypatch, caplog, fault):
    monkeypatch.setattr(program_module, "Program", lambda *args: Spoiled(*args, fault))
    whole, y, programs, calls = torch.ones(3, 2), torch.full((2, 2), 3.0), Programs(CPU), []
    x = whole[:2]

    def function():
        calls.append(1)
        return {"x": (x @ y) @ y - x, "sum": y.sum()}

    for runs in (1, 2):
        expected = (x @ y) @ y - x
        assert programs.run("key", function, [x, y], {"x": x})["sum"].item() == 12
        torch.testing.assert_close(whole, torch.cat([expected, torch.ones(1, 2)]))
        assert len(calls) == 1 + runs
    assert len(caplog.records) == 1


def test_programs_share_memory_that_each_fills_anew():
    (x, y), workspace = pair(0), Workspace(CPU)
    first, second = (Program(record(lambda f=f: f(x, y), [x, y]), workspace, {}) for f in (joined, in_place))
    for program, function in ((first, joined), (second, in_place), (first, joined)):
        torch.testing.assert_close(program.run(), function(x.clone(), y.clone()))


def test_a_step_of_descent_adds_products_to_its_carry_without_a_gradient():
    (x, y), weights = pair(0), torch.randn(20, generator=torch.Generator().manual_seed(1))

    def step():
        gradient = torch.cat([(x.T @ (x @ y)).flatten(), (x @ y).sum(0)])
        return {"weights": weights - 0.1 * gradient}

    recording, before = record(step, [x, y, weights]), weights.clone()
    program = Program(recording, Workspace(CPU), {"weights": weights})
    assert all(writer_of(call) for call in recording.calls)
    writing = [call.operator for call in recording.calls if call.written]
    assert writing == [aten.addmm_.default, aten.add_.Tensor]  # weights are where they are to be, without a copy
    program.run()
    torch.testing.assert_close(weights, before - 0.1 * torch.cat([(x.T @ x @ y).flatten(), (x @ y).sum(0)]))


def test_gradients_of_biases_are_summed_apart():
    torch.manual_seed(0)
    images, weights, bias = torch.randn(3, 2, 12, 12), torch.randn(4, 2, 3, 3), torch.randn(4)

    def function():
        leaves = [weights.detach().requires_grad_(), bias.detach().requires_grad_()]
        results = functional.max_pool2d(functional.conv2d(images, *leaves), 2)
        kernel, shift = torch.autograd.grad(results.square().sum(), leaves)
        return {"kernel": kernel, "bias": shift, "results": results.detach()}

    expected, recording = function(), record(function, [images, weights, bias])
    found = Program(recording, Workspace(CPU), {}).run()
    torch.testing.assert_close(found, expected)
    calls = {call.operator: call for call in recording.calls}
    assert calls[aten.convolution_backward.default].args[-1] == [False, True, False]
    assert aten.sum.dim_IntList in calls


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_large_products_are_computed_by_onednn_and_small_ones_are_not():
    x, w, b, few = torch.randn(20, 1024), torch.randn(512, 1024), torch.randn(512), torch.randn(2, 1024)
    one = torch.randn(1)

    def function():
        y = torch.addmm(b, x, w.T)
        parts = torch.cat([(y.T @ x).flatten(), (y @ w).flatten()])
        return {"y": y, "back": y @ w, "few": few @ w.T, "parts": parts, "shifted": torch.addmm(one, x, w.T)}

    recording = record(function, [x, w, b, few, one])
    found, operators = Program(recording, Workspace(CPU), {}).run(), [call.operator for call in recording.calls]
    assert operators.count(torch.ops.mkldnn._linear_pointwise.default) == 2
    for name, wanted in function().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-2)


def test_programs_are_recorded_once_until_their_arguments_move():
    programs, calls = Programs(CPU), []

    def double(clients):
        held = programs.hold("held", {"x": torch.full((clients, 2), float(clients))})

        def function():
            calls.append(clients)
            return {"twice": 2 * held["x"]}

        return programs.run(("double", clients), function, held.values(), {})["twice"].tolist()

    assert [double(clients) for clients in (2, 1, 2, 3, 2)] == [[[2.0 * n] * 2] * n for n in (2, 1, 2, 3, 2)]
    assert calls == [2, 1, 3, 2]


def branching(x):
    return {"x": 2 * x if bool(x.mean() > 0) else x - 1}


def scaled_by_a_number(x):
    return {"x": x * x.mean().item()}


def masked(x):
    return {"x": x[x > 0].sum() + x}


def scaled_by_a_list(x):
    return {"x": x * sum(x.tolist())}


def scaled_by_numpy(x):
    return {"x": x * float(x.numpy().max())}


def scaled_by_an_array(x):
    return {"x": x * float(np.asarray(x)[0])}


def nonzero(x):
    return {"x": x + len(x.nonzero())}


FOLLOWING = [branching, scaled_by_a_number, scaled_by_a_list, scaled_by_numpy, scaled_by_an_array, masked, nonzero]


@pytest.mark.parametrize("function", FOLLOWING)
def test_functions_that_follow_values_are_called_each_time(function, caplog):
    programs = Programs(CPU)
    for values in ([-1.0, 0], [0.0, 0], [1.0, 2], [-1.0, 2], [-2.0, 0]):
        held, target = programs.hold("held", {"x": torch.tensor(values)}), torch.zeros(2)
        programs.run("key", lambda held=held: function(**held), held.values(), {"x": target})
        torch.testing.assert_close(target, function(torch.tensor(values))["x"])
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "the model or the algorithm reads values of tensors in Python"
    ]


def test_functions_of_whole_numbers_as_indices_are_recorded_once():
    programs, calls = Programs(CPU), []

    def chosen(x, index):
        calls.append(1)
        return {"x": x[index]}

    for index in ([0, 1], [1, 1]):
        held = programs.hold("held", {"x": torch.tensor([3.0, 4])})
        held["index"] = programs.memory("index", (2,), torch.int64).copy_(torch.tensor(index))
        found = programs.run("key", lambda held=held: chosen(**held), held.values(), {})["x"]
        assert found.tolist() == [3.0 + one for one in index]
    assert len(calls) == 1


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_outputs_that_are_called_for_do_not_overwrite_each_other(order):
    x, y = pair(0)
    targets = {name: {"x": x, "y": y}[name] for name in order}

    def called():
        assert x.sum().item() != y.sum().item()  # a look at values, so it is not recorded
        return swapped(x, y)

    Programs(CPU).run("key", called, [x, y], targets)
    torch.testing.assert_close([y, x], pair(0))


def test_twice_as_many_parts_take_twice_the_looks_at_calls(monkeypatch):
    looks, places = [0], layout_module.places

    def counted(tree):
        looks[0] += len(tree)
        return places(tree)

    def joined_parts(x, count):
        return {"whole": torch.cat([x[index] * index for index in range(count)])}

    monkeypatch.setattr(layout_module, "places", counted)
    found, x = {}, torch.ones(64, 4)
    for count in (32, 64):
        looks[0] = 0
        layout_module.lay_out_parts(record(lambda count=count: joined_parts(x, count), [x]))
        found[count] = looks[0]
    assert 0 < found[64] < 3 * found[32]
