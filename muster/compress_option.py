"""The option `--compress` of commands that export or train: how reports become smaller."""

COMPRESS = (
    "How reports become smaller, in steps by commas: rotation, subsample=FRACTION, count_sketch=FRACTION, "
    "low_rank=RANK (docs/compression.md)."
)
