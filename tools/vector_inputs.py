"""The fixed inputs of the vectors of a device (tools/make_device_vectors.py)."""

import hashlib

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SEED = 2**53 + 3
"""A seed that a double cannot hold."""


def private(seed):
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def values(size, seed=5):
    """Float32 values that any language can make again: (i · 40503 mod 65537) / 8192 − 4."""
    return ((np.arange(seed, seed + size) * 40503 % 65537) / 8192 - 4).astype(np.float32)


def digest(data):
    return hashlib.sha256(data).hexdigest()
