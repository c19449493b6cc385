"""Elastic training whose checkpoints are objects: a worker is killed, then all are, and the run continues from them."""

from pathlib import Path

import elastic_fits
import numpy as np
import pytest
from launched_runs import launch
from optional_packages import require
from s3_server import s3_server

from tfdist.checkpoint.remote.remote_store import RemoteStore
from tfdist.strategies import MirroredStrategy

_SCRIPT = Path(__file__).with_name("on_workers_elastic_fits.py")
_RATES = {"unavailable": 0.03, "slow down": 0.02, "reset": 0.03, "cut off": 0.02, "lost reply": 0.05, "late": 0.03}

pytestmark = [pytest.mark.long, pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]


def test_all_are_killed_and_continue_from_the_store(tmp_path, monkeypatch):
    require("s3fs", "moto", "flask")
    with s3_server() as server:
        settings = {
            "AWS_ENDPOINT_URL": server.address,
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_ACCESS_KEY_ID": "worker",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        server.control(rates={**_RATES, "old list": 0.5}, seed=1)
        options = ["--workers", "3", "--elastic", "1", "--max-restarts", "1"]
        run = launch(tmp_path, _SCRIPT, "on_a_store", "s3://bucket/run", options=options).assert_complete()
        hits = server.control(rates={}, seed=1)["hits"]
        assert hits.keys() >= _RATES.keys()
        store = RemoteStore("s3://bucket/run", objects=server.objects("reader", "run"))
        last, skipped = store.newest()
    assert (last.metadata["step"], last.saved_ranks, skipped) == (240, (0, 1, 2), [])
    ended = [int(run.path(f"on_a_store-{rank}.ended").read_text()) for rank in range(3)]
    (tmp_path / "alone").mkdir()
    expected = elastic_fits.on_a_store(MirroredStrategy(["CPU:0"]), tmp_path / "alone", lambda model: [])
    first = run.arrays("on_a_store-0.npz")
    for rank in range(3):
        assert run.json(f"on_a_store-{rank}-0.json") == []
        found = run.json(f"on_a_store-{rank}-1.json")
        # When a save is due, the one before has ended. Rank 0 may have joined after it.
        assert found[-1][0] >= max(ended) // 10 * 10 - 10 and found[-1][1][-2:] == [1, 2], (found, ended)
        got = run.arrays(f"on_a_store-{rank}.npz")
        for key, values in expected.items():
            np.testing.assert_array_equal(got[key], first[key], f"{key}, {rank}")
            # 240 updates of sums that associate differently.
            np.testing.assert_allclose(got[key], values, rtol=1e-5, atol=1e-5, err_msg=key)
