import weakref

import numpy as np
import pytest
from msgspec.structs import replace

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.errors import DeadlinePassed, NonFiniteReport, PlanRefused
from device_runtime.runner import execute
from device_runtime.work import decode_unweighted, encode_report
from fedcore import checkpoint
from fedcore.batching import batches, noise
from fedcore.plan import BlobRef
from fedcore.report import LEVELS, LOSS_COUNTS, ReportLayout, Segment, count_losses, levels
from fedcore.schedule import Loop
from fedcore.wire.messages import Assignment
from tests.device_runtime import linear


def load(blobs):
    return {name: OnnxRuntime().load(blob, name) for name, blob in blobs.items()}


def weighed(result):
    """The report as it would be uploaded."""
    return linear.plan().report.weigh(result.values, result.weight)


def run(plan, data, **more):
    return execute(plan, load(linear.graphs()), {"params": linear.PARAMS}, data, linear.KEY, **more)


@pytest.mark.parametrize("n", [1, 4, 7, 30])
def test_report_equals_plain_numpy_also_with_a_padded_last_batch(n):
    data = linear.examples(n)
    result = run(linear.plan(), data)
    expected = linear.reference(linear.PARAMS, data, linear.KEY)
    np.testing.assert_allclose(weighed(result), expected, rtol=2e-6, atol=1e-5)
    assert result.values.dtype == np.float32
    assert (result.examples, result.steps) == (n, 3 * -(-n // 4))


def run_many(plan, data, **more):
    graphs = {name: Eavesdropper(graph) for name, graph in load(linear.many_steps()).items()}
    return execute(plan, dict(graphs), {"params": linear.PARAMS}, data, linear.KEY, **more), graphs


@pytest.mark.parametrize("n", [1, 7, 64, 601])
def test_many_steps_in_a_call_give_the_report_of_one_step_after_the_other(n):
    data, train = linear.examples(n), Loop(batch_size=4, epochs=3, steps=400)
    found, graphs = run_many(linear.plan(linear.many_steps(), train=train), data)
    expected = run(linear.plan(train=train), data)
    assert found.values.tobytes() == expected.values.tobytes()
    assert (found.weight, found.steps) == (expected.weight, expected.steps)
    calls = [len(noise) for noise in graphs["train.steps"].heard]
    assert sum(calls) == train.step_count(n)
    assert max(calls) == min(64, -(-n // 4))


def test_noise_of_many_steps_is_that_of_each():
    plan = linear.plan(linear.many_steps(), sweep=Loop(batch_size=3, epochs=2))
    train, sweep = plan.passes
    _, graphs = run_many(replace(plan, passes=(train, replace(sweep, noise=True))), linear.examples(5))
    expected = [[noise(linear.KEY, 1, 2 * call + step, 3) for step in range(2)] for call in range(2)]
    np.testing.assert_array_equal(graphs["sweep.steps"].heard, expected)


def test_work_that_may_not_go_on_stops_between_two_calls():
    going = iter([True, False])
    with pytest.raises(DeadlinePassed, match="in pass 'train' after 64 steps"):
        run_many(linear.plan(linear.many_steps()), linear.examples(601), keep_going=lambda: next(going))


def test_divergence_within_a_call_is_told_from_that_of_the_first_step():
    data, plan = linear.examples(100), linear.plan(linear.many_steps())
    far = {"x": data["x"] * 20, "y": data["y"]}  # every step overshoots by more
    with pytest.raises(NonFiniteReport, match="left the finite numbers in later steps"):
        run_many(plan, far)
    with pytest.raises(NonFiniteReport, match="not finite in the first step"):
        run_many(plan, {"x": data["x"] * 1e20, "y": data["y"]})


@pytest.mark.parametrize("graphs", [linear.graphs, linear.many_steps])
def test_a_report_says_which_losses_the_first_step_and_training_reached(graphs):
    data, loop = linear.examples(13), Loop(batch_size=4, epochs=2)
    plan = linear.plan(graphs(), train=loop, more=(LOSS_COUNTS,))
    result = execute(plan, load(graphs()), {"params": linear.PARAMS}, data, linear.KEY)
    found = result.values[-2 * LEVELS :].reshape(2, LEVELS)
    rows = next(indices[mask == 1] for indices, mask in batches(loop, 13, linear.KEY, 0))
    squares = (data["x"] @ linear.PARAMS - data["y"]) ** 2 / 2  # those of the second pass too, which moves nothing
    expected = [levels() <= mean for mean in (squares[rows].mean(), squares.mean())]
    np.testing.assert_array_equal(found, np.float32(expected))
    assert found.sum(1).tolist() != [found[0].sum()] * 2


def test_levels_of_loss_are_exact_and_those_out_of_reach_count_nothing():
    assert levels()[[0, 1, 16, 17, 18, -1]].tolist() == [2**-8, 1.5 * 2**-8, 1, 1.5, 2, 1.5 * 2**23]
    at = [count_losses(np.float32([4, 4 * loss]), np.float32([1, 0])).sum() for loss in (1.5, 1.4999999, -3, 1e30)]
    assert at == [18, 17, 0, LEVELS]
    assert count_losses(np.float32([0, 0]), np.float32([1, np.nan])).tolist() == [0] * 2 * LEVELS


def test_a_plan_that_counts_losses_which_no_pass_has_is_refused():
    plan = linear.plan()
    passes = tuple(replace(stage, metrics=("examples",)) for stage in plan.passes)
    segments = (*plan.report.segments[:-2], LOSS_COUNTS)
    with pytest.raises(PlanRefused, match="wants 128 sums in segment 'losses'"):
        run(replace(plan, passes=passes, report=replace(plan.report, segments=segments)), linear.examples(4))


def test_a_step_limit_ends_a_pass_and_leaves_the_weight():
    train = Loop(batch_size=4, epochs=3, steps=2)
    data = linear.examples(10)
    result = run(linear.plan(train=train), data)
    expected = linear.reference(linear.PARAMS, data, linear.KEY, train)
    np.testing.assert_allclose(weighed(result), expected, rtol=2e-6, atol=1e-5)
    assert result.steps == 2 + 3


def test_every_pass_has_an_order_of_its_own():
    sweep = Loop(batch_size=4, steps=1)
    data = linear.examples(10)
    result = run(linear.plan(sweep=sweep), data)
    expected = linear.reference(linear.PARAMS, data, linear.KEY, sweep=sweep)
    np.testing.assert_allclose(weighed(result), expected, rtol=2e-6, atol=1e-5)


def test_a_secure_round_stores_unweighted_values_bit_for_bit():
    plan, result = linear.plan(), run(linear.plan(), linear.examples(7))
    blob = BlobRef.of(b"")
    clear = Assignment(
        assignment="a", task="t", round=1, attempt=1, slot=0, seed=0, plan=blob, checkpoint=blob, report_within_s=1.0
    )
    stored = encode_report(replace(clear, secagg=b"M0"), plan, result)
    assert decode_unweighted(stored, plan.report).tobytes() == result.values.tobytes()
    uploaded = checkpoint.decode(encode_report(clear, plan, result), plan.report.wire)["report"]
    assert uploaded.tobytes() == weighed(result).tobytes()


class Eavesdropper:
    """A graph, and the noise of every run of it."""

    def __init__(self, graph):
        self.graph, self.heard = graph, []

    def run(self, inputs, outputs):
        if "noise" in inputs:
            self.heard.append(inputs["noise"].copy())
        self.graph.run(inputs, outputs)


def test_noise_is_drawn_for_every_step_by_its_index_over_all_epochs():
    plan = linear.plan(sweep=Loop(batch_size=3, epochs=2))
    train, sweep = plan.passes
    plan = replace(plan, passes=(train, replace(sweep, noise=True)))
    graphs = load(linear.graphs())
    graphs["sweep.step"] = step = Eavesdropper(graphs["sweep.step"])
    execute(plan, graphs, {"params": linear.PARAMS}, linear.examples(5), linear.KEY)
    expected = [noise(linear.KEY, 1, index, 3) for index in range(4)]
    np.testing.assert_array_equal(step.heard, expected)


def test_same_work_gives_the_same_bytes_another_place_another_order():
    data = linear.examples(10)
    first, again = run(linear.plan(), data), run(linear.plan(), data)
    assert first.values.tobytes() == again.values.tobytes()
    elsewhere = execute(
        linear.plan(), load(linear.graphs()), {"params": linear.PARAMS}, data, replace(linear.KEY, slot=4)
    )
    assert elsewhere.values[: linear.D].tobytes() != first.values[: linear.D].tobytes()


def test_executables_serve_a_second_run_with_other_data():
    graphs = load(linear.graphs())
    for seed, n in ((1, 9), (2, 5)):
        data = linear.examples(n, seed)
        result = execute(linear.plan(), dict(graphs), {"params": linear.PARAMS}, data, linear.KEY)
        expected = linear.reference(linear.PARAMS, data, linear.KEY)
        np.testing.assert_allclose(weighed(result), expected, rtol=2e-6, atol=1e-5)


class Watched:
    """An executable that notes whether what it writes overlaps what it reads."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def run(self, inputs, outputs):
        self.calls.append(any(np.shares_memory(i, o) for i in inputs.values() for o in outputs.values()))
        self.inner.run(inputs, outputs)


def test_no_graph_ever_writes_into_what_it_reads():
    graphs = {name: Watched(one) for name, one in load(linear.graphs()).items()}
    execute(linear.plan(), dict(graphs), {"params": linear.PARAMS}, linear.examples(10), linear.KEY)
    assert {name: len(one.calls) for name, one in graphs.items()} == {
        "train.begin": 1,
        "train.step": 6,
        "sweep.begin": 1,
        "sweep.step": 3,
        "report": 1,
    }
    assert not any(any(one.calls) for one in graphs.values())


def test_the_broadcast_and_the_examples_are_left_as_they_were():
    data, params = linear.examples(6), linear.PARAMS.copy()
    execute(linear.plan(), load(linear.graphs()), {"params": params}, data, linear.KEY)
    np.testing.assert_array_equal(params, linear.PARAMS)
    np.testing.assert_array_equal(data["x"], linear.examples(6)["x"])


def test_a_deadline_stops_between_steps():
    asked = iter([True, True, False])
    with pytest.raises(DeadlinePassed, match="'train' after 2 steps"):
        run(linear.plan(), linear.examples(20), keep_going=lambda: next(asked))


def test_divergence_is_named_and_nothing_is_reported():
    data = linear.examples(6)
    data["y"] = np.full(6, 3e38, np.float32)
    with pytest.raises(NonFiniteReport, match="non-finite value: the loss was not finite in the first step"):
        run(linear.plan(), data)


@pytest.mark.parametrize(
    ("size", "count", "says"),
    [
        (1e19, 4, "after one step the loss was not finite"),
        (1e5, 40, "the loss left the finite numbers in later steps: training diverged"),
    ],
)
def test_a_report_that_is_not_finite_says_when_that_began(size, count, says):
    data = linear.examples(count)
    data["x"] *= np.float32(size)
    with pytest.raises(NonFiniteReport) as raised:
        run(linear.plan(), data)
    assert says in str(raised.value)


def test_a_report_that_the_passes_cannot_fill_is_refused():
    plan = linear.plan()
    layout = ReportLayout((Segment("weight", 1, "sum"), Segment("other.metrics", 2, "sum")), "uniform")
    with pytest.raises(PlanRefused, match=r"other\.metrics"):
        run(replace(plan, report=layout), linear.examples(4))


def test_a_mean_segment_that_the_report_graph_lacks_is_refused():
    layout = ReportLayout((Segment("weight", 1, "sum"), Segment("hessian", 3, "mean")), "uniform")
    with pytest.raises(PlanRefused, match=r"'report'.*hessian"):
        run(replace(linear.plan(), report=layout), linear.examples(4))


def test_a_plan_that_asks_for_impossible_memory_is_refused():
    with pytest.raises(PlanRefused, match="buffer"):
        run(linear.plan(train=Loop(batch_size=1 << 60)), linear.examples(4))


def test_a_plan_without_example_fields_is_refused():
    plan = replace(linear.plan(), examples=replace(linear.plan().examples, fields=()))
    with pytest.raises(PlanRefused, match="no example field"):
        run(plan, {})


class Witness:
    """A graph that notes, when it runs, which other graphs are still in memory."""

    def __init__(self, name, graph, others, seen):
        self.name, self.graph, self.others, self.seen = name, graph, others, seen

    def run(self, inputs, outputs):
        self.seen[self.name] = {name for name, one in self.others.items() if one()} - {self.name}
        self.graph.run(inputs, outputs)


def test_graph_is_freed_before_the_next_pass_and_the_report():
    others, seen = {}, {}
    graphs = {name: Witness(name, one, others, seen) for name, one in load(linear.graphs()).items()}
    others |= {name: weakref.ref(one) for name, one in graphs.items()}
    execute(linear.plan(), graphs, {"params": linear.PARAMS}, linear.examples(10), linear.KEY)
    assert seen["sweep.step"] == {"report"}
    assert seen["report"] == set()


def test_a_plan_that_bounds_the_report_and_sends_no_bound_is_refused():
    plan = linear.plan()
    means = tuple(one for one in plan.report.segments if one.reduction == "mean" or one.name == "weight")
    bounded = replace(plan, report=ReportLayout(means, "uniform", bounded=True))
    with pytest.raises(PlanRefused, match="its broadcast has no 'clip'"):
        run(bounded, linear.examples(4))
