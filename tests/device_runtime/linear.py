"""Linear regression by hand: a two-pass plan in ONNX, and the same arithmetic in NumPy."""

import numpy as np
import onnx
from msgspec.structs import replace
from onnx import TensorProto, helper

from fedcore.batching import StreamKey, batches
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan, Plan, PredictPlan
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Loop

D = 3
LEARNING_RATE = 0.1
FLOAT = TensorProto.FLOAT
METRICS = ("examples", "loss")
VECTOR = ("broadcast.params", FLOAT, [D])
BATCH = [("example.x", FLOAT, ["B", D]), ("example.y", FLOAT, ["B"]), ("mask", FLOAT, ["B"])]
TRAIN, SWEEP = Loop(batch_size=4, epochs=2), Loop(batch_size=4, shuffle=False)


def graph(nodes, inputs, outputs, constants=()):
    """ONNX bytes. `nodes` are (operator, inputs, output) or (operator, inputs, output, attributes)."""
    made = [helper.make_node(kind, ins, [out], **(rest[0] if rest else {})) for kind, ins, out, *rest in nodes]
    proto = helper.make_graph(
        made,
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [helper.make_tensor(name, kind, [len(values)], values) for name, kind, values in constants],
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return model.SerializeToString()


def gradient_nodes(params):
    """The summed gradient of half the squared error at `params`, and [examples, loss] sums."""
    return [
        ("MatMul", ["example.x", params], "predicted"),
        ("Sub", ["predicted", "example.y"], "error"),
        ("Mul", ["error", "mask"], "masked"),
        ("MatMul", ["masked", "example.x"], "gradient"),
        ("ReduceSum", ["mask"], "n", {"keepdims": 1}),
        ("Mul", ["masked", "masked"], "square"),
        ("ReduceSum", ["square"], "squares", {"keepdims": 1}),
        ("Mul", ["squares", "half"], "loss"),
        ("Concat", ["n", "loss"], "metrics", {"axis": 0}),
    ]


def graphs():
    """The five graphs of the plan."""
    half, rate = ("half", FLOAT, [0.5]), ("rate", FLOAT, [LEARNING_RATE])
    metrics = ("metrics", FLOAT, [2])
    move = [
        ("Div", ["gradient", "n"], "mean"),
        ("Mul", ["mean", "rate"], "move"),
        ("Sub", ["carry.params", "move"], "next.params"),
    ]
    add = [("Add", ["carry.gradient_sum", "gradient"], "next.gradient_sum")]
    difference = ("Sub", ["train.carry.params", "broadcast.params"], "delta")
    last = ("Identity", ["sweep.carry.gradient_sum"], "gradient")
    carries = [("train.carry.params", FLOAT, [D]), ("sweep.carry.gradient_sum", FLOAT, [D])]
    return {
        "train.begin": graph(
            [("Identity", ["broadcast.params"], "next.params")], [VECTOR], [("next.params", FLOAT, [D])]
        ),
        "train.step": graph(
            gradient_nodes("carry.params") + move,
            [("carry.params", FLOAT, [D]), VECTOR, *BATCH],
            [("next.params", FLOAT, [D]), metrics],
            [half, rate],
        ),
        "sweep.begin": graph(
            [("Sub", ["broadcast.params", "broadcast.params"], "next.gradient_sum")],
            [VECTOR],
            [("next.gradient_sum", FLOAT, [D])],
        ),
        "sweep.step": graph(
            gradient_nodes("broadcast.params") + add,
            [("carry.gradient_sum", FLOAT, [D]), VECTOR, *BATCH],
            [("next.gradient_sum", FLOAT, [D]), metrics],
            [half],
        ),
        "report": graph([difference, last], [VECTOR, *carries], [("delta", FLOAT, [D]), ("gradient", FLOAT, [D])]),
    }


def many_steps():
    """The graphs of the plan, with those of many steps in the place of those of one."""
    return {
        f"{name}s" if name.endswith(".step") else name: _looped(blob) if name.endswith(".step") else blob
        for name, blob in graphs().items()
    }


def _looped(step):
    """A graph of one step as a graph of many: a loop over the examples, and last the mask."""
    inner = onnx.load_model_from_string(step)
    body = inner.graph
    state = [one for one in body.input if one.name.startswith("carry.")]
    rows = [one for name in ("example.x", "example.y", "mask") for one in body.input if one.name == name]
    outer = [one for one in body.input if one.name.startswith("broadcast.")]
    ends = [next(one for one in body.output if one.name == f"next.{item.name[6:]}") for item in state]
    ends += [one for one in body.output if one.name == "metrics"]
    inside = {one.name: f"inner.{one.name}" for one in (*state, *rows, *ends)}
    nodes = [
        helper.make_node(
            node.op_type,
            [inside.get(name, name) for name in node.input],
            [inside.get(name, name) for name in node.output],
            **{one.name: helper.get_attribute_value(one) for one in node.attribute},
        )
        for node in body.node
    ]

    def info(one, name, *lead):
        sizes = [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim]
        return helper.make_tensor_value_info(name, FLOAT, [*lead, *sizes])

    loop = helper.make_node(
        "Scan",
        [one.name for one in (*state, *rows)],
        [one.name for one in ends],
        num_scan_inputs=len(rows),
        body=helper.make_graph(
            nodes,
            "body",
            [info(one, inside[one.name]) for one in (*state, *rows)],
            [info(one, inside[one.name]) for one in ends],
        ),
    )
    whole = helper.make_graph(
        [loop],
        "graph",
        [*state, *outer, *(info(one, one.name, "S") for one in rows)],
        [*ends[:-1], info(ends[-1], "metrics", "S")],
        body.initializer,
    )
    made = helper.make_model(whole, opset_imports=inner.opset_import, ir_version=10)
    return made.SerializeToString()


def plan(blobs=None, *, fmt="onnx", train=TRAIN, sweep=SWEEP, fields=None, codecs=(), bits=0, more=()):
    """The plan whose graphs are `blobs`. codecs: of both mean segments. bits: of an upload. more: segments."""
    blobs = graphs() if blobs is None else blobs
    return Plan(
        name="linear",
        schema=ParamSchema((TensorSpec("w", (D,)),)),
        broadcast=(VectorSpec("params", D),),
        examples=ExampleSpec(fields or (Field("x", "float32", (D,)), Field("y", "float32"))),
        passes=(
            PassPlan("train", train, (VectorSpec("params", D),), METRICS),
            PassPlan("sweep", sweep, (VectorSpec("gradient_sum", D),), METRICS),
        ),
        report=ReportLayout(
            (
                Segment("delta", D, "mean", codecs=codecs),
                Segment("gradient", D, "mean", codecs=codecs),
                Segment("weight", 1, "sum"),
                Segment("train.metrics", 2, "sum", METRICS),
                Segment("sweep.metrics", 2, "sum", METRICS),
                *more,
            ),
            "examples",
            bits=bits,
        ),
        graphs={fmt: {name: BlobRef.of(blob) for name, blob in blobs.items()}},
    )


def predict_graph():
    """The model's output for every example: its product with the parameters."""
    return graph(
        [("MatMul", ["example.x", "params"], "output")],
        [("example.x", FLOAT, ["B", D]), ("params", FLOAT, [D])],
        [("output", FLOAT, ["B"])],
    )


def predicting(graph, base=None, **members):
    """The plan with a predict graph. members: of its predict member, other than they would be."""
    given = {
        "inputs": ("x",),
        "outputs": (Field("output", "float32"),),
        "batch_size": 1,
        "graphs": {"onnx": BlobRef.of(graph)},
    }
    return replace(base or plan(), predict=PredictPlan(**given | members))


def examples(n, seed=0):
    """`n` noisy examples of a known line."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + rng.normal(scale=0.1, size=n)).astype(np.float32)
    return {"x": x, "y": y}


def reference(params, data, key, train=TRAIN, sweep=SWEEP):
    """The report in float64, batch by batch, without padding."""
    x, y = data["x"].astype(np.float64), data["y"].astype(np.float64)

    def gradient(w, indices, mask):
        real = indices[mask == 1]
        error = x[real] @ w - y[real]
        return error @ x[real], np.array([len(real), 0.5 * (error**2).sum()])

    w, trained, swept = params.astype(np.float64), np.zeros(2), np.zeros(2)
    for indices, mask in batches(train, len(x), key, 0):
        g, sums = gradient(w, indices, mask)
        w, trained = w - LEARNING_RATE * g / sums[0], trained + sums
    total = np.zeros(D)
    for indices, mask in batches(sweep, len(x), key, 1):
        g, sums = gradient(params.astype(np.float64), indices, mask)
        total, swept = total + g, swept + sums
    n = len(x)
    return np.concatenate([n * (w - params), n * total, [n], trained, swept])


PARAMS = np.array([0.3, 0.2, -0.1], np.float32)
KEY = StreamKey(seed=7, round=2, slot=3)
