"""Examples in TensorFlow's serialisation, the protobuf message tf.train.Example, read without TensorFlow.

An example maps names to features, and a feature is a list of bytes, floats or integers, as
tensorflow/core/example/example.proto and feature.proto describe it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from simulator.population import Array

DTYPES = {"bytes_list": np.object_, "float_list": np.float32, "int64_list": np.int64}


def fields_of(example: bytes) -> dict[str, Array]:
    """The fields of an example: bytes, float32 or int64, (values,). Raises ValueError for a malformed one."""
    from google.protobuf.message import DecodeError

    try:
        features = example_class().FromString(example).features.feature
    except DecodeError as error:
        raise ValueError(f"no tf.train.Example: {error}") from error
    return {
        name: np.array(getattr(feature, kind).value, DTYPES[kind])
        for name, feature in features.items()
        if (kind := feature.WhichOneof("kind"))
    }


@functools.cache
def example_class() -> Any:
    """The class of messages tf.train.Example."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="muster/example.proto", package="tensorflow", syntax="proto3")

    def message(name: str, into: Any = file.message_type) -> Any:
        return into.add(name=name)

    def field(of: Any, number: int, name: str, kind: int, **more: Any) -> None:
        of.field.add(name=name, number=number, type=kind, label=more.pop("label", kinds.LABEL_OPTIONAL), **more)

    for name, kind in (
        ("BytesList", kinds.TYPE_BYTES),
        ("FloatList", kinds.TYPE_FLOAT),
        ("Int64List", kinds.TYPE_INT64),
    ):
        field(message(name), 1, "value", kind, label=kinds.LABEL_REPEATED)
    feature = message("Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
        called = name.replace("List", "_list").lower()
        field(feature, number, called, kinds.TYPE_MESSAGE, type_name=f".tensorflow.{name}", oneof_index=0)
    features = message("Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    field(entry, 1, "key", kinds.TYPE_STRING)
    field(entry, 2, "value", kinds.TYPE_MESSAGE, type_name=".tensorflow.Feature")
    field(
        features,
        1,
        "feature",
        kinds.TYPE_MESSAGE,
        type_name=".tensorflow.Features.FeatureEntry",
        label=kinds.LABEL_REPEATED,
    )
    field(message("Example"), 1, "features", kinds.TYPE_MESSAGE, type_name=".tensorflow.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
