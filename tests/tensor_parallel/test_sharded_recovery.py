"""FailureRecovery with split variables: each task writes its parts, and any layout restores them, bit by bit.

The devices of this process stand for tasks. `tests/chaos/test_sharded_stages.py` uses processes.
"""

from pathlib import Path
from typing import Any

import keras
import layout_models as models
import numpy as np
import pytest
import tensorflow as tf
from layout_models import strategy_of
from test_callbacks_in_stages import Interruption, train

from tfdist.callbacks import FailureRecovery
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.recovery import variable_copies, worker_calls, worker_tensors
from tfdist.tensor_parallel.split_variable import SplitVariable

Folder = Path


@pytest.fixture
def tasks(cpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device seems to be another task, and this process one without variables."""
    own = worker_calls.host_of(worker_calls.own_task())
    for module in (variable_copies, worker_tensors):
        monkeypatch.setattr(module, "task_of", lambda device: f"/job:worker/replica:0/task:{device[-1]}")
    for module in (variable_copies, worker_tensors, worker_calls):
        monkeypatch.setattr(module, "host_of", lambda device: own)
    monkeypatch.setattr(variable_copies, "own_task", lambda: "/job:chief/replica:0/task:0")


def made(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        x = keras.Input((12,))
        hidden = keras.layers.Dense(16, "gelu", name="up")(x)
        hidden = keras.layers.Dropout(0.2, seed=1)(keras.layers.Dense(8, name="down")(hidden))
        model = keras.Model(x, keras.layers.Dense(12, name="logits")(keras.layers.BatchNormalization()(hidden)))
        optimizer = keras.optimizers.Adam(1e-2, use_ema=True, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def complete(model: keras.Model) -> list[np.ndarray]:
    return [one.numpy() for one in [*model.variables, *model.optimizer.variables]]


def state(model: keras.Model) -> list[np.ndarray]:
    """Also of the other columns."""
    held = [held_variable(one) for one in [*model.variables, *model.optimizer.variables]]
    return [*complete(model), *(copy.numpy() for one in held for copy in getattr(one, "copies", ()))]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def newest(folder: Folder) -> Path:
    return max(folder.glob("ckpt-*"))


def test_split_variables_of_tasks(tasks: None, tmp_path: Path) -> None:
    of_tasks = lambda: made(strategy_of(ways=2, stages=2))  # noqa: E731
    undisturbed = of_tasks()
    history = train(undisturbed, FailureRecovery(tmp_path / "a", every_steps=2))
    interrupted = of_tasks()
    with pytest.raises(KeyboardInterrupt):  # with an accumulation half done
        train(interrupted, FailureRecovery(tmp_path / "b", every_steps=3, background=False), Interruption(9))
    resumed = of_tasks()
    assert train(resumed, FailureRecovery(tmp_path / "b", every_steps=3)) == history
    assert_equal(state(resumed), state(undisturbed))

    # Each task writes its parts. The first stage's devices are 0 and 1.
    written = {path.stem: dict(tf.train.list_variables(str(path.with_suffix("")))) for path in _indices(tmp_path / "a")}
    assert set(written) == {f"worker-{task}" for task in range(4)}
    both = [written["worker-0"], written["worker-1"]]
    assert all(one["weights/2.Dense/0"] == [12, 16] for one in both)  # the shape of the complete variable
    sizes = [path.stat().st_size for path in sorted(newest(tmp_path / "a").glob("worker-*.data-*"))]
    variables = [*undisturbed.variables, *undisturbed.optimizer.variables]
    split = sum(one.numpy().nbytes for one in variables if isinstance(held_variable(one), SplitVariable))
    assert max(sizes) < split  # nobody has all of them

    # A complete training is restored and trains nothing: in other parts, along other axes, in columns, or whole.
    rows = {"up/kernel": ("model", None), "up/bias": (None,), "logits/kernel": ("model", None), "logits/bias": (None,)}
    expected = complete(undisturbed)
    for strategy in (
        strategy_of(ways=4),
        strategy_of(ways=2, columns=2, layout_map=models.layout(2, **rows)),
        strategy_of(ways=1, stages=2, layout_map=None),
        tf.distribute.get_strategy(),
    ):
        other = made(strategy)
        train(other, FailureRecovery(tmp_path / "a"))
        assert_equal(complete(other), expected)

    # Variables that are in their place already: by the next training of the same model.
    train(interrupted, FailureRecovery(tmp_path / "a"))
    assert_equal(state(interrupted), state(undisturbed))


def test_complete_variables_are_restored_in_parts(tasks: None, tmp_path: Path) -> None:
    complete_model = made(strategy_of(ways=1, stages=2, layout_map=None))
    train(complete_model, FailureRecovery(tmp_path))
    split = made(strategy_of(ways=2, stages=2))
    train(split, FailureRecovery(tmp_path))
    assert_equal(complete(split), complete(complete_model))


def _indices(folder: Folder) -> list[Path]:
    return sorted(newest(folder).glob("*.index"))


@pytest.mark.long
def test_devices_of_one_process(cpus: list[str], tmp_path: Path) -> None:
    """They write complete values."""
    undisturbed = made(strategy_of(ways=2))
    history = train(undisturbed, FailureRecovery(tmp_path / "a", every_steps=3))
    interrupted = made(strategy_of(ways=2))
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, FailureRecovery(tmp_path / "b", every_steps=3), Interruption(9))
    resumed = made(strategy_of(ways=2))
    assert train(resumed, FailureRecovery(tmp_path / "b", every_steps=3)) == history
    assert_equal(state(resumed), state(undisturbed))
    assert not _indices(tmp_path / "a")


def test_parts_are_multiplied_where_they_are(cpus: list[str]) -> None:
    """As accumulators are if the number of micro-steps changes."""
    variable = SplitVariable(tf.Variable([1.0, 2.0, 3.0, 4.0], tf.float64), 0, [cpus[:2], cpus[2:]])
    devices = [shard.device for shard in variable.shards]
    worker_tensors.multiply([variable], 0.5)
    assert [shard.numpy().tolist() for shard in variable.shards] == [[0.5, 1.0], [1.5, 2.0]] * 2
    assert [shard.device for shard in variable.shards] == devices
