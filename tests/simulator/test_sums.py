"""The sums of a round: what clients add, and how long a clipped report may be."""

import math

import torch

from simulator.engines.sums import RoundSums, SumsLayout


def test_bounded_reports_are_held_to_the_bound_as_on_devices():
    layout = SumsLayout({"delta": 2, "gradient": 1}, {}, bounded=True)
    sums = RoundSums(layout, torch.empty(layout.size, dtype=torch.float64))
    report = {
        "delta": torch.tensor([[3.0, 0.0], [0.0, 0.5], [math.nan, 1.0]]),
        "gradient": torch.tensor([[4.0], [0.0], [0.0]]),
    }
    finite = sums.add(report, {}, torch.ones(3), {}, torch.tensor([1.0]))
    assert finite.tolist() == [True, True, False]
    torch.testing.assert_close(sums.report["delta"], torch.tensor([0.6, 0.5], dtype=torch.float64))
    torch.testing.assert_close(sums.report["gradient"], torch.tensor([0.8], dtype=torch.float64))
    assert (float(sums.weight), float(sums.contributors)) == (3, 2)
