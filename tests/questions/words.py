"""Words of a Zipf law on devices, how often they really are there, and how well a list of them is."""

from collections import Counter

import numpy as np

from simulator.population import Population

LETTERS = 8
HIGH = 123


def zipf(devices, words, seed, most=1):
    """A population whose devices have from 1 to `most` words, the r-th of them in proportion to 1 / r."""
    source = np.random.default_rng(seed)
    known = set()
    while len(known) < words:
        known.add(bytes(source.integers(97, HIGH, source.integers(2, LETTERS + 1)).tolist()))
    table = as_rows(sorted(known, key=lambda word: source.random()))
    shares = 1 / np.arange(1, words + 1)
    shares /= shares.sum()
    shards = [{"word": table[source.choice(words, source.integers(1, most + 1), p=shares)]} for _ in range(devices)]
    return Population.of([f"user {user}" for user in range(devices)], shards, HIGH)


def as_rows(words, letters=LETTERS):
    """Words as rows of a field, with zeros behind them."""
    return np.stack([np.frombuffer(word.ljust(letters, b"\0"), np.uint8) for word in words])


def counts(users):
    """How many devices have each word."""
    found = Counter()
    for user in range(len(users)):
        found.update({row.tobytes().rstrip(b"\0").decode() for row in users.shard(user)["word"]})
    return found


def f1(found, users, top=20):
    """F1 of the first `top` found words; a word that as many devices have as the last of the true ones is right."""
    true = counts(users)
    least = sorted(true.values(), reverse=True)[top - 1]
    first = found[:top]
    return 2 * sum(true[word] >= least for word in first) / (len(first) + top)
