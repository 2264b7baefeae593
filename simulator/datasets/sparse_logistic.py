"""A sparse logistic problem with the structure of Konečný et al.: many users with few examples and favourite words.

Konečný, McMahan, Ramage, Richtárik, "Federated optimization: distributed machine learning for on-device intelligence",
2016, section 4. They predict from the words of a public post whether it gets a comment: 10,000 authors with 75 to 9,000
posts each, 20,000 words. Those posts are not public. This generator has the properties that they call important:

* users hold unequally many examples (log-normal numbers);
* features are sparse and binary, and their frequencies follow a power law (Zipf);
* users differ: each belongs to a cluster with favourite words, and has further favourites, so that few users use most
  words;
* the rate of positive labels differs from user to user.

Examples are dense arrays with a constant 1 as their last feature, so use at most some thousands of features.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from simulator.errors import DatasetError
from simulator.population import Population

CLUSTERS = 10
WORDS, FEWEST, LOG_MEAN, LOG_DEVIATION, MOST = 12, 10, 3.0, 1.0, 400
CLUSTER_SHAPE, USER_SHAPE = 0.3, 0.3
"""Shapes of the gamma distributions that favour words; a smaller one makes users differ more."""
USER_BIAS, WORD_WEIGHT = 1.0, 1.0
"""Standard deviations of a user's own inclination to positive labels, and of the true weight of a word."""


def sparse_logistic(users: int = 200, features: int = 1000, seed: int = 0) -> Population:
    """`x` float32 (features,) of zeros and ones, `y` int64, 0 or 1.

    Raises DatasetError when there is no user, or there are no more features than words in an example.
    """
    if users < 1 or features <= 2 * WORDS:
        raise DatasetError(
            f"a sparse logistic problem has users and more than {2 * WORDS} features, not {users} and {features}"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, users]))
    words = features - 1
    frequencies = 1 / np.arange(1, words + 1)
    favoured_CW = generator.gamma(CLUSTER_SHAPE, size=(CLUSTERS, words))
    weights = generator.normal(0, WORD_WEIGHT, words)
    shards = []
    for user in range(users):
        size = min(MOST, FEWEST + int(generator.lognormal(LOG_MEAN, LOG_DEVIATION)))
        taste = frequencies * favoured_CW[user % CLUSTERS] * generator.gamma(USER_SHAPE, size=words)
        x = _examples(generator, size, taste)
        odds = x @ weights + generator.normal(0, USER_BIAS)
        y = generator.random(size) < 1 / (1 + np.exp(-odds))
        constant = np.ones((size, 1), np.float32)
        shards.append({"x": np.hstack([x, constant]), "y": y.astype(np.int64)})
    return Population.of([f"author-{user:04d}" for user in range(users)], shards)


def _examples(generator: Generator, size: int, taste: NDArray[np.float64]) -> NDArray[np.float32]:
    """The words in each example: float32 (size, words) of zeros and ones."""
    words = generator.choice(len(taste), (size, WORDS), p=taste / taste.sum())
    x = np.zeros((size, len(taste)), np.float32)
    np.put_along_axis(x, words, 1, axis=1)
    return x
