"""Runs of workers whose results several files check."""

from pathlib import Path

import pytest
from launched_runs import launch_once

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def elastic_workers(tmp_path_factory):
    """Two workers, one and two again, which at last compute what tests of two workers with one device each check."""
    options = ["--workers", "2", "--min-workers", "1", "--max-restarts", "3", "--restart-delay", "0"]
    return launch_once(
        tmp_path_factory, "elastic workers", _HERE / "on_workers_elastic.py", "disturbed", options=options
    )


@pytest.fixture(scope="session")
def workers_of_two_devices(tmp_path_factory):
    """Two workers of two logical devices each."""
    return launch_once(tmp_path_factory, "workers of two devices", _HERE / "on_workers.py", options=["--workers", "2"])


@pytest.fixture
def compiled(monkeypatch):
    """What XLA has compiled: of layers and losses, and of updates."""
    from xla_counts import count_compiled

    return count_compiled(monkeypatch)
