"""A training whose number of workers grows and shrinks on request computes what one process does."""

import tempfile
from pathlib import Path

import elastic_fits
import numpy as np
import pytest
from launched_runs import launch
from on_workers_resized_fit import SOCKET_VARIABLE

from tfdist.strategies import MirroredStrategy

pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.usefixtures("cpus")]


def test_workers_are_added_and_leave_while_the_others_train(tmp_path, monkeypatch):
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir(), several.mkdir()
    with tempfile.TemporaryDirectory(prefix="tfdist-") as short:  # the path of a socket has at most 107 bytes
        socket = f"{short}/run.sock"
        monkeypatch.setenv(SOCKET_VARIABLE, socket)
        options = ["--workers", "2", "--elastic", "1:4", "--control-socket", socket]
        run = launch(several, Path(__file__).with_name("on_workers_resized_fit.py"), options=options)
    output = run.assert_complete().output
    assert "3 workers from now on: worker 2 starts" in output
    assert "worker 2 has joined the others" in output
    assert "worker 2 left, as it was asked to: exit code 75; it is not restarted" in output
    assert "1 worker lost, 1 joined" in output
    assert not list(several.glob("*-2.*"))
    expected = elastic_fits.one_leaves(MirroredStrategy(["CPU:0"]), one, lambda model: [])
    for rank in (0, 1):
        assert run.json(f"numbers-{rank}.json") == {"seen": [[0, 1], [0, 1, 2], [0, 1]], "replicas": 2, "workers": 4}
        for key, value in run.arrays(f"fit-{rank}.npz").items():
            # 240 updates of sums that associate differently.
            np.testing.assert_allclose(value, expected[key], rtol=5e-6, atol=5e-6, err_msg=f"{key}, {rank}")
