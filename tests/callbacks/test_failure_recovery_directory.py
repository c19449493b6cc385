"""FailureRecovery's directory: one process at a time trains there, and corrupt checkpoints are never overwritten."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from interruptions import Interrupt, Interrupted
from small_training import fit

from tfdist.callbacks import FailureRecovery, failure_recovery
from tfdist.checkpoint import CheckpointError, DirectoryLock, sharded_save
from tfdist.recovery import storage_tiers, worker_coordination

pytestmark = pytest.mark.usefixtures("cpus")
ROOT = Path(__file__).resolve().parents[2]
LOCK = "import sys; from tfdist.checkpoint import DirectoryLock as L; lock = L(sys.argv[1]); lock.acquire(0); input()"


def is_locked(directory):
    """Returns whether another process cannot lock the directory."""
    run = subprocess.run(
        [sys.executable, "-c", LOCK, str(directory)],
        env={"PYTHONPATH": str(ROOT)},
        input="\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 or "Another process trains in this directory" in run.stderr, run.stderr
    return run.returncode != 0


class Look(Interrupt):
    """Records whether the directory is locked, instead of interrupting."""

    def __init__(self, directory):
        super().__init__("on_train_batch_end", 1)
        self.directory, self.seen = directory, []

    def called(self, *_, **__):
        if not self.seen:
            self.seen.append(is_locked(self.directory))


def test_it_is_locked_while_fit_runs(tmp_path):
    look = Look(tmp_path)
    fit(tmp_path, look)
    assert look.seen == [True] and not is_locked(tmp_path)


def test_after_an_interruption_the_same_process_resumes(tmp_path):
    with pytest.raises(Interrupted):
        fit(tmp_path, Interrupt("on_train_batch_end", 3), every_steps=1)
    assert is_locked(tmp_path), "its save may still be running"
    look = Look(tmp_path)
    fit(tmp_path, look, every_steps=1)
    assert look.seen == [True] and not is_locked(tmp_path)


def test_it_is_free_after_fit_failed_before_or_after_its_steps(tmp_path, monkeypatch):
    with pytest.raises(Interrupted) as after:
        fit(tmp_path, Interrupt("on_train_end", 1))
    assert not is_locked(tmp_path) and after.tb is not None

    def choose(store, *, of_loop):
        assert is_locked(tmp_path)
        raise Interrupted

    monkeypatch.setattr(storage_tiers, "choose_checkpoint", choose)
    with pytest.raises(Interrupted) as before:
        fit(tmp_path)
    assert not is_locked(tmp_path) and before.tb is not None


def test_two_trainings_at_once(tmp_path, monkeypatch):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program = LOCK.replace("input()", "print('held', flush=True); input()")
    monkeypatch.setattr(DirectoryLock.acquire, "__defaults__", (0.0,))
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        unfinished = tmp_path / ".unfinished-0000000003-a"
        unfinished.mkdir()
        with pytest.raises(CheckpointError, match=f"Another process trains .*process {other.pid} on host"):
            fit(tmp_path)
        assert unfinished.exists(), "it may be a save of the other one"
        other.communicate("\n")
    fit(tmp_path)
    assert not unfinished.exists()


def test_only_the_chief_locks_it(tmp_path, monkeypatch):
    """This process is another worker, and the chief has found no checkpoint."""
    monkeypatch.setattr(failure_recovery, "rank_and_num_workers", lambda strategy: (1, 1))
    monkeypatch.setattr(FailureRecovery, "_save", lambda self, **_: None)
    monkeypatch.setattr(
        "tfdist.recovery.worker_coordination.WorkerCoordination.broadcast", lambda *_: (None, "attempt", False)
    )
    look = Look(tmp_path)
    fit(tmp_path, look)
    assert look.seen == [False]


def test_corrupt_checkpoints_are_never_overwritten(tmp_path):
    fit(tmp_path, epochs=3)
    saved = {path: path.read_bytes() + b" " for path in tmp_path.glob("*/manifest.json")}
    for path, content in saved.items():
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="None of the checkpoints is complete. Received: ckpt-.*ckpt-.*ckpt-"):
        fit(tmp_path, epochs=4)
    assert {path: path.read_bytes() for path in tmp_path.glob("*/manifest.json")} == saved and len(saved) == 3


def test_the_chief_waits_for_peer_timeout_seconds(tmp_path, monkeypatch):
    waited = []

    def collect(directory, ranks, *, timeout_seconds, lost):
        waited.append(timeout_seconds)
        return {}

    monkeypatch.setattr(sharded_save, "collect_receipts", collect)
    fit(tmp_path / "default", epochs=1)
    fit(tmp_path / "longer", epochs=1, peer_timeout_seconds=3600)
    assert waited == [600, 3600]
    with pytest.raises(ValueError, match="Received: peer_timeout_seconds=-1"):
        FailureRecovery(tmp_path, peer_timeout_seconds=-1)


def test_a_worker_waits_as_long_for_a_chief_that_has_no_such_callback(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(failure_recovery, "rank_and_num_workers", lambda strategy: (1, 2))
    store = SimpleNamespace(is_published=lambda key, within_seconds: asked.append(within_seconds))
    monkeypatch.setattr(worker_coordination, "key_values", store)
    with pytest.raises(RuntimeError, match="The chief does not train with FailureRecovery"):
        fit(tmp_path, peer_timeout_seconds=7)
    assert asked == [7]
