"""The bound on a report that is clipped: its name, apart from what loads NumPy."""

CLIP = "clip"
"""The vector of a broadcast, of one value, that no report of the round is longer than."""
