"""The vectors by which a device in another language is held against this implementation."""

from tests.make_device_vectors import PATH, text


def test_the_vectors_of_devices_are_what_this_implementation_answers():
    assert PATH.read_text() == text(), "run `python -m tests.make_device_vectors`, and read the difference"
