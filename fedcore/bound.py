"""The name of the bound on a clipped report, in a module that loads no NumPy."""

CLIP = "clip"
"""The vector of a broadcast that bounds the L2 norm of every report of the round: one value."""
