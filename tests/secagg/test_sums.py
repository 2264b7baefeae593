import numpy as np
import pytest
from tests.secagg.cohort import Cohort, vectors_for, invitation

@pytest.mark.parametrize("mode",[0,1])
def test_x(mode):
    c=Cohort(20, invitation(mode=mode)); v=vectors_for(c)
    a=c.run(v,gone=((10,),(11,),(12,13),(14,) if mode else (),(15,)))
    alive=[s for s in c.clients if s not in (10,11,12,13)]
    assert a.devices==16 and a.weight==16
    np.testing.assert_array_equal(a.sums, sum(v[s].astype(float) for s in alive))
    r=c.server.results()
    print(c.clients[20].result(r[20]))
