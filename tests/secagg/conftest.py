"""A cohort of nine, brought up to where a test begins to lie."""

import pytest

from tests.secagg.cohort import VICTIM, Cohort, invitation


@pytest.fixture
def cohort():
    return Cohort(9, invitation(min_sum=3))


@pytest.fixture
def victim(cohort):
    return cohort.clients[VICTIM]


@pytest.fixture
def advertised(cohort):
    cohort.advertise()
    return cohort


@pytest.fixture
def delivered(advertised):
    advertised.share(advertised.rosters)
    return advertised


@pytest.fixture
def uploaded(delivered):
    delivered.survivors = delivered.upload(delivered.deliveries)
    return delivered
