"""Codecs of reports: linear, unbiased, and the same for whoever has the public key."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace
from scipy.linalg import hadamard

from fedcore.codecs import CodecKey, CountSketch, LowRank, Rotation, RoundKey, Subsample, coded_sizes, decode, encode
from fedcore.compression import Compression
from fedcore.errors import CompressionError, PlanError, ReportError
from fedcore.params import ParamSchema, TensorSpec
from fedcore.plan import Plan, TripPlan
from fedcore.report import ReportLayout, Segment
from tests.device_runtime import linear

KEY = RoundKey(seed=2**63 - 1, round=7)


def vector(size, seed=0):
    return np.random.default_rng(seed).normal(size=size)


def rotated_by_matrix(values, block, key):
    """The rotation as matrices: H times signs over √B, on one block after the other."""
    values, signs = values.copy(), key.signs(-(-values.size // block) * block)
    begins = [min(begin, values.size - block) for begin in range(0, values.size, block)]
    for place, begin in enumerate(begins):
        part = values[begin : begin + block] * signs[place * block : (place + 1) * block]
        values[begin : begin + block] = hadamard(block) @ part / block**0.5
    return values


@pytest.mark.parametrize(("size", "block"), [(1, 1), (2, 2), (16, 16), (37, 8), (40, 8), (63, 32)])
def test_a_rotation_is_a_hadamard_transform_of_signed_blocks(size, block):
    key, values = CodecKey(KEY, 0, 0), vector(size)
    np.testing.assert_allclose(Rotation(block).encode(values, key), rotated_by_matrix(values, block, key), atol=1e-12)


@given(size=st.integers(0, 300), seed=st.integers(0, 2**63 - 1), segment=st.integers(0, 3))
def test_a_rotation_is_undone_and_keeps_norms_and_sums(size, seed, segment):
    codecs, key = (Rotation.of(size), Rotation.of(size)), RoundKey(seed, 1)
    first, second = vector(size, 1), vector(size, 2)
    coded = [encode(codecs, one, key, segment) for one in (first, second, first + second)]
    np.testing.assert_allclose(coded[0] + coded[1], coded[2], atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(coded[0]), np.linalg.norm(first), atol=1e-12)
    np.testing.assert_allclose(decode(codecs, coded[0], size, key, segment), first, atol=1e-12)


def test_a_rotation_spreads_one_value_over_all():
    for size in (1000, 1024, 1500):
        spike = np.zeros(size)
        spike[3] = 1
        assert np.abs(Rotation.of(size).encode(spike, CodecKey(KEY, 0, 0))).max() <= 4 / size**0.5


def test_keys_differ_by_seed_round_segment_and_place():
    keys = [CodecKey(RoundKey(seed, number), segment, place) for seed, number, segment, place in np.ndindex(2, 2, 2, 2)]
    assert len({key.signs(64).tobytes() for key in keys}) == 16


def test_signs_are_the_bits_of_the_stream():
    words, signs = CodecKey(KEY, 1, 2).words(2), CodecKey(KEY, 1, 2).signs(100)
    assert signs.tolist() == [1 - 2 * (int(words[place // 64]) >> place % 64 & 1) for place in range(100)]


@pytest.mark.parametrize("block", [0, 3, 16])
def test_a_rotation_that_does_not_fit_its_segment_is_refused(block):
    with pytest.raises(PlanError, match=f"a rotation in blocks of {block}; 8 values need a power of two up to 8"):
        Segment("delta", 8, "mean", codecs=(Rotation(block),))


def test_a_sum_of_metrics_has_no_codec():
    with pytest.raises(ReportError, match="is a sum of metrics"):
        Segment("train.metrics", 8, "sum", codecs=(Rotation(8),))


@pytest.mark.parametrize(("codecs", "bits"), [((), 4), ((CountSketch(1, 4),), 0)], ids=["bits", "sketch"])
def test_a_bounded_report_has_nothing_that_makes_a_norm_greater(codecs, bits):
    segments = Segment("delta", 8, "mean", codecs=codecs), Segment("weight", 1, "sum")
    with pytest.raises(ReportError, match="may make a norm greater"):
        ReportLayout(segments, "uniform", bounded=True, bits=bits)


def test_an_unknown_codec_in_a_plan_is_refused():
    encoded = linear.plan(codecs=(Rotation(2),)).encode()
    assert Plan.decode(encoded).report.segments[0].codecs == (Rotation(2),)
    with pytest.raises(PlanError, match="Invalid value 'top_k'"):
        Plan.decode(encoded.replace(b'"rotation"', b'"top_k"'))


def test_a_decoded_sum_has_the_weighted_mean_of_reports():
    segments = Segment("delta", 50, "mean", codecs=(Rotation(16),)), Segment("weight", 1, "sum")
    layout = ReportLayout((*segments, Segment("train.metrics", 2, "sum")), "examples")
    deltas, metrics = [vector(50, 1).astype(np.float32), vector(50, 2).astype(np.float32)], np.ones(2, np.float32)
    total = np.zeros(layout.size)
    for delta, weight in zip(deltas, (3.0, 1.0), strict=True):
        coded = layout.encode({"delta": delta}, KEY)
        total += layout.weigh(layout.concatenate(coded | {"train.metrics": metrics}, weight), weight)
    parts = layout.decoded.split(layout.decode(total, KEY))
    np.testing.assert_allclose(parts["delta"], (3 * deltas[0] + deltas[1]) / 4, atol=1e-6)
    np.testing.assert_array_equal(parts["train.metrics"], [2, 2])


LOSSY = {
    "subsample": (Subsample(13),),
    "rotated subsample": (Rotation(32), Subsample(13)),
    "one row of counters": (CountSketch(1, 13),),
    "three rows of counters": (CountSketch(3, 8),),
    "low rank": (LowRank(2, ((7, 3), (3, 5), (4, 1))),),
    "all of them": (LowRank(3, ((4, 10),)), Rotation(8), Subsample(9), CountSketch(1, 5)),
}


@pytest.mark.parametrize("chain", LOSSY.values(), ids=LOSSY)
def test_a_codec_is_linear_and_keeps_the_precision(chain):
    values = vector(40, 1), vector(40, 2)
    coded = [encode(chain, one, KEY, 0) for one in (*values, 2 * values[0] - values[1])]
    assert {one.size for one in coded} == {coded_sizes(chain, 40)[-1]}
    np.testing.assert_allclose(2 * coded[0] - coded[1], coded[2], atol=1e-12)
    single = encode(chain, values[0].astype(np.float32), KEY, 0)
    assert (single.dtype, decode(chain, single, 40, KEY, 0).dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(single, coded[0], atol=1e-5)


@pytest.mark.parametrize("chain", LOSSY.values(), ids=LOSSY)
def test_what_a_codec_loses_is_nothing_on_average(chain):
    values, draws = vector(40, 3), 600
    keys = [RoundKey(seed, 1) for seed in range(draws)]
    decoded = np.array([decode(chain, encode(chain, values, key, 0), 40, key, 0) for key in keys])
    error = np.abs(decoded.mean(axis=0) - values) / (decoded.std(axis=0) / draws**0.5 + 1e-12)
    assert error.max() < 4


@pytest.mark.parametrize("fraction", [0.5, 0.125])
def test_the_error_of_a_rotated_subsample_is_known(fraction):
    # Each of C of V values counts V / C times: the squared error is (V / C − 1) ‖v‖², whatever v is.
    values, codecs = np.zeros(1024), (Rotation(1024), Subsample(int(1024 * fraction)))
    values[:3] = 5, -1, 2
    keys = [RoundKey(seed, 1) for seed in range(40)]
    errors = [np.sum((decode(codecs, encode(codecs, values, key, 0), 1024, key, 0) - values) ** 2) for key in keys]
    assert np.mean(errors) / np.sum(values**2) == pytest.approx(1 / fraction - 1, rel=0.1)


def test_only_a_sketch_may_make_a_norm_greater():
    for name, chain in LOSSY.items():
        longest = max(np.linalg.norm(encode(chain, vector(40, seed), KEY, 0)) for seed in range(20))
        assert (longest <= max(np.linalg.norm(vector(40, seed)) for seed in range(20))) or "counters" in name, name


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (Subsample(0), "at least 1 and at most 8"),
        (Subsample(9), "a subsample of 9 values"),
        (CountSketch(0, 4), "0 × 4 counters"),
        (CountSketch(3, 3), "3 × 3 counters"),
        (CountSketch(17, 0), "17 rows"),
        (LowRank(0, ((2, 4),)), "factors of rank 0"),
        (LowRank(1, ((3, 3),)), "matrices with 9 values"),
    ],
)
def test_a_codec_that_does_not_fit_its_segment_is_refused(codec, words):
    with pytest.raises(PlanError, match=words):
        Segment("delta", 8, "mean", codecs=(codec,))


def test_a_plan_cannot_have_its_values_gone_over_without_end():
    """A sketch of a row for each value takes memory by the square of them, and a plan has room for 100,000 codecs."""
    encoded = linear.plan(codecs=(Subsample(2),)).encode()
    one = b'{"codec":"subsample","kept":2}'
    assert one in encoded
    Plan.decode(encoded.replace(one, b",".join([one] * 8)))
    for codecs in (b",".join([one] * 9), b'{"codec":"count_sketch","rows":100000,"columns":0}'):
        with pytest.raises(PlanError, match="there may be"):
            Plan.decode(encoded.replace(one, codecs))


def test_a_plan_cannot_have_its_report_taken_apart_without_end():
    """A coordinator goes over the segments of each report that comes, and a plan has room for 80,000."""
    encoded = linear.plan(codecs=(Subsample(2),)).encode()
    start = encoded.index(b'"segments":[') + len(b'"segments":[')
    present = len(Plan.decode(encoded).report.segments)

    def with_more(count):
        more = b"".join(b'{"name":"s%d","size":1,"reduction":"mean"},' % number for number in range(count))
        return encoded[:start] + more + encoded[start:]

    assert len(Plan.decode(with_more(64 - present)).report.segments) == 64
    for count in (65 - present, 40_000):
        with pytest.raises(PlanError, match=f"has {present + count} segments; there may be 64"):
            Plan.decode(with_more(count))


def test_numbers_in_a_plan_that_are_out_of_range_are_refused():
    encoded = linear.plan(codecs=(Subsample(2),)).encode()
    for kept in (b"-1", b"4", b"1e3", b"99999999999999999999", b"null"):
        with pytest.raises(PlanError):
            Plan.decode(encoded.replace(b'"kept":2', b'"kept":' + kept))


SCHEMA = ParamSchema((TensorSpec("w", (20, 4, 5)), TensorSpec("b", (20,))))


def test_a_compression_becomes_the_codecs_of_long_segments():
    compression = Compression.parse(" low_rank=2 , rotation,subsample=0.5")
    matrices = ((20, 20), (20, 1))
    assert compression.codecs(420, SCHEMA) == (LowRank(2, matrices), Rotation(32), Subsample(30))
    assert compression.codecs(1, SCHEMA) == ()
    assert Compression.parse("").codecs(420, SCHEMA) == ()
    assert Compression.parse("count_sketch=0.1").codecs(420, SCHEMA) == (CountSketch(3, 14),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("top_k=0.1", "top_k does not commute with sums: every device would choose other places"),
        (
            "rotation,error_feedback",
            "error_feedback does not commute with sums: what a device left out would come rounds later",
        ),
        ("rotate", "no compression is called 'rotate'; did you mean rotation"),
        ("subsample", "write subsample=NUMBER, a fraction above 0 and below 1, of the values that travel, not nan"),
        ("subsample=1", "not 1"),
        ("subsample=half", "subsample=half: 'half' is not a number"),
        ("rotation=3", "write rotation without a number, not 3"),
        ("low_rank=1.5", "a whole number of 1 or more, not 1.5"),
        ("low_rank=inf", "not inf"),
        ("bits=3", "write bits=NUMBER, 1, 2, 4 or 8 for each unencrypted value, not 3"),
        ("bits=4,rotation", "bits come last"),
        ("rotation,low_rank=2", "low_rank comes first"),
    ],
)
def test_a_wrong_compression_is_named(text, words):
    with pytest.raises(CompressionError, match=words):
        Compression.parse(text)


def test_a_segment_of_no_matrices_has_no_low_rank():
    with pytest.raises(CompressionError, match="a segment has 840 values, not 420"):
        Compression.parse("low_rank=2").codecs(840, SCHEMA)


def test_a_compressed_plan_has_codecs_in_both_trips():
    plan = linear.plan()
    large = ReportLayout((Segment("delta", 70, "mean"), Segment("weight", 1, "sum")), "examples")
    trip = TripPlan(broadcast=plan.broadcast, passes=plan.passes, report=large, graphs=plan.graphs)
    compressed = Compression.parse("subsample=0.1,bits=2").applied(replace(plan, report=large, second=trip))
    assert [(trip.report.size, trip.report.bits) for trip in compressed.trips] == [(8, 2), (8, 2)]
    assert [trip.report.decoded for trip in compressed.trips] == [large, large]
