"""The vectors by which a device in another language is held against this implementation."""

import json

import numpy as np
import pytest

from fedcore.errors import WireError
from fedcore.labels import check_labels
from fedcore.wire.messages import AssignmentAnswer, decode
from tools.make_device_vectors import PATH, text


def test_the_vectors_of_devices_are_what_this_implementation_answers():
    """Low-rank factors up to rounding: a processor's matrix products round in their own order."""
    kept, made = json.loads(PATH.read_text()), json.loads(text())
    factors = [np.frombuffer(bytes.fromhex(one["low_rank"].pop("coded")), "<f4") for one in (kept, made)]
    assert kept == made, "run `python -m tools.make_device_vectors`, and read the difference"
    np.testing.assert_allclose(*factors, rtol=0, atol=5e-5)


def test_the_form_of_a_message_does_not_matter():
    vectors = json.loads(PATH.read_text())["messages"]
    given, *alike = [
        decode(one.encode(), AssignmentAnswer)
        for one in (vectors["good"]["assignment"][0], *vectors["alike_assignments"])
    ]
    assert alike == [given] * 3


def test_labels_and_targets_of_the_vectors_are_good_and_bad_here_too():
    vectors = json.loads(PATH.read_text())
    for good in vectors["labels"]["good"]:
        check_labels(good)
    for bad in vectors["labels"]["bad"]:
        with pytest.raises(ValueError, match="label"):
            check_labels(bad)
    for bad in vectors["messages"]["bad_targets"]:
        with pytest.raises(WireError, match="target"):
            decode(bad.encode(), AssignmentAnswer)
