"""Who is held out, against the rule of the specification written here from SHA-256 alone."""

import hashlib
import json
import math
import struct
from itertools import pairwise

import numpy as np
import pytest

from fedcore.errors import PlanError
from fedcore.hold_out import HoldOut, is_held_out
from fedcore.plan import ExampleSpec, Field, Plan
from tests.fedcore.test_plan import changed, make_plan
from tools.make_device_vectors import PATH

IDS = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(10_000)]
FIELDS = (Field("x", "float32", (2, 3)), Field("y", "int64"))
CODES = {"float32": "f", "int64": "q", "int32": "i", "uint8": "B"}


def examples(count=2000):
    rng = np.random.default_rng(3)
    return {"x": rng.normal(size=(count, 2, 3)).astype(np.float32), "y": rng.integers(0, 10, count)}


def spec_of(share, side="train", fields=FIELDS, collection="default"):
    return ExampleSpec(fields, collection, HoldOut(share, side))


def within_three_sigma(held_out, share, count):
    return abs(held_out - share * count) <= 3 * math.sqrt(share * (1 - share) * count)


def device_by_the_specification(population, device):
    tag = b"muster.hold-out.device.v1" + bytes(1) + population.encode() + bytes(1) + device.encode()
    return struct.unpack(">Q", hashlib.sha256(tag).digest()[:8])[0] / 2**64


def kept_by_the_specification(spec, columns, count):
    kept = []
    for place in range(count):
        tag = b"muster.hold-out.example.v1" + bytes(1) + spec.collection.encode() + bytes(1)
        for field in spec.fields:
            values = np.asarray(columns[field.name][place]).ravel().tolist()
            tag += struct.pack(f"<{len(values)}{CODES[field.dtype]}", *values)
        held_out = struct.unpack(">Q", hashlib.sha256(tag).digest()[:8])[0] / 2**64 < spec.hold_out.share
        kept += [place] * (held_out == (spec.hold_out.side == "held-out"))
    return kept


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_a_share_of_the_devices_is_held_out(share):
    held_out = [device for device in IDS if is_held_out("phones", device, share)]
    assert within_three_sigma(len(held_out), share, len(IDS))
    assert held_out == [device for device in IDS if device_by_the_specification("phones", device) < share]


def test_a_smaller_share_of_the_devices_is_within_a_larger_one():
    shares = [{device for device in IDS if is_held_out("phones", device, share)} for share in (0, 0.05, 0.1, 0.2, 0.7)]
    assert not shares[0]
    assert all(smaller < larger for smaller, larger in pairwise(shares))


def test_two_populations_hold_out_devices_independently():
    phones, tablets = ({one for one in IDS if is_held_out(name, one, 0.3)} for name in ("phones", "tablets"))
    assert within_three_sigma(len(phones & tablets), 0.09, len(IDS))


def test_a_share_of_the_examples_is_held_out():
    kept = spec_of(0.2).kept(examples())
    assert within_three_sigma(np.count_nonzero(~kept), 0.2, len(kept))
    assert (spec_of(0.2, "held-out").kept(examples()) == ~kept).all()
    assert not (spec_of(0.1, "held-out").kept(examples()) & kept).any()  # 10 % is within 20 %


@pytest.mark.parametrize("vector", json.loads(PATH.read_text())["hold_outs"], ids=str)
def test_examples_are_held_out_as_the_specification_says(vector):
    given = vector["examples"]
    fields = tuple(Field(one["name"], one["dtype"], tuple(one["shape"])) for one in given["fields"])
    columns = {
        field.name: np.frombuffer(bytes.fromhex(vector["columns"][field.name]), field.dtype).reshape(-1, *field.shape)
        for field in fields
    }
    spec = ExampleSpec(fields, given["collection"], HoldOut(**given["hold_out"]))
    assert np.flatnonzero(spec.kept(columns)).tolist() == vector["kept"]
    assert kept_by_the_specification(spec, columns, vector["count"]) == vector["kept"]


def test_an_example_stays_on_its_side_wherever_it_is_stored():
    columns, mixed = examples(200), np.random.default_rng(1).permutation(200)
    kept = spec_of(0.5).kept(columns)
    assert (spec_of(0.5).kept({name: column[mixed] for name, column in columns.items()}) == kept[mixed]).all()
    strided = {
        name: np.repeat(column, 2, axis=0)[::2].astype(column.dtype.newbyteorder(">"))
        for name, column in columns.items()
    }
    assert (spec_of(0.5).kept(strided) == kept).all()


def test_collection_and_order_of_fields_change_who_is_held_out():
    columns = examples(200)
    kept = [
        spec.kept(columns).tolist()
        for spec in (spec_of(0.5), spec_of(0.5, collection="b"), spec_of(0.5, fields=FIELDS[::-1]))
    ]
    assert kept[0] != kept[1] != kept[2] != kept[0]


def test_a_plan_without_a_hold_out_runs_on_all_examples():
    assert ExampleSpec(FIELDS).kept(examples(7)).tolist() == [True] * 7


def test_fields_without_values_are_hashed_too():
    spec = spec_of(0.5, fields=(Field("x", "float32", (0,)),))
    assert len(set(spec.kept({"x": np.zeros((5, 0), np.float32)}).tolist())) == 1
    assert spec.kept({"x": np.zeros((0, 0), np.float32)}).tolist() == []


@pytest.mark.parametrize("share", [1, 1.2, -0.1, math.nan, math.inf])
def test_a_share_that_cannot_be_is_refused_by_name(share):
    with pytest.raises(PlanError, match=r"hold_out_examples must be a number, at least 0 and below 1, not"):
        HoldOut.asked(share, on_held_out=False)


def test_no_plan_runs_on_held_out_examples_where_none_are():
    with pytest.raises(PlanError, match="on_held_out_examples must be left out without hold_out_examples"):
        HoldOut.asked(0.0, on_held_out=True)
    assert HoldOut.asked(0, on_held_out=False) is None
    assert HoldOut.asked(0.25, on_held_out=True) == HoldOut(0.25, "held-out")


@pytest.mark.parametrize(
    "hold_out", [{"share": 1}, {"share": 0}, {"share": -0.1}, {"share": 0.1, "side": "both"}, {"side": "train"}, 0.2]
)
def test_a_plan_with_a_hold_out_that_cannot_be_is_malformed(hold_out):
    members = json.loads(make_plan().encode())["examples"]
    with pytest.raises(PlanError, match="malformed plan"):
        Plan.decode(changed(examples=members | {"hold_out": hold_out}))
    assert Plan.decode(changed(examples=members | {"hold_out": None})) == make_plan()
    good = Plan.decode(changed(examples=members | {"hold_out": {"share": 0.2}}))
    assert good.examples.hold_out == HoldOut(0.2, "train")
