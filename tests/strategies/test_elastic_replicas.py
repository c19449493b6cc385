"""A training that resumes with another number of replicas; the batch is not a multiple of both numbers."""

import elastic_programs
import numpy as np
import pytest
from elastic_training import Fault, train
from one_process import in_one_process

from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
PLAIN = {"plain": True, "accumulation_steps": 2}
# Nine updates by sums that associate differently.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def undisturbed(cpus, tmp_path_factory):
    """Of one process: any number of replicas computes the same."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return elastic_programs.flat({"": in_one_process(train, folder, **PLAIN)})


@pytest.mark.long  # test_elastic_on_workers.py has other numbers of workers
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_the_batch_of_all_stays_what_it_was(cpus, tmp_path, undisturbed, before, after):
    """It resumes within an epoch and an accumulation. Of 16 rows 3 replicas have 6, 5 and 5; 2 have 8 and 8."""
    with pytest.raises(RuntimeError, match="on purpose"):
        train(MirroredStrategy(cpus[:before]), tmp_path, [Fault(5)], **PLAIN)
    ended = elastic_programs.flat({"": train(MirroredStrategy(cpus[:after]), tmp_path, **PLAIN)})
    assert ended["/iterations/0"] == 9
    for name, expected in undisturbed.items():
        np.testing.assert_allclose(ended[name], expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
