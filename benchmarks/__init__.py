"""Benchmarks: one module each, listed in `options.py`. Each compares with a peer or a limit in the same run."""
