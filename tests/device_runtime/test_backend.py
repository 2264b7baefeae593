import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.errors import PlanRefused, RuntimeFailed
from tests.device_runtime.linear import FLOAT, graph

F = np.float32


def doubler(extra=()):
    """d = c + c, with inputs that nothing reads."""
    inputs = [("c", FLOAT, ["n"]), *((name, FLOAT, [3]) for name in extra)]
    return graph(
        [("Add", ["c", "c"], "d"), ("Mul", ["c", "c"], "square")],
        inputs,
        [("d", FLOAT, ["n"]), ("square", FLOAT, ["n"])],
    )


def test_outputs_are_written_into_the_callers_buffers():
    loaded, c, d = OnnxRuntime().load(doubler()), np.array([1, 2], F), np.zeros(2, F)
    loaded.run({"c": c}, {"d": d})
    assert d.tolist() == [2, 4]
    c[:] = 5  # in place: bound memory, not a copy
    loaded.run({"c": c}, {"d": d})
    assert d.tolist() == [10, 10]


def test_other_arrays_and_sizes_are_bound_anew():
    loaded = OnnxRuntime().load(doubler())
    for size in (2, 5, 3):
        d = np.zeros(size, F)
        loaded.run({"c": np.full(size, size, F)}, {"d": d})
        assert d.tolist() == [2 * size] * size


def test_memory_freed_and_allocated_again_is_not_taken_for_the_old():
    loaded, d = OnnxRuntime().load(doubler()), np.zeros(64, F)
    for value in range(50):
        loaded.run({"c": np.full(64, value, F)}, {"d": d})
        assert d[0] == 2 * value


def test_an_output_that_is_no_longer_asked_for_is_no_longer_written():
    loaded, c = OnnxRuntime().load(doubler()), np.full(2, 3, F)
    d, square = np.zeros(2, F), np.zeros(2, F)
    loaded.run({"c": c}, {"d": d, "square": square})
    square[:] = 0
    loaded.run({"c": c}, {"d": d})
    assert square.tolist() == [0, 0]


def test_inputs_that_the_graph_does_not_know_are_ignored():
    d = np.zeros(2, F)
    OnnxRuntime().load(doubler()).run({"c": np.ones(2, F), "other": np.ones(9, F)}, {"d": d})
    assert d.tolist() == [2, 2]


def test_an_output_may_not_share_memory_with_an_input():
    loaded, buffer = OnnxRuntime().load(doubler(), "train.step"), np.ones(4, F)
    with pytest.raises(ValueError, match=r"'d'.*'train.step' shares memory with input 'c'"):
        loaded.run({"c": buffer[:2]}, {"d": buffer[1:3]})


def test_a_strided_array_is_not_bound():
    with pytest.raises(ValueError, match="contiguous"):
        OnnxRuntime().load(doubler()).run({"c": np.ones(4, F)[::2]}, {"d": np.zeros(2, F)})


def test_an_unreadable_graph_is_refused_by_name(capfd):
    with pytest.raises(PlanRefused, match=r"cannot load graph 'train\.step'"):
        OnnxRuntime().load(b"not a graph", "train.step")
    assert capfd.readouterr() == ("", "")


def test_graph_of_another_opset_or_damaged_is_refused_before_training(capfd):
    newer = onnx.load_model_from_string(doubler())
    newer.opset_import[0].version = 99
    with pytest.raises(PlanRefused, match=r"'train\.step'.*[Oo]pset"):
        OnnxRuntime().load(newer.SerializeToString(), "train.step")
    whole = doubler()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(PlanRefused, match=r"train\.step"):
            OnnxRuntime().load(whole[:cut], "train.step")
    assert capfd.readouterr().err == ""


def test_a_missing_input_and_an_unknown_output_are_refused_by_name():
    loaded = OnnxRuntime().load(doubler(), "report")
    with pytest.raises(PlanRefused, match=r"'report' wants inputs \['c'\]"):
        loaded.run({}, {"d": np.zeros(2, F)})
    with pytest.raises(PlanRefused, match=r"'report'.*lacks outputs \['delta'\]"):
        loaded.run({"c": np.ones(2, F)}, {"delta": np.zeros(2, F)})


@pytest.mark.parametrize("buffer", [np.zeros(3, F), np.zeros((2, 2), F), np.zeros(2, np.int64)])
def test_a_graph_never_writes_past_a_buffer_that_does_not_fit(buffer, capfd):
    c = np.ones(2, F)
    with pytest.raises(RuntimeFailed, match="'graph' failed"):
        OnnxRuntime().load(doubler()).run({"c": c}, {"d": buffer})
    assert not buffer.any()
    assert capfd.readouterr() == ("", "")


def test_a_graph_cannot_read_files_of_the_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(np.ones(2, F).tobytes())
    weights = TensorProto(name="w", data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="secret")
    value = [helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("c", "d")]
    proto = helper.make_graph([helper.make_node("Add", ["c", "w"], ["d"])], "g", value[:1], value[1:], [weights])
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(PlanRefused):
        OnnxRuntime().load(model.SerializeToString())


def elsewhere(path):
    """A tensor whose bytes are in a file."""
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[5], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=path)
    return tensor


def reading(path, where):
    """A graph that gives five bytes of a file as floats, which it names in one of the places where ONNX allows it."""
    constant = helper.make_node("Constant", [], ["w"], value=elsewhere(path))
    cast = helper.make_node("Cast", ["w"], ["d"], to=TensorProto.FLOAT)
    take = [helper.make_node("Gather", ["w", "zero"], ["g"]), helper.make_node("Cast", ["g"], ["d"], to=FLOAT)]
    inputs = [helper.make_tensor_value_info("yes", TensorProto.BOOL, [])]
    inputs += [helper.make_tensor_value_info("zero", TensorProto.INT64, [5])]
    outputs = [helper.make_tensor_value_info("d", FLOAT, [5])]
    branch = helper.make_graph([constant, *take], "b", [], outputs)
    inner = helper.make_graph(take, "b", [], outputs, [elsewhere(path)])
    graphs = {
        "initializer": helper.make_graph(take, "g", inputs, outputs, [elsewhere(path)]),
        "initializer, cast": helper.make_graph([cast], "g", inputs, outputs, [elsewhere(path)]),
        "constant": helper.make_graph([constant, *take], "g", inputs, outputs),
        "branch": helper.make_graph(
            [helper.make_node("If", ["yes"], ["d"], then_branch=branch, else_branch=branch)], "g", inputs, outputs
        ),
        "branch's initializer": helper.make_graph(
            [helper.make_node("If", ["yes"], ["d"], then_branch=inner, else_branch=inner)], "g", inputs, outputs
        ),
    }
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graphs[where], opset_imports=opsets, ir_version=10).SerializeToString()


@pytest.mark.parametrize("where", ["initializer", "initializer, cast", "constant", "branch", "branch's initializer"])
@pytest.mark.parametrize("path", ["diary.txt", "./diary.txt", "../here/diary.txt", "{}/diary.txt"])
def test_a_graph_cannot_read_a_file_of_the_device(where, path, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "diary.txt").write_bytes(b"diary")
    monkeypatch.chdir(folder)
    with pytest.raises(PlanRefused):
        OnnxRuntime().load(reading(path.format(folder), where))
