"""Synthetic data sets: synthetic(α, β), quadratics, and a sparse logistic problem.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks" (FedProx), MLSys 2020,
section 5.1 and appendix C.1. Client k draws, for 60 features and 10 classes,

    u_k ~ N(0, α)     W_k, b_k ~ N(u_k, 1)     y = argmax(W_k x + b_k)
    B_k ~ N(0, β)     v_k ~ N(B_k, 1)          x ~ N(v_k, Σ),  Σ diagonal with Σ_jj = j^−1.2

and holds 50 examples and a log-normal(4, 2) number of further ones: few clients have most examples. As in the paper's
released code, α and β are standard deviations, which matters only if they are neither 0 nor 1, and the argmax is not
sampled.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from simulator.errors import DatasetError
from simulator.population import Population

FEATURES, CLASSES = 60, 10
FEWEST, LOG_MEAN, LOG_DEVIATION = 50, 4.0, 2.0
MOST = 5_000
"""The most examples of a client: the paper's distribution is unbounded."""


def synthetic(clients: int = 30, alpha: float = 1.0, beta: float = 1.0, seed: int = 0) -> Population:
    """`x` float32 (60,), `y` int64 below 10. Raises DatasetError when a number is out of range."""
    if clients < 1 or alpha < 0 or beta < 0:
        raise DatasetError(f"synthetic has 1 client or more, and α and β from 0, not {clients}, {alpha} and {beta}")
    generator = np.random.Generator(np.random.Philox(key=[seed, clients]))
    deviation = np.arange(1, FEATURES + 1) ** -0.6
    shards = []
    for _ in range(clients):
        size = min(MOST, FEWEST + int(generator.lognormal(LOG_MEAN, LOG_DEVIATION)))
        centre = generator.normal(0, alpha)
        weights = generator.normal(centre, 1, (CLASSES, FEATURES))
        bias = generator.normal(centre, 1, CLASSES)
        means = generator.normal(generator.normal(0, beta), 1, FEATURES)
        x = generator.normal(means, deviation, (size, FEATURES))
        shards.append({"x": x.astype(np.float32), "y": (x @ weights.T + bias).argmax(1).astype(np.int64)})
    return Population.of([f"synthetic-{index:03d}" for index in range(clients)], shards)


# Quadratics: clients whose losses are quadratic functions, for the model `least_squares`.
#
#     F_i(x) = ½ (x − o_i)ᵀ H_i (x − o_i)      H_i = diag(h_i1, …, h_iD)      F = mean over clients of F_i
#
# The minimum of F is x* = (1, …, 1) / √D. There the gradients of the clients differ by G, the dissimilarity of
# Karimireddy et al., "SCAFFOLD", ICML 2020, assumption A1: G² = 1/N Σ_i ‖∇F_i(x*)‖². The Hessian of F has eigenvalues
# from 1 down to 1 / condition, and the clients' own differ from it, coordinate by coordinate.
#
# A client has D examples: example j is √(D h_ij) e_j, with the label that makes o_i the client's own minimum. So a
# gradient on all of them is ∇F_i, without noise; smaller batches are noisy. Every F_i(o_i) is 0, so F(x*) is not. Trap:
# with equal Hessians FedAvg has no drift, even if G is large.

CURVATURE_SPREAD = 0.5
"""The most by which a client's curvature differs from the mean of all clients, relatively."""


def quadratics(
    clients: int = 20, dissimilarity: float = 1.0, condition: float = 10.0, dimensions: int = 16, seed: int = 0
) -> Population:
    """Clients of equal size. `x` float32 (dimensions,), `y` float32.

    Raises DatasetError when there are fewer than two clients, or a number is out of range.
    """
    if clients < 2 or dimensions < 1:
        raise DatasetError(f"quadratics need two clients and a dimension, not {clients} and {dimensions}")
    if dissimilarity < 0 or condition < 1:
        raise DatasetError(
            f"the dissimilarity of quadratics is 0 or more and their condition 1 or more, not {dissimilarity} and "
            f"{condition}"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, clients]))
    slopes_ND = _centred(generator.standard_normal((clients, dimensions)))
    slopes_ND *= dissimilarity / np.sqrt((slopes_ND**2).sum(1).mean())
    spread_ND = _centred(generator.uniform(-1, 1, (clients, dimensions)))
    spread_ND *= CURVATURE_SPREAD / np.abs(spread_ND).max()
    curvatures_ND = np.geomspace(1, 1 / condition, dimensions) * (1 + spread_ND)
    minima_ND = minimum(dimensions) - slopes_ND / curvatures_ND
    shards = [
        {"x": np.diag(scales_D).astype(np.float32), "y": (scales_D * minimum_D).astype(np.float32)}
        for scales_D, minimum_D in zip(np.sqrt(dimensions * curvatures_ND), minima_ND, strict=True)
    ]
    return Population.of([f"quadratic-{index:03d}" for index in range(clients)], shards)


def minimum(dimensions: int) -> NDArray[np.float64]:
    """x*, the minimum of the mean loss over clients: (dimensions,), of length 1."""
    return np.full(dimensions, dimensions**-0.5)


def _centred(values_ND: NDArray[np.float64]) -> NDArray[np.float64]:
    centred: NDArray[np.float64] = values_ND - values_ND.mean(0)
    return centred


# A sparse logistic problem with the structure of Konečný et al.: many users with few examples and favourite words.
#
# Konečný, McMahan, Ramage, Richtárik, "Federated optimization: distributed machine learning for on-device
# intelligence", 2016, section 4. They predict from the words of a public post whether it gets a comment: 10,000 authors
# with 75 to 9,000 posts each, 20,000 words. Those posts are not public. This generator has the properties that they
# call important:
#
# * users hold unequally many examples (log-normal numbers);
# * features are sparse and binary, and their frequencies follow a power law (Zipf);
# * users differ: each belongs to a cluster with favourite words, and has further favourites, so that few users use most
#   words;
# * the rate of positive labels differs from user to user.
#
# Examples are dense arrays with a constant 1 as their last feature, so use at most some thousands of features.

CLUSTERS = 10
WORDS, SPARSE_FEWEST, SPARSE_LOG_MEAN, SPARSE_LOG_DEVIATION, SPARSE_MOST = 12, 10, 3.0, 1.0, 400
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
        size = min(SPARSE_MOST, SPARSE_FEWEST + int(generator.lognormal(SPARSE_LOG_MEAN, SPARSE_LOG_DEVIATION)))
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
