"""Two workers read their own rows, make equally many steps, and resume after a kill with the same bits, from S3."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from child_environment import run_python
from launched_runs import launch
from optional_packages import require
from s3_server import BUCKET, s3_server

from tfdist.data import from_parquet

require("s3fs", "moto", "flask")

_SCRIPT = Path(__file__).with_name("data_workers.py")
_RATE, _EPOCHS, _ROWS_OF_FILES = 0.05, 2, (5, 0, 13, 3, 8)
_SHUFFLED = {"batch_size": 5, "shuffle": 9, "seed": 4, "weight": "w"}
CASES = {
    "plain": {"dataset": {"batch_size": 6}},
    "few": {"dataset": {"batch_size": 1}},
    "whole": {"dataset": _SHUFFLED, "recover": True},
    "killed": {"dataset": _SHUFFLED, "recover": True, "faults": [[1, 9]], "url": f"s3://{BUCKET}/rows"},
}
pytestmark = pytest.mark.multi_process


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The folder of the files, and all rows."""
    folder, generator = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    tables, first = [], 0
    for number, size in enumerate(_ROWS_OF_FILES):
        columns = {name: generator.uniform(size=size).astype(np.float32) for name in "abyw"}
        tables.append(pa.table({"id": np.arange(first, first + size), **columns}))
        pq.write_table(tables[-1], folder / f"part-{number}.parquet", row_group_size=4)
        first += size
    return folder, {
        name: values.to_numpy() for name, values in zip("iabyw", pa.concat_tables(tables).columns, strict=True)
    }


@pytest.fixture(scope="module")
def server(rows):
    """An S3 server that has the files, which this process and those that it starts use."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        file_system = server.objects("owner", "rows").connection.file_system
        file_system.put(f"{rows[0]}/", f"{BUCKET}/rows", recursive=True, ACL="public-read")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def workers(rows, server, tmp_path_factory):
    """Every tenth request is refused, or its connection reset."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "cases.json").write_text(json.dumps(CASES))
    names = ",".join(CASES)
    options = ["--workers", "2", "--max-restarts", "1", "--restart-delay", "0"]
    server.control(rates={"unavailable": 0.05, "reset": 0.05}, seed=0)
    run = launch(folder, _SCRIPT, str(rows[0]), str(folder / "cases.json"), names, options=options).assert_complete()
    hits = server.control(rates={}, seed=0)["hits"]
    assert hits["unavailable"] and hits["reset"]
    return run


def steps_of(run, case, attempts=(0,), workers=2):
    """The ids of each step by epoch and number, over all workers; those of a later attempt replace earlier ones."""
    found = {}
    for attempt in attempts:
        seen = {}
        for rank in range(workers):
            for line in run.path(f"{case}-{rank}-{attempt}.jsonl").read_text().splitlines():
                epoch, step, ids = json.loads(line)
                seen.setdefault((epoch, step), []).extend(ids)
        found |= {place: sorted(ids) for place, ids in seen.items()}
    return found


def trained(steps, values, weighted):
    """The kernel after plain gradient descent on these batches, in float64."""
    kernel = np.zeros(2)
    for place in sorted(steps):
        ids = steps[place]
        x, y = np.stack([values["a"][ids], values["b"][ids]], 1).astype(float), values["y"][ids]
        weight = values["w"][ids] if weighted else np.ones(len(ids))
        kernel -= _RATE * 2 * (x * ((x @ kernel - y) * weight)[:, None]).sum(0) / len(ids)
    return kernel


@pytest.mark.parametrize("case", ["plain", "few", "whole"])
def test_each_row_is_used_once_an_epoch_and_weighs_alike(workers, rows, case):
    attempt = 0
    steps = steps_of(workers, case, (attempt,))
    for epoch in range(_EPOCHS):
        ids = sum((ids for (of, _), ids in steps.items() if of == epoch), [])
        assert sorted(ids) == list(range(sum(_ROWS_OF_FILES)))
    kernels = [workers.arrays(f"{case}-{rank}-{attempt}.npz")["kernel"].ravel() for rank in range(2)]
    np.testing.assert_array_equal(*kernels)
    # float32 against float64, over at most 58 updates.
    np.testing.assert_allclose(kernels[0], trained(steps, rows[1], "weight" in CASES[case]["dataset"]), rtol=2e-5)


def test_batches_are_those_of_two_streams(workers):
    steps = steps_of(workers, "plain")
    assert steps[0, 0] == [0, 1, 2, 15, 16, 17] and steps[1, 4] == [12, 13, 14, 27, 28]


def test_a_worker_reads_only_its_own_blocks(workers):
    assert workers.json("plain-0-0.json")["blocks"] == [0, 1, 2, 3, 4]
    assert workers.json("plain-1-0.json")["blocks"] == [4, 5, 6, 7, 8]
    assert workers.json("killed-1-1.json")["blocks"] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("web", [False, True], ids=["s3", "http"])
def test_a_url_gives_the_rows_of_a_path(rows, server, web):
    url = f"{server.address}/{BUCKET}/rows/part-2.parquet" if web else f"s3://{BUCKET}/rows/part-2.parquet"
    local, remote = from_parquet(rows[0] / "part-2.parquet"), from_parquet(url)
    assert remote.rows_of_blocks == local.rows_of_blocks == (4, 4, 4, 1)
    assert remote._source.read(2, ["w", "id"]) == local._source.read(2, ["w", "id"])
    size, version = remote._source._versions[0]
    assert size == (rows[0] / "part-2.parquet").stat().st_size and len(version) > 8, "an ETag"


def test_a_bucket_that_is_missing_is_named(server):
    with pytest.raises(FileNotFoundError, match="'s3://elsewhere/rows', .*specified bucket does not exist"):
        from_parquet("s3://elsewhere/rows")


def test_a_training_that_is_killed_in_a_shuffled_epoch_ends_with_the_same_bits(workers):
    whole = steps_of(workers, "whole")
    assert len({tuple(whole[epoch, 0]) for epoch in range(_EPOCHS)}) == _EPOCHS
    assert steps_of(workers, "killed", (0, 1)) == whole
    np.testing.assert_array_equal(workers.arrays("killed-0-1.npz")["kernel"], workers.arrays("whole-0-0.npz")["kernel"])


@pytest.mark.long
def test_a_process_that_forks_connects_again(server):
    program = (
        "import os; from tfdist.data import from_parquet\n"
        f"source = from_parquet('s3://{BUCKET}/rows')._source\n"
        "first, child = source.read(0, ['id']), os.fork()\n"
        "assert source.read(0, ['id']) == first and source.read(5, ['id']).num_rows\n"
        "child or os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0 and source.read(7, ['id']).num_rows\n"
    )
    assert run_python("-c", program, limit_seconds=180).stderr == "", "nothing was waited for or closed"


@pytest.mark.long
def test_fewer_workers_resume_with_the_same_batches(workers, rows, tmp_path):
    """Worker 1 is lost twice, so that worker 0 trains alone from the middle of the second epoch on."""
    cases = {"killed": {"dataset": _SHUFFLED, "recover": True, "faults": [[1, 9], [1, 0]]}}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    options = ["--workers", "2", "--min-workers", "1", "--max-restarts", "2", "--restart-delay", "0"]
    run = launch(tmp_path, _SCRIPT, str(rows[0]), str(tmp_path / "cases.json"), "killed", options=options)
    run.assert_complete()
    assert run.json("killed-0-2.json")["workers"] == 1
    alone = steps_of(run, "killed", (2,), workers=1)
    assert len(alone) >= 3 and alone.items() <= steps_of(workers, "whole").items()
    assert steps_of(run, "killed") | alone == steps_of(workers, "whole")
    kernels = [
        finished.arrays(f"{name}.npz")["kernel"] for finished, name in ((run, "killed-0-2"), (workers, "whole-0-0"))
    ]
    np.testing.assert_allclose(*kernels, rtol=2e-5)  # sums of one worker associate differently
