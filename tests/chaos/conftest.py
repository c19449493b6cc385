"""Trainings without faults, each run once for all tests."""

import pytest
from training import EPOCHS
from worker_runs import assert_is_complete, command, counting_steps, run


@pytest.fixture(scope="session")
def undisturbed_workers(tmp_path_factory):
    """Called with the number of workers, returns the folder of a training without faults."""
    known = {}

    def of(workers, *, kind="workers", epochs=EPOCHS):
        if (workers, kind, epochs) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            arguments, environ = command(folder, kind, workers, epochs=epochs)
            run(arguments, environ)
            assert_is_complete(counting_steps(folder, workers), epochs)
            known[workers, kind, epochs] = folder
        return known[workers, kind, epochs]

    return of
