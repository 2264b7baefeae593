"""`muster privacy epsilon` against values that others published or that follow by hand."""

import json

import pytest

from tests.muster.test_cli import in_process


def epsilon(**options):
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = in_process("privacy", "epsilon", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["epsilon"]


@pytest.mark.parametrize(
    ("options", "expected", "within"),
    [
        # Balle, Wang 2018: the exact ε of one Gaussian.
        ({"noise_multiplier": 1, "rounds": 1, "delta": 1e-5}, 4.3772, 1e-3),
        # √T of them are one of a T-th of the variance.
        ({"noise_multiplier": 10, "rounds": 100, "delta": 1e-5}, 4.3772, 1e-3),
        # A device that is in one round of ten, over a hundred rounds, is in ten.
        ({"noise_multiplier": 10**0.5, "rounds": 100, "delta": 1e-5, "min_separation_rounds": 10}, 4.3772, 1e-3),
        # Kairouz et al. 2021: in a tree of 2^k rounds a device of one round is in k + 1 blocks.
        (
            {"noise_multiplier": 7**0.5, "rounds": 64, "delta": 1e-5, "mechanism": "tree", "min_separation_rounds": 64},
            4.3772,
            1e-3,
        ),
        # Two bands, 1 and ½, give every column but the last the squared length 5/4.
        (
            {
                "noise_multiplier": 1.25**0.5,
                "rounds": 10,
                "delta": 1e-5,
                "mechanism": "banded",
                "bands": 2,
                "min_separation_rounds": 10,
            },
            4.3772,
            1e-3,
        ),
    ],
)
def test_epsilon_is_that_which_others_find(options, expected, within):
    assert epsilon(**options) == pytest.approx(expected, rel=within)


def test_sampled_rounds_spend_less_than_a_looser_accountant_published():
    # The MNIST table of TensorFlow Privacy: noise 1.1, batches of 256 of 60,000, 60 epochs; RDP says 3.01.
    sampled = epsilon(noise_multiplier=1.1, rounds=14062, delta=1e-5, sampling_probability=256 / 60000)
    assert 0.75 * 3.01 < sampled < 3.01


def test_noise_of_devices_costs_a_little_more_than_gaussian_noise():
    facts = {"noise_multiplier": 4, "rounds": 20, "delta": 1e-6}
    assert 1 < epsilon(**facts, mechanism="distributed") / epsilon(**facts) < 1.25


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mechanism": "laplace"}, "mechanism must be one of gaussian, tree, banded, distributed, not laplace"),
        ({"mechanism": "banded"}, "bands must be from 2"),
        ({"mechanism": "tree", "sampling_probability": 0.5}, "sampling_probability below 1 is for"),
        ({"delta": 1}, "delta must be above 0 and below 1"),
        ({"noise_multiplier": 0}, "noise_multiplier"),
    ],
)
def test_what_no_accountant_can_count_is_refused_with_the_reason(options, said):
    facts = {"noise_multiplier": 1, "rounds": 2, "delta": 1e-5} | options
    words = [word for name, value in facts.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = in_process("privacy", "epsilon", *words)
    assert done.exit_code != 0
    assert said in f"{done.output}{done.exception}"
