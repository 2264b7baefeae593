"""The vectors by which a device in another language is held against this implementation."""

import json

from fedcore.wire.messages import AssignmentAnswer, decode
from tools.make_device_vectors import PATH, text


def test_the_vectors_of_devices_are_what_this_implementation_answers():
    assert PATH.read_text() == text(), "run `python -m tools.make_device_vectors`, and read the difference"


def test_the_form_of_a_message_does_not_matter():
    vectors = json.loads(PATH.read_text())["messages"]
    given, *alike = [
        decode(one.encode(), AssignmentAnswer)
        for one in (vectors["good"]["assignment"][0], *vectors["alike_assignments"])
    ]
    assert alike == [given] * 3
