"""Secure aggregation, protocol SA1: sums of vectors, while every single vector stays hidden. Spec: docs/spec/secagg.md.

Bytes in, bytes out: no clock, no network, no files. `Client` and `Server` are the two ends. The program that embeds
them carries the messages and keeps the state that must be durable.
"""
