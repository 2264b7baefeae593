"""The protocol's arithmetic once more, integer by integer, without NumPy or a stream cipher: slow and obvious."""

import hashlib
import hmac

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB

WORD = 2**64


def keystream(key, size):
    """AES-256 of the counters 0, 1, …, cut into words."""
    encryptor = Cipher(AES256(key), ECB()).encryptor()
    blocks = [encryptor.update(counter.to_bytes(16, "big")) for counter in range(-(-size // 2))]
    return [int.from_bytes(part, "little") for block in blocks for part in (block[:8], block[8:])][:size]


def add_masks(words, masks):
    words = list(words)
    for key, sign in masks:
        for place, word in enumerate(keystream(key, len(words))):
            words[place] = (words[place] + sign * word) % WORD
    return words


def pack(quantised, field_bits):
    """Fields of one segment: value v goes into word v mod P, at field ⌊v / P⌋."""
    count = -(-len(quantised) // (64 // field_bits))
    words = [0] * count
    for v, q in enumerate(quantised):
        words[v % count] += q << field_bits * (v // count)
    return words


def unpack(words, size, field_bits):
    return [words[v % len(words)] >> field_bits * (v // len(words)) & (1 << field_bits) - 1 for v in range(size)]


def seal_words(weight, packed):
    """Weight, segments, check word."""
    words = [weight, *packed]
    return [*words, sum((2 * place + 1) * word for place, word in enumerate(words)) % WORD]


def hkdf(secret, salt, info):
    """RFC 5869, 32 bytes of it."""
    prk = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(prk, info + b"\1", hashlib.sha256)


def interpolate(points, prime, at=0):
    """Lagrange's formula, term by term."""
    total = 0
    for x, y in points.items():
        above = below = 1
        for other in points:
            if other != x:
                above = above * (at - other) % prime
                below = below * (x - other) % prime
        total += y * above * pow(below, -1, prime)
    return total % prime


def x25519(scalar, u):
    """RFC 7748, §5: the Montgomery ladder."""
    p = 2**255 - 19
    k = int.from_bytes(scalar, "little") & (1 << 254) - 8 | 1 << 254
    x1 = int.from_bytes(u, "little") % 2**255
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in range(254, -1, -1):
        if k >> bit & 1:
            x2, x3, z2, z3 = x3, x2, z3, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb = d * a, c * b
        aa, bb = a * a, b * b
        x4, z4 = aa * bb % p, (aa - bb) * (aa + 121665 * (aa - bb)) % p
        x3, z3 = (da + cb) ** 2 % p, x1 * (da - cb) ** 2 % p
        x2, z2 = x4, z4
        if k >> bit & 1:
            x2, x3, z2, z3 = x3, x2, z3, z2
    return (x2 * pow(z2, -1, p) % p).to_bytes(32, "little")
