"""Benchmarks: each compares with a peer or a limit in the same run, and gives one JSON object."""
