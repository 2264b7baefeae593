"""The option `--compress` of commands that export or train: how reports become smaller."""

COMPRESS = (
    "How reports become smaller, in steps by commas: rotation, subsample=FRACTION, count_sketch=FRACTION, "
    "low_rank=RANK, and last bits=1, 2, 4 or 8 (docs/compression.md)."
)
