from collections import Counter

import pytest

from secagg.keys import NeighbourGraph, Tree, climb, depth, sha256
from secagg.parameters import GraphParameters, find
from tests.secagg import reference

ROOT, BEACON = bytes(32), b"\1" * 64


@pytest.mark.parametrize(("n", "k"), [(8, 7), (9, 8), (9, 4), (65, 20), (100, 32), (3, 2), (2, 1), (6, 4)])
def test_being_neighbours_is_mutual_and_everyone_has_k_of_them(n, k):
    graph = NeighbourGraph(GraphParameters(n, k, k), ROOT, BEACON)
    near = [graph.neighbours(position) for position in range(n)]
    for position in range(n):
        assert len(near[position]) == len(set(near[position])) == k
        assert position not in near[position]
        assert all(position in near[peer] for peer in near[position])


def test_the_ring_is_the_order_of_the_stream_and_ranks_follow_it():
    n, k = 21, 6
    words = reference.keystream(sha256(b"muster.secagg.v1.graph\0" + ROOT + BEACON), n)
    ring = sorted(range(n), key=lambda position: (words[position], position))
    graph = NeighbourGraph(GraphParameters(n, k, 4), ROOT, BEACON)
    for place, position in enumerate(ring):
        assert graph.neighbours(position) == [ring[(place + step) % n] for step in (1, 2, 3, -3, -2, -1)]


def test_root_and_beacon_both_change_who_is_near():
    chosen = GraphParameters(100, 32, 22)
    near = {
        tuple(NeighbourGraph(chosen, *bits).neighbours(0)) for bits in ((ROOT, BEACON), (BEACON, BEACON), (ROOT, ROOT))
    }
    assert len(near) == 3


def test_everyone_is_equally_likely_to_be_near():
    counts = Counter()
    for beacon in range(400):
        counts.update(NeighbourGraph(GraphParameters(20, 4, 3), ROOT, beacon.to_bytes(32, "big")).neighbours(0))
    expected = 400 * 4 / 19
    assert sum((counts[p] - expected) ** 2 / expected for p in range(1, 20)) < 60  # 18 degrees of freedom


@pytest.mark.security("passes a device's check with chance (1 − f)^k")
@pytest.mark.parametrize("share", [0.02, 0.05])
def test_a_roster_with_made_up_devices_is_let_by_as_seldom_as_said(share):
    """A device checks its neighbours alone, which are drawn after the roster is fixed."""
    n, draws = 200, 400
    chosen = find(n)
    made_up = set(range(1, 1 + round(share * n)))
    graphs = (NeighbourGraph(chosen, ROOT, beacon.to_bytes(32, "big")) for beacon in range(draws))
    let_by = sum(not made_up & set(graph.neighbours(0)) for graph in graphs)
    most = (1 - share) ** chosen.k * draws
    assert 0 <= let_by < most + 4 * most**0.5
    assert share > 0.02 or let_by > most / 3


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
def test_a_path_proves_its_leaf_at_its_place_and_no_other(n):
    leaves = [bytes([i]) * 96 for i in range(n)]
    tree = Tree(leaves)
    for position, leaf in enumerate(leaves):
        path = tree.path(position)
        assert len(path) == 32 * depth(n)
        assert climb(leaf, position, path) == tree.root
        assert all(climb(leaf, other, path) != tree.root for other in range(n) if other != position)
        assert climb(leaf[:-1] + b"x", position, path) != tree.root
