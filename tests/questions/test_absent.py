"""Numbers that are no data: labels that are ignored, and what fills a text's tokens, are NULL in every answer."""

import numpy as np
import pytest

from fedcore.errors import QuestionError
from fedcore.plan import IGNORED, BlobRef, Field, Tokenizer
from muster.asking import Fields, Terms, compiled, fields_in
from simulator.population import Population
from simulator.questions import ask_population
from tests.questions.graphs import planned
from tests.questions.pooled import told
from tests.questions.test_sql_against_sqlite import on

Y = np.array([0, 1, 2, 2, IGNORED, IGNORED])
USERS = Population(
    ("a", "b", "c", "d"), {"label": np.tile(Y, 4), "x": np.arange(24, dtype=np.float32)}, np.arange(0, 25, 6)
)
FIELDS = Fields((Field("label", "int64", (), 3, ignored=IGNORED), Field("x", "float32")), "")


def shown(words, fields=FIELDS, users=USERS, **terms):
    return ask_population(compiled(words, fields, Terms(minimum_devices=1, **terms)), users).rows


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("SELECT COUNT(*), COUNT(label), SUM(label), AVG(label) FROM examples", [(24, 16, 20, 1.25)]),
        ("SELECT label, COUNT(*) FROM examples GROUP BY label", [(None, 8), (0, 4), (1, 4), (2, 8)]),
        ("SELECT MIN(label), MAX(label), VAR_POP(label) FROM examples", [(0, 2, 0.6875)]),
        ("SELECT COUNT(*) FROM examples WHERE label < 0", []),
        ("SELECT COUNT(*) FROM examples WHERE NOT label = 2", [(8,)]),
        ("SELECT COUNT(*) FROM examples WHERE label IS NULL", [(8,)]),
        ("labels label", [(0, 4, 4, 0.25), (1, 4, 4, 0.25), (2, 8, 4, 0.5)]),
        ("histogram label", [(0, 0, 4, 4, 0.25), (1, 1, 4, 4, 0.25), (2, 2, 8, 4, 0.5)]),
        ("quantiles label", [(0, 0, 0, 1, 2, 2, 2, 16)]),
        ("normaliser label", [("label", None, 1.25, pytest.approx(0.6875**0.5), 16)]),
    ],
)
def test_ignored_labels_are_null(words, expected, secure):
    words = f"{words} MAX 6 ROWS PER DEVICE" if secure else words
    asked = [words] if words.startswith("SELECT") else words.split()
    assert list(shown(asked, secure=secure)) == expected


def test_a_correlation_is_of_rows_whose_label_counts():
    kept = USERS.fields["label"] >= 0
    ((found, rows),) = shown(["correlation", "label", "x", "low=0,0", "high=2,23"])
    expected = np.corrcoef(USERS.fields["label"][kept], USERS.fields["x"][kept])[0, 1]
    assert (found, rows) == (pytest.approx(expected, abs=1e-6), 16)


def test_elements_of_a_label_count_by_themselves():
    labels = np.array([[0, 1, IGNORED], [IGNORED, 1, 1]] * 3)
    users = Population(("a", "b", "c"), {"label": labels}, np.arange(0, 7, 2), 2)
    fields = fields_in(users, "a data set")
    assert fields.fields == (Field("label", "int64", (3,), 2, ignored=IGNORED),)
    assert list(shown(["labels", "label"], fields, users)) == [(0, 3, 3, 0.25), (1, 9, 3, 0.75)]
    assert [row[2:] for row in shown(["normaliser", "label"], fields, users)] == [
        (0.0, 0.0, 3),
        (1.0, 0.0, 6),
        (1.0, 0.0, 3),
    ]


def test_what_fills_the_tokens_of_a_text_is_no_token():
    tokens = np.array([[5, 0, 9], [7, 9, 9]] * 3, np.int32)
    users = Population(("a", "b", "c"), {"text": tokens}, np.arange(0, 7, 2))
    field = Field("text", "int32", (3,), 10, tokenizer=Tokenizer(BlobRef.of(b"{}"), 9))
    rows = shown(["labels", "text"], Fields((field,), ""), users)
    assert [row[:2] for row in rows] == [(0, 3), (5, 3), (7, 3)]


def test_whole_numbers_below_0_have_no_known_range():
    users = Population(("a", "b"), {"t": np.array([-5, 7]), "y": np.array([0, 1])}, np.arange(3))
    fields = fields_in(users, "a data set")
    assert fields.fields[0].high is None
    with pytest.raises(QuestionError, match="t is int64 of unknown range"):
        shown(["SELECT SUM(t) FROM examples"], fields, users)
    assert shown(["SELECT COUNT(*) FROM examples"], fields, users) == ((2,),)
    assert shown(["sizes"], fields, users)[0][3:] == (2, 1.0)


def test_infinity_is_null_in_sql_and_by_name():
    users = Population.of(["a"], [{"x": np.array([1, np.inf, -np.inf, np.nan, 3], np.float32)}])
    fields = fields_in(users, "a data set")
    assert shown(["SELECT COUNT(x) FROM examples"], fields, users) == ((2,),)
    assert [row[:3] for row in shown(["histogram", "x", "low=0", "high=4", "bins=2"], fields, users)] == [
        (0.0, 2.0, 1),
        (2.0, 4.0, 1),
    ]
    assert shown(["normaliser", "x", "low=0", "high=4"], fields, users) == (("x", None, 2.0, 1.0, 2),)


@pytest.mark.parametrize("words", ["SELECT SUM(t) FROM examples", "labels t", "heavy-hitters t"])
def test_a_field_of_a_type_that_no_device_has_is_refused_by_it(words):
    users = Population(("a", "b"), {"t": np.array([0.5, 7])}, np.arange(3))
    asked = [words] if words.startswith("SELECT") else words.split()
    with pytest.raises(QuestionError, match="t is float64; make it one of float32, int64"):
        shown(asked, fields_in(users, "a data set"), users)


@pytest.mark.parametrize("form", ["onnx", "executorch"])
def test_graphs_leave_out_what_is_ignored(form, request):
    from device_runtime.backends.executorch import ExecuTorch
    from device_runtime.backends.onnxruntime import OnnxRuntime

    if form == "executorch":
        request.getfixturevalue("executorch")
    backend = {"onnx": OnnxRuntime, "executorch": ExecuTorch}[form]()
    for words, expected in [
        (["SELECT COUNT(*), COUNT(label), SUM(label) FROM examples"], [(12, 8, 10)]),
        (["labels", "label"], [(0, 2, 2, 0.25), (1, 2, 2, 0.25), (2, 4, 2, 0.5)]),
    ]:
        asked = compiled(words, FIELDS, Terms(minimum_devices=1))
        reports = on(backend)(*planned(asked, form), [USERS.shard(client) for client in range(2)])
        assert list(told(asked, reports).rows) == expected
