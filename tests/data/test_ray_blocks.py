"""Data of Ray: blocks in its object store, read by its driver, its actors, and processes that connect."""

import pickle

import pytest
from child_environment import child_environment, run_python

from tfdist.data import from_ray

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.usefixtures("cpus"), pytest.mark.long]
_CHILD = """
import pickle, sys
data = pickle.load(open(sys.argv[1], "rb"))
print([batch.tolist() for batch in data.dataset(6, features="id", streams=2).as_numpy_iterator()])
"""


@pytest.fixture(scope="module")
def session():
    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    ray.init(num_cpus=2, object_store_memory=100 << 20, runtime_env={"env_vars": child_environment()}, **options)
    yield
    ray.shutdown()


def batches_of(data):
    return [batch.tolist() for batch in data.dataset(6, features="id", streams=2).as_numpy_iterator()]


def child(path):
    return run_python("-c", _CHILD, path, limit_seconds=120, exit_code=None)


def test_blocks_are_read_by_all_kinds_of_processes(session, tmp_path):
    data = from_ray(ray.data.range(28, override_num_blocks=3).map_batches(lambda batch: batch))
    expected = batches_of(data)
    assert sorted(sum(expected, [])) == list(range(28))
    (tmp_path / "data").write_bytes(pickle.dumps(data))
    read = child(tmp_path / "data")
    assert read.stdout.strip() == str(expected), read.stderr[-3000:]

    @ray.remote(num_cpus=1)
    class Worker:
        def in_child(self, path):
            read = child(path)
            return read.stdout.strip() or read.stderr[-3000:]

        def here(self, data):
            return batches_of(data)

    worker = Worker.remote()
    assert ray.get(worker.in_child.remote(tmp_path / "data")) == str(expected)
    assert ray.get(worker.here.remote(data)) == expected
    data.close()
    assert "cannot be read from" in child(tmp_path / "data").stderr


def test_tensors_of_ray_keep_their_shape(session):
    tensors = ray.data.range_tensor(5, shape=(2, 3))
    with from_ray(tensors) as data:
        batch = next(iter(data.dataset(5, features="data")))
        assert batch.shape == [5, 2, 3] and batch.numpy()[4].tolist() == [[4] * 3] * 2


def test_a_store_has_files_that_are_removed(session, tmp_path):
    with from_ray(ray.data.range(10), store=tmp_path) as data:
        assert sorted(sum(batches_of(data), [])) == list(range(10))
    assert not list(tmp_path.iterdir())
