"""`tfdist checkpoints`: what it lists, verifies and prunes."""

import json
import subprocess
import sys

import numpy as np
import pytest
from optional_packages import require

from tfdist.checkpoint import CheckpointStore, Shard, open_store
from tfdist.launch.cli.main import main
from tfdist.utils.formatting import format_bytes


def save(directory, sequence, *, metadata, num_ranks=1, rank=0):
    own = Shard({"a": np.arange(100_000, dtype=np.float32)})
    shared = Shard({}) if rank == 0 else None
    store = CheckpointStore(directory, keep=9)
    return store.save(
        sequence, "a", rank=rank, num_ranks=num_ranks, rank_shard=own, shared_shard=shared, metadata=metadata
    )


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """1 is complete, 2 has a flipped bit, 3 lacks a file, 4 is complete without a step, 5 is unfinished."""
    path = tmp_path / "checkpoints"
    monkeypatch.setattr("time.time", lambda: 1000.0)
    for sequence in (1, 2, 3):
        save(path, sequence, metadata={"step": 100 * sequence, "epoch": sequence - 1})
    torn = path / "ckpt-0000000002" / "rank-0.safetensors"
    data = bytearray(torn.read_bytes())
    data[-1] ^= 1
    torn.write_bytes(data)
    (path / "ckpt-0000000003" / "shared.safetensors").unlink()
    save(path, 4, metadata={})
    save(path, 5, metadata={}, num_ranks=2, rank=1)
    monkeypatch.setattr("time.time", lambda: 1090.0)
    return path


def listed(capsys):
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out.splitlines()


def test_the_listing_checks_sizes(directory, capsys):
    assert main(["checkpoints", str(directory)]) == 0
    headings, *rows, total = listed(capsys)
    assert headings.split() == ["sequence", "step", "epoch", "workers", "size", "age", "status"]
    paths = [*(directory / f"ckpt-000000000{number}" for number in range(1, 5)), directory / ".unfinished-0000000005-a"]
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in paths]
    assert [" ".join(row.split()) for row in rows] == [
        f"1 100 0 1 {format_bytes(sizes[0])} 90 s complete",
        f"2 200 1 1 {format_bytes(sizes[1])} 90 s complete",
        f"3 - - - {format_bytes(sizes[2])} - corrupt: shared.safetensors is missing",
        f"4 - - 1 {format_bytes(sizes[3])} 90 s complete",
        f"5 - - - {format_bytes(sizes[4])} - unfinished: save in progress or interrupted",
    ]
    assert (
        len(
            {
                row.index(word)
                for row, word in zip(rows, "complete complete corrupt complete unfinished".split(), strict=True)
            }
        )
        == 1
    )
    assert total.startswith(f"{directory}: 3 complete, 1 corrupt, 1 unfinished; sizes and manifests were checked")


def test_verify_computes_checksums(directory, capsys):
    assert main(["checkpoints", str(directory), "--verify"]) == 1
    *rows, total = listed(capsys)
    assert rows[2].endswith("corrupt: rank-0.safetensors is not what was written: its checksum differs")
    assert total == f"{directory}: 2 complete, 2 corrupt, 1 unfinished; all checksums were verified"


def test_verify_accepts_complete_and_unfinished_ones(directory, capsys):
    assert main(["checkpoints", str(directory), "--prune", "5"]) == 0
    save(directory, 6, metadata={}, num_ranks=2, rank=1)
    assert main(["checkpoints", str(directory), "--verify"]) == 0


def test_prune_dry_run_removes_nothing(directory, capsys):
    before = sorted(directory.rglob("*"))
    assert main(["checkpoints", str(directory), "--prune", "1", "--dry-run"]) == 0
    lines = listed(capsys)
    names = [".unfinished-0000000005-a", *(f"ckpt-000000000{number}" for number in (1, 2, 3))]
    assert lines[:4] == [f"would remove {name}" for name in names]
    assert sorted(directory.rglob("*")) == before


def test_prune(directory, capsys):
    assert main(["checkpoints", str(directory), "--prune", "2", "--verify"]) == 0
    lines = listed(capsys)
    names = [".unfinished-0000000005-a", "ckpt-0000000002", "ckpt-0000000003"]
    assert lines[:3] == [f"removed {name}" for name in names]
    assert [line.split()[0] for line in lines[4:-1]] == ["1", "4"]
    assert sorted(path.name for path in directory.iterdir()) == ["ckpt-0000000001", "ckpt-0000000004"]


def test_json(directory, capsys):
    assert main(["checkpoints", str(directory), "--verify", "--json"]) == 1
    read = json.loads("\n".join(listed(capsys)))
    assert (read["directory"], read["checksums_verified"], read["removed"]) == (str(directory), True, [])
    statuses = [entry["status"] for entry in read["checkpoints"]]
    assert statuses == ["complete", "corrupt", "corrupt", "complete", "unfinished"]
    first = read["checkpoints"][0]
    size = sum(file.stat().st_size for file in (directory / "ckpt-0000000001").iterdir())
    assert first == {
        "sequence": 1,
        "step": 100,
        "epoch": 0,
        "workers": 1,
        "size_bytes": size,
        "saved_at": 1000.0,
        "status": "complete",
        "reason": "",
        "name": "ckpt-0000000001",
    }
    assert main(["checkpoints", str(directory), "--prune", "1", "--dry-run", "--json"]) == 0
    assert len(json.loads("\n".join(listed(capsys)))["would_remove"]) == 4


def test_no_checkpoints(tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert listed(capsys) == [f"{tmp_path}: no checkpoints"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: DIR"),
        (["none"], "The directory does not exist. Received: 'none'. Expected: the directory that FailureRecovery"),
        (["file"], "The directory does not exist. Received: 'file'"),
        ([".", "--dry-run"], "Received: --dry-run alone. Expected: --prune KEEP"),
        ([".", "--prune", "0"], "--prune: Invalid number. Received: '0'. Expected: a whole number of at least 1"),
        ([".", "--prune", "all"], "--prune: Invalid number. Received: 'all'"),
        ([".", "--prun", "1"], "unrecognized arguments: --prun"),
    ],
)
def test_wrong_command(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["checkpoints", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "error: " in captured.err and not captured.out


def test_what_cannot_be_read_is_an_error(directory, monkeypatch, capsys):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tfdist.checkpoint.checkpoint.Checkpoint", refuse)
    before = sorted(directory.rglob("*"))
    for options in ([], ["--prune", "1"]):
        assert main(["checkpoints", str(directory), *options]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("tfdist checkpoints: The checkpoints could not be ") and not captured.out
        assert "Permission denied" in captured.err and "Change its permissions" in captured.err
    assert sorted(directory.rglob("*")) == before


def test_the_missing_command_names_all_commands(capsys):
    assert main([]) == 2
    assert "Expected: one of run, resize, plan, checkpoints, doctor. See tfdist --help" in capsys.readouterr().err


def test_neither_tensorflow_nor_numpy_is_loaded_before_it_is_needed(directory, environ):
    program = f"""
import sys
import tfdist.launch.cli.main
early = {{"numpy", "tensorflow"}} & set(sys.modules)
code = tfdist.launch.cli.main.main(["checkpoints", {str(directory)!r}])
print(code, early, {{"keras", "tensorflow"}} & set(sys.modules))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-1] == "0 set() set()"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes(count, text):
    assert format_bytes(count) == text


def test_an_address(capsys, monkeypatch):
    require("fsspec")
    monkeypatch.setattr("time.time", lambda: 1000.0)
    url = "memory://bucket/test-checkpoints-command"
    for sequence in (1, 2):
        shards = {"rank_shard": Shard({"a": np.arange(100)}), "shared_shard": Shard({})}
        open_store(url).save(sequence, "a", rank=0, num_ranks=1, metadata={"step": sequence, "epoch": 0}, **shards)
    assert main(["checkpoints", url, "--verify", "--prune", "1"]) == 0
    removed, _, row, total = listed(capsys)
    assert removed == "removed ckpt-0000000001"
    assert row.split()[:4] == ["2", "2", "0", "1"] and row.endswith("complete")
    assert total == f"{url}: 1 complete; all checksums were verified"
    assert main(["checkpoints", "nowhere://bucket"]) == 2
    assert "an address of unknown kind" in capsys.readouterr().err
