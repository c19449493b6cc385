"""What workers keep in shared memory outlives them, and ends with the run, however that ends."""

import time
from pathlib import Path

_LIMIT_SECONDS = 60
_KEEP = """
    memory = pathlib.Path(os.environ["TFDIST_MEMORY"])
    (memory / "kept").mkdir(parents=True, exist_ok=True)
"""


def test_it_outlives_a_killed_worker_and_ends_with_the_run(run, tmp_path):
    script = f"""{_KEEP}
    if ATTEMPT == 0:
        (memory / "kept" / str(RANK)).write_text("state")
        note(f"kept-{{RANK}}")
        wait_for("kept-0")
        wait_for("kept-1")
        die() if RANK == 1 else hang()
    say(memory, *sorted(path.name for path in (memory / "kept").iterdir()))
    """
    ended = run(script, "--max-restarts", "1", "--restart-delay", "0")
    assert ended.code == 0
    assert all(ended.of(rank)[0].split()[1:] == ["0", "1"] for rank in (0, 1))
    memory = Path(ended.of(0)[0].split()[0])
    assert memory.parent == Path("/dev/shm") and not memory.exists()


def test_it_ends_with_a_launcher_that_is_killed(start, tmp_path):
    run = start(f"{_KEEP}\n    (HERE / 'memory').write_text(str(memory)); note('up'); hang()", workers=1)
    run.wait_for("up")
    memory = Path((tmp_path / "memory").read_text())
    assert memory.is_dir()
    run.process.kill()
    run.process.communicate()
    end = time.monotonic() + _LIMIT_SECONDS
    while memory.exists():
        assert time.monotonic() < end, "the memory is left"
        time.sleep(0.01)
