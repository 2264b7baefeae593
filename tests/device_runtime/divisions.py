"""Graphs that divide: those that a predict graph may be, and those that it may not."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def graph(nodes, constants=(), kind=INT64):
    """A model that makes `d` of `c`, of two values each."""
    edge = [helper.make_tensor_value_info(name, kind, [2]) for name in ("c", "d")]
    constants = [numpy_helper.from_array(value, name) for name, value in constants]
    made = helper.make_graph(nodes, "g", edge[:1], edge[1:], constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def by(number, operator="Div", dtype=np.int64):
    """Data, divided by a constant."""
    kind = FLOAT if dtype == np.float32 else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return graph([helper.make_node(operator, ["c", "by"], ["d"])], [("by", np.array(number, dtype))], kind)


def in_a_loop(divisor):
    """A division in the body of a loop, by a value of that name."""
    values = [helper.make_tensor_value_info(name, INT64, []) for name in ("x", "y")]
    step = helper.make_tensor_value_info("step", TensorProto.UINT8, [])
    body = helper.make_graph([helper.make_node("Div", ["x", divisor], ["y"])], "b", [values[0], step], values[1:])
    scan = helper.make_node("Scan", ["c", "steps"], ["d"], body=body, num_scan_inputs=2)
    return graph([scan], [("steps", np.zeros(2, np.uint8)), ("by", np.array(7))])


def elsewhere():
    """A divisor whose values are not in raw_data."""
    made = by(7)
    (tensor,) = made.graph.initializer
    tensor.ClearField("raw_data")
    tensor.int64_data.append(7)
    return made


def twice():
    """A constant divisor whose name a node gives again."""
    made = by(7)
    made.graph.node.insert(0, helper.make_node("Identity", ["c"], ["by"]))
    return made


def as_an_input():
    """A constant divisor that the caller may replace."""
    made = by(7)
    made.graph.input.append(helper.make_tensor_value_info("by", INT64, []))
    return made


ALLOWED = {
    "integers by 7": by(7),
    "small integers by 255": by(255, dtype=np.uint8),
    "integers by -2": by([-2, 3]),
    "remainders by -7": by(-7, "Mod", np.int32),
    "floats by 0": by(0, dtype=np.float32),
    "floats by -1": by(-1, dtype=np.float32),
    "in a loop by 7": in_a_loop("by"),
    "no division": graph([helper.make_node("Reciprocal", ["c"], ["d"])], kind=FLOAT),
}
REFUSED = {
    "integers by data": graph([helper.make_node("Div", ["c", "c"], ["d"])]),
    "remainders by data": graph([helper.make_node("Mod", ["c", "c"], ["d"])]),
    "floats by data": graph([helper.make_node("Div", ["c", "c"], ["d"])], kind=FLOAT),
    "integers by 0": by(0),
    "integers by -1": by(-1),
    "one of two by -1": by([3, -1], dtype=np.int32),
    "remainders by 0": by(0, "Mod"),
    "in a loop by data": in_a_loop("x"),
    "by values elsewhere": elsewhere(),
    "by a name that is given twice": twice(),
    "by an input with a default": as_an_input(),
    "by nothing": graph([helper.make_node("Div", ["c"], ["d"])]),
}
