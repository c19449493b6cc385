"""Local updates on two workers: equal to synchronous training, to an independent reference, and to themselves."""

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from launched_runs import launch_once
from local_models import MODE, ReferenceWorkers, compiled, fit
from shared_workers import run_of_program

from tfdist.callbacks import FailureRecovery
from tfdist.checkpoint import CheckpointStore
from tfdist.compression import Policy
from tfdist.strategies import MultiWorkerMirroredStrategy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]
_SCRIPT = Path(__file__).with_name("on_workers_local.py")
_GROUPS = [[0], [1, 2, 3]]  # 48 of 65 parameters in the first fragment


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["1 + 1", "2 + 2"])
def devices(request):
    """The number of devices of each of two workers."""
    return request.param


@pytest.fixture(scope="module")
def run(request, tmp_path_factory, devices):
    """Two workers of one device, or of two."""
    if devices == 1:
        return run_of_program(request, "on_workers_local").assert_complete()
    name = f"local updates {devices}"
    options = ["--workers", "2"]
    return launch_once(tmp_path_factory, name, _SCRIPT, str(devices), options=options).assert_complete()


def close(values, expected, tolerance):
    for number, value in enumerate(expected):
        np.testing.assert_allclose(values[f"weight {number}"], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["local 1", "diloco 1", "local 1 loop"])
def test_an_exchange_after_each_update_is_synchronous_training(run, name):
    expected = run.arrays(f"sync{' loop' * name.endswith('loop')}-0.npz")
    for key, value in expected.items():
        if not (name.endswith("loop") and key in ("weight 4", "weight 5")):  # statistics, which a loop may not average
            np.testing.assert_allclose(run.arrays(f"{name}-0.npz")[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["local 1", "diloco 1"])
def test_logs_of_an_epoch_and_evaluations_are_over_all_workers(run, name):
    seen, other = (run.json(f"seen-{rank}.json") for rank in range(2))
    assert seen[name] == other[name]
    for log, values in seen["sync"].items():
        np.testing.assert_allclose(seen[name][log], values, rtol=1e-6)
    np.testing.assert_allclose(seen[f"{name} evaluated"], seen["sync evaluated"], rtol=1e-6)


def nesterov():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mean", {"groups": [[0, 1, 2, 3]]}),
        ("compiled", {"groups": [[0, 1, 2, 3]]}),
        ("fragments", {"groups": _GROUPS, "outer": nesterov}),
        ("overlap", {"groups": _GROUPS, "outer": nesterov, "overlap_steps": 2, "kept_share": 0.5}),
    ],
)
def test_weights_are_those_of_two_processes_that_exchange_by_hand(run, devices, name, arguments):
    reference = ReferenceWorkers(lambda: keras.optimizers.Adam(0.02), sync_every=3, devices=devices, **arguments)
    # Adam divides by roots of small numbers, which passes on rounding.
    close(run.arrays(f"{name}-0.npz"), reference.train(), 1e-5)


@pytest.mark.parametrize(
    "name", ["local 1", "local 1 loop", "diloco 1", "mean", "fragments", "overlap", "everything", "resumed"]
)
def test_all_workers_end_with_the_same_weights(run, name):
    first, second = (run.arrays(f"{name}-{rank}.npz") for rank in range(2))
    for key, value in first.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(value, second[key])


def test_no_message_between_two_exchanges(run):
    (few, *sent_in_few), (many, *sent_in_many) = run.json("seen-0.json")["messages"]
    assert (few, many) == (4, 40)
    assert sent_in_few == sent_in_many


def test_batch_statistics_are_averaged(run):
    assert run.json("seen-0.json")["statistics"] == run.json("seen-1.json")["statistics"]


def test_a_report_counts_the_exchanges(run):
    # Two epochs of four updates, an exchange after three of them and one at the end of the epoch: 65 float32 values.
    assert run.json("seen-0.json")["mean"]["wire_bytes"] == [65 * 4 * 2 / 4] * 2


def test_one_worker_resumes_from_the_anchors(run, tmp_path, cpus):
    shutil.copytree(run.folder / "interrupted", tmp_path / "checkpoints")
    newest, _ = CheckpointStore(tmp_path / "checkpoints").newest()
    shared = newest.read_shared().tensors
    anchors = [shared[f"local_updates/0/{fragment}/anchor/{i}"] for fragment, i in [(0, 0), (1, 0), (1, 1), (1, 2)]]
    seen = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(self.model.get_weights())

    strategy = MultiWorkerMirroredStrategy(mode=MODE, compression=Policy("int8", dense_below=0))
    model = compiled(strategy, lambda: keras.optimizers.Adam(0.02))
    fit(model, callbacks=[FailureRecovery(tmp_path / "checkpoints"), Note()])
    for value, anchor in zip(seen[0], anchors, strict=True):
        np.testing.assert_array_equal(value, anchor)
    assert all(np.isfinite(value).all() for value in model.get_weights())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_training_that_resumes_between_two_exchanges_is_the_same_to_the_bit(run, rank):
    complete, resumed = run.arrays(f"complete-{rank}.npz"), run.arrays(f"resumed-{rank}.npz")
    for key, value in complete.items():
        np.testing.assert_array_equal(value, resumed[key])
