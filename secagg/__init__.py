"""Secure aggregation, protocol SA1: sums of vectors whose summands nobody sees. Spec: docs/spec/secagg.md.

Bytes in, bytes out: no clock, no network, no files. `Client` and `Server` are the two ends; whoever embeds them carries
the messages and keeps what has to be durable.
"""
